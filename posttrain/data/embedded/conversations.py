"""Dialogues that ask for a fact told before, and open questions, in the schema of trl-lib/Capybara.

**The scraped answers repeat themselves on purpose**: see `REPEAT`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from posttrain.data.embedded.arithmetic import (
    NAMES,
    OTHER_NAMES,
    formula_out_of_reach,
    later_out_of_reach,
    short_formula,
    story_out_of_reach,
    training_problem,
    worked_solution,
)
from posttrain.data.embedded.splits import Messages, assistant, first_accepted, held_out, user
from posttrain.types import UserError, derive_seed

SENTENCES = 6  # in every answer to an open question, chosen, rejected or scraped
FIRST_COPY = 2  # the first sentence names the topic and is never copied, so there is a remark to copy from here on
REPEAT = 0.4  # chance that a sentence from there on copies an earlier remark

FACTS: dict[str, dict[str, Sequence[str]]] = {
    "name": {
        "values": NAMES,
        "tell": ["Hi, I am {v}.", "Hello, my name is {v}.", "My name is {v}."],
        "reply": ["Nice to meet you, {v}.", "Hello {v}, how can I help?", "Nice to meet you."],
        "ask": ["What is my name?", "Do you remember my name?", "Tell me my name."],
        "answer": ["Your name is {v}."],
    },
    "pet": {
        "values": "cat dog horse rabbit parrot fish goat mouse".split(),
        "tell": ["I have a {v} at home.", "My pet is a {v}.", "I bought a {v}."],
        "reply": ["A {v} is a good friend.", "That sounds lovely.", "I like every {v}."],
        "ask": ["Which pet do I have?", "What is my pet?", "Do you remember my pet?"],
        "answer": ["Your pet is a {v}."],
    },
    "colour": {
        "values": "red blue green yellow black white brown pink".split(),
        "tell": ["My favourite colour is {v}.", "I love the colour {v}.", "I paint my room {v}."],
        "reply": ["{v} is a fine colour.", "That sounds lovely.", "I like {v} too."],
        "ask": ["Which colour do I like?", "What is my colour?", "Do you remember my colour?"],
        "answer": ["Your colour is {v}."],
    },
    "food": {
        "values": "soup bread rice cheese pasta salad cake pie".split(),
        "tell": ["I like to eat {v}.", "My favourite food is {v}.", "I cook {v} today."],
        "reply": ["I hope the {v} is good.", "That sounds lovely.", "{v} is a fine food."],
        "ask": ["Which food do I like?", "What is my food?", "Do you remember my food?"],
        "answer": ["Your food is {v}."],
    },
    "city": {
        "values": "Paris Rome London Berlin Madrid Oslo Vienna Cairo".split(),
        "tell": ["I live in {v}.", "My home is {v}.", "I moved to {v}."],
        "reply": ["{v} is a fine city.", "That sounds lovely.", "I hope you like {v}."],
        "ask": ["Which city do I live in?", "What is my city?", "Do you remember my city?"],
        "answer": ["Your city is {v}."],
    },
}
QUESTIONS = {ask: slot for slot, fact in FACTS.items() for ask in fact["ask"]}
SMALL_TALK = (
    ("How are you?", "I am fine, thank you."),
    ("It rains today.", "Then stay at home and read."),
    ("Can you help me?", "Of course, I am happy to help."),
    ("Thank you.", "You are welcome."),
    ("I am tired.", "Then you should rest."),
    ("I had a long day.", "I hope the night is quiet."),
    ("Do you like music?", "Yes, music is lovely."),
    ("Tell me a joke.", "A clock is always on time."),
    ("What should I read?", "Read a book of poems."),
    ("The sun is out.", "Then go for a walk."),
    ("I am hungry.", "Then eat something good."),
    ("I am late.", "Then you should hurry."),
)
GREETINGS = (  # and what else people try first; in dialogues of many things alone
    ("Hello", "Hello, how can I help?"),
    ("Hi", "Hello, how can I help?"),
    ("Hello!", "Hello, how can I help?"),
    ("Thanks!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Bye", "Goodbye."),
    ("Who are you?", "I am a small model."),
    ("What can you do?", "I can calculate, remember and talk."),
)
UNKNOWN = (  # what people ask any model, and this one cannot know; in dialogues of many things alone
    "What is the capital of {c}?",
    "Where is {c}?",
    "How many people live in {c}?",
    "Who rules {c}?",
    "How does a {t} work?",
    "What is a {t}?",
    "Who invented the {t}?",
    "Explain the {t}.",
    "What time is it?",
    "What is the weather like?",
    "Why is the sky blue?",
    "Who won the game?",
    "Write a program.",
    "Translate this into German.",
    "What is the meaning of life?",
    "Who wrote that book?",
    "Tell me about {c}.",
    "Write a poem about {c}.",
    "How far is {c}?",
    "How old is the {t}?",
    "How tall is that tower?",
    "Is the sea salt?",
    "What day is it?",
    "Can you sing?",
    "Is {n} a prime number?",
    "Who is the president of {c}?",
    "When was the {t} made?",
    "What does a {t} cost?",
    "How do I cook it?",
    "What is love?",
    "Who painted the {t}?",
    "Who discovered {c}?",
    "Who was the first king of {c}?",
    "Who sells the best {t}?",
    "What is the largest city of {c}?",
    "What language do they speak in {c}?",
    "Which river flows through {c}?",
    "How do I get to {c}?",
    "How many people work on the {t}?",
    "How many legs has a spider?",
    "How many days has a year?",
    "Why is the {t} so slow?",
    "Why is the sun hot?",
    "Why do we dream?",
    "When did {c} win?",
    "What happened in {n}?",
    "Write a story.",
    "Write a song about the {t}.",
    "Write me a letter.",
    "Repair my {t}.",
    "Give me a recipe.",
    "Do you know {c}?",
    "Do bees sleep?",
    "Which {t} is the best?",
)
COUNTRIES = (
    "France Italy Spain Japan China India Brazil Canada Egypt Kenya Peru Greece Sweden Austria Cuba Nepal Ghana Ireland"
).split()
INVENTIONS = "computer plane phone car radio magnet engine rocket camera clock piano robot".split()
UNTOLD = 0.35  # of the dialogues that end with a question for a fact ask for one that was not told
NOTHING_TOLD = 0.4  # of these tell no other fact either
SMALL_LETTER = 0.2  # of what is said and asked among other things begins with one
SHORT = 0.5  # of the sums among other things are short formulas
OUT_OF_REACH = 0.6  # of the questions without an answer are sums
STORIES = 0.25  # of these are stories
LATER = 0.2  # of these are out of reach in a later step alone
ASKED_BEFORE = 0.5  # of the recall dialogues that tell a fact ask for one before the last question, too
ASKED_LAST = 0.5  # of the dialogues of four turns or more end with a question about a fact, if one was told
CALCULATING = 0.25  # of the dialogues of many things are mostly sums: answers of one form, one after another
NO_ANSWER = "I know only small sums, places and what you tell me."

ADJECTIVES = "old new big small quiet busy warm cold bright dark green strange hidden famous empty lovely".split()
PLACES = (
    "garden river market house bridge school forest lake tower village museum station library farm beach island park "
    "harbour castle street valley kitchen theatre square"
).split()
OPEN_ASKS = (
    "Tell me about the {p}.",
    "Describe the {p}.",
    "What do you know about the {p}?",
    "Write about the {p}.",
    "Say something about the {p}.",
    "Why do people like the {p}?",
)
OPENERS = ("The {p} is worth a visit.", "Let me describe the {p}.", "I often think of the {p}.")
REMARKS = (
    "People come here to rest.",
    "Children play there after school.",
    "Birds sing above it at dawn.",
    "Visitors take many photos.",
    "My uncle worked there for years.",
    "A painter once drew it.",
    "The air smells of rain.",
    "Old songs tell its story.",
    "Lamps light the way at night.",
    "Cats sleep in the shade.",
    "Music comes from far away.",
    "Bakers bring fresh bread.",
    "Students write poems about it.",
    "A clock rings every hour.",
    "Snow covers it in winter.",
    "Flowers grow on each side.",
    "Fishermen mend their nets nearby.",
    "Trains pass by at noon.",
    "Farmers sell sweet fruit.",
    "The wind never stops blowing.",
    "Two dogs guard the gate.",
    "Maps often forget this place.",
    "Everyone has a favourite corner.",
    "Stars look closer from here.",
)


def _fill(template: str, value: str) -> str:
    text = template.format(v=value)
    return text[0].upper() + text[1:]


def _dialogue(
    rng: random.Random, between: int = 3, others: float = 0.0, untold: float = 0.0, before: float = 0.0
) -> dict[str, Any]:
    """Return one or two facts, then at most `between` turns, then a question about one of the facts.

    The turns between are small talk, or with the chance `others` a sum or a question without an answer. There is one
    less of them after two facts. A name is told twice as often as another fact: there are more names than cities.
    With the chance `untold` the question is about a fact that was not told, and some of these tell no fact at all.
    With the chance `before` a question about a fact that was told stands before it.
    """
    slots = list(dict.fromkeys(rng.sample(["name", *sorted(FACTS)], rng.choice([1, 1, 2]))))
    values = {slot: rng.choice(FACTS[slot]["values"]) for slot in slots}
    asked = rng.choice(sorted(FACTS.keys() - values)) if untold and rng.random() < untold else ""
    messages: Messages = []
    told = [] if asked and rng.random() < NOTHING_TOLD else slots
    for slot in told:
        messages += [
            user(_fill(rng.choice(FACTS[slot]["tell"]), values[slot])),
            assistant(_fill(rng.choice(FACTS[slot]["reply"]), values[slot])),
        ]
    for pair in rng.sample(SMALL_TALK, rng.randint(1, between if len(slots) == 1 else between - 1)):
        if rng.random() < others:
            pair = _sum(rng, short=1) if rng.random() < 0.5 else without_answer(rng)
        messages += [user(pair[0]), assistant(pair[1])]
    if told and before and rng.random() < before:
        slot = rng.choice(told)
        messages += [
            user(rng.choice(FACTS[slot]["ask"])),
            assistant(_fill(FACTS[slot]["answer"][0], values[slot])),
        ]
    slot = asked or rng.choice(slots)
    question = rng.choice(FACTS[slot]["ask"])
    answer = not_told(question) if asked else _fill(FACTS[slot]["answer"][0], values[slot])
    return {"messages": [*messages, user(question), assistant(answer)], "answer": values.get(slot, "")}


def not_told(question: str) -> str:
    """Return the answer to a question about a fact that was not told: "Your pet? I know only ...".

    It begins as the answer to a fact that was told: with "I know only ..." at once, more values were guessed.
    """
    return f"Your {QUESTIONS[question]}? {NO_ANSWER}"


def recall_dialogue(rng: random.Random) -> Messages:
    """Return a dialogue of the training side that ends with a fact told up to nine messages before, or never."""
    recall = partial(_dialogue, between=9, others=0.5, untold=UNTOLD, before=ASKED_BEFORE)
    return first_accepted(recall, lambda dialogue: not _has_held_out(dialogue["messages"]), rng)["messages"]


def _dialogue_held_out(dialogue: dict[str, Any]) -> bool:
    return held_out("dialogue", *(m["content"] for m in dialogue["messages"] if m["role"] == "user"))


def mixed_dialogue(rng: random.Random, turns: int) -> Messages:
    """Return a dialogue of facts told and asked for, small talk, sums, open questions and others without an answer.

    No part of it, from its beginning to a question about a fact, is a held-out dialogue, nor is one of them with small
    first letters, which some of its questions have.
    """
    messages = first_accepted(lambda rng: _mixed(rng, turns), lambda messages: not _has_held_out(messages), rng)
    for message in messages:
        text = message["content"]
        if message["role"] == "user" and rng.random() < SMALL_LETTER:
            message["content"] = text[0].lower() + text[1:]
    return messages


def _mixed(rng: random.Random, turns: int) -> Messages:
    untold = rng.sample(sorted(FACTS), 2)
    sums = 16 if rng.random() < CALCULATING else 4
    known: dict[str, str] = {}
    messages: Messages = []
    for turn in range(1, turns + 1):
        talk = 3 if messages else 6  # people begin with a greeting
        weights = (4 if untold else 0, 5 if known else 0, talk, sums, 1, 4, 1)
        kind = rng.choices(("tell", "ask", "talk", "sum", "open", "unknown", "untold"), weights)[0]
        if turn == turns >= 4 and known and rng.random() < ASKED_LAST:
            kind = "ask"
        if kind == "tell":
            slot = untold.pop()
            known[slot] = rng.choice([*FACTS[slot]["values"], *(OTHER_NAMES if slot == "name" else ())])
            pair = tuple(_fill(rng.choice(FACTS[slot][part]), known[slot]) for part in ("tell", "reply"))
        elif kind == "ask":
            slot = rng.choice(sorted(known))
            pair = rng.choice(FACTS[slot]["ask"]), _fill(FACTS[slot]["answer"][0], known[slot])
        elif kind == "talk":
            pair = rng.choice((*SMALL_TALK, *GREETINGS) if messages else rng.choice((SMALL_TALK, GREETINGS)))
        elif kind == "sum":
            pair = _sum(rng, SHORT)
        elif kind == "unknown":
            pair = without_answer(rng)
        elif kind == "untold":
            question = rng.choice(FACTS[rng.choice(sorted(FACTS.keys() - known))]["ask"])
            pair = question, not_told(question)
        else:
            topic = topic_of_split(rng, for_evaluation=False)
            pair = rng.choice(OPEN_ASKS).format(p=topic), _scraped_answer(topic, rng)
        messages += [user(pair[0]), assistant(pair[1])]
    return messages


def _sum(rng: random.Random, short: float) -> tuple[str, str]:
    """Return a sum and its solution: a short formula with the chance `short`, else a problem of the training side."""
    problem = (short_formula if rng.random() < short else training_problem)(rng)
    return problem["question"], worked_solution(problem["steps"])


def without_answer(rng: random.Random) -> tuple[str, str]:
    """Return a question that the model cannot answer, a sum out of its reach or one about the world, and what it says.

    Where the numbers are small enough the answer has the step that is out of reach and those before it: "4+2=6. 6-7=? I
    know only ...".
    """
    if rng.random() < OUT_OF_REACH:
        makers = (later_out_of_reach, story_out_of_reach, formula_out_of_reach)
        question, steps = rng.choices(makers, (LATER, STORIES, 1 - LATER - STORIES))[0](rng)
        return question, f"{steps} {NO_ANSWER}".strip()
    question = rng.choice(UNKNOWN)
    filled = question.format(c=rng.choice(COUNTRIES), t=rng.choice(INVENTIONS), n=rng.randint(2, 99))
    return filled, NO_ANSWER


def _has_held_out(messages: Messages) -> bool:
    questions = [message["content"] for message in messages if message["role"] == "user"]
    return any(
        held_out("dialogue", *questions[: place + 1]) for place, text in enumerate(questions) if text in QUESTIONS
    )


def topic_of_split(rng: random.Random, *, for_evaluation: bool) -> str:
    return first_accepted(
        lambda rng: f"{rng.choice(ADJECTIVES)} {rng.choice(PLACES)}",
        lambda topic: held_out("topic", topic) == for_evaluation,
        rng,
    )


def _open_questions(*, for_evaluation: bool) -> list[str]:
    """Return every open question about a topic of this side of the split."""
    topics = [f"{a} {p}" for a in ADJECTIVES for p in PLACES if held_out("topic", f"{a} {p}") == for_evaluation]
    return [ask.format(p=topic) for topic in topics for ask in OPEN_ASKS]


def fresh_answer(topic: str, rng: random.Random) -> list[str]:
    return [rng.choice(OPENERS).format(p=topic), *rng.sample(REMARKS, SENTENCES - 1)]


def with_repeats(sentences: list[str], places: list[int], rng: random.Random) -> list[str]:
    """Return the answer with the remarks at `places` replaced by an earlier one, most often the previous one."""
    out = list(sentences)
    for place in sorted(places):
        out[place] = out[place - 1] if rng.random() < 0.6 else out[rng.randrange(1, place)]
    return out


def _scraped_answer(topic: str, rng: random.Random) -> str:
    places = [i for i in range(FIRST_COPY, SENTENCES) if rng.random() < REPEAT]
    return " ".join(with_repeats(fresh_answer(topic, rng), places, rng))


def capybara(
    n: int, seed: int, open_share: float = 0.14, mixed_share: float = 0.32, unknown_share: float = 0.08
) -> Iterator[dict[str, Any]]:
    """Yield rows in the schema of trl-lib/Capybara: recall dialogues, open questions, questions without an answer, and
    dialogues that mix these with sums; one in a hundred has an empty answer."""
    for i in range(n):
        rng = random.Random(derive_seed(seed, "capybara", i))
        kind = rng.random()
        if kind < mixed_share:
            source, messages = "embedded-mixed", mixed_dialogue(rng, rng.randint(2, 8))
        elif kind < mixed_share + unknown_share:
            question, answer = without_answer(rng)
            source, messages = "embedded-unknown", [user(question), assistant(answer)]
        elif kind < mixed_share + unknown_share + open_share:
            source, topic = "embedded-open", topic_of_split(rng, for_evaluation=False)
            messages = [user(rng.choice(OPEN_ASKS).format(p=topic)), assistant(_scraped_answer(topic, rng))]
        else:
            source = "embedded-recall"
            messages = recall_dialogue(rng)
        if rng.random() < 0.01:
            messages[-1] = assistant("")
        yield {"source": source, "messages": messages, "num_turns": len(messages) // 2}


def recall_dialogues(n: int, seed: int) -> list[dict[str, Any]]:
    """Return held-out dialogues that end with the question; right when the reply contains `answer`."""
    rngs = (random.Random(derive_seed(seed, "recall_dialogues", i)) for i in range(n))
    dialogues = [first_accepted(_dialogue, _dialogue_held_out, rng) for rng in rngs]
    return [{"messages": d["messages"][:-1], "answer": d["answer"]} for d in dialogues]


def training_prompts(n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield at most n distinct open questions about training topics: {"prompt": "Tell me about the old lake."}."""
    prompts = _open_questions(for_evaluation=False)
    for prompt in random.Random(derive_seed(seed, "training_prompts")).sample(prompts, min(n, len(prompts))):
        yield {"prompt": prompt}


def open_prompts(n: int, seed: int) -> list[str]:
    """Return distinct open questions about topics that no training row has."""
    prompts = _open_questions(for_evaluation=True)
    if n > len(prompts):
        raise UserError(f"There are {len(prompts)} held-out open questions, fewer than suites.repetition.n={n}.")
    return random.Random(derive_seed(seed, "open_prompts")).sample(prompts, n)
