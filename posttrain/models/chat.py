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
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jinja2
from tokenizers import AddedToken

from posttrain.config import find_file
from posttrain.files import read_text
from posttrain.models import template_limits
from posttrain.runtime import panics_in_words, plain_text_tokenizer
from posttrain.types import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]  # {"role": "assistant", "content": "Left"}; optional: "mask_spans": [[0, 2]], "train": False

TEMPLATE_PATH = Path(__file__).with_name("chatml.jinja")
ROLES = ("system", "user", "assistant")  # many templates print a role unchanged, so it is not free text
REMEDY = (
    "Write chat.template=chatml to train with this project's ChatML template, or "
    "chat.template=FILE with a corrected copy of the model's own."
)
_PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")  # private-use characters: no template contains them


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


class Chat:
    """One tokenizer with one template that was checked: made by `Chat.load`, the same in all phases.

    stop_id      the token that ends the assistant's turn, e.g. that of <|im_end|>
    control_ids  the tokens no content may become: all special ones and all added ones the template writes itself
    start_ids    the special tokens that the tokenizer puts before plain text: Llama's <|begin_of_text|>, none for Qwen
    added_tokens how many ids were added to the tokenizer: the model's embeddings must grow by as many rows
    """

    tokenizer: PreTrainedTokenizerBase
    template: str
    hash: str
    stop_id: int
    pad_id: int
    control_ids: frozenset[int]
    start_ids: list[int]
    added_tokens: int

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, origin: str, added_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.hash = template_hash(template)
        self.added_tokens = added_tokens
        self._origin = origin
        self._added_ids = frozenset(tokenizer.added_tokens_decoder)
        self._literals: dict[tuple[str, bool], list[int]] = {}
        self._texts: dict[tuple[tuple[str, ...], bool], list[str]] = template_limits.Kept()
        self._pieces: dict[tuple[tuple[str, ...], bool], list[list[int]]] = template_limits.Kept()
        self._accepted: dict[tuple[tuple[str, ...], bool], list[list[int]]] = template_limits.Kept()

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
        names = sorted(filter(None, map(self._backend.id_to_token, self.control_ids)), key=len, reverse=True)
        self._control_text = re.compile("|".join(map(re.escape, names)))
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

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """Return ids of a conversation, and a mask, True exactly on the assistants' contents and stop tokens.

        An assistant's message may carry `mask_spans`, character ranges [start, end) of its content that are not trained
        (e.g. what an interpreter printed). The content is cut there, so that no token is on both sides. With
        `train: False` neither the content nor its stop token is trained.
        """
        return self.encode_batch([messages])[0]

    def encode_batch(self, dialogues: Sequence[Sequence[Message]]) -> list[Encoded]:
        """Return `encode` of many conversations: all their contents go through the tokenizer together."""
        structures = [self._structure(messages) for messages in dialogues]
        cuts = [[_cut(message) for message in messages] for messages in dialogues]
        texts = [text for cut in cuts for message in cut for text, _ in message.pieces]
        contents = iter(self._content_ids(texts))
        encoded = []
        for literals, cut in zip(structures, cuts, strict=True):
            ids = list(literals[0])
            mask = [False] * len(ids)
            for message, literal in zip(cut, literals[1:], strict=True):
                for _, trained in message.pieces:
                    content = next(contents)
                    ids += content
                    mask += [trained] * len(content)
                ids += literal
                mask += [False] * len(literal)
                if message.is_answer:
                    mask[-len(literal)] = True
            encoded.append(Encoded(ids, mask))
        return encoded

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the conversation so far and the header that opens the assistant's turn: where sampling starts."""
        literals = self._structure(messages, open_turn=True)
        contents = self._content_ids([message.get("content") for message in messages])
        ids = list(literals[0])
        for content, literal in zip(contents, literals[1:], strict=True):
            ids += content + literal
        return ids

    def extend(self, user_text: str, *, finished: bool = True) -> list[int]:
        """Return what follows a sampled turn: the rest after its stop token, the user's message, the next header.

        `finished=False` is for a turn that the token budget cut short: then these ids begin with the stop token.
        """
        _, _, between, header = self._pieces[("user", "assistant", "user"), True]
        return between[1 if finished else 0 :] + self.content_ids(user_text) + header

    def content_ids(self, text: str) -> list[int]:
        """Return the ids of plain text: "<|im_end|>" gives its letters, never the control token."""
        return self._content_ids([text])[0]

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
        self._backend.encode_special_tokens = True  # a copy made by pickle forgets it
        try:
            rows = self._encode(texts)
        except (UnicodeEncodeError, TypeError) as error:
            bad = next(text for text in texts if not _is_text(text))
            raise UserError(
                f"The content of a message is not text: {bad!a:.80}. Every content must be one string of whole Unicode "
                f"characters (no list of parts, no missing value, no half of a surrogate pair); repair or drop the row."
            ) from error
        for i, ids in enumerate(rows):
            if not self.control_ids.isdisjoint(ids):
                rows[i] = self._split_control_text(texts[i])
        return rows

    @panics_in_words()
    def _encode(self, texts: Sequence[Any]) -> list[list[int]]:
        return [row.ids for row in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _split_control_text(self, text: str) -> list[int]:
        """Split control tokens after their first character, where the vocabulary has them as ordinary pieces too."""
        starts = [match.start() + 1 for match in re.finditer(f"(?=({self._control_text.pattern}))", text)]
        parts = [text[a:b] for a, b in pairwise([0, *starts, len(text)])]
        ids = [i for row in self._encode(parts) for i in row]
        if not self.control_ids.isdisjoint(ids):
            raise UserError(
                f"The tokenizer turns part of this text into a control token: {text[:80]!r}. Its vocabulary lacks some "
                f"character and its unknown token is a control token too. Drop such rows or use another tokenizer."
            )
        return ids

    # Literals

    def _structure(self, messages: Sequence[Message], *, open_turn: bool = False) -> list[list[int]]:
        """Return the literals around the contents of these messages: one more than there are messages."""
        roles: tuple[Any, ...] = tuple(message.get("role") for message in messages)
        if (roles, open_turn) not in self._accepted:
            if unknown := [role for role in roles if role not in ROLES]:
                raise UserError(f"A message has the role {unknown[0]!r}, but a role is one of {', '.join(ROLES)}.")
            literals = self._literal_ids(roles, open_turn)
            for role, literal in zip(roles, literals[1:], strict=True):
                if role == "assistant" and (not literal or literal[0] != self.stop_id):
                    self._refuse(f"does not end every answer with its stop token in a dialogue {roles}")
            if not self._added_among(literals) <= self.control_ids:
                self._refuse(f"writes control tokens in a dialogue {roles} that it writes nowhere else")
            self._accepted[roles, open_turn] = literals
        return self._accepted[roles, open_turn]

    def _added_among(self, literals: Iterable[list[int]]) -> set[int]:
        """Return the added tokens in literals, without the one for unknown characters."""
        return {i for ids in literals for i in ids if i in self._added_ids and i != self.tokenizer.unk_token_id}

    def _literal_ids(self, roles: tuple[str, ...], open_turn: bool) -> list[list[int]]:
        if (roles, open_turn) not in self._pieces:
            texts = self._literal_texts(roles, open_turn)
            self._pieces[roles, open_turn] = [self._tokenise_literal(text, i == 0) for i, text in enumerate(texts)]
        return self._pieces[roles, open_turn]

    def _literal_texts(self, roles: tuple[str, ...], open_turn: bool) -> list[str]:
        if (roles, open_turn) not in self._texts:
            parts = _PLACEHOLDER.split(self._render(_placeholders(roles), open_turn))
            if parts[1::2] != [str(i) for i in range(len(roles))]:
                self._refuse(f"drops, repeats or moves messages of a dialogue {roles}")
            self._texts[roles, open_turn] = parts[0::2]
        return self._texts[roles, open_turn]

    def _render(self, messages: list[Message], open_turn: bool) -> str:
        try:
            with template_limits.at_most(template_limits.STEPS):
                rendered = self.tokenizer.apply_chat_template(
                    messages, chat_template=self.template, add_generation_prompt=open_turn, tokenize=False
                )
        except Exception as error:  # a template is foreign code and may raise anything
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"{self._origin} fails on a dialogue [{roles}]: {one_line(error)}. {REMEDY}") from error
        assert isinstance(rendered, str)
        return rendered

    def _tokenise_literal(self, text: str, first: bool) -> list[int]:
        if (text, first) not in self._literals:
            ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            if ids and not first and ids[0] not in self._added_ids:
                # Text after a content does not start a sentence: the tokenizer must not put a space before it.
                self._backend.encode_special_tokens = False
                ids = self._backend.encode(text, add_special_tokens=False).ids
            self._literals[text, first] = ids
        return self._literals[text, first]

    # Checks, once at load

    def _check_template(self) -> None:
        """Find the stop token; raise UserError if the template can't be marked or rewrites earlier messages."""
        turns = ("user", "assistant") * 3 + ("user",)
        dialogues = [_placeholders(roles) for roles in (("user",), ("system", *turns))]
        words = template_limits.why_not(self.template, self.tokenizer.special_tokens_map, dialogues)
        if words:
            raise UserError(f"{self._origin} cannot be used: {words} for a short dialogue. {REMEDY}")
        accepted: list[tuple[str, ...]] = [turns]
        try:
            self._literal_texts(("system", "user"), False)
            accepted.append(("system", *turns))
        except UserError as error:
            if not isinstance(error.__cause__, jinja2.TemplateError):
                raise  # a template may refuse system messages, in words; then so do we, when one comes
        stops: set[int] = set()
        after: dict[tuple[str, str], list[int]] = {}
        for roles in accepted:
            whole = self._literal_ids(roles, False)
            for count in range(roles.index("user") + 1, len(roles)):
                pieces = self._literal_ids(roles[:count], False)
                if pieces[:-1] != whole[:count] or pieces[-1] != whole[count][: len(pieces[-1])]:
                    self._refuse(
                        "writes earlier turns differently once later ones follow, so sampled tokens can't be kept"
                        + self._about_thoughts()
                    )
                if roles[count] == "assistant" and self._literal_ids(roles[:count], True) != whole[: count + 1]:
                    self._refuse(
                        "opens an answer that is to be generated differently from an existing answer, so "
                        "training and sampling would see different tokens"
                    )
                if after.setdefault((roles[count - 1], roles[count]), whole[count]) != whole[count]:
                    self._refuse(
                        "writes the same step of a dialogue differently at different places, so turns can't be appended"
                    )
                if roles[count - 1] == "assistant":
                    stops.update(pieces[-1][:1] or [-1])
            self._check_contents(roles)
        if len(stops) != 1 or not stops <= self._added_ids:
            self._refuse(
                "can't be marked: the assistant's text is not followed at once by a stop token (an added token such as "
                "<|im_end|>), so the model could not learn to stop"
            )
        self.stop_id = stops.pop()
        self._literal_ids(("user", "assistant", "user"), True)

    def _check_contents(self, roles: tuple[str, ...]) -> None:
        """Check that the template does not change ordinary contents, also in earlier turns."""
        says = {
            "system": "Reply briefly.",
            "user": "Which way\nnow?",
            "assistant": "<think>\nThe ice is left.\n</think>\n\n<answer>Right</answer>",
        }
        literals = self._literal_texts(roles, False)
        expected = literals[0] + "".join(says[role] + text for role, text in zip(roles, literals[1:], strict=True))
        if self._render([{"role": role, "content": says[role]} for role in roles], False) != expected:
            self._refuse(
                "rewrites messages (many remove <think>...</think> from earlier answers), so training and "
                "sampling would see different tokens"
            )

    def _about_thoughts(self) -> str:
        thought = "The ice is left."
        contents = ("Which way?", f"<think>\n{thought}\n</think>\n\nRight", "And now?")
        dialogue = [
            {"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), contents, strict=True)
        ]
        return "" if thought in self._render(dialogue, True) else " (it removes the thoughts of earlier answers)"

    def _refuse(self, reason: str) -> NoReturn:
        raise UserError(f"{self._origin} {reason}. {REMEDY}")

    def _choose_pad(self) -> int:
        """Return any special token but the stop token: padding must never look like the end of an answer."""
        known = self.tokenizer
        usual: list[Any] = [known.pad_token_id, known.eos_token_id, known.unk_token_id, known.bos_token_id]
        return next((i for i in (*usual, *sorted(self.control_ids)) if i not in (None, self.stop_id)), self.stop_id)


def _placeholders(roles: Sequence[str]) -> list[Message]:
    """Return a dialogue of these roles whose contents can be located in a rendered template."""
    return [{"role": role, "content": f"\ue000{i}\ue001"} for i, role in enumerate(roles)]


class _Cut(NamedTuple):
    """A content in pieces, each trained or not: _Cut([("2+2=", True), ("4", False), ("", True)], is_answer=True)."""

    pieces: list[tuple[Any, bool]]
    is_answer: bool


def _cut(message: Message) -> _Cut:
    role, content, spans = message["role"], message.get("content"), message.get("mask_spans")
    if message.get("train") is False:
        return _Cut([(content, False)], False)
    if spans is None or len(spans) == 0 or not isinstance(content, str):
        return _Cut([(content, role == "assistant")], role == "assistant")
    if role != "assistant":
        raise UserError(f"mask_spans {spans} belong to a message with role {role!r}: only answers are trained.")
    pieces: list[tuple[str, bool]] = []
    at = 0
    for start, end in sorted((int(a), int(b)) for a, b in spans):
        if not 0 <= start <= end <= len(content):
            raise UserError(f"mask_spans holds [{start}, {end}), outside a content of {len(content)} characters.")
        if max(start, at) < end:
            pieces += [(content[at:start], True), (content[max(start, at) : end], False)]
            at = end
    return _Cut([*pieces, (content[at:], True)], True)


def _is_text(content: object) -> bool:
    return isinstance(content, str) and not any("\ud800" <= character <= "\udfff" for character in content)
