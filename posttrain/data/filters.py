r"""Which rows are good enough to train on?  One function per kind: a row in, a `Example` or the reason to drop it out.

Reasons are short and fixed, because the table counts them: "not exactly one \boxed", "empty content", ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from posttrain.chat import Message
from posttrain.config import Source
from posttrain.data import gsm8k as gsm8k_rows
from posttrain.judge import MathJudge, last_boxed

BOX = re.compile(r"\\boxed\s*\{")
# Possessive, so that the time is linear in any text: what may close the sentence or the formula around the box, and
# what the interpreter printed.
AFTER_BOX = re.compile(r"[\s.$!]*+(\\[)\]])?+[\s.$!]*+")
PRINTED = re.compile(r"<llm-code-output>(?:(?!</?llm-code-output>).)*+</llm-code-output>", re.DOTALL)


LARGEST_SCORE = 1e100  # what is larger, or no number, is no score


class Example(NamedTuple):
    """What is kept: one dialogue, or chosen and rejected; the question, which decides the side of the split; and what
    the answer comes to, where the row says it."""

    question: str
    dialogues: list[list[Message]]
    answer: str | None = None


Check = Callable[[dict[str, Any], Source, MathJudge], Example | str]


def openmathinstruct(row: dict[str, Any], source: Source, judge: MathJudge) -> Example | str:
    """A question and a worked solution whose one box, at its end, holds the expected answer."""
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


def gsm8k(row: dict[str, Any], source: Source, judge: MathJudge) -> Example | str:
    """A question that is not held out, and its worked answer with the final number in a box."""
    question, answer = row["question"], row["answer"]
    if reason := fault([{"role": "user", "content": question}, {"role": "assistant", "content": answer}]):
        return reason
    number = gsm8k_rows.final(answer)
    if number is None:
        return "no number behind ####"
    if gsm8k_rows.is_held_out(question):
        return "held out for the evaluation"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": gsm8k_rows.solution(answer)}]
    return Example(question, [messages], number)


def dialogue(row: dict[str, Any], source: Source, judge: MathJudge) -> Example | str:
    """User and assistant in turn, after a system message perhaps; the held-out split goes by the first user message.

    It ends before an answer that was cut short, which the chat's files mark with "finished": false.
    """
    cut = next((place for place, each in enumerate(row["messages"]) if each.get("finished") is False), None)
    messages = _plain(row["messages"] if cut is None else row["messages"][: max(cut - 1, 0)])
    if cut is not None and not any(message["role"] == "assistant" for message in messages):
        return "an answer that was cut short"
    if reason := fault(messages):
        return reason
    if sum(message["role"] == "assistant" for message in messages) < (source.min_turns or 1):
        return f"fewer than {source.min_turns} answers"
    return Example(next(message["content"] for message in messages if message["role"] == "user"), [messages])


def preference(row: dict[str, Any], source: Source, judge: MathJudge) -> Example | str:
    """Two different answers to the same prompt, the chosen one scored higher (local pairs may come without scores).

    A `prompt` beside whole dialogues, as UltraFeedback has it, is ignored: it repeats their first message as a string.
    """
    chosen, rejected = (whole_dialogue(row[name], row.get("prompt")) for name in ("chosen", "rejected"))
    for messages in (chosen, rejected):
        if reason := fault(messages):
            return reason
    if chosen[:-1] != rejected[:-1]:
        return "two different prompts"
    if chosen[-1]["content"].strip() == rejected[-1]["content"].strip():
        return "identical answers"
    scores: list[Any] = [row.get("score_chosen"), row.get("score_rejected")]
    margin = source.min_margin or 0.0
    if all(isinstance(score, int | float) and abs(score) < LARGEST_SCORE for score in scores):
        if not float(scores[0]) - float(scores[1]) > margin:
            return f"score margin not above {margin:g}"
    elif source.kind == "ultrafeedback" or margin > 0 or scores != [None, None]:
        return "no scores"
    return Example("\n".join(message["content"] for message in chosen[:-1]), [chosen, rejected])


def prompt(row: dict[str, Any], source: Source, judge: MathJudge) -> Example | str:
    """A prompt alone, as text or as messages of which the last is the user's (TRL's prompt-only format)."""
    asked = row["prompt"]
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else _plain(asked)
    if reason := fault([*messages, {"role": "assistant", "content": "its answer, to come"}]):
        return "does not end with the user" if reason == "roles do not alternate" else reason
    answer = str(found) if (found := row.get("answer")) is not None else ""
    return Example("\n".join(message["content"] for message in messages), [messages], answer.strip() or None)


CHECKS: dict[str, Check] = {
    "openmathinstruct": openmathinstruct,
    "gsm8k": gsm8k,
    "capybara": dialogue,
    "messages": dialogue,
    "demonstrations": dialogue,
    "ultrafeedback": preference,
    "preferences": preference,
    "prompts": prompt,
}


def fault(messages: Sequence[Message]) -> str | None:
    """Why these messages are no dialogue that can be trained on; None if they are one."""
    contents = [message["content"] for message in messages]
    if not all(isinstance(content, str) and _is_unicode(content) for content in contents):
        return "content is no text"
    if not all(map(is_text, contents)):
        return "empty content"
    roles = [message["role"] for message in messages]
    if any(role not in ("system", "user", "assistant") for role in roles):
        return "a role other than system, user and assistant"
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns or turns[-1] != "assistant":
        return "does not end with the assistant"
    if turns != ["user", "assistant"] * (len(turns) // 2):
        return "roles do not alternate"
    return None


def is_text(value: object) -> bool:
    """True for a text that is more than white space and that a tokenizer can read."""
    return isinstance(value, str) and _is_unicode(value) and bool(value.strip())


def _is_unicode(text: str) -> bool:
    """False for half a surrogate pair, which JSON can spell and no tokenizer can read."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _plain(messages: Sequence[dict[str, Any]]) -> list[Message]:
    """Role, content and mask_spans; what else a set keeps in its messages would only be in the way."""
    return [
        {"role": message["role"], "content": message["content"]}
        | ({"mask_spans": message["mask_spans"]} if message.get("mask_spans") else {})
        for message in messages
    ]


def whole_dialogue(answer: Any, prompt: Any) -> list[Message]:
    """A dialogue from any of: whole messages; a prompt and the last message; a prompt and an answer as strings."""
    messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else _plain(answer)
    if messages and messages[0]["role"] == "assistant" and prompt:
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _plain(prompt)
        return [*before, *messages]
    return messages
