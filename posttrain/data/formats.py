"""Which of the common formats does a row have?  Its columns decide, and it becomes messages or a pair.

    as_dialogue({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]})
        -> Recognised("ShareGPT", {"messages": [{"role": "user", "content": "Hi"}, ...], ...}, {"conversations"})

Only the form of a row is changed here; `filters` judges its messages.
TRL's `maybe_convert_to_chatml` renames the keys of ShareGPT's messages, but not its roles, and knows no other format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from envs.local_rows import ROLE_NAMES
from posttrain.data.local import brief
from posttrain.models import Message

TEXT = "plain text"  # role of the one message of a row that is not a dialogue
CALLS = ("tool_calls", "function_call")  # a message that has one may lack a content
DIALOGUES = ("messages", "conversations", "conversation")
SYSTEM = ("system", "system_prompt")
WHOLE = "pairs of dialogues"
MESSAGES_IN_WORDS = 'a list of messages [{"role": "user", "content": "..."}, ...]'
DIALOGUE_FORMATS = (
    "messages or conversations (lists of role and content, or of ShareGPT's from and value); instruction and output "
    "(Alpaca, also with input); prompt and completion (text or messages); text"
)
PAIR_FORMATS = (
    "prompt, chosen and rejected (text or messages); chosen and rejected as whole dialogues, also as text with "
    r'"\n\nHuman: ..." and "\n\nAssistant: ..." (HH); conversations, chosen and rejected (LLaMA-Factory); question, '
    "chosen and rejected (Orca, also with system); instruction, chosen and rejected (also with input); input, chosen "
    "and rejected"
)
PROMPT_FORMATS = "prompt (text or messages); messages or conversations whose last message is the user's"
KTO = (
    "This is KTO's format, one answer with a label that says whether it is good. Phase 2 compares two answers to a "
    "prompt: write rows with prompt, chosen and rejected. Or train on good answers in phase 1: keep the rows whose "
    "label is true and remove that column. Rename it if it has another meaning"
)
# Values of a column `label` that call an answer good or bad.
VERDICTS = {
    "true", "false", "yes", "no", "y", "n", "t", "f", "1", "0", "-1", "1.0", "0.0", "-1.0", "good", "bad",
    "desirable", "undesirable", "chosen", "rejected", "accepted",
}  # fmt: skip
_HH = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


class Recognised(NamedTuple):
    """The name of a format, the row as `filters` reads it, and the columns that were read."""

    format: str
    row: dict[str, Any]
    columns: set[str]


Recognise = Callable[[dict[str, Any]], Recognised | str]  # or why the row has no known format


def as_dialogue(row: dict[str, Any]) -> Recognised | str:
    """Return the row with its `messages`; plain text becomes one message with the role TEXT."""
    columns = used_columns(row)
    if _is_kto(row, columns):
        return KTO
    if {"chosen", "rejected"} <= columns and "messages" not in columns:
        other = as_pair(row)
        if isinstance(other, str):
            return f"These are pairs of answers, which are for phase 2 (kind: preferences), but {other}"
        return "These are pairs of answers: phase 2 reads them (kind: preferences)"
    for there in (columns, set(row)):  # a column that is empty here may have a value in other rows
        if column := next((name for name in DIALOGUES if name in there), None):
            messages = as_messages(row[column])
            if messages is None:
                return _not_messages(column, row[column], MESSAGES_IN_WORDS)
            return _with_system(_name(column, row[column]), row, messages, {column})
        if {"instruction", "output"} <= there:
            earlier = _history(row.get("history"))
            if earlier is None:
                return f"column history should be a list of [question, answer], but is {brief(row['history'])}"
            turn = [{"role": "user", "content": _instruction(row)}, {"role": "assistant", "content": row["output"]}]
            used = {"instruction", "input", "output", "history"}
            return _with_system("Alpaca", row, [*earlier, *turn], used)
        if {"prompt", "completion"} <= there:
            messages = []
            for name, role in (("prompt", "user"), ("completion", "assistant")):
                side = _side(row[name], role)
                if side is None:
                    return _not_messages(name, row[name], f"text or {MESSAGES_IN_WORDS}")
                messages += side
            return _with_system("prompt and completion", row, messages, {"prompt", "completion"})
        if "text" in there:
            return Recognised("text", row | {"messages": [{"role": TEXT, "content": row["text"]}]}, {"text"})
    return ""


def as_pair(row: dict[str, Any]) -> Recognised | str:
    """Return the row with `chosen` and `rejected` as texts or messages, and the `prompt` if they lack it."""
    if not {"chosen", "rejected"} <= row.keys():
        other = as_dialogue(row)
        if isinstance(other, str):
            return other if other == KTO else ""
        return f"These are rows of one answer ({other.format}): phase 1 reads them (kind: messages)"
    sides: dict[str, str | list[Message]] = {}
    for name in ("chosen", "rejected"):
        value = [row[name]] if isinstance(row[name], dict) else row[name]
        side = value if isinstance(value, str) else as_messages(value)
        if side is None:
            return _not_messages(name, row[name], f"text or {MESSAGES_IN_WORDS}")
        sides[name] = side
    used = {"chosen", "rejected", "score_chosen", "score_rejected"}
    prompt, form, columns = _prompt(row)
    texts = {name: side for name, side in sides.items() if isinstance(side, str)}
    if isinstance(prompt, str) and _HH.search(prompt) and len(texts) == 2:
        prompt, form = _hh(prompt), "HH dialogues"
        prompt = prompt[:-1] if prompt[-1] == {"role": "assistant", "content": ""} else prompt
        sides |= {name: _hh_answer(side) for name, side in texts.items()}
    elif not has_value(prompt) and len(texts) == 2 and all(map(_HH.search, texts.values())):
        form, sides = "HH dialogues", sides | {name: _hh(side) for name, side in texts.items()}
    dialogues = {name: side for name, side in sides.items() if isinstance(side, list) and side}
    if len(dialogues) == 2 and all(side[0]["role"] != "assistant" for side in dialogues.values()):
        before = as_messages(prompt) if columns == {"prompt"} else None
        if before:
            dialogues = {name: _behind(before, side) for name, side in dialogues.items()}
            used |= columns
        begun = {name: _begun(row, side) for name, side in dialogues.items()}
        whole = {name: messages for name, (messages, _) in begun.items()}
        used = used.union(*(column for _, column in begun.values()))
        return Recognised(form if form == "HH dialogues" else WHOLE, row | whole, used)
    if prompt is None:
        if texts:
            are = "is" if len(texts) == 1 else "are"
            return f"{' and '.join(texts)} {are} text, and there is no prompt: add a column prompt"
        return Recognised(WHOLE, row | sides, used)  # `filters` reports what is missing
    before = prompt if isinstance(prompt, str) else as_messages(prompt)
    if before is None:
        return _not_messages(min(columns), prompt, f"text or {MESSAGES_IN_WORDS}")
    begun, column = _begun(row, [{"role": "user", "content": before}] if isinstance(before, str) else before)
    return Recognised(form, row | sides | {"prompt": begun if column else before}, used | columns | column)


def as_prompt(row: dict[str, Any]) -> Recognised | str:
    """Return the row with a `prompt`, as text or as messages."""
    return _prompt_row(row, ("prompt", *DIALOGUES))


def last_turn(row: dict[str, Any]) -> Recognised | str:
    """Return the row with its dialogue as `prompt`, even if it has a column of that name."""
    return _prompt_row(row, DIALOGUES)


def _prompt_row(row: dict[str, Any], names: Sequence[str]) -> Recognised | str:
    columns = used_columns(row)
    for there in (columns, set(row)):
        if column := next((name for name in names if name in there), None):
            text = column == "prompt"
            prompt = row[column] if text and isinstance(row[column], str) else as_messages(row[column])
            if prompt is None:
                return _not_messages(column, row[column], "text or " * text + MESSAGES_IN_WORDS)
            if isinstance(prompt, str) and not columns & set(SYSTEM):
                return Recognised("prompts", row, {column, "answer"})
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            recognised = _with_system("prompts", row, messages, {column, "answer"})
            return recognised._replace(row=row | {"prompt": recognised.row["messages"]})
    return ""


def as_messages(value: object) -> list[Message] | None:
    """Return messages with role, content and their other keys; None where the value is not a list of messages.

    ShareGPT's keys and other names of the three roles are replaced; other roles stay.
    """
    if not isinstance(value, list):
        return None
    messages: list[Message] = []
    for each in value:
        if not isinstance(each, dict):
            return None
        role_keys, content_keys = ("role", "from"), ("content", "value")
        if not (any(key in each for key in role_keys) and any(key in each for key in (*content_keys, *CALLS))):
            return None
        role_key, content_key = (
            next((key for key in keys if each.get(key) is not None), keys[0]) for keys in (role_keys, content_keys)
        )
        role = each.get(role_key)
        message = {"role": ROLE_NAMES.get(role, role) if isinstance(role, str) else role}
        message["content"] = each.get(content_key)
        messages.append(message | {key: each[key] for key in each if key not in (role_key, content_key, *message)})
    return messages


def used_columns(row: dict[str, Any]) -> set[str]:
    """Return the columns with a value. Parquet gives every row all columns of its file, and CSV all cells."""
    return {name for name, value in row.items() if has_value(value)}


def has_value(value: object) -> bool:
    """Return False for the value of a column or a key that a row does not use."""
    return not (value is None or value in ("", [], {}))


def _is_kto(row: dict[str, Any], columns: set[str]) -> bool:
    """Return whether a column says that the answer is good or bad. Beside a `completion`, any label counts as such."""
    label = str(row["label"]).strip().lower() if "label" in columns else ""
    if "kto_tag" in columns or not label:
        return "kto_tag" in columns
    others = bool(columns & {*DIALOGUES}) or {"instruction", "output"} <= columns
    return label in VERDICTS if others else "completion" in columns


def _not_messages(column: str, value: object, expected: str) -> str:
    return f"column {column} should be {expected}, but is {brief(value)}"


def _name(column: str, messages: list[dict[str, Any]]) -> str:
    if messages and messages[0].get("from") is not None:
        return "ShareGPT"
    return "messages" if column == "messages" else f"messages in {column}"


def _side(value: object, role: str) -> list[Message] | None:
    """Return a text (also a missing one) as one message and messages unchanged; None for anything else."""
    if value is None or isinstance(value, str):
        return [{"role": role, "content": value}]
    return as_messages([value] if isinstance(value, dict) else value)


def _instruction(row: dict[str, Any]) -> Any:
    """Return Alpaca's instruction and its input on separate lines, as LLaMA-Factory joins them."""
    instruction, more = row["instruction"], row.get("input")
    if not more or not isinstance(instruction, str) or not isinstance(more, str):
        return instruction
    return f"{instruction}\n{more}" if instruction else more


def _history(value: object) -> list[Message] | None:
    """Return the turns before Alpaca's, [["Hi", "Hello"], ...] as in LLaMA-Factory, as messages; or None."""
    if value is None or value == "":
        return []
    if not isinstance(value, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in value):
        return None
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in value for role, text in zip(roles, turn, strict=True)]


def _begun(row: dict[str, Any], messages: list[Message]) -> tuple[list[Message], set[str]]:
    """Return the messages after a system message from a column, if there is one, and that column."""
    column = next((name for name in SYSTEM if name in used_columns(row)), None)
    if column is None:
        return messages, set()
    first = {"role": "system", "content": row[column]}
    repeated = messages[:1] and {key: messages[0].get(key) for key in first} == first
    return (messages if repeated else [first, *messages]), {column}


def _with_system(form: str, row: dict[str, Any], messages: list[Message], used: set[str]) -> Recognised:
    begun, column = _begun(row, messages)
    return Recognised(form, row | {"messages": begun}, used | column)


def _prompt(row: dict[str, Any]) -> tuple[Any, str, set[str]]:
    """Return the prompt before two answers, the name of the format, and the columns; None where there is no prompt."""
    for there in (used_columns(row), {name for name in row if row[name] is not None}):
        if "prompt" in there:
            return row["prompt"], "prompt, chosen, rejected", {"prompt"}
        if "question" in there:
            return row["question"], "Orca pairs", {"question"}
        if "instruction" in there:
            return _instruction(row), "Alpaca pairs", {"instruction", "input"}
        if column := next((name for name in DIALOGUES if name in there), None):
            return row[column], "LLaMA-Factory pairs", {column}
        if "input" in there:
            return row["input"], "input, chosen, rejected", {"input"}
    return None, "", set()


def _behind(prompt: list[Message], side: list[Message]) -> list[Message]:
    """Return the prompt and then the dialogue without what it repeats of the prompt, as TRL joins them."""
    before, after = ([(each["role"], each["content"]) for each in messages] for messages in (prompt, side))
    if after[1 : 1 + len(before)] == before:  # behind a system message of its own
        return side
    repeated = next(n for n in range(len(before), -1, -1) if before[len(before) - n :] == after[:n])
    return [*prompt[: len(prompt) - repeated], *side]


def _hh(text: str) -> list[Message]:
    r"""Return [user, assistant, ...] of "\n\nHuman: Hi\n\nAssistant: Hello"; a text before them has no role."""
    before, *turns = _HH.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    pairs = zip(turns[::2], turns[1::2], strict=True)
    messages = [{"role": roles[name], "content": content.strip()} for name, content in pairs]
    return [{"role": None, "content": before}, *messages] if before.strip() else messages


def _hh_answer(text: str) -> str | list[Message]:
    r"""Return the answer after an HH prompt, or messages where it has several turns ("Hello\n\nHuman: Bye")."""
    begins = _HH.search(text)
    if begins is None:
        return text
    answer = text[: begins.start()]
    answered = [{"role": "assistant", "content": answer}] if answer.strip() else []
    return [*answered, *_hh(text[begins.start() :])]
