"""Do the checks of IFEval's instructions say what those of lm-evaluation-harness say, whatever a model writes?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.evaluation import EvaluateRun
from posttrain.evaluation.figures import summarise
from posttrain.evaluation.instructions import CHECKS, NOT_CHECKED, follows, instruction_items, instruction_scores
from posttrain.evaluation.tasks import build_tasks
from posttrain.types import UserError

AT_LEAST = {"relation": "at least"}
# instruction, arguments, answers that follow it, answers that do not; as the harness (0.4.13) judges them
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("punctuation:no_comma", {}, ["a b."], ["a, b", ""]),
    ("startend:quotation", {}, ['"a"', ' "a\nb" '], ["a", '"', '"a']),
    ("startend:end_checker", {"end_phrase": "Is it so? "}, ['What? "is it SO?"'], ["Is it so? Yes."]),
    ("combination:two_responses", {}, ["a******b", "******a******b"], ["a", "a******a", "a************b"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say A."}, [" say a. A"], ["A. Say A."]),
    ("detectable_format:title", {}, ["x\n<<a>>", "<<<a>>>"], ["<<>>", "<< >>", "<<a\n>>", "<a>"]),
    ("detectable_format:json_format", {}, ['```json\n{"a": 1}\n```', "[]"], ["{a}", "```", "[" * 100_000]),
    ("detectable_format:constrained_response", {}, ["Well. My answer is no."], ["No."]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n\n\n  - b"], ["* a", "** a\n* b", "*\n* a"]),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* *b*", "**a**\n*b*"],
        ["*a*", "** **"],
    ),
    ("detectable_format:multiple_sections", {"section_spliter": "Day", "num_sections": 2}, ["Day 1 Day2"], ["Day 1"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] [[b]"], ["[a", "[a\n] [b]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["x\np. s. y"], ["PS y", "p.s"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S y"], ["P.S. y"]),
    ("length_constraints:number_words", AT_LEAST | {"num_words": 2}, ["it's", "a b"], ["a"]),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 2}, ["a"], ["a b"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a***b", "***\na\n***\nb"], ["a", "a******b"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        ['a\n\n"So, b'],
        ["a\n\nb", "So", "a\n\nso\n\nb"],
    ),
    ("keywords:existence", {"keywords": ["a.b", "c"]}, ["C A.B"], ["axb c"]),
    ("keywords:forbidden_words", {"forbidden_words": ["no"]}, ["not"], ["NO!"]),
    ("keywords:frequency", AT_LEAST | {"keyword": "an", "frequency": 2}, ["banana"], ["an"]),
    ("keywords:letter_frequency", {"let_relation": "less than", "letter": "A", "let_frequency": 2}, ["a"], ["Aa"]),
    ("keywords:letter_frequency", {"let_relation": "at least", "letter": "!", "let_frequency": 2}, ["!!"], ["a!"]),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "at least", "capital_frequency": 2},
        ["NASA's A-B.", "I'M"],
        ["NASA Nasa"],
    ),
]


def row(prompt: str, *ids: str, **kwargs: Any) -> dict[str, Any]:
    return {"key": prompt, "prompt": prompt, "instruction_id_list": list(ids), "kwargs": [kwargs for _ in ids]}


@pytest.mark.parametrize(("name", "given", "right", "wrong"), CASES)
def test_an_instruction_is_checked(name: str, given: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    (item,) = instruction_items([row("x", name, **given)], "rows", 1)
    (instruction,) = item["instructions"]
    assert [text for text in right if not follows(text, instruction)] == []
    assert [text for text in wrong if follows(text, instruction)] == []


def test_every_check_has_a_case() -> None:
    assert {name for name, *_ in CASES} == CHECKS.keys() and not CHECKS.keys() & NOT_CHECKED.keys()


def test_long_answers_of_one_character_are_checked_at_once() -> None:
    """A pattern that tries every pair of places would take hours here."""
    items = instruction_items([row("x", name, **given) for name, given, *_ in CASES], "rows", 99)
    for text in (letter * 200_000 for letter in ("[", "<", "*", "\n", " ", "-", "{", "a", "1", "P.")):
        for item in items:
            instruction_scores(text, item["instructions"])


def test_prompts_with_an_instruction_that_is_not_checked_are_left_out_and_counted() -> None:
    rows = [
        row("one", "language:response_language", "punctuation:no_comma", language="de"),
        row("two", "punctuation:no_comma"),
        row("three", "made:up"),
        row("four", "startend:quotation", "punctuation:no_comma"),
    ]
    items = instruction_items(rows, "rows", 9)
    assert [item["key"] for item in items] == ["two", "four"]
    assert [item["left_out"] for item in items] == [{"one": ["language:response_language"]}, {"three": ["made:up"]}]
    assert [item["key"] for item in instruction_items(rows, "rows", 1)] == ["two"]
    with pytest.raises(UserError, match="no prompt of which every instruction can be checked"):
        instruction_items(rows[:1], "rows", 1)


def test_scores_are_strict_and_loose_by_prompt_and_by_instruction() -> None:
    (item,) = instruction_items([row("x", "startend:quotation", "punctuation:no_comma")], "rows", 1)
    scores = instruction_scores('Sure, here it is:\n"a *b*"', item["instructions"])
    assert scores == {
        "accuracy": False, "followed": [False, False], "loose": True, "followed_loosely": [True, True],
    }  # fmt: skip
    assert instruction_scores('"a"', item["instructions"])["accuracy"] is True


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("keywords:existence", {}, "keywords = None, which should be a list of texts"),
        ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "more"}, '"less than" or "at least"'),
        ("detectable_format:number_bullet_lists", {"num_bullets": "2"}, "num_bullets = '2', which should be a number"),
        ("detectable_format:number_bullet_lists", {"num_bullets": -2}, "num_bullets = -2, which should be a number"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": -5.0, "first_word": "so"},
            "nth_paragraph = -5, which should be a number above 0",
        ),
    ],
)
def test_an_argument_that_is_not_there_is_told(name: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as problem:
        instruction_items([row("x", name, **given)], "suites.instructions.source=f.jsonl", 1)
    assert said in str(problem.value) and "f.jsonl: the prompt x has the instruction" in str(problem.value)


def test_the_suite_reads_a_file_and_counts(tmp_path: Path) -> None:
    file = tmp_path / "ifeval.jsonl"
    # as a table holds them: each row has the arguments of all, and whole numbers are fractions
    table = [
        row("a", "punctuation:no_comma", num_bullets=None),
        row("b", "language:response_language", language="de"),
        row("c", "detectable_format:number_bullet_lists", "punctuation:no_comma", num_bullets=1.0),
    ]
    file.write_text("".join(json.dumps(each) + "\n" for each in table))
    cfg = EvaluateRun.model_validate({
        "output_dir": str(tmp_path), "checkpoints": {"one": "one"},
        "settings": [{"name": "greedy", "temperature": 0.0}],
        "suites": {"instructions": {"source": str(file), "n": 9}},
    })  # fmt: skip
    (task,) = build_tasks(cfg)
    texts = ["no", "* a, b"]
    rows = [
        item | {"text": text, "tokens": 1, "never_stops": False} | instruction_scores(text, item["instructions"])
        for item, text in zip(task.items, texts, strict=True)
    ]
    figures = summarise(cfg, task.described("one", rows), {})["instructions"]
    assert figures["accuracy"] == 0.5 and figures["n"] == 2 and figures["instruction_accuracy"] == pytest.approx(2 / 3)
    assert figures["left_out"] == 1 and figures["not_checked"] == {"language:response_language": 1}

    file.write_text(json.dumps(table[0] | {"kwargs": []}) + "\n")
    with pytest.raises(UserError, match=r"line 1 of .*: prompt should be text, instruction_id_list a list"):
        build_tasks(cfg)
