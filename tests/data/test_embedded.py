"""Is the generated data what the real sets look like, fair to learn from, and apart from what is evaluated?"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import ROOT, python

from posttrain.data import embedded
from posttrain.data.embedded import arithmetic, conversations, environments
from posttrain.runtime import checkpoint
from posttrain.types import UserError

N = 600
ACTIONS = ("Left", "Down", "Right", "Up")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return embedded.build_base(tmp_path_factory.mktemp("quickstart") / "base", seed=3)


@pytest.fixture(scope="module")
def chat(base):
    from transformers import AutoTokenizer

    import posttrain.models.convgpt  # noqa: F401
    from posttrain.models.chat import Chat

    return Chat.load(AutoTokenizer.from_pretrained(base), None)


def sentences(answer: str) -> list[str]:
    return answer.removesuffix(".").split(". ")


def pairs_of(kind: str) -> list[dict]:
    marks = {"\\boxed": "math", "<answer>": "env"}
    said = [(row, row["chosen"][-1]["content"]) for row in embedded.preference_pairs(N, 0)]
    return [row for row, text in said if next((k for mark, k in marks.items() if mark in text), "repetition") == kind]


def users(messages) -> tuple[str, ...]:
    return tuple(message["content"] for message in messages if message["role"] == "user")


# Schemas: exactly the columns of the real sets


@pytest.mark.parametrize(
    ("generate", "columns"),
    [
        (
            embedded.openmathinstruct,
            "question generated_solution expected_answer predicted_answer error_message is_correct dataset "
            "generation_type",
        ),
        (embedded.capybara, "source messages num_turns"),
        (embedded.ultrafeedback, "prompt prompt_id chosen rejected messages score_chosen score_rejected"),
    ],
)
def test_rows_have_the_columns_of_the_real_set(generate, columns):
    rows = list(generate(50, 0))
    assert len(rows) == 50
    assert all(set(row) == set(columns.split()) for row in rows)


@pytest.mark.parametrize("generate", [embedded.openmathinstruct, embedded.capybara, embedded.ultrafeedback])
def test_a_row_depends_on_seed_and_place_only(generate):
    rows = list(generate(40, 5))
    assert list(generate(20, 5)) == rows[:20]
    assert list(generate(20, 6)) != rows[:20]


def test_demonstrations_follow_from_their_number_and_alternate():
    played: list[tuple[str, dict[str, Any]]] = [("frozen_lake", {"size": 3}), ("sokoban", {})]
    rows = list(embedded.demonstrations(played, 8, 0))
    assert [row["env"] for row in rows] == ["frozen_lake", "sokoban"] * 4
    assert rows[:3] == list(embedded.demonstrations(played, 3, 0))
    system, first = (message["content"] for message in rows[0]["messages"][:2])
    assert "P is you" in system and len(first.partition("\n\n")[0].splitlines()) == 3
    compact = next(iter(embedded.demonstrations(played, 1, 0, style="compact")))["messages"]
    assert compact[0]["content"].startswith("Walk over the frozen lake to the goal.") and len(compact) == len(
        rows[0]["messages"]
    )
    assert len({users(row["messages"]) for row in rows}) == 8


# The faults that the real filters exist for are there, and few


def test_every_fault_of_openmathinstruct_occurs():
    rows = list(embedded.openmathinstruct(3000, 1))
    faults = {
        "wrong": sum(not row["is_correct"] for row in rows),
        "code": sum("<llm-code-output>" in row["generated_solution"] for row in rows),
        "boxes": sum(row["generated_solution"].count("\\boxed") == 2 for row in rows),
        "duplicates": len(rows) - len({(row["question"], row["generated_solution"]) for row in rows}),
    }
    assert all(10 < count < 150 for count in faults.values()), faults


def test_correct_solutions_are_correct():
    for row in embedded.openmathinstruct(N, 2):
        *steps, said = row["generated_solution"].split(". The answer is ")
        right = row["predicted_answer"] == row["expected_answer"]
        assert row["is_correct"] == right
        if "llm-code" in row["generated_solution"] or row["generated_solution"].count("\\boxed") > 1:
            continue
        *_, last = steps[0].split(". ")
        formula, result = last.split("=")
        assert said == f"\\boxed{{{row['predicted_answer']}}}."
        assert result == row["predicted_answer"]
        first, other = (int(part) for part in formula.replace("-", "+").split("+"))
        true = first - other if "-" in formula else first + other
        assert (str(true) == row["predicted_answer"]) == right
        assert str(true) == row["expected_answer"]


def in_signs(word: re.Match[str]) -> str:
    return {"plus": "+", "minus": "-"}[word[1]]


def test_formulas_are_solved_step_by_step():
    """In a fifth of the problems, of which none asks what is held out; each step goes on with the last result."""
    rows = list(embedded.openmathinstruct(2000, 2))
    signed = {row["question"]: re.sub(" (plus|minus) ", in_signs, row["question"]) for row in rows}
    formulas = [row for row in rows if re.search(r"\d[+-]\d", signed[row["question"]]) and row["error_message"]]
    assert 0.15 < len(formulas) / len(rows) < 0.25
    assert len([row for row in formulas if signed[row["question"]] != row["question"]]) > 20
    for row in formulas:
        (asked,) = re.findall(r"\d+(?:[+-]\d+)+", signed[row["question"]])
        total, *others = [int(number) for number in re.findall(r"[+-]?\d+", asked)]
        operands = ("".join(re.findall("[+-]", asked)), *map(int, re.findall(r"\d+", asked)))
        assert arithmetic.split_of({"question": row["question"], "operands": operands}) == "train"
        steps = re.findall(r"(\d+)([+-]\d+)=(\d+)\.", row["generated_solution"].partition("The answer")[0])
        for (before, change, after), other in zip(steps, others, strict=True):
            assert (int(before), int(change)) == (total, other)
            total = int(after)
        assert row["predicted_answer"] == str(total)
        right = sum(int(number) for number in re.findall(r"[+-]?\d+", asked))
        assert (str(right) == row["predicted_answer"]) == row["is_correct"]
        assert all(0 <= int(after) <= 3 * arithmetic.LARGEST for *_, after in steps)


def filled(template: str, value: str) -> str:
    text = template.format(v=value)
    return text[0].upper() + text[1:]


def facts_asked(messages: list[dict[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield for each question about a fact its answer and the one that follows from what was told before it."""
    told: dict[str, str] = {}
    said = [message["content"] for message in messages]
    for asked, answer in zip(said[::2], said[1::2], strict=True):
        asked = asked[0].upper() + asked[1:]
        for slot, fact in conversations.FACTS.items():
            for value in (*fact["values"], *(arithmetic.OTHER_NAMES if slot == "name" else ())):
                if asked in [filled(tell, value) for tell in fact["tell"]]:
                    told[slot] = value
            if asked in fact["ask"]:
                right = (
                    filled(fact["answer"][0], told[slot]) if slot in told else f"Your {slot}? {conversations.NO_ANSWER}"
                )
                yield answer, right


def test_many_things_are_talked_of_in_one_dialogue_but_never_a_game():
    rows = [row for row in embedded.capybara(2000, 0) if row["source"] == "embedded-mixed"]
    assert 0.3 < len(rows) / 2000 < 0.38
    # A sum after something else, a recalled fact after a sum, a question that it cannot answer, one for a fact that was
    # not told, a message that begins with a small letter.
    after = {"sum": 0, "recall": 0, "unknown": 0, "untold": 0, "small": 0}
    for row in rows:
        said = [message["content"] for message in row["messages"]]
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * (len(said) // 2)
        assert not any("<answer>" in text or "Goal" in text for text in said)
        sums = [place for place, text in enumerate(said) if "\\boxed" in text]
        recalled = [place for place, text in enumerate(said) if text.startswith("Your ")]
        after["sum"] += any(place > 1 for place in sums)
        after["recall"] += bool(sums and recalled and min(sums) < max(recalled))
        asked = list(facts_asked(row["messages"] if said[-1] else row["messages"][:-2]))
        assert all(answer == right for answer, right in asked)
        after["untold"] += any(right.endswith(conversations.NO_ANSWER) for _, right in asked)
        after["unknown"] += conversations.NO_ANSWER in said
        after["small"] += any(text[0].islower() for text in said[::2])
    assert min(after.values()) > 60, after


def test_what_was_told_is_recalled_and_what_was_not_is_refused():
    rows = [row["messages"] for row in embedded.capybara(2000, 0) if row["source"] == "embedded-recall"]
    whole = [messages for messages in rows if messages[-1]["content"]]
    asked = [list(facts_asked(messages)) for messages in whole]
    assert all(answer == right for each in asked for answer, right in each)
    assert {len(each) for each in asked} == {1, 2} and 0.3 < sum(len(each) == 2 for each in asked) / len(asked) < 0.5
    refused = [messages for messages in whole if messages[-1]["content"].endswith(conversations.NO_ANSWER)]
    assert 0.29 < len(refused) / len(whole) < 0.41
    tells = {filled(tell, value) for f in conversations.FACTS.values() for tell in f["tell"] for value in f["values"]}
    beside = sum(messages[0]["content"] in tells for messages in refused)  # another fact was told
    assert 0.5 < beside / len(refused) < 0.7


def test_what_is_out_of_reach_is_refused_alone_and_in_pairs():
    """And no sum of the training side is."""
    alone = [row["messages"] for row in embedded.capybara(2000, 0) if row["source"] == "embedded-unknown"]
    rows = [*embedded.ultrafeedback(2000, 0)]
    pairs = [row for row in rows if row["chosen"][-1]["content"].endswith(conversations.NO_ANSWER)]
    assert 130 < len(alone) < 210 and 350 < len(pairs) < 500
    assert all(answer["content"].endswith(conversations.NO_ANSWER) or not answer["content"] for _, answer in alone)
    answers = {messages[0]["content"]: messages[1]["content"] for messages in alone if messages[1]["content"]}
    answers |= {row["prompt"]: row["chosen"][-1]["content"] for row in pairs}
    later = set()
    for text, answer in answers.items():
        numbers = [int(number) for number in re.findall(r"\d+", text)]
        *steps, last = answer.removesuffix(conversations.NO_ANSWER).strip().split(". ")
        if not last or text in conversations.QUESTIONS:
            continue
        total = numbers[0]
        for other, step in zip(numbers[1:], [*steps, last], strict=False):
            found = re.fullmatch(rf"{total}([+-]){other}=(\d+|\?)", step)
            assert found, (text, answer)
            total += other if found[1] == "+" else -other
            assert found[2] == ("?" if step is last else str(total))
        assert max(numbers) <= arithmetic.LARGEST and not 0 <= total <= 3 * arithmetic.LARGEST
        if steps:
            later.add(text)
    kinds = {"large": 0, "product": 0, "negative": 0, "large story": 0, "negative story": 0, "later": len(later)}
    three = 0
    for text in answers.keys() - later:
        numbers = [int(number) for number in re.findall(r"\d+", text)]
        small = max(numbers, default=0) <= arithmetic.LARGEST
        if " has " in text and len(numbers) > 1:
            assert "=?" in answers[text] if small else answers[text] == conversations.NO_ANSWER
            kinds["negative story" if small else "large story"] += 1
        elif re.search(r"(\d+) *([-+*/]) *(\d+)", worded(text)):
            product = re.search(r"\d *[*/]", worded(text))
            assert not small or product or "=?" in answers[text], text
            kinds["product" if product else "negative" if small else "large"] += 1
            three += len(numbers) == 3
    assert min(kinds.values()) > 12 and 0.4 < sum(kinds.values()) / len(answers) < 0.65, kinds
    assert 20 < three < 100 and kinds["large story"] > 30
    untold = [row["chosen"] for row in pairs if row["prompt"] in conversations.QUESTIONS]
    assert 30 < sum(len(messages) == 2 for messages in untold) < 90
    assert 60 < sum(len(messages) > 2 for messages in untold) < 150
    assert all(answer == right for messages in untold for answer, right in facts_asked(messages))
    held_out = embedded.preference_pairs(500, 0)
    assert not [row for row in held_out if conversations.NO_ANSWER in row["chosen"][-1]["content"]]


def test_pairs_about_a_fact_told_prefer_its_value_once():
    rows = [row for row in embedded.ultrafeedback(2000, 0) if row["chosen"][-1]["content"].startswith("Your ")]
    pairs = [row for row in rows if conversations.NO_ANSWER not in row["chosen"][-1]["content"]]
    assert 170 < len(pairs) < 310
    for row in pairs:
        *before, (asked, answer) = [row["messages"][i : i + 2] for i in range(0, len(row["messages"]), 2)]
        value = answer["content"].split()[-1].removesuffix(".")
        assert asked["content"] in conversations.QUESTIONS
        assert any(value in told["content"] for told, _ in before)
        assert row["rejected"][-1]["content"] in (f"{answer['content']} {answer['content']}", answer["content"], "")


def test_pairs_about_small_talk_prefer_its_reply_once():
    replies = dict((*conversations.SMALL_TALK, *conversations.GREETINGS))
    rows = [row for row in embedded.ultrafeedback(2000, 0) if row["prompt"] in replies]
    assert 50 < len(rows) < 120
    for row in rows:
        reply = replies[row["prompt"]]
        assert row["chosen"][-1]["content"] == reply
        assert row["rejected"][-1]["content"] in (f"{reply} {reply}", reply, "")


def worded(text: str) -> str:
    """Return a question with signs instead of words."""
    for sign, word in arithmetic.WORDS.items():
        text = text.replace(word, sign)
    return text


def test_what_the_chat_offers_is_said_in_training(chat):
    from posttrain import config

    examples = config.resolve(config.ChatRun, ROOT / "configs/quickstart/chat.yaml").examples
    city = conversations.FACTS["city"]
    assert examples[0] in [tell.format(v="Vienna") for tell in city["tell"]] and examples[1] in city["ask"]
    numbers = [int(number) for number in re.findall(r"\d+", examples[2])]
    assert arithmetic.split_of({"question": examples[2], "operands": ("+", *numbers)}) == "train"
    assert re.fullmatch(r"\d+\+\d+\?", examples[3])
    asked, country = conversations.UNKNOWN[0], conversations.COUNTRIES[0]
    assert examples[4] == asked.format(c=country)


def said_by_the_quickstart(lines: list[str], *options: str) -> list[str]:
    """Return what the chat with the models of `make quickstart` that lie here says to each line."""
    if not checkpoint.is_whole(ROOT / "runs/quickstart/phase3/final"):
        pytest.skip("needs the models of `make quickstart`")
    script, file = "inference_with_improved_settings.py", "configs/quickstart/chat.yaml"
    return subprocess.run(
        [sys.executable, script, "--config", file, *options],
        cwd=ROOT, input="".join(f"{line}\n" for line in lines), capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip


@pytest.mark.slow
def test_the_chat_of_the_quickstart_answers_what_it_offers():
    lines = ["My home is Vienna.", "What is my city?", "Gina has 4 nuts and wins 11. Count the nuts of Gina."]
    first, second, third = said_by_the_quickstart(lines)
    assert "Vienna" in first or first == "That sounds lovely."
    assert (second, third) == ("Your city is Vienna.", r"4+11=15. The answer is \boxed{15}.")
    script = (ROOT / "inference_with_improved_settings.py").read_text(encoding="utf-8")
    (example,) = re.findall('--prompt "(.*)" >', script)
    assert said_by_the_quickstart([], "--prompt", example) == [r"3+4=7. The answer is \boxed{7}."]


@pytest.mark.slow
def test_the_chat_of_the_quickstart_does_sums_and_says_what_it_does_not_know():
    """Alone, and in one conversation."""
    rng = random.Random(0)
    sums = [(rng.randint(1, 15), rng.randint(1, 15)) for _ in range(20)]
    unknown = [
        "What is the capital of Norway?", "Where is Japan?", "Who wrote Hamlet?", "How does a train work?",
        "Explain the rainbow.", "Who invented the telephone?", "What year is it?", "Why is the sea salt?",
        "How many people live in Oslo?", "Write a Python function.",
    ]  # fmt: skip
    large = [f"{a}{sign}{b}?" for a in (48, 72, 136, 250, 3407) for sign, b in (("+", 8), ("-", 5), ("*", 3), ("/", 2))]
    alone = [line for text in [*(f"{a}+{b}?" for a, b in sums), *unknown, *large] for line in (text, "/reset")]
    mixed, expected = [], []  # eight conversations of many things
    for city in conversations.FACTS["city"]["values"]:
        a, b, c, d = rng.sample(range(5, 16), 4)
        mixed += [
            f"My home is {city}.",
            f"{a}+{b}?",
            "What is my city?",
            "What is the capital of Peru?",
            f"{c} + {d} - 4 =",
            f"{b} plus {c}",
            f"Ada has {a} nuts and wins {d} and then loses {c}. Count the nuts of Ada.",
            "/reset",
        ]
        first, *last = [rf"\boxed{{{result}}}." for result in (a + b, c + d - 4, b + c, a + d - c)]
        expected += ["", first, f"Your city is {city}.", conversations.NO_ANSWER, *last]
    answers = said_by_the_quickstart([*alone, *mixed])
    assert len(answers) == 50 + 56, answers
    right = sum(rf"\boxed{{{a + b}}}" in answer for (a, b), answer in zip(sums, answers[:20], strict=True))
    assert right >= 18 and answers[20:30].count(conversations.NO_ANSWER) >= 8, answers
    assert answers[30:50].count(conversations.NO_ANSWER) >= 17, list(zip(large, answers[30:50], strict=True))
    wrong = [(said, end) for said, end in zip(answers[50:], expected, strict=True) if not said.endswith(end)]
    assert len(wrong) <= 5, wrong  # of 48: what is said to the city is not counted


@pytest.mark.slow
def test_the_chat_of_the_quickstart_understands_other_words():
    """Sums as people ask for them, greetings in small letters, and facts that were not told."""
    sums = {"What's 2+3?": 5, "hi, 4+9?": 13, "Compute 7+8.": 15, "calculate 12-5.": 7, "5+0": 5, "what is 9-4?": 5}
    sums |= {"What is the sum of 6 and 7?": 13, "Please calculate 3+8.": 11, "0+4?": 4, "Can you do 14-6?": 8}
    greetings = {"hello": "Hello, how can I help?", "hi": "Hello, how can I help?", "thanks!": "You are welcome."}
    untold = [fact["ask"][0] for fact in conversations.FACTS.values()]
    expected = {text: rf"\boxed{{{result}}}." for text, result in sums.items()} | greetings
    expected |= dict.fromkeys(untold, conversations.NO_ANSWER)
    answers = said_by_the_quickstart([line for text in expected for line in (text, "/reset")])
    wrong = [
        (text, said) for (text, end), said in zip(expected.items(), answers, strict=True) if not said.endswith(end)
    ]
    assert len(wrong) <= 1, wrong


@pytest.mark.slow
def test_the_chat_of_the_quickstart_remembers_after_six_other_messages():
    """Names and cities, a conversation each, of which guesses would get one or two right."""
    between = ["How are you?", "7+6?", "What is the capital of Peru?", "I am tired.", "12-5?", "Thank you."]
    lines, expected = [], []
    for fact in (conversations.FACTS["name"], conversations.FACTS["city"]):
        for value in fact["values"][:8]:
            lines += [fact["tell"][2].format(v=value), *between, fact["ask"][0], "/reset"]
            expected.append(fact["answer"][0].format(v=value))
    recalled = said_by_the_quickstart(lines)[7::8]
    right = sum(said == answer for said, answer in zip(recalled, expected, strict=True))
    assert right >= 14, list(zip(recalled, expected, strict=True))


@pytest.mark.slow
def test_the_chat_of_the_quickstart_does_not_guess_what_was_not_told():
    """Neither where nothing was told nor where another fact was; what was told it still says."""
    lines, expected = [], []
    for told, fact in conversations.FACTS.items():
        for asked, other in conversations.FACTS.items():
            tell, value = fact["tell"][0], fact["values"][0]
            for said in ("How are you?", tell.format(v=value)):
                lines += [said, "7+6?", "Thank you.", other["ask"][0], "/reset"]
                known = told == asked and said != "How are you?"
                expected.append(fact["answer"][0].format(v=value) if known else conversations.NO_ANSWER)
    answers = said_by_the_quickstart(lines)[3::4]
    right = sum(said.endswith(end) for said, end in zip(answers, expected, strict=True))
    assert len(answers) == 50 and right >= 40, list(zip(answers, expected, strict=True))


def test_numbers_stay_whole_tokens(chat):
    for problem in embedded.math_problems(300, 0):
        assert 0 <= int(problem["answer"]) <= 3 * arithmetic.LARGEST
    assert all(len(chat.content_ids(str(number))) == 1 for number in range(100))
    for number in (100, 145, 2026):  # in digits, also in a formula
        assert chat.content_ids(f"{number}+7") == [
            token for part in (*str(number), "+7") for token in chat.content_ids(part)
        ]
    (twelve,) = chat.content_ids("12")
    assert all(twelve in chat.content_ids(text) for text in ("Anna has 12 nuts", "5+12=17", "\\boxed{12}"))


def test_every_fault_of_ultrafeedback_occurs():
    rows = list(embedded.ultrafeedback(2000, 1))
    ties = sum(row["score_chosen"] == row["score_rejected"] for row in rows)
    identical = sum(row["chosen"] == row["rejected"] for row in rows)
    empty = sum(row["rejected"][-1]["content"] == "" for row in rows)
    assert all(5 < count < 80 for count in (ties, identical, empty)), (ties, identical, empty)


# Repetition: on purpose in the corpus, the only difference between the answers of a pair, at equal length


def test_open_answers_have_a_fixed_number_of_sentences_and_repeat_as_documented():
    answers = [
        row["messages"][-1]["content"]
        for row in embedded.capybara(4000, 0)
        if row["source"] == "embedded-open" and row["messages"][-1]["content"]
    ]
    assert {len(sentences(answer)) for answer in answers} == {conversations.SENTENCES}
    repeated = [conversations.SENTENCES - len(set(sentences(answer))) for answer in answers]
    expected = conversations.REPEAT * (conversations.SENTENCES - conversations.FIRST_COPY)
    assert sum(repeated) / len(repeated) == pytest.approx(expected, rel=0.1)


def test_repetition_pairs_differ_in_repetition_alone():
    pairs, lengths = pairs_of("repetition"), []
    assert len(pairs) > N / 3
    for row in pairs:
        chosen, rejected = (sentences(row[name][-1]["content"]) for name in ("chosen", "rejected"))
        assert len(chosen) == len(rejected) == len(set(chosen)) == conversations.SENTENCES
        assert len(set(rejected)) < conversations.SENTENCES
        assert set(rejected) <= set(chosen)
        assert chosen[0] == rejected[0]
        lengths.append((len(row["chosen"][-1]["content"]), len(row["rejected"][-1]["content"])))
    assert sum(c for c, _ in lengths) == pytest.approx(sum(r for _, r in lengths), rel=0.02)


def test_math_pairs_are_right_and_wrong():
    pairs = pairs_of("math")
    assert len(pairs) > N / 4
    for row in pairs:
        assert row["prompt"] == row["chosen"][0]["content"] == row["rejected"][0]["content"]
        boxes = [row[name][-1]["content"].split("boxed{")[1] for name in ("chosen", "rejected")]
        assert boxes[0] != boxes[1]
        assert row["score_chosen"] > row["score_rejected"]


def test_environment_pairs_keep_and_break_the_form():
    from envs.protocol import Protocol, parse

    pairs = pairs_of("env")
    assert len(pairs) > N / 15
    for row in pairs:
        assert row["chosen"][:-1] == row["rejected"][:-1]
        assert row["chosen"][0]["role"] == "system"
        good, bad = (parse(row[name][-1]["content"], Protocol(), ACTIONS) for name in ("chosen", "rejected"))
        assert good.well_formed and good.actions and not good.invalid
        assert not bad.well_formed or bad.invalid


# Held out means held out


def test_held_out_questions_and_operands_are_in_no_training_row():
    problems = {split: embedded.math_problems(400, 9, split) for split in ("unseen_questions", "unseen_operands")}
    trained = {row["question"] for seed in (0, 9) for row in embedded.openmathinstruct(4000, seed)}
    trained |= {row["prompt"] for row in embedded.ultrafeedback(4000, 9)}
    trained |= {asked for row in embedded.capybara(4000, 9) for asked in users(row["messages"])}
    for asked in problems.values():
        assert trained.isdisjoint(problem["question"] for problem in asked)

    def numbers(question: str) -> tuple[str, ...]:
        words = question.replace(".", "").split()
        said = [str(any(word in verbs for word in words)) for verbs in (arithmetic.GAINS, arithmetic.LOSSES)]
        return (*said, *(word for word in words if word.isdigit()))

    seen = {numbers(question) for question in trained}
    unseen = [numbers(problem["question"]) not in seen for problem in problems["unseen_operands"]]
    known = [numbers(problem["question"]) not in seen for problem in problems["unseen_questions"]]
    assert all(unseen)
    assert sum(known) < len(known) / 2


def test_held_out_dialogues_and_topics_are_in_no_training_row():
    rows = [row["messages"] for seed in (0, 9) for row in embedded.capybara(4000, seed)]
    rows += [row["messages"] for row in embedded.ultrafeedback(4000, 9)]
    trained = {users(messages)[:end] for messages in rows for end in range(1, len(messages) // 2 + 1)}
    assert trained.isdisjoint(users(dialogue["messages"]) for dialogue in embedded.recall_dialogues(400, 9))
    prompts = {row["prompt"] for row in embedded.ultrafeedback(4000, 9)} | {asked for said in trained for asked in said}
    assert prompts.isdisjoint(embedded.open_prompts(200, 9))
    pairs = [row["prompt"] for row in embedded.preference_pairs(N, 9) if "<answer>" not in row["chosen"][-1]["content"]]
    assert prompts.isdisjoint(pairs)


def test_recall_asks_for_something_said_before_and_small_talk_lies_between():
    for dialogue in embedded.recall_dialogues(200, 0):
        told = [place for place, text in enumerate(users(dialogue["messages"])) if dialogue["answer"] in text]
        assert dialogue["messages"][-1]["role"] == "user"
        assert dialogue["answer"] not in dialogue["messages"][-1]["content"]
        assert told and len(users(dialogue["messages"])) - told[0] >= 3


def test_open_prompts_are_distinct_and_bounded():
    prompts = embedded.open_prompts(150, 0)
    assert len(set(prompts)) == 150
    assert prompts != embedded.open_prompts(150, 1)
    with pytest.raises(UserError, match=r"held-out open questions, fewer than suites\.repetition\.n"):
        embedded.open_prompts(10**6, 0)


# Demonstrations


def test_masked_thoughts_leave_the_answer(chat):
    rows = list(embedded.demonstrations([("frozen_lake", {})], 60, 0, answers_only=0.5))
    masked = [row for row in rows if any("mask_spans" in message for message in row["messages"])]
    assert 15 < len(masked) < 45
    encoded = chat.encode(masked[0]["messages"])
    shown = "".join(chat.tokenizer.decode([i]) for i, on in zip(encoded.ids, encoded.mask, strict=True) if on)
    answers = [m["content"].split("</think>")[1] for m in masked[0]["messages"] if m["role"] == "assistant"]
    assert shown == "<|im_end|>".join([*answers, ""])


def test_no_demonstrator_is_an_expert():
    for name, mix in environments.MIXES.items():
        assert "expert" not in mix, name
        assert sum(mix.values()) == pytest.approx(1)


# The base model


def test_base_is_a_whole_checkpoint_and_the_same_for_the_same_seed(base, tmp_path):
    manifest = checkpoint.verify(base)
    assert manifest["meta"]["chat_template_sha256"]
    again = embedded.build_base(tmp_path / "again", seed=3)
    assert (again / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    assert (again / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_role_headers_and_actions_are_short(chat):
    import envs

    assert len(chat.prompt([{"role": "user", "content": ""}])) == 6  # start, role, end, line break, start, role
    for name in environments.MIXES:
        for action in envs.make(name).actions or ():
            assert len(chat.content_ids(action)) == len(chat.content_ids(f" {action}")) == 1


def test_generating_needs_no_torch():
    code = "import sys, posttrain.data.embedded as e; list(e.ultrafeedback(3, 0)); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_splits_lie_on_both_sides():
    problems = [arithmetic.word_problem(random.Random(i)) for i in range(3000)]
    sides = [arithmetic.split_of(problem) for problem in problems]
    shares = {side: sides.count(side) / len(sides) for side in set(sides)}
    assert 0.7 < shares["train"] < 0.9
    assert min(shares.values()) > 0.05


@pytest.mark.thorough
def test_the_command_writes_the_base_model_and_says_one_line(base: Path, tmp_path: Path) -> None:
    done = python("-m", "posttrain.data.embedded", "--out", str(tmp_path / "base"))
    assert (done.stdout, done.stderr) == (f"The base model is in {tmp_path / 'base'}.\n", "")
    assert checkpoint.is_whole(tmp_path / "base")
    assert (tmp_path / "base/model.safetensors").read_bytes() != (base / "model.safetensors").read_bytes()  # seed 0
