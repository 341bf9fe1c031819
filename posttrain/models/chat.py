"""How does a conversation become token ids, and which of them did the model write?  The only file about templates.

A template never sees what people, environments or models wrote. It is rendered once per sequence of roles with
placeholders for the contents; the text between the placeholders are the *literals*:

    messages    [user, assistant]
    rendered    <|im_start|>user\\n {0} <|im_end|>\\n<|im_start|>assistant\\n {1} <|im_end|>\\n
    literals    └──── piece 0 ────┘     └───────────── piece 1 ─────────────┘     └ piece 2 ┘

Literals are tokenised with control tokens recognised, contents as plain text. So no content can become a control token,
and ids are the same whether a dialogue is encoded at once or grows turn by turn in a rollout. Tokenising the rendered
text in one go gives the same ids except where the tokenizer joins or cuts across the edge of a content, e.g. an answer
that starts with a line break after the "\\n" of its header, and where a template trims contents: here they stay whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken

from posttrain.config import find_file
from posttrain.files import read_text
from posttrain.models.literals import REMEDY, Literals, Message
from posttrain.models.tools import PROBE, PROBE_CALL, THINK, TOOL_CALLS, Said, Tools, marks_of, read_calls, tools_key
from posttrain.runtime import panics_in_words, plain_text_tokenizer
from posttrain.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_PATH = Path(__file__).with_name("chatml.jinja")


class Encoded(NamedTuple):
    """Encoded(ids=[5, 17, 9, 40, 6], mask=[False, False, False, True, True]): True on what the assistant wrote."""

    ids: list[int]
    mask: list[bool]


def template_text(template: str | Path) -> str:
    """Return the text of a template: `chatml`, the project's own, or a file."""
    path = TEMPLATE_PATH if str(template) == "chatml" else find_file(template)
    if path is None:
        raise UserError(f"chat.template={template}: there is no such file. {REMEDY}")
    return read_text(path, REMEDY)


def template_hash(text: str) -> str:
    """Return sha256 of a template, as in the manifest of a checkpoint."""
    return hashlib.sha256(text.encode()).hexdigest()


class Chat(Literals):
    """One tokenizer with one template that was checked: made by `Chat.load`, the same in all phases.

    stop_id      the token that ends the assistant's turn, e.g. that of <|im_end|>
    control_ids  the tokens no content may become: all special ones and all added ones the template writes itself
    start_ids    the special tokens that the tokenizer puts before plain text: Llama's <|begin_of_text|>, none for Qwen
    added_tokens how many ids were added to the tokenizer: the model's embeddings must grow by as many rows
    """

    hash: str
    pad_id: int
    start_ids: list[int]
    added_tokens: int

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, origin: str, added_tokens: int) -> None:
        super().__init__(tokenizer, template, origin)
        self.hash = template_hash(template)
        self.added_tokens = added_tokens
        self._patterns: dict[frozenset[int], re.Pattern[str]] = {}

        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        whole, text = (list(tokenizer("a", add_special_tokens=each)["input_ids"]) for each in (True, False))
        self.start_ids = next((whole[:n] for n in range(len(whole)) if whole[n : n + len(text)] == text), [])
        self._backend = plain_text_tokenizer(tokenizer, special)
        self._check_template()

        written = self._added_among(ids for pieces in self._pieces.values() for ids in pieces)
        control = special | set(tokenizer.all_special_ids) | written
        if tokenizer.unk_token_id not in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
            control.discard(tokenizer.unk_token_id)  # ordinary text may hold characters the vocabulary lacks
        self.control_ids = frozenset(control)
        if not control & self._added_ids <= special:
            self._backend = plain_text_tokenizer(tokenizer, control)
        self.pad_id = self._choose_pad()

    @classmethod
    def load(cls, tokenizer: PreTrainedTokenizerBase, template: str | Path | None, kept: str | None = None) -> Chat:
        """Return the chat of a model. `template` is a file or None: then the model's own, or ours if it has none.

        The tokenizer is changed: it gets the template, a padding token and, with our template, the two ChatML tokens
        where it lacks them. A template without the tokens that the tokenizer puts before plain text (`start_ids`) gets
        them, except the one with hash `kept`, which an earlier phase used.
        """
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise UserError(
                f"The tokenizer of {tokenizer.name_or_path or 'the model'} has no fast version (tokenizer.json), which "
                f"masks need. Convert it with transformers' AutoTokenizer and save it beside the model."
            )
        if template is not None:
            text, origin = template_text(template), f"The chat template {template}"
        elif tokenizer.chat_template:
            text, origin = tokenizer.chat_template, f"The chat template of {tokenizer.name_or_path or 'the model'}"
            if not isinstance(text, str):
                text = text.get("default", "") if isinstance(text, dict) else ""
        else:
            text, origin = TEMPLATE_PATH.read_text(encoding="utf-8"), "The chat template chatml"
        text = text.replace("\r\n", "\n")  # as it will be read back from the checkpoint: the hash must not change

        added = 0
        if text.endswith(TEMPLATE_PATH.read_text(encoding="utf-8")):  # a start of text may come before it
            before = len(tokenizer)
            tokens = [AddedToken(name, special=True, normalized=False) for name in ("<|im_start|>", "<|im_end|>")]
            tokenizer.add_tokens(tokens, special_tokens=True)  # type: ignore[arg-type]
            added = len(tokenizer) - before
            tokenizer.eos_token = "<|im_end|>"  # for servers of the model, which stop there
        try:
            chat = cls(tokenizer, text, origin, added)
        except UserError:
            if text == text.rstrip():
                raise
            text = text.rstrip()  # white space after the last tag would follow every dialogue: an editor's slip
            chat = cls(tokenizer, text, origin, added)
        if chat.hash != kept and not chat.writes_start():
            start = "".join(tokenizer.convert_ids_to_tokens(chat.start_ids))
            text = re.sub(r"^[ \t]+(?={[%#])", "", text)  # transformers leaves out spaces before a line's first block
            text = "{{- " + json.dumps(start, ensure_ascii=False) + " }}" + text
            chat = cls(tokenizer, text, origin, added)
        tokenizer.chat_template = text
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(chat.pad_id)
        return chat

    # Token ids of conversations

    def encode(self, messages: Sequence[Message], tools: Tools | None = None) -> Encoded:
        """Return ids of a conversation, and a mask, True exactly on the assistants' contents and stop tokens.

        An assistant's message may carry `mask_spans`, character ranges [start, end) of its content that are not trained
        (e.g. what an interpreter printed). The content is cut there, so that no token is on both sides. With
        `train: False` neither the content nor its stop token is trained.

        Args:
            messages: the conversation; `tool_calls` of an assistant are part of what it wrote, results of tools are
                messages of the role tool.
            tools: schemas of the tools that the model is shown.
        """
        return self.encode_batch([messages], [tools])[0]

    def encode_batch(
        self, dialogues: Sequence[Sequence[Message]], tools: Sequence[Tools | None] | None = None
    ) -> list[Encoded]:
        """Return `encode` of many conversations: all their contents go through the tokenizer together."""
        keys = [None] * len(dialogues) if tools is None else list(map(tools_key, tools))
        structures = [self._structure(messages, tools=key) for messages, key in zip(dialogues, keys, strict=True)]
        cuts = [
            [_cut(message, self.written(message), self.lead) for message in self.with_ids(messages)]
            for messages in dialogues
        ]
        texts = [text for cut in cuts for message in cut for text, _ in message.pieces]
        contents = iter(self._content_ids(texts))
        encoded = []
        for literals, cut, key in zip(structures, cuts, keys, strict=True):
            ids = list(literals[0])
            mask = [False] * len(ids)
            for message, literal in zip(cut, literals[1:], strict=True):
                for text, trained in message.pieces:
                    content = self._own(next(contents), text, message.role, key, message.calls)
                    ids += content
                    mask += [trained] * len(content)
                ids += literal
                mask += [False] * len(literal)
                if message.is_answer:
                    mask[-len(literal)] = True
            encoded.append(Encoded(ids, mask))
        return encoded

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Return the conversation so far and the header that opens the assistant's turn: where sampling starts."""
        key = tools_key(tools)
        literals = self._structure(messages, open_turn=True, tools=key)
        return list(literals[0]) + self._following(messages, literals, key)

    def extend(self, said: str | Sequence[Message], *, finished: bool = True, tools: Tools | None = None) -> list[int]:
        """Return what follows a sampled turn: the rest after its stop token, the next messages, the next header.

        Args:
            said: the user's text, or messages, such as the results of the tools that the turn called.
            finished: False for a turn that the token budget cut short: then these ids begin with the stop token.
            tools: those of the prompt.
        """
        messages: Sequence[Message] = [{"role": "user", "content": said}] if isinstance(said, str) else said
        key, before = tools_key(tools), [{"role": "user"}, {"role": "assistant"}]
        _, _, between, *rest = self._structure([*before, *messages], open_turn=True, tools=key)
        return between[1 if finished else 0 :] + self._following(messages, [[], *rest], key)

    def _following(self, messages: Sequence[Message], literals: Sequence[list[int]], tools: str | None) -> list[int]:
        """Return each message's content and the literal behind it."""
        messages = self.with_ids(messages)
        texts = list(map(self.written, messages))
        ids: list[int] = []
        for message, text, content, literal in zip(
            messages, texts, self._content_ids(texts), literals[1:], strict=True
        ):
            ids += self._own(content, text, message["role"], tools, bool(message.get("tool_calls"))) + literal
        return ids

    def check_tools(self, tools: Tools) -> None:
        """Raise UserError if the template cannot show these tools or write calls that can be read."""
        self.prompt([{"role": "user", "content": "Hi"}], tools)
        assert self.call_form

    def read_calls(self, text: str) -> Said:
        """Return the calls of tools in the text of a sampled turn."""
        form = self.call_form
        marks = self._call_marks if form == "response" else ("", "")
        return read_calls(text, form, self.tokenizer, marks, thought_open=self.opens_thoughts)

    @cached_property
    def opens_thoughts(self) -> bool:
        """Whether the template writes `<think>` where it opens a turn in a dialogue with tools."""
        return self._literal_texts(("user",), True, PROBE)[-1].rstrip().endswith(THINK)

    @cached_property
    def _call_marks(self) -> tuple[str, str]:
        return marks_of(self.written({"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}))

    def content_ids(self, text: str) -> list[int]:
        """Return the ids of plain text: "<|im_end|>" gives its letters, never the control token."""
        return self._without(self._content_ids([text])[0], text, self.control_ids)

    @panics_in_words()
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids without the stop token at their end; other control tokens appear as text."""
        ids = list(ids[:-1]) if len(ids) and ids[-1] == self.stop_id else list(ids)
        # Behind an anchor, because some decoders swallow a space at the start of what they are given.
        anchor = self._backend.decode([self.stop_id], skip_special_tokens=False)
        return self._backend.decode([self.stop_id, *ids], skip_special_tokens=False)[len(anchor) :]

    def writes_start(self) -> bool:
        """Return whether the template writes what the tokenizer puts before plain text, in a dialogue of any shape."""
        return not self.start_ids or any(self.start_ids[0] in pieces[0] for pieces in self._pieces.values())

    # The template as part of a checkpoint

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer with this template (chat_template.jinja) into a checkpoint's folder."""
        self.tokenizer.chat_template = self.template
        self.tokenizer.save_pretrained(folder)
        assert (Path(folder) / "chat_template.jinja").is_file()

    def require_same_template(self, previous_hash: str | None, path: str | Path) -> None:
        """Raise UserError where checkpoint `path` was trained with another template (previous_hash None: unknown)."""
        if previous_hash is not None and previous_hash != self.hash:
            raise UserError(
                f"{path} was trained with another chat template (sha256 {previous_hash[:12]}) than this phase would "
                f"use: {self._origin[0].lower()}{self._origin[1:]} (sha256 {self.hash[:12]}). All phases need the same "
                f"one: remove chat.template to take the one in {path}, or train the earlier phase with the new one."
            )

    # Contents

    def _content_ids(self, texts: Sequence[Any]) -> list[list[int]]:
        """Return the ids of each text, control tokens among them where the vocabulary has them as ordinary pieces."""
        self._backend.encode_special_tokens = True  # a copy made by pickle forgets it
        try:
            return self._encode(texts)
        except (UnicodeEncodeError, TypeError) as error:
            bad = next(text for text in texts if not _is_text(text))
            raise UserError(
                f"The content of a message is not text: {bad!a:.80}. Every content must be one string of whole Unicode "
                f"characters (no list of parts, no missing value, no half of a surrogate pair); repair or drop the row."
            ) from error

    @panics_in_words()
    def _encode(self, texts: Sequence[Any]) -> list[list[int]]:
        return [row.ids for row in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _kept_out(self, role: str, tools: str | None) -> frozenset[int]:
        """Return the tokens that a content must not hold: in a dialogue with tools, for others than the assistant, also
        added tokens that the template writes there, such as <tool_response>."""
        if role == "assistant" or (tools is None and role != "tool"):
            return self.control_ids
        return self._with_tools[tools is not None]

    def _own(self, ids: list[int], text: str, role: str, tools: str | None, calls: bool) -> list[int]:
        """Return the ids of what a message wrote without control tokens, but for the one that calls begin with."""
        if not calls or self.marker is None or not text.startswith(TOOL_CALLS):
            return self._without(ids, text, self._kept_out(role, tools))
        rest = text.removeprefix(TOOL_CALLS)
        return [self.marker, *self._without(self._content_ids([rest])[0], rest, self._kept_out(role, tools))]

    def _without(self, ids: list[int], text: str, control: frozenset[int]) -> list[int]:
        """Return the ids of a text without control tokens, which are split after their first character."""
        if control.isdisjoint(ids):
            return ids
        if control not in self._patterns:
            names = sorted(filter(None, map(self._backend.id_to_token, control)), key=len, reverse=True)
            self._patterns[control] = re.compile(f"(?=({'|'.join(map(re.escape, names))}))")
        starts = [match.start() + 1 for match in self._patterns[control].finditer(text)]
        parts = [text[a:b] for a, b in pairwise([0, *starts, len(text)])]
        split = [i for row in self._encode(parts) for i in row]
        if not control.isdisjoint(split):
            raise UserError(
                f"The tokenizer turns part of this text into a control token: {text[:80]!r}. Its vocabulary lacks some "
                f"character and its unknown token is a control token too. Drop such rows or use another tokenizer."
            )
        return split

    def _choose_pad(self) -> int:
        """Return any special token but the stop token: padding must never look like the end of an answer."""
        known = self.tokenizer
        usual: list[Any] = [known.pad_token_id, known.eos_token_id, known.unk_token_id, known.bos_token_id]
        return next((i for i in (*usual, *sorted(self.control_ids)) if i not in (None, self.stop_id)), self.stop_id)


class _Cut(NamedTuple):
    """A content in pieces, each trained or not: _Cut("assistant", [("2+2=", True), ("4", False), ("", True)], True)."""

    role: str
    pieces: list[tuple[Any, bool]]
    is_answer: bool
    calls: bool = False


def _cut(message: Message, content: Any, lead: str) -> _Cut:
    """Cut what a message wrote, its content and its calls; `mask_spans` count from the beginning of the content.

    lead: white space that may have been put before the content.
    """
    role, spans, calls = message["role"], message.get("mask_spans"), bool(message.get("tool_calls"))
    if message.get("train") is False:
        return _Cut(role, [(content, False)], False, calls)
    if spans is None or len(spans) == 0 or not isinstance(content, str):
        return _Cut(role, [(content, role == "assistant")], role == "assistant", calls)
    if role != "assistant":
        raise UserError(f"mask_spans {spans} belong to a message with role {role!r}: only answers are trained.")
    if calls and not content.startswith(message.get("content") or ""):
        raise UserError(f"mask_spans {spans} belong to an answer with calls, whose content the template changes.")
    added = 0 if calls or content == message["content"] else len(lead)
    pieces: list[tuple[str, bool]] = []
    at = 0
    for start, end in sorted((int(a) + added, int(b) + added) for a, b in spans):
        if not added <= start <= end <= len(content):
            raise UserError(
                f"mask_spans holds [{start - added}, {end - added}), outside a content of {len(content) - added}"
                " characters."
            )
        if max(start, at) < end:
            pieces += [(content[at:start], True), (content[max(start, at) : end], False)]
            at = end
    return _Cut(role, [*pieces, (content[at:], True)], True, calls)


def _is_text(content: object) -> bool:
    return isinstance(content, str) and not any("\ud800" <= character <= "\udfff" for character in content)
