"""Pairs of answers, a chosen and a rejected one, in the schema of HuggingFaceH4/ultrafeedback_binarized."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

from posttrain.data.embedded.arithmetic import problem_of_split, short_formula, training_problem, worked_solution
from posttrain.data.embedded.conversations import (
    FIRST_COPY,
    GREETINGS,
    OPEN_ASKS,
    QUESTIONS,
    SENTENCES,
    SMALL_TALK,
    fresh_answer,
    mixed_dialogue,
    not_told,
    recall_dialogue,
    topic_of_split,
    with_repeats,
    without_answer,
)
from posttrain.data.embedded.environments import early_turn, malformed
from posttrain.data.embedded.splits import assistant, user
from posttrain.types import derive_seed

MATH_PAIRS, ENV_PAIRS = 0.35, 0.15  # shares among the preference pairs; the rest is about repetition
UNKNOWN = 0.15  # share of the training pairs about questions without an answer, which would be forgotten without them
UNTOLD = 0.2  # share of these that ask for a fact that was not told
RECALL = 0.2  # share of the other training pairs that recall facts, which would be denied without them
TALK = 0.06  # share of the pairs left that are small talk
SHORT = 0.3  # share of the training pairs about sums that are short formulas, which would be taken for these
BEFORE = 0.1  # share of the training pairs without environments that come late in a dialogue


def _pair(rng: random.Random, held_out: bool) -> dict[str, Any]:
    kind = rng.random()
    begins = held_out  # nothing stands before it
    if not held_out and rng.random() < UNKNOWN:
        begins = untold = rng.random() < UNTOLD  # what was told before could be an answer
        if untold:
            question = rng.choice(sorted(QUESTIONS))
            chosen = not_told(question)
        else:
            question, chosen = without_answer(rng)
        prompt = [user(question)]
        rejected = twice(chosen)  # a guess would make sums less likely where they are right, too
    elif not held_out and rng.random() < RECALL:
        begins = True
        *prompt, answer = recall_dialogue(rng)
        chosen, rejected = answer["content"], twice(answer["content"])
    elif not held_out and rng.random() < TALK:
        said, chosen = rng.choice((*SMALL_TALK, *GREETINGS))
        prompt, rejected = [user(said)], twice(chosen)
    elif kind < ENV_PAIRS:
        begins = True
        prompt, chosen = early_turn(rng, "validation" if held_out else "train")
        rejected = malformed(chosen, rng)
    elif kind < ENV_PAIRS + MATH_PAIRS:
        if held_out:
            problem = problem_of_split("unseen_questions", rng)
        else:
            problem = (short_formula if rng.random() < SHORT else training_problem)(rng)
        prompt, chosen = [user(problem["question"])], worked_solution(problem["steps"])
        result = str(problem["steps"][-1][3])
        wrong = rng.choice([str(number) for number in problem["operands"][1:] if str(number) != result] or ["0"])
        rejected = chosen.replace(f"boxed{{{result}}}", f"boxed{{{wrong}}}")
    else:
        topic = topic_of_split(rng, for_evaluation=held_out)
        prompt = [user(rng.choice(OPEN_ASKS).format(p=topic))]
        clean = fresh_answer(topic, rng)
        places = rng.sample(range(FIRST_COPY, SENTENCES), rng.randint(2, 4))
        chosen, rejected = " ".join(clean), " ".join(with_repeats(clean, places, rng))
    if not begins and rng.random() < BEFORE:
        prompt = [*mixed_dialogue(rng, rng.randint(1, 2)), *prompt]
    question, better = prompt[-1]["content"], rng.choice([7.0, 7.5, 8.0, 8.5, 9.0])
    return {
        "prompt": question,
        "prompt_id": hashlib.sha256(question.encode()).hexdigest(),
        "chosen": [*prompt, assistant(chosen)],
        "rejected": [*prompt, assistant(rejected)],
        "messages": [*prompt, assistant(chosen)],
        "score_chosen": better,
        "score_rejected": better - rng.choice([1.0, 2.0, 3.0, 4.0]),
    }


def twice(answer: str) -> str:
    return f"{answer} {answer}"


def ultrafeedback(n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows in the schema of HuggingFaceH4/ultrafeedback_binarized; a few are ties, identical or empty."""
    for i in range(n):
        rng = random.Random(derive_seed(seed, "ultrafeedback", i))
        row, fault = _pair(rng, held_out=False), rng.random()
        if fault < 0.02:
            row["score_rejected"] = row["score_chosen"]
        elif fault < 0.03:
            row["rejected"] = row["chosen"]
        elif fault < 0.04:
            row["rejected"] = [row["rejected"][0], assistant("")]
        yield row


def preference_pairs(n: int, seed: int) -> list[dict[str, Any]]:
    """Return held-out pairs in the form of `ultrafeedback`, over other questions, topics and levels."""
    return [_pair(random.Random(derive_seed(seed, "preference_pairs", i)), held_out=True) for i in range(n)]
