r"""Which rows are good enough to train on?  One function per kind: a row in, a `Example` or the reason to drop it out.

Reasons are short and fixed, because the table counts them: "not exactly one \boxed", "empty content", ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from envs.local_rows import CALLERS, RESULTS
from envs.math_judge import MathJudge, last_boxed
from posttrain.config import Source
from posttrain.data import gsm8k as gsm8k_rows
from posttrain.data.calls import BAD_CALLS, BAD_TOOLS, schemas_of, with_calls
from posttrain.data.formats import TEXT, has_value
from posttrain.data.local import printable
from posttrain.models import Message

BOX = re.compile(r"\\boxed\s*\{")
# Possessive, so that the time is linear in any text: the end of the sentence or the formula around the box, and the
# interpreter's output.
AFTER_BOX = re.compile(r"[\s.$!]*+(\\[)\]])?+[\s.$!]*+")
TURNS = re.compile(r"(?:ua(?:t++a)*+)++")  # roles by their first letters: results of tools stand between two answers
PRINTED = re.compile(r"<llm-code-output>(?:(?!</?llm-code-output>).)*+</llm-code-output>", re.DOTALL)


LARGEST_SCORE = 1e100  # what is larger, or not a number, is not a score

# Keys of a message, beside role and content, that may change its meaning if they have a value. A row with a key that is
# in none of these lists is dropped, because the key may matter; the table shows its name.
SWITCHES = ("weight", "train", "training", "loss")  # 0 or false: this answer is read, but not trained
DROPPED = {
    "calls of tools": ("tool_calls", "function_call", "tool_call_id", "tools", "functions", "tool_responses"),
    "thoughts beside the content": ("reasoning_content", "reasoning", "reasoning_details", "thinking", "thoughts"),
    "pictures, sound or files": (
        "images", "image", "image_url", "videos", "video", "audios", "audio", "files", "attachments",
    ),
    "names of speakers": ("name",),
    "refusals beside the content": ("refusal",),
}  # fmt: skip
# Those that matter as a column of the row as well: the ones that change the question, and, where the row's answer is
# trained, all but `name`, which names the row there.
ASKED_COLUMNS = ("tools", "functions", "images", "image", "videos", "video", "audios", "audio")
ANSWER_COLUMNS = tuple(key for keys in DROPPED.values() for key in keys if key != "name")
IGNORED = {  # a message's origin, and opinions about it
    "id", "message_id", "msg_id", "uuid", "parent", "parent_id", "conversation_id", "index", "idx", "turn", "turn_id",
    "turn_identifier", "timestamp", "time", "date", "create_time", "created", "created_at", "update_time", "updated_at",
    "language", "lang", "model", "model_name", "provider", "source", "url", "country", "state", "header", "hashed_ip",
    "toxic", "redacted", "score", "rating", "feedback", "tokens", "token_count", "num_tokens", "length", "metadata",
    "annotations",
}  # fmt: skip
UNKNOWN = "unknown key of a message"
UNTRAINED = "marked as not to be trained"
REMEDIES = {  # what to do about rows that are dropped for these reasons, by how the reason begins
    BAD_CALLS: 'A call is {"function": {"name": ..., "arguments": {...}}}, the arguments also as a JSON text.',
    BAD_TOOLS: "The column `tools` is a list of JSON schemas, as transformers' get_json_schema makes them.",
    "calls of tools": "Calls of tools are trained in phase 1, in rows of kind: messages; remove such rows.",
    "thoughts beside": "Write thoughts into the content (<think>...</think> before the answer) and remove the key.",
    UNKNOWN: "Remove that key from the messages, if it does not change what they mean.",
    UNTRAINED: "Their `weight`, `train`, `training` or `loss` is 0 or false: remove that column to train on them.",
    **{
        f"{name} of a row": f"Write 0 or 1 into the column `{name}` (the `weight` of a source mixes several), or rename"
        " it if it does not say what is trained."
        for name in SWITCHES
    },
    "names of speakers": "Remove the key `name`, if the contents say enough without it.",
    "no prompt before": "Add a column `prompt`, or begin both dialogues with it.",
    "longer than": "Write a larger limit of tokens (data.max_length; in phase 3 rollout.max_context).",
}
_REASONS = {key: reason for reason, keys in DROPPED.items() for key in keys}
OF_TOOLS = ("tool_calls", "tool_call_id")  # keys of a message that are kept where tools may be part of a row
TOOL_COLUMNS = ("tools", "functions")  # `functions` is OpenAI's former name
NOTHING = ("[]", "{}", "null")  # empty values, above all of columns of tools
SPELLED = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}  # in a cell of a CSV file


class Example(NamedTuple):
    """A row that is kept: one dialogue, or chosen and rejected; the question, which decides its side of the split; the
    right answer if known; whether a last turn without an answer was cut off, or turns that are too long; the schemas of
    its tools."""

    question: str
    dialogues: list[list[Message]]
    answer: str | None = None
    cut: bool = False
    shortened: bool = False
    tools: list[dict[str, Any]] | None = None

    @property
    def calls(self) -> bool:
        """Return whether tools are part of it."""
        return bool(self.tools) or any(m["role"] == "tool" or "tool_calls" in m for m in self.dialogues[0])


Check = Callable[[dict[str, Any], Source, MathJudge], Example | str]


def keep_openmathinstruct(row: dict[str, Any], source: Source, judge: MathJudge) -> Example | str:
    """Keep a question and a worked solution with one box, at its end, that holds the expected answer."""
    question, solution = row["question"], row["generated_solution"]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": solution}]
    if reason := fault(messages):
        return reason
    if not row["is_correct"]:
        return "marked as wrong"
    if row["error_message"] not in ("", None, "<not_executed>"):
        return "its code failed"
    if "<llm-code" in solution:
        if source.code == "drop":
            return "uses code"
        # What the interpreter printed is read, not written: the model must not learn to invent it.
        spans = [list(match.span()) for match in PRINTED.finditer(solution)]
        if len(spans) != solution.count("<llm-code-output>") or len(spans) != solution.count("</llm-code-output>"):
            return "broken code block"
        messages[1]["mask_spans"] = spans
    boxes = list(BOX.finditer(solution))
    held = last_boxed(solution)
    if len(boxes) != 1 or solution.count("\\boxed") != 1 or held is None:
        return r"not exactly one \boxed"
    last_brace = solution.rindex("}")
    if solution[boxes[0].end() : last_brace].strip() != held or not AFTER_BOX.fullmatch(solution, last_brace + 1):
        return "text after the box"
    if not judge.correct(solution, str(row["expected_answer"])):
        return "box is not the expected answer"
    return Example(question, [messages], str(row["expected_answer"]))


def keep_gsm8k(row: dict[str, Any], source: Source, judge: MathJudge) -> Example | str:
    """Keep a question that is not held out, and its worked answer with the final number in a box."""
    question, answer = row["question"], row["answer"]
    if reason := fault([{"role": "user", "content": question}, {"role": "assistant", "content": answer}]):
        return reason
    number = gsm8k_rows.final(answer)
    if number is None:
        return "no number behind ####"
    if gsm8k_rows.is_held_out(question):
        return "held out for the evaluation"
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": gsm8k_rows.worked_answer(answer)},
    ]
    return Example(question, [messages], number)


def keep_dialogue(row: dict[str, Any], source: Source, judge: MathJudge) -> Example | str:
    """Keep a dialogue in which user and assistant take turns; the first user message decides its side of the split.

    It ends before an answer that was cut short, which the chat's files mark with "finished": false, and before a last
    message of the user that has no answer. Plain text is one message with a role of its own.
    """
    matter = [name for name in ANSWER_COLUMNS if name not in TOOL_COLUMNS]
    if reason := _columns_that_matter(row, matter) or _untrained(row):
        return reason
    shown = (row[name] for name in TOOL_COLUMNS if has_value(row.get(name)) and row[name] not in NOTHING)
    tools = next((schemas_of(value) for value in shown), None)
    if isinstance(tools, str):
        return tools
    all_messages = row["messages"]
    if [message["role"] for message in all_messages] == [TEXT]:
        text = all_messages[0]["content"]
        return Example(text, [all_messages]) if is_readable_text(text) else "empty content"
    cut = next((place for place, each in enumerate(all_messages) if each.get("finished") is False), None)
    whole_answers = all_messages if cut is None else all_messages[: max(cut - 1, 0)]
    if cut is not None and not any(message["role"] == "assistant" for message in whole_answers):
        return "an answer that was cut short"
    ended = without_last_question(whole_answers)
    messages = plain_messages(ended, calls=True, tools=tools or ())
    if isinstance(messages, str):
        return messages
    if reason := fault(messages):
        return reason
    if sum(message["role"] == "assistant" for message in messages) < (source.min_turns or 1):
        return f"fewer than {source.min_turns} answers"
    question = next(message["content"] for message in messages if message["role"] == "user")
    return Example(question, [messages], cut=len(ended) < len(whole_answers), tools=tools)


def keep_preference(row: dict[str, Any], source: Source, judge: MathJudge) -> Example | str:
    """Keep two different answers to the same prompt, the chosen one scored higher (local pairs may have no scores).

    A `prompt` beside whole dialogues, as UltraFeedback has it, is ignored: it repeats their first message as a string.
    Nothing behind a last answer is trained, so a last turn of the user is cut from either side.
    """
    dialogues = _untrained(row) or dialogues_of_pair(row)
    if isinstance(dialogues, str):
        return dialogues
    chosen, rejected = dialogues
    if chosen[-1]["content"].strip() == rejected[-1]["content"].strip():
        return "identical answers"
    scores: list[Any] = [row.get("score_chosen"), row.get("score_rejected")]
    margin = source.min_margin or 0.0
    if all(isinstance(score, int | float) and abs(score) < LARGEST_SCORE for score in scores):
        if not float(scores[0]) - float(scores[1]) > margin:
            return f"score margin not above {margin:g}"
    elif source.kind == "ultrafeedback" or margin > 0 or scores != [None, None]:
        return "no scores"
    question = "\n".join(message["content"] for message in chosen[:-1])
    cut = any(_whole(row[name], row.get("prompt"))[-1]["role"] == "user" for name in ("chosen", "rejected"))
    return Example(question, [chosen, rejected], cut=cut)


def dialogues_of_pair(row: dict[str, Any]) -> tuple[list[Message], list[Message]] | str:
    """Return two whole dialogues that differ in the last answer alone, or why a row does not have them."""
    if reason := _columns_that_matter(row):
        return reason
    dialogues: list[list[Message]] = []
    for name in ("chosen", "rejected"):
        messages = plain_messages(without_last_question(_whole(row[name], row.get("prompt"))))
        if isinstance(messages, str):
            return messages
        if messages and messages[0]["role"] == "assistant":
            return "no prompt before the answer"
        if reason := fault(messages):
            return reason
        if messages[-1].keys() != {"role", "content"}:
            return "an answer that is not to be trained whole"
        dialogues.append([{"role": each["role"], "content": each["content"]} for each in messages])
    chosen, rejected = dialogues
    return (chosen, rejected) if chosen[:-1] == rejected[:-1] else "two different prompts"


def keep_prompt(row: dict[str, Any], source: Source, judge: MathJudge) -> Example | str:
    """Keep a prompt alone, as text or as messages that end with the user's (TRL's prompt-only format)."""
    if reason := _columns_that_matter(row, ASKED_COLUMNS) or _untrained(row):
        return reason
    messages = prompt_messages(row["prompt"])
    if isinstance(messages, str):
        return messages
    answer = str(value) if (value := row.get("answer")) is not None else ""
    return Example("\n".join(message["content"] for message in messages), [messages], answer.strip() or None)


def prompt_messages(prompt_given: str | list[Message]) -> list[Message] | str:
    """Return a prompt's messages, which end with the user's, or why they cannot be answered."""
    messages = plain_messages(
        [{"role": "user", "content": prompt_given}] if isinstance(prompt_given, str) else prompt_given
    )
    if isinstance(messages, str):
        return messages
    reason = fault([*messages, {"role": "assistant", "content": "its answer, to come"}])
    if reason is not None:
        return "does not end with the user" if reason == "roles do not alternate" else reason
    return [{"role": message["role"], "content": message["content"]} for message in messages]


CHECKS: dict[str, Check] = {
    "openmathinstruct": keep_openmathinstruct,
    "gsm8k": keep_gsm8k,
    "capybara": keep_dialogue,
    "messages": keep_dialogue,
    "demonstrations": keep_dialogue,
    "ultrafeedback": keep_preference,
    "preferences": keep_preference,
    "prompts": keep_prompt,
}


def without_last_question(messages: list[Message]) -> list[Message]:
    """Return the messages without the user's messages, and results of tools, after the last answer.

    All of them if there is no answer.
    """
    kept = len(messages)
    if any(message["role"] == "assistant" for message in messages):
        while messages[kept - 1]["role"] in ("user", "tool", *RESULTS):
            kept -= 1
    return messages[:kept]


def fault(messages: Sequence[Message]) -> str | None:
    """Return why these messages are not a dialogue that can be trained on; None if they are."""
    contents = [message["content"] for message in messages]
    if not all(isinstance(content, str) and _is_unicode(content) for content in contents):
        return "content is not text"
    if not all(is_readable_text(m["content"]) for m in messages if m["role"] != "tool" and not m.get("tool_calls")):
        return "empty content"
    roles = [message["role"] for message in messages]
    if any(role not in ("system", "user", "assistant", "tool") for role in roles):
        return "a role other than system, user and assistant"
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns or turns[-1] != "assistant":
        return "does not end with the assistant"
    if not TURNS.fullmatch("".join(role[0] for role in turns)):
        return "roles do not alternate"
    return None


def is_readable_text(value: object) -> bool:
    """Return True for a text that is more than white space and that a tokenizer can read."""
    return isinstance(value, str) and _is_unicode(value) and bool(value.strip())


def _is_unicode(text: str) -> bool:
    """Return False for half a surrogate pair, which JSON can spell and no tokenizer can read."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def plain_messages(
    messages: Sequence[dict[str, Any]], *, calls: bool = False, tools: Sequence[dict[str, Any]] = ()
) -> list[Message] | str:
    """Return messages with role, content, `mask_spans`, `train: False` and, with `calls`, what belongs to tools.

    Or the reason: they need other keys. tools: the schemas of the row.
    """
    kept: list[Message] = []
    for given in messages:
        if not calls and given["role"] in (*CALLERS, "tool"):
            return _REASONS["tool_calls"]
        message = with_calls(given, tools) if calls else given
        if isinstance(message, str):
            return message
        known = ("role", "content", "mask_spans", "finished", *(OF_TOOLS if calls else ()))
        known += ("name",) if calls and message["role"] == "tool" else ()
        trained: bool | None = None
        for key, value in message.items():
            if key in known or key in IGNORED or not has_value(value):
                continue
            if reason := _REASONS.get(key):
                return reason
            if key not in SWITCHES:
                return f"{UNKNOWN}: {printable(key)}"
            if value not in (0, 1):  # False and True among them
                return f"{key} of a message is neither 0 nor 1"
            trained = bool(value) and trained is not False
        if trained and message["role"] != "assistant":
            return "a message to be trained that is not an answer"
        content = message["content"]
        if isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content):
            if not all(map(_is_text_part, content)):
                return "content with parts that are not text"
            content = "".join(part["text"] for part in content)
        spans = {"mask_spans": message["mask_spans"]} if message.get("mask_spans") else {}
        untrained = {"train": False} if trained is False and message["role"] == "assistant" else {}
        called = {key: message[key] for key in (*OF_TOOLS, "name") if key in known and has_value(message.get(key))}
        kept.append({"role": message["role"], "content": content} | spans | untrained | called)
    return kept


def _is_text_part(part: dict[str, Any]) -> bool:
    """Return True for {"type": "text", "text": "Hi"}, also with the empty columns of other parts."""
    others = {key for key, value in part.items() if value is not None} - {"type", "text", "cache_control"}
    return part["type"] == "text" and isinstance(part.get("text"), str) and not others


def columns_judged(kind: str) -> set[str]:
    """Return the columns beside messages, pairs or prompts that decide whether a row of this kind is kept."""
    return {*SWITCHES, *(ASKED_COLUMNS if kind in ("prompts", "recall") else ANSWER_COLUMNS)}


def _columns_that_matter(row: dict[str, Any], names: Sequence[str] = ANSWER_COLUMNS) -> str | None:
    """Return why the answers of a row depend on more than its messages; None where they do not."""
    for name in names:
        if has_value(row.get(name)) and row[name] not in NOTHING:
            return _REASONS[name]
    return None


def _untrained(row: dict[str, Any]) -> str | None:
    """Return why a column says that a row is not to be trained on; None where none does."""
    for name in SWITCHES:
        value = row.get(name)
        if isinstance(value, str):
            value = SPELLED.get(value.strip().lower(), value.strip())
        if has_value(value) and value not in (0, 1):  # False and True among them
            return f"{name} of a row is neither 0 nor 1"
        if has_value(value) and not value:
            return UNTRAINED
    return None


def _whole(answer: Any, prompt: Any) -> list[Message]:
    """Return a dialogue from messages, from a prompt and the last message, or from a prompt and an answer as text."""
    messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if messages and messages[0]["role"] == "assistant" and prompt is not None:
        return [*([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt), *messages]
    return messages
