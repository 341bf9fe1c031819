"""What does a chat template write around the contents of a conversation?  Its literals, found with placeholders.

A template is foreign code. It is checked once, when the chat is loaded: what it writes must not depend on contents, nor
change when later messages follow. Dialogues with tools are checked when the first one comes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2

from posttrain.models import template_limits
from posttrain.models.tools import (
    OPEN,
    PROBE,
    PROBE_CALL,
    TOOL_CALLS,
    Form,
    form_of,
    hermes_text,
    named_results,
    nine,
    parsed_json,
    plain_calls,
    texts_in,
)
from posttrain.types import UserError, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]  # {"role": "assistant", "content": "Left"}; optional: "mask_spans": [[0, 2]], "train": False
Shape = tuple[tuple[str, ...], bool, str | None]  # roles, whether a turn is opened, and the tools as JSON

ROLES = ("system", "user", "assistant", "tool")  # many templates print a role unchanged, so it is not free text
REMEDY = (
    "Write chat.template=chatml to train with this project's ChatML template, or "
    "chat.template=FILE with a corrected copy of the model's own."
)
MARK = "\ue002" * 9  # stands for the id of a call
_PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")  # private-use characters: no template contains them
RESULT = '\n He said: "4\\5"\n\tü <b>\n'  # a tool's result that shows whether a template changes results


class Literals:
    """The literals of one tokenizer's template."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    stop_id: int
    control_ids: frozenset[int]
    lead = ""  # the white space with which an answer begins, where the header does not end with it: " " in Mistral's v3
    _backend: Tokenizer

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, origin: str) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._origin = origin
        self._added_ids = frozenset(tokenizer.added_tokens_decoder)
        self._literals: dict[tuple[str, bool], list[int]] = template_limits.Kept()
        self._texts: dict[Shape, list[str]] = template_limits.Kept()
        self._pieces: dict[Shape, list[list[int]]] = template_limits.Kept()
        self._accepted: dict[Shape, list[list[int]]] = template_limits.Kept()
        self._with_tools: dict[bool, frozenset[int]] = {}  # the tokens that results must not hold
        self._no_system = self._one_question = False

    # Literals

    def _structure(
        self, messages: Sequence[Message], *, open_turn: bool = False, tools: str | None = None
    ) -> list[list[int]]:
        """Return the literals around the contents of these messages: one more than there are messages."""
        roles: tuple[Any, ...] = tuple(message.get("role") for message in messages)
        if (roles, open_turn, tools) not in self._accepted:
            if unknown := [role for role in roles if role not in ROLES]:
                raise UserError(f"A message has the role {unknown[0]!r}, but a role is one of {', '.join(ROLES)}.")
            if tools is not None or "tool" in roles:
                self.require_tools(tools is not None)
            if self._no_system and "system" in roles:
                self._refuse(
                    "leaves out a system message once an answer follows, so it cannot stay where it was sampled after:"
                    " write its text into the first message of the user"
                )
            if self._one_question and tools is not None and roles.count("user") > 1:
                self._refuse(
                    "shows tools before the last message of the user alone, so a second one would change what the"
                    " earlier turns were sampled after: a dialogue with tools can have only one"
                )
            literals = self._literal_ids(roles, open_turn, tools)
            for role, literal in zip(roles, literals[1:], strict=True):
                if role == "assistant" and (not literal or literal[0] != self.stop_id):
                    self._refuse(f"does not end every answer with its stop token in a dialogue {roles}")
            if tools is None and "tool" not in roles and not self._added_among(literals) <= self.control_ids:
                self._refuse(f"writes control tokens in a dialogue {roles} that it writes nowhere else")
            if tools is not None:
                self._check_schemas(tools, roles, open_turn)
            self._accepted[roles, open_turn, tools] = literals
        return self._accepted[roles, open_turn, tools]

    def _check_schemas(self, tools: str, roles: tuple[str, ...], open_turn: bool) -> None:
        """Raise UserError unless the literals hold each tool's name, and no control token of its schema."""
        texts = "".join(self._literal_texts(roles, open_turn, tools))
        schemas = parsed_json(tools)
        if hidden := [name for tool in schemas if (name := tool["function"]["name"]) not in texts]:
            self._refuse(f"does not show the tool {hidden[0]} to the model")
        plain = "\n".join(texts_in(schemas))
        if held := [name for name in self.control_names() if name in plain]:
            raise UserError(
                f"The schema of a tool holds the control token {held[0]}, which the model would read as one. Remove it"
                " from names and descriptions."
            )

    def _added_among(self, literals: Iterable[list[int]]) -> set[int]:
        """Return the added tokens in literals, without the one for unknown characters."""
        return {i for ids in literals for i in ids if i in self._added_ids and i != self.tokenizer.unk_token_id}

    def _literal_ids(self, roles: tuple[str, ...], open_turn: bool, tools: str | None = None) -> list[list[int]]:
        shape = (roles, open_turn, tools)
        if shape not in self._pieces:
            texts = self._literal_texts(roles, open_turn, tools)
            self._pieces[shape] = [self._tokenise_literal(text, i == 0) for i, text in enumerate(texts)]
        return self._pieces[shape]

    def _literal_texts(self, roles: tuple[str, ...], open_turn: bool, tools: str | None = None) -> list[str]:
        shape = (roles, open_turn, tools)
        if shape not in self._texts:
            parts = _PLACEHOLDER.split(self._framed(self._render(self._stand_ins(roles), open_turn, tools)))
            if parts[1::2] != [str(i) for i in range(len(roles))]:
                self._refuse(f"drops, repeats or moves messages of a dialogue {roles}")
            self._texts[shape] = self._around(roles, parts[0::2])
        return self._texts[shape]

    def _around(self, roles: tuple[str, ...], texts: list[str]) -> list[str]:
        """Return literals without what belongs to the messages: white space before answers, ids behind results."""
        for i, role in enumerate(roles):
            if role == "assistant":
                texts[i] = texts[i].removesuffix(self.lead)
            elif role == "tool":
                texts[i + 1] = texts[i + 1].rpartition(MARK)[2]
        if any(MARK in text for text in texts):
            self._refuse("writes the ids of calls before their results")
        return texts

    def _render(self, messages: list[Message], open_turn: bool, tools: str | None = None) -> str:
        try:
            with template_limits.at_most(template_limits.STEPS):
                rendered = self.tokenizer.apply_chat_template(
                    messages,
                    tools=None if tools is None else parsed_json(tools),
                    chat_template=self.template,
                    add_generation_prompt=open_turn,
                    tokenize=False,
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
        turns: tuple[str, ...] = ("user", "assistant") * 3 + ("user",)
        dialogues = [_placeholders(roles) for roles in (("user",), ("system", *turns))]
        words = template_limits.why_not(self.template, self.tokenizer.special_tokens_map, dialogues)
        if words:
            raise UserError(f"{self._origin} cannot be used: {words} for a short dialogue. {REMEDY}")
        opened, answered = self._render(dialogues[0], True), self._render(_placeholders(turns[:2]), False)
        header = answered.partition("\ue0001\ue001")[0]
        if header.startswith(opened) and header[len(opened) :].isspace():
            self.lead = header[len(opened) :]
        accepted: list[tuple[str, ...]] = [turns]
        try:
            self._literal_texts(("system", "user"), False)
            answered = self._render(_placeholders(("system", "user", "assistant")), False)
            self._no_system = "\ue0000\ue001" not in answered
            accepted += [] if self._no_system else [("system", *turns)]
        except UserError as error:
            if not isinstance(error.__cause__, jinja2.TemplateError):
                raise  # a template may refuse system messages, in words; then so do we, when one comes
        stops = self._check_turns(accepted)
        for roles in accepted:
            self._check_contents(roles)
        if len(stops) != 1 or not stops <= self._added_ids:
            self._refuse(
                "can't be marked: the assistant's text is not followed at once by a stop token (an added token such as "
                "<|im_end|>), so the model could not learn to stop"
            )
        self.stop_id = stops.pop()
        self._literal_ids(("user", "assistant", "user"), True)

    def _check_turns(self, accepted: list[tuple[str, ...]], tools: str | None = None) -> set[int]:
        """Return the tokens that follow answers; UserError if an answer's context changes with what follows it."""
        stops: set[int] = set()
        after: dict[tuple[str, str], list[int]] = {}
        for roles in accepted:
            whole = self._literal_ids(roles, False, tools)
            for count in range(roles.index("user") + 1, len(roles)):
                pieces = self._literal_ids(roles[:count], False, tools)
                several = roles[count - 1 : count + 1] == ("tool", "tool")  # nothing is sampled between them
                if not several and (pieces[:-1] != whole[:count] or pieces[-1] != whole[count][: len(pieces[-1])]):
                    self._refuse(
                        "writes earlier turns differently once later ones follow, so sampled tokens can't be kept"
                        + self._about_thoughts()
                    )
                if roles[count] == "assistant" and self._literal_ids(roles[:count], True, tools) != whole[: count + 1]:
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
        return stops

    def _check_contents(self, roles: tuple[str, ...]) -> None:
        """Check that the template does not change ordinary contents, also in earlier turns."""
        says = {
            "system": "Reply briefly.",
            "user": "Which way\nnow?",
            "assistant": "<think>\nThe ice is left.\n</think>\n\n<answer>Right</answer>",
        }
        messages: list[Message] = [  # each different: some templates find a message by its content
            {"role": role, "content": f"{n}. {says[role]}" if role == "user" else says[role]}
            for n, role in enumerate(roles)
        ]
        literals = self._literal_texts(roles, False)
        expected = literals[0] + "".join(
            self.written(message) + text for message, text in zip(messages, literals[1:], strict=True)
        )
        if self._render(messages, False) != expected:
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

    # Tools

    @cached_property
    def call_form(self) -> Form:
        """The form of the calls that the template writes. UserError where it writes none that can be read."""
        call = {"role": "assistant", "content": "", "tool_calls": [self._probe_call]}
        if not self._writes_calls:
            if OPEN in self._render(_placeholders(("user",)), False, PROBE):
                return "hermes"  # as SmolLM3: its system message explains the form, and calls are left to contents
            self._refuse("leaves out calls of tools")
        written = self._between(("user",), call)
        plain = written.removeprefix(TOOL_CALLS)  # a control token of Mistral's, which calls begin with
        if control := next((name for name in self.control_names() if name in plain), None):
            self._refuse(f"writes calls of tools with the control token {control}, which no text of a turn can hold")
        form = form_of(written)
        if form is None and getattr(self.tokenizer, "response_template", None) is not None:
            return "response"
        if form is None:
            self._refuse(f"writes calls of tools in a form that is not known here: {written!r:.80}")
        return form

    @cached_property
    def _writes_calls(self) -> bool:
        message: Message = {"role": "assistant", "content": "Now."}
        user = _placeholders(("user",))
        with_call = self._render([*user, message | {"tool_calls": [self._probe_call]}], False, PROBE)
        return with_call != self._render([*user, message], False, PROBE)

    @cached_property
    def _wants_ids(self) -> bool:
        """Whether the template takes calls with ids of nine characters alone."""
        plain, with_id = ([{"tool_calls": [PROBE_CALL | more]}] for more in ({}, {"id": MARK}))
        return not self._writes(plain) and self._writes(with_id)

    def _writes(self, messages: Sequence[Message]) -> bool:
        """Return whether the template writes these messages behind one of the user, in this order."""
        try:
            self._render(
                [*_placeholders(("user",)), *({"role": "assistant", "content": ""} | m for m in messages)], False
            )
        except UserError:
            return False
        return True

    @property
    def _probe_call(self) -> Message:
        return PROBE_CALL | {"id": nine("", 0)} if self._wants_ids else PROBE_CALL

    @cached_property
    def _frame(self) -> tuple[str, str] | None:
        """What stands around the name in a call, where the template takes results after calls alone."""
        result = {"role": "tool", "content": "", "tool_call_id": MARK}
        if not self._wants_ids or self._writes([{}, result, {}]):
            return None
        before, after = self._literal_texts(("user",), True)[1], self._literal_texts(("user", "assistant"), False)[2]
        parts = _PLACEHOLDER.split(self._render([*_placeholders(("user",)), _stand_in_call(1)], False))
        return parts[2].removeprefix(before), parts[4].removesuffix(after)

    def _stand_ins(self, roles: Sequence[str]) -> list[Message]:
        """Return `_placeholders`, with ids and calls where the template does not write results without them."""
        messages = _placeholders(roles)
        if "tool" in roles and self._wants_ids:
            for i, (role, following) in enumerate(pairwise([*roles, ""])):
                if role == "tool":
                    messages[i]["tool_call_id"] = MARK
                elif role == "assistant" and following == "tool" and self._frame is not None:
                    messages[i] = _stand_in_call(i)
        return messages

    def _framed(self, rendered: str) -> str:
        """Return a rendered text in which the place of each `_stand_in_call` is all of its call."""
        if MARK not in rendered or self._frame is None:
            return rendered
        before, after = map(re.escape, self._frame)
        return re.sub(f"{before}({_PLACEHOLDER.pattern}){after}", r"\1", rendered)

    @cached_property
    def marker(self) -> int | None:
        """The control token that calls begin with, which is sampled as part of a turn; None where there is none."""
        number = self._backend.token_to_id(TOOL_CALLS)
        return number if self.call_form == "mistral" and number in self.control_ids else None

    def with_ids(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages in which each result names its call, where the template asks for that."""
        has_results = any(message["role"] == "tool" for message in messages)
        return named_results(messages) if has_results and self._wants_ids else messages

    @cached_property
    def _copies_results(self) -> bool:
        return (
            self._between(("user", "assistant"), {"role": "tool", "content": RESULT, "tool_call_id": nine("", 0)})
            == RESULT
        )

    def control_names(self) -> list[str]:
        """Return the control tokens as text, the longest first."""
        names = filter(None, map(self._backend.id_to_token, self.control_ids))
        return sorted(names, key=len, reverse=True)

    def written(self, message: Message) -> Any:
        """Return the text between a message's literals: its content, its calls, or a tool's result as it is written."""
        content = message.get("content")
        if message.get("role") == "tool" and isinstance(content, str) and not self._copies_results:
            return self._between(("user", "assistant"), message)
        if not message.get("tool_calls"):
            leads = (
                message.get("role") == "assistant" and isinstance(content, str) and not content.startswith(self.lead)
            )
            return f"{self.lead}{content}" if leads else content
        try:
            calls = plain_calls(message["tool_calls"])
        except ValueError as error:
            raise UserError(f"tool_calls {message['tool_calls']!r:.80} cannot be read: {error}.") from error
        if self._wants_ids:
            calls = [call | {"id": nine(call.get("id"), number)} for number, call in enumerate(calls)]
        form, said = self.call_form, content if isinstance(content, str) else ""
        if form == "hermes" and not self._writes_calls:
            return hermes_text(said, calls)
        text = self._between(("user",), {"role": "assistant", "content": said, "tool_calls": calls})
        if said.strip() not in text:
            self._refuse("leaves out what an answer says beside a call")
        return text

    def _between(self, before: Sequence[str], message: Message) -> str:
        """Return what the template writes between the literals of a message that follows placeholders."""
        roles = (*before, message["role"])
        literals = self._literal_texts(roles, False, PROBE)
        start = "".join(f"{text}\ue000{i}\ue001" for i, text in enumerate(literals[:-2])) + literals[-2]
        rendered = self._framed(self._render([*self._stand_ins(roles)[:-1], message], False, PROBE))
        if not (rendered.startswith(start) and rendered[len(start) :].endswith(literals[-1])):
            self._refuse(f"writes a message of the role {message['role']} with calls or results in another place")
        return rendered[len(start) : len(rendered) - len(literals[-1])]

    def require_tools(self, given: bool) -> None:
        """Raise UserError if no dialogue with tools (given: with their schemas) can be marked."""
        if given in self._with_tools:
            return
        tools, user = PROBE if given else None, _placeholders(("user",))
        roles: tuple[str, ...] = ("user", "assistant", "tool", "assistant", "user", "assistant", "tool", "tool")
        roles += ("assistant", "user")
        if words := template_limits.why_not(
            self.template, self.tokenizer.special_tokens_map, [_placeholders(roles)], tools
        ):
            raise UserError(f"{self._origin} cannot be used with tools: {words} for a short dialogue. {REMEDY}")
        if given and self._render(user, False, PROBE) == self._render(user, False):
            self._refuse("does not show tools to the model")
        try:
            self._check_turns([roles], tools)
        except UserError:
            if not given:
                raise
            roles = ("user", "assistant", "tool", "assistant", "tool", "tool", "assistant")
            self._check_turns([roles], tools)
            self._one_question = True
        says = {"user": "Which way\nnow?", "assistant": "<think>\nThe ice is left.\n</think>\n\nRight", "tool": RESULT}
        messages: list[Message] = [{"role": role, "content": says[role]} for role in roles]
        if given or self._writes_calls:
            assert self.call_form
            for i, (role, following) in enumerate(pairwise(roles)):
                if (role, following) == ("assistant", "tool"):
                    messages[i] = {"role": "assistant", "content": "", "tool_calls": [self._probe_call]}
            messages = list(self.with_ids(messages))
        literals = self._literal_texts(roles, False, tools)
        texts = [self.written(message) for message in messages]
        expected = literals[0] + "".join(text + literal for text, literal in zip(texts, literals[1:], strict=True))
        if not self._writes_calls:
            messages = [{"role": m["role"], "content": text} for m, text in zip(messages, texts, strict=True)]
        if self._render(messages, False, tools) != expected:
            self._refuse("rewrites messages of a dialogue with tools, so training and sampling would see other tokens")
        self._with_tools[given] = self.control_ids | self._added_among(self._literal_ids(roles, False, tools))

    def _refuse(self, reason: str) -> NoReturn:
        raise UserError(f"{self._origin} {reason}. {REMEDY}")


def _placeholders(roles: Sequence[str]) -> list[Message]:
    """Return a dialogue of these roles whose contents can be located in a rendered template."""
    return [{"role": role, "content": f"\ue000{i}\ue001"} for i, role in enumerate(roles)]


def _stand_in_call(number: int) -> Message:
    """Return an answer with a call whose name is the placeholder of its message."""
    function = {"name": f"\ue000{number}\ue001", "arguments": {}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": MARK, "function": function}]}
