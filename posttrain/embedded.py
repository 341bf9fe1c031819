"""What does the quickstart train on?  Small generated data in the schemas of the three real sets, and a base model.

Everything is drawn from `derive_seed(seed, ...)`, row by row, so row 17 is the same in any process and for any `n`.

- `openmathinstruct`: word problems with worked steps and a boxed answer. A few per cent are the kinds of row the real
  filters exist for: wrong answers, code solutions, two boxes, duplicates.
- `capybara`: small talk in which a fact told early is asked for later, and open questions answered in exactly
  `SENTENCES` sentences. **These answers repeat themselves on purpose**, as scraped text does: from the third on, each
  sentence is, with probability `REPEAT`, a copy of an earlier one. A model trained on them really repeats itself, and
  the fixed number of sentences means that it cannot repeat less by merely saying less.
- `ultrafeedback`: pairs of answers. In the chosen one no sentence comes twice; the rejected one, equally long, repeats
  sentences, or its box holds a number of the question instead of the result, or it breaks the rules of an environment.
- `demonstrations`: episodes of the environments played by weak players: the format and the rules, not the skill.

Held-out sets are disjoint from training by construction: a hash of the question (or the operands, the dialogue, the
topic) decides its side, whatever the seed. The facts of the held-out dialogues come from the same lists of names,
animals, colours, ... as in training; it is their combination that is new. Pairs about environments are on other levels,
but two levels can look alike to a player who sees its neighbourhood alone: about one held-out pair in a hundred.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from posttrain.types import UserError, derive_seed

Messages = list[dict[str, Any]]  # role, content, and mask_spans where a part of an answer is not trained

SENTENCES = 6  # in every answer to an open question, chosen, rejected or scraped
FIRST_COPY = 2  # the first sentence names the topic and is never copied, so there is a remark to copy from here on
REPEAT = 0.4  # chance that a sentence from there on copies an earlier remark

NAMES = "Anna Ben Carl Dora Emma Finn Gina Hugo Iris Jack Kate Leo Mia Nora Omar Pia Rosa Sam Tina Will".split()
THINGS = "apples books coins cards eggs pens stones shells toys cakes stars nuts".split()
GAINS = ("gets", "finds", "buys", "wins")
LOSSES = ("loses", "sells", "drops", "breaks")
ASKS = (
    "How many {t} does {n} have now?",
    "How many {t} are there in the end?",
    "Count the {t} of {n}.",
)
LARGEST = 15  # operand; sums of three stay far below 129, up to which numbers are whole tokens

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


def _held_out(*key: object) -> bool:
    """True for a tenth of all keys, the same tenth for every seed and process."""
    digest = hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % 10 == 0


def _draw(draw: Callable[[random.Random], Any], wanted: Callable[[Any], bool], rng: random.Random) -> Any:
    """The first draw on the wanted side of a split (a tenth at least lies on either side, so this ends soon)."""
    return next(value for value in (draw(rng) for _ in itertools.count()) if wanted(value))


# ---------------------------------------------------------------------------------------------------------- arithmetic


def _problem(rng: random.Random) -> dict[str, Any]:
    """{"question", "steps": [(7, "+", 5, 12), ...], "operands": ("+", 7, 5)} for one or two operations."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    signs = rng.choice([("+",), ("-",), ("+", "+"), ("+", "-")])
    start = total = rng.randint(2, LARGEST)
    text = f"{name} has {start} {thing}"
    steps: list[tuple[int, str, int, int]] = []
    operands = [start]
    for i, sign in enumerate(signs):
        other = rng.randint(2, LARGEST) if sign == "+" else rng.randint(1, min(LARGEST, total - 1))
        result = total + other if sign == "+" else total - other
        verb = rng.choice(GAINS if sign == "+" else LOSSES)
        text += f"{' and then' if i else ' and'} {verb} {other}"
        steps.append((total, sign, other, result))
        operands.append(other)
        total = result
    question = f"{text}. {rng.choice(ASKS).format(n=name, t=thing)}"
    return {"question": question, "steps": steps, "operands": ("".join(signs), *operands)}


def _math_split(problem: dict[str, Any]) -> str:
    if _held_out("operands", *problem["operands"]):
        return "unseen_operands"
    return "unseen_questions" if _held_out("question", problem["question"]) else "train"


def _worked(steps: list[tuple[int, str, int, int]]) -> str:
    lines = " ".join(f"{a}{sign}{b}={c}." for a, sign, b, c in steps)
    return rf"{lines} The answer is \boxed{{{steps[-1][3]}}}."


def _miscalculated(steps: list[tuple[int, str, int, int]], rng: random.Random) -> list[tuple[int, str, int, int]]:
    """The same steps with the last sum wrong by a little."""
    a, sign, b, c = steps[-1]
    return [*steps[:-1], (a, sign, b, max(0, c + rng.choice([-3, -2, -1, 1, 2, 3])) if c else c + 1)]


def openmathinstruct(n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows in the schema of nvidia/OpenMathInstruct-1; about one in twelve is there for the filters to take."""
    for i in range(n):
        rng = random.Random(derive_seed(seed, "openmathinstruct", i))
        if rng.random() < 0.02 and i:  # a duplicate of the row before
            rng = random.Random(derive_seed(seed, "openmathinstruct", i - 1))
            rng.random()
        problem = _draw(_problem, lambda p: _math_split(p) == "train", rng)
        yield _math_row(problem, rng)


def _math_row(problem: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    steps, kind = problem["steps"], rng.random()
    expected = predicted = str(steps[-1][3])
    solution, error = _worked(steps), "<not_executed>"
    if kind < 0.03:
        steps = _miscalculated(steps, rng)
        solution, predicted = _worked(steps), str(steps[-1][3])
    elif kind < 0.05:
        code = "\n".join(f"x = {a} {sign} {b}" for a, sign, b, _ in steps)
        solution = (
            f"Let us compute.\n<llm-code>\n{code}\nx\n</llm-code>\n<llm-code-output>\n{expected}\n</llm-code-output>\n"
            rf"The answer is \boxed{{{expected}}}."
        )
        error = ""
    elif kind < 0.06:
        solution = rf"\boxed{{{steps[0][2]}}} is too simple. {solution}"
    return {
        "question": problem["question"],
        "generated_solution": solution,
        "expected_answer": expected,
        "predicted_answer": predicted,
        "error_message": error,
        "is_correct": predicted == expected,
        "dataset": "gsm8k",
        "generation_type": "without_reference_solution",
    }


def math_problems(n: int, seed: int, split: str = "unseen_questions") -> list[dict[str, str]]:
    """Held-out problems: new questions over operands met in training, or operands never met together there."""
    assert split in ("unseen_questions", "unseen_operands")
    rngs = (random.Random(derive_seed(seed, "math_problems", split, i)) for i in range(n))
    problems = [_draw(_problem, lambda p: _math_split(p) == split, rng) for rng in rngs]
    return [{"question": p["question"], "answer": str(p["steps"][-1][3])} for p in problems]


# ------------------------------------------------------------------------------------------------------- conversations


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _fill(template: str, value: str) -> str:
    text = template.format(v=value)
    return text[0].upper() + text[1:]


def _dialogue(rng: random.Random) -> dict[str, Any]:
    """One or two facts, then one to three turns of small talk, then a question about one of the facts."""
    slots = rng.sample(sorted(FACTS), rng.choice([1, 1, 2]))
    values = {slot: rng.choice(FACTS[slot]["values"]) for slot in slots}
    messages: Messages = []
    for slot in slots:
        messages += [
            _user(_fill(rng.choice(FACTS[slot]["tell"]), values[slot])),
            _assistant(_fill(rng.choice(FACTS[slot]["reply"]), values[slot])),
        ]
    for said, replied in rng.sample(SMALL_TALK, rng.randint(1, 3 if len(slots) == 1 else 2)):
        messages += [_user(said), _assistant(replied)]
    slot = rng.choice(slots)
    messages += [
        _user(rng.choice(FACTS[slot]["ask"])),
        _assistant(_fill(FACTS[slot]["answer"][0], values[slot])),
    ]
    return {"messages": messages, "answer": values[slot]}


def _dialogue_held_out(dialogue: dict[str, Any]) -> bool:
    return _held_out("dialogue", *(m["content"] for m in dialogue["messages"] if m["role"] == "user"))


def _topic(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(PLACES)}"


def _topic_held_out(topic: str) -> bool:
    return _held_out("topic", topic)


def _fresh_answer(topic: str, rng: random.Random) -> list[str]:
    return [rng.choice(OPENERS).format(p=topic), *rng.sample(REMARKS, SENTENCES - 1)]


def _with_repeats(sentences: list[str], places: list[int], rng: random.Random) -> list[str]:
    """The same answer with the remarks at `places` replaced by an earlier one, most often the one just before."""
    out = list(sentences)
    for place in sorted(places):
        out[place] = out[place - 1] if rng.random() < 0.6 else out[rng.randrange(1, place)]
    return out


def _scraped_answer(topic: str, rng: random.Random) -> str:
    places = [i for i in range(FIRST_COPY, SENTENCES) if rng.random() < REPEAT]
    return " ".join(_with_repeats(_fresh_answer(topic, rng), places, rng))


def capybara(n: int, seed: int, open_share: float = 0.35) -> Iterator[dict[str, Any]]:
    """Rows in the schema of trl-lib/Capybara: recall dialogues and open questions; one in a hundred has a hole."""
    for i in range(n):
        rng = random.Random(derive_seed(seed, "capybara", i))
        if rng.random() < open_share:
            source, topic = "embedded-open", _draw(_topic, lambda t: not _topic_held_out(t), rng)
            messages = [_user(rng.choice(OPEN_ASKS).format(p=topic)), _assistant(_scraped_answer(topic, rng))]
        else:
            source = "embedded-recall"
            messages = _draw(_dialogue, lambda d: not _dialogue_held_out(d), rng)["messages"]
        if rng.random() < 0.01:
            messages[-1] = _assistant("")
        yield {"source": source, "messages": messages, "num_turns": len(messages) // 2}


def recall_dialogues(n: int, seed: int) -> list[dict[str, Any]]:
    """Held-out dialogues that end with the question; right when the reply contains `answer`."""
    rngs = (random.Random(derive_seed(seed, "recall_dialogues", i)) for i in range(n))
    dialogues = [_draw(_dialogue, _dialogue_held_out, rng) for rng in rngs]
    return [{"messages": d["messages"][:-1], "answer": d["answer"]} for d in dialogues]


def open_prompts(n: int, seed: int) -> list[str]:
    """Distinct open questions about topics that no training row has."""
    topics = [f"{a} {p}" for a in ADJECTIVES for p in PLACES if _topic_held_out(f"{a} {p}")]
    prompts = [ask.format(p=topic) for topic in topics for ask in OPEN_ASKS]
    if n > len(prompts):
        raise UserError(f"There are {len(prompts)} held-out open questions, fewer than suites.repetition.n={n}.")
    return random.Random(derive_seed(seed, "open_prompts")).sample(prompts, n)


# -------------------------------------------------------------------------------------------------------- environments

# How often each weak player acts in a demonstration, turn by turn. None of them is good at its environment alone.
MIXES: dict[str, dict[str, float]] = {
    "frozen_lake": {"goal": 0.37, "safe": 0.37, "random": 0.26},
    "sokoban": {"push": 0.1, "go": 0.1, "free": 0.1, "random": 0.7},
}
ANSWERS_ONLY = 0.3  # share of demonstrations whose thoughts are not trained, only what follows from them


def demonstrations(
    environments: Sequence[str], n: int, seed: int, answers_only: float = ANSWERS_ONLY
) -> Iterator[dict[str, Any]]:
    """`n` episodes on training levels, the environments in turn: {"messages": [...], "env": "frozen_lake"}.

    Who plays them says `MIXES`, or `envs.demos.default_mix`; ValueError where an environment has nobody.

    A thought is copied from the state, which is soon learnt; the action that follows is noisy and a single token of
    many. So a share of the rows masks the thoughts (`mask_spans`), which lends the actions more weight.
    """
    import envs
    from envs.demos import default_mix, demonstrate
    from envs.protocol import Protocol

    protocol = Protocol()
    for i in range(n):
        name = environments[i % len(environments)]
        place = derive_seed(seed, "demonstrations", i)
        env = envs.make(name)
        mix = MIXES.get(name) or default_mix(env)
        messages: Messages = [*demonstrate(env, protocol, place % 2**32, "train", mix)]
        if random.Random(place).random() < answers_only:
            for message in messages:
                if message["role"] == "assistant":
                    message["mask_spans"] = [[0, message["content"].index("<answer>")]]
        yield {"messages": messages, "env": name}


# --------------------------------------------------------------------------------------------------------- preferences

MATH_PAIRS, ENV_PAIRS = 0.35, 0.15  # shares among the preference pairs; the rest is about repetition


def _pair(rng: random.Random, held_out: bool) -> dict[str, Any]:
    kind = rng.random()
    if kind < ENV_PAIRS:
        prompt, chosen = _env_turn(rng, "validation" if held_out else "train")
        rejected = _malformed(chosen, rng)
    elif kind < ENV_PAIRS + MATH_PAIRS:
        side = "unseen_questions" if held_out else "train"
        problem = _draw(_problem, lambda p: _math_split(p) == side, rng)
        prompt, chosen = [_user(problem["question"])], _worked(problem["steps"])
        result = str(problem["steps"][-1][3])
        wrong = rng.choice([str(number) for number in problem["operands"][1:] if str(number) != result] or ["0"])
        rejected = chosen.replace(f"boxed{{{result}}}", f"boxed{{{wrong}}}")
    else:
        topic = _draw(_topic, lambda t: _topic_held_out(t) == held_out, rng)
        prompt = [_user(rng.choice(OPEN_ASKS).format(p=topic))]
        fresh = _fresh_answer(topic, rng)
        places = rng.sample(range(FIRST_COPY, SENTENCES), rng.randint(2, 4))
        chosen, rejected = " ".join(fresh), " ".join(_with_repeats(fresh, places, rng))
    asked, better = prompt[-1]["content"], rng.choice([7.0, 7.5, 8.0, 8.5, 9.0])
    return {
        "prompt": asked,
        "prompt_id": hashlib.sha256(asked.encode()).hexdigest(),
        "chosen": [*prompt, _assistant(chosen)],
        "rejected": [*prompt, _assistant(rejected)],
        "messages": [*prompt, _assistant(chosen)],
        "score_chosen": better,
        "score_rejected": better - rng.choice([1.0, 2.0, 3.0, 4.0]),
    }


def _env_turn(rng: random.Random, split: str) -> tuple[Messages, str]:
    """One of the first turns of a demonstration: the conversation up to it, and what the demonstrator wrote."""
    import envs
    from envs.demos import demonstrate
    from envs.protocol import Protocol

    name = rng.choice(sorted(MIXES))
    messages: Messages = [*demonstrate(envs.make(name), Protocol(), rng.getrandbits(31), split, MIXES[name])]
    turn = 2 + 2 * rng.randrange(min(3, (len(messages) - 1) // 2))  # behind the system message and the first state
    return messages[:turn], messages[turn]["content"]


def _malformed(reply: str, rng: random.Random) -> str:
    """The same reply with a fault that the environments penalise."""
    thought, action = reply.removesuffix("</answer>").split("<answer>")
    faults = [f"{thought}{action}", f"{thought}<answer>Jump</answer>", f"{thought.removesuffix('</think>')} {action}"]
    return rng.choice(faults)


def ultrafeedback(n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows in the schema of HuggingFaceH4/ultrafeedback_binarized; a few are ties, identical or empty."""
    for i in range(n):
        rng = random.Random(derive_seed(seed, "ultrafeedback", i))
        row, fault = _pair(rng, held_out=False), rng.random()
        if fault < 0.02:
            row["score_rejected"] = row["score_chosen"]
        elif fault < 0.03:
            row["rejected"] = row["chosen"]
        elif fault < 0.04:
            row["rejected"] = [row["rejected"][0], _assistant("")]
        yield row


def preference_pairs(n: int, seed: int) -> list[dict[str, Any]]:
    """Held-out pairs, same schema and kinds as `ultrafeedback`, over questions, topics and levels it never has."""
    return [_pair(random.Random(derive_seed(seed, "preference_pairs", i)), held_out=True) for i in range(n)]


# ---------------------------------------------------------------------------------------------------------- base model

VOCABULARY = 1024
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# A role name keeps its line break and a word its leading space, also its trailing one before a number: so a number is
# the same token in "has 12", "12+5" and "{12}", and sums need to be learnt once.
PIECES = r"(?:system|user|assistant)\n| ?\p{L}+ (?=\d)| ?\p{L}+|\d{1,3}| ?[^\s\p{L}\d]+|\s"


def _texts(seed: int) -> Iterator[str]:
    """What the tokenizer is trained on: a sample of everything above, and all numbers to 129."""
    import envs

    for row in openmathinstruct(2000, seed):
        yield from (row["question"], row["generated_solution"])
    conversations = [capybara(3000, seed), demonstrations(sorted(MIXES), 600, seed)]
    for row in itertools.chain.from_iterable(conversations):
        yield from (f"{message['role']}\n{message['content']}" for message in row["messages"])
    for name in sorted(MIXES):  # not all there are: an environment that is added makes no other tokenizer
        actions = envs.make(name).actions or ()
        yield from actions * 2000  # an action begins an answer there and follows a word elsewhere
    yield from [str(number) for number in range(130)] * 200


def build_base(folder: str | Path, seed: int = 0) -> Path:
    """Writes the model that the quickstart starts from: a tokenizer fitted to this text, and random weights."""
    import torch
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from posttrain import checkpoint
    from posttrain.chat import Chat
    from posttrain.convgpt import ConvGPTConfig, ConvGPTForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(seed), trainer)
    bpe.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    chat = Chat.load(tokenizer, None)

    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(seed, "base"))
        net = ConvGPTForCausalLM(
            ConvGPTConfig(
                vocab_size=len(tokenizer),
                hidden_size=256,  # a 16 x 16 square, pooled to a decoder of width 64
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=2,
                head_dim=32,
                intermediate_size=192,
                max_position_embeddings=1024,
                initializer_range=0.06,  # 0.02 is small at this width: learning then starts late
                rope_theta=100.0,
                tie_word_embeddings=False,  # tied embeddings need scale_up, which would be most of the parameters
                pad_token_id=chat.pad_id,
                bos_token_id=None,
                eos_token_id=chat.stop_id,
            )
        )

    def write(out: Path) -> None:
        net.save_pretrained(out)
        chat.save(out)

    return checkpoint.save(Path(folder), write, chat_template_sha256=chat.hash, phase="base", seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"The base model lies in {build_base(arguments.out, arguments.seed)}.")


if __name__ == "__main__":
    main()
