"""Does an answer follow instructions that a program can check?  IFEval (Zhou et al., arXiv 2311.07911).

A prompt holds one to three instructions, each with an id and arguments. The checks are those of lm-evaluation-harness,
without the ones that need a language detector or a sentence model (`NOT_CHECKED`). An answer may be any text: patterns
are matched in linear time, and words of a row are matched as they are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from posttrain.types import Record, UserError

Arguments = Mapping[str, Any]
NOT_CHECKED = {
    "language:response_language": "needs a language detector",
    "change_case:english_capital": "needs a language detector",
    "change_case:english_lowercase": "needs a language detector",
    "length_constraints:number_sentences": "needs a model that finds the ends of sentences",
}
ALLOWED_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")  # of constrained_response
FENCES = ("```json", "```Json", "```JSON", "```")
# what nltk's tokenizer separates from a word: punctuation, and the ends of contractions
BETWEEN_WORDS = re.compile(r"[\s,;:@#$%&?!()\[\]{}<>\"“”‘’`]+|--+|\.\.\.")
CONTRACTION = re.compile(r"(?<=\w)(n't|'(?:s|m|d|ll|re|ve))\b", re.IGNORECASE)


class Check(NamedTuple):
    """A function of an answer and the arguments of an instruction, and which arguments it needs, with their types."""

    follows: Callable[[str, Arguments], bool]
    needs: dict[str, type]


def _related(count: int, relation: str, threshold: int) -> bool:
    """Return whether a count is "less than" a threshold, or "at least" it."""
    return count < threshold if relation == "less than" else count >= threshold


def _placeholders(text: str) -> int:
    """Return how many pairs of square brackets there are, each from the first [ to the next ] of its line."""
    count = 0
    for line in text.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            count, start = count + 1, line.find("[", end)
    return count


def _bullets(text: str) -> int:
    starred = re.findall(r"^[^\S\n]*\*[^*].*$", text, flags=re.MULTILINE)
    return len(starred) + len(re.findall(r"^[^\S\n]*-.*$", text, flags=re.MULTILINE))


def _highlights(text: str) -> int:
    single = [found for found in re.findall(r"\*[^\n*]*\*", text) if found.strip("*").strip()]
    double = [found for found in re.findall(r"\*\*[^\n*]*\*\*", text) if found[2:-2].strip()]
    return len(single) + len(double)


def _has_title(text: str) -> bool:
    """Return whether a line has <<a title>>."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and start + 3 <= end and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def _is_json(text: str) -> bool:
    text = text.strip()
    for fence in FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _has_postscript(text: str, marker: str) -> bool:
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(patterns.get(marker, re.escape(marker.lower())), text.lower()) is not None


def _has_paragraphs(text: str, count: int) -> bool:
    """Return whether *** separates this many paragraphs; only the first and the last part may be empty."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    empty = [place for place, part in enumerate(parts) if not part.strip()]
    return set(empty) <= {0, len(parts) - 1} and len(parts) - len(empty) == count


def _nth_paragraph_begins(text: str, given: Arguments) -> bool:
    """Return whether blank lines separate the right number of paragraphs, and the nth begins with the right word."""
    parts, nth = text.split("\n\n"), given["nth_paragraph"]
    count = sum(bool(part.strip()) for part in parts)
    if nth > count or not (paragraph := parts[nth - 1].strip()):
        return False
    word = re.split(r"[.,?!'\"]", paragraph.split()[0].lstrip("'").lstrip('"'), maxsplit=1)[0].lower()
    return count == given["num_paragraphs"] and word == given["first_word"].lower()


def _two_responses(text: str) -> bool:
    """Return whether ****** separates two different answers."""
    parts = text.split("******")
    written = [part.strip() for part in parts if part.strip()]
    inner_empty = any(not part.strip() for part in parts[1:-1])
    return not inner_empty and len(written) == 2 and written[0] != written[1]


def _capital_words(text: str) -> int:
    return sum(word.isupper() for word in BETWEEN_WORDS.split(CONTRACTION.sub(r" \1", text)) if word)


def _occurrences(text: str, word: str) -> int:
    return len(re.findall(re.escape(word), text, flags=re.IGNORECASE))


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, flags=re.IGNORECASE) is not None


def _sections(text: str, splitter: str) -> int:
    return len(re.findall(rf"{re.escape(splitter.strip())}\s?\d+", text))


CHECKS: dict[str, Check] = {
    "punctuation:no_comma": Check(lambda text, _: "," not in text, {}),
    "startend:quotation": Check(lambda text, _: re.fullmatch(r'"(?s:.*)"', text.strip()) is not None, {}),
    "startend:end_checker": Check(
        lambda text, given: text.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower()),
        {"end_phrase": str},
    ),
    "combination:two_responses": Check(lambda text, _: _two_responses(text), {}),
    "combination:repeat_prompt": Check(
        lambda text, given: text.strip().lower().startswith(given["prompt_to_repeat"].strip().lower()),
        {"prompt_to_repeat": str},
    ),
    "detectable_format:title": Check(lambda text, _: _has_title(text), {}),
    "detectable_format:json_format": Check(lambda text, _: _is_json(text), {}),
    "detectable_format:constrained_response": Check(
        lambda text, _: any(allowed in text for allowed in ALLOWED_ANSWERS), {}
    ),
    "detectable_format:number_bullet_lists": Check(
        lambda text, given: _bullets(text) == given["num_bullets"], {"num_bullets": int}
    ),
    "detectable_format:number_highlighted_sections": Check(
        lambda text, given: _highlights(text) >= given["num_highlights"], {"num_highlights": int}
    ),
    "detectable_format:multiple_sections": Check(
        lambda text, given: _sections(text, given["section_spliter"]) >= given["num_sections"],
        {"section_spliter": str, "num_sections": int},
    ),
    "detectable_content:number_placeholders": Check(
        lambda text, given: _placeholders(text) >= given["num_placeholders"], {"num_placeholders": int}
    ),
    "detectable_content:postscript": Check(
        lambda text, given: _has_postscript(text, given["postscript_marker"].strip()), {"postscript_marker": str}
    ),
    "length_constraints:number_words": Check(
        lambda text, given: _related(len(re.findall(r"\w+", text)), given["relation"], given["num_words"]),
        {"relation": str, "num_words": int},
    ),
    "length_constraints:number_paragraphs": Check(
        lambda text, given: _has_paragraphs(text, given["num_paragraphs"]), {"num_paragraphs": int}
    ),
    "length_constraints:nth_paragraph_first_word": Check(
        _nth_paragraph_begins, {"num_paragraphs": int, "nth_paragraph": int, "first_word": str}
    ),
    "keywords:existence": Check(
        lambda text, given: all(_occurrences(text, word) for word in given["keywords"]), {"keywords": list}
    ),
    "keywords:forbidden_words": Check(
        lambda text, given: not any(_has_word(text, word) for word in given["forbidden_words"]),
        {"forbidden_words": list},
    ),
    "keywords:frequency": Check(
        lambda text, given: _related(
            _occurrences(text, given["keyword"].strip()), given["relation"], given["frequency"]
        ),
        {"relation": str, "keyword": str, "frequency": int},
    ),
    "keywords:letter_frequency": Check(
        lambda text, given: _related(
            text.lower().count(given["letter"].strip().lower()), given["let_relation"], given["let_frequency"]
        ),
        {"let_relation": str, "letter": str, "let_frequency": int},
    ),
    "change_case:capital_word_frequency": Check(
        lambda text, given: _related(_capital_words(text), given["capital_relation"], given["capital_frequency"]),
        {"capital_relation": str, "capital_frequency": int},
    ),
}


def instruction_items(rows: Sequence[Record], where: str, n: int) -> list[Record]:
    """Return the first `n` prompts of IFEval of which every instruction can be checked.

    {"messages": [...], "key": "1005", "instructions": [{"id": "punctuation:no_comma"}, ...],
     "left_out": {"1001": ["language:response_language"], ...}}

    `left_out` has the prompts between the one before and this one, with their instructions that are not checked.

    Args:
        rows: with the columns of google/IFEval: key, prompt, instruction_id_list, kwargs.
        where: the key of the config that names them, for messages.

    Raises:
        UserError: an instruction lacks an argument, or not one prompt can be checked.
    """
    items: list[Record] = []
    left_out: dict[str, list[str]] = {}
    for number, row in enumerate(rows, 1):
        if len(items) == n:
            break
        key, ids = str(row.get("key", number)), row["instruction_id_list"]
        if unknown := [name for name in ids if name not in CHECKS]:
            left_out[key] = unknown
            continue
        given = zip(ids, row["kwargs"], strict=True)
        instructions = [_instruction(name, kwargs, f"{where}: the prompt {key}") for name, kwargs in given]
        messages = [{"role": "user", "content": row["prompt"]}]
        items.append({"messages": messages, "key": key, "instructions": instructions, "left_out": left_out})
        left_out = {}
    if not items:
        raise UserError(
            f"{where} has no prompt of which every instruction can be checked; not checked are"
            f" {', '.join(NOT_CHECKED)}. Name a file with the rows of google/IFEval."
        )
    return items


def _instruction(name: str, kwargs: Arguments | None, where: str) -> Record:
    """Return {"id": name} with the arguments that its check needs."""
    given = {key: value for key, value in (kwargs or {}).items() if key in CHECKS[name].needs}
    for key, kind in CHECKS[name].needs.items():
        value = given.get(key)
        if kind is int and isinstance(value, float) and value.is_integer():  # as a table of numbers holds it
            given[key] = value = int(value)
        fits = isinstance(value, kind) and not isinstance(value, bool) and bool(value)
        if fits and kind is int:
            fits = given[key] > 0
        if fits and kind is list:
            fits = all(isinstance(each, str) and each for each in given[key])
        if fits and "relation" in key:
            fits = value in ("less than", "at least")
        if not fits:
            expected = {int: "a number above 0", str: "a text", list: "a list of texts"}[kind]
            expected = '"less than" or "at least"' if "relation" in key else expected
            raise UserError(
                f"{where} has the instruction {name} with {key} = {value!r}, which should be {expected}. Correct it in"
                " its kwargs, or remove the prompt."
            )
    return {"id": name} | given


def follows(text: str, instruction: Record) -> bool:
    """Return whether an answer follows an instruction of `instruction_items`; an empty one follows none.

    >>> follows("no commas here", {"id": "punctuation:no_comma"})
    True
    """
    return bool(text.strip()) and CHECKS[instruction["id"]].follows(text, instruction)


def instruction_scores(text: str, instructions: Sequence[Record]) -> Record:
    """Return whether an answer follows each instruction, and whether all of them.

    `loose`: as above, or without its first line, its last line or its asterisks, whichever follows (section 2.2 of the
    paper).
    """
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    variants = [*cut, *(each.replace("*", "") for each in cut)]
    followed = [follows(text, each) for each in instructions]
    loose = [any(follows(variant, each) for variant in variants) for each in instructions]
    return {"accuracy": all(followed), "followed": followed, "loose": all(loose), "followed_loosely": loose}
