"""How much faster are multi-turn rollouts when the KV cache is kept, and not the whole history read again each turn?

Engines play the same conversations (same random weights, prompts, replies and number of sampled tokens): `slots` is
what we train with, `replay` our fallback, `generate` transformers' own loop, called once per turn, its paged one
`continuous-batching`, `trl-environment` and `trl-rollout-func` those of GRPOTrainer, `vllm` where it is installed.
    python benchmarks/rollout.py [--size 40m] [--engines slots trl-environment] [--turns 2 5 10] [--json FILE]
    python benchmarks/rollout.py --ragged   # turns of 1 to 24 tokens instead of 24 each
"""

from __future__ import annotations

import copy
import logging
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure
from _measure import PAD, SHAPES

from posttrain.models.chat import Chat
from posttrain.plan import seconds as plan_seconds
from posttrain.plan.parts import Numbers
from posttrain.rollout.engines.base import Sampler, TurnRequest
from posttrain.rollout.engines.graphs import GraphSampler
from posttrain.rollout.engines.replay import ReplaySampler
from posttrain.rollout.engines.slots import SlotSampler
from posttrain.rollout.engines.vllm import VLLMSampler
from posttrain.runtime import hardware
from posttrain.types import Completion, SamplingParams, derive_seed

GROUP = 8  # the members of a group share their prompt, as they do in training
STOP = 511  # ends a turn where turns differ in length; no prompt and no reply has it
PAGE = 32  # tokens of a page of the continuous batching cache


class Script(NamedTuple):
    """What the model is given, as text: prompts[row] of 80-120 words and replies[turn][row] of 20-40."""

    prompts: list[str]
    replies: list[list[str]]  # one turn fewer than are sampled: nobody reads a reply to the last one

    @property
    def turns(self) -> int:
        return len(self.replies) + 1


class Played(NamedTuple):
    sampled: list[list[int]]  # the sampled tokens of each conversation
    context: int  # tokens of all conversations, those that were only read included


Contestant = Callable[[SamplingParams], Played]


def script(conversations: int, turns: int) -> Script:
    def text(low: int, high: int, *place: int | str) -> str:
        rng = random.Random(derive_seed(*place))
        return " ".join(f"w{n}" for n in rng.choices(range(7, STOP), k=rng.randint(low, high)))

    prompts = [text(80, 120, "prompt", row // GROUP) for row in range(conversations)]
    return Script(
        prompts, [[text(20, 40, "reply", turn, row) for row in range(conversations)] for turn in range(turns - 1)]
    )


def settings(params: SamplingParams, stop_ids: Sequence[int]) -> GenerationConfig:
    """For transformers: so many tokens at most, from the whole distribution."""
    return GenerationConfig(
        max_new_tokens=params.max_new_tokens,
        do_sample=params.temperature > 0,
        top_k=0 if params.temperature > 0 else None,
        pad_token_id=PAD,
        eos_token_id=list(stop_ids),
    )


@contextmanager
def ragged(model: Any, every: int) -> Iterator[None]:
    """A turn ends where the tokens of its conversation are a multiple of `every`, and nowhere else.

    Whoever reads the same contexts then writes turns of the same lengths, each about as often, and a batch is ragged.
    """

    def end(_module: Any, _args: Any, given: dict[str, Any], out: Any) -> None:
        position_BQ = given["position_ids"][:, -out.logits.shape[1] :]
        out.logits[..., STOP] = torch.where((position_BQ + 2) % every == 0, 1e4, -torch.inf)

    hook = model.register_forward_hook(end, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


# ------------------------------------------------------------------------------------- engines asked turn by turn


class GenerateSampler(ReplaySampler):
    """The peer: plain `model.generate` over the left-padded histories, which draws by itself and keeps no log-probs."""

    model: Any  # `generate` has no types

    @torch.no_grad()
    def sample(self, handles: Sequence[int], params: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        rows = [self._ids[handle] for handle in handles]
        new_BN = self.write(rows, settings(params, self.stop_ids))
        for row, new in zip(rows, new_BN, strict=True):
            if STOP in self.stop_ids and STOP in new:
                del new[new.index(STOP) + 1 :]  # padding
            row.extend(new)
        return [Completion(new, [], False) for new in new_BN]

    def write(self, rows: list[list[int]], config: GenerationConfig) -> list[list[int]]:
        width = max(map(len, rows))
        ids_BT = torch.tensor([[PAD] * (width - len(row)) + row for row in rows], device=self.model.device)
        mask_BT = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.model.device)
        return self.model.generate(ids_BT, attention_mask=mask_BT, generation_config=config)[:, width:].tolist()


class ContinuousSampler(GenerateSampler):
    """`model.generate_batch`, whose manager lives as long as the conversations: its pages keep what was read."""

    room = 0  # tokens that all conversations take in the end

    def write(self, rows: list[list[int]], config: GenerationConfig) -> list[list[int]]:
        paged = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=math.ceil(self.room / PAGE) + 2 * len(rows),
            max_batch_tokens=max(512, 2 * len(rows)),
        )
        answers = self.model.generate_batch(
            rows, generation_config=config, continuous_batching_config=paged, persistent_manager=True
        )
        return [answer.generated_tokens for answer in answers.values()]

    def close(self, handles: Sequence[int]) -> None:
        super().close(handles)
        self.model.destroy_cached_continuous_batching_manager()


SAMPLERS: dict[str, type[SlotSampler | ReplaySampler]] = {
    "slots": SlotSampler,
    "generate": GenerateSampler,
    "replay": ReplaySampler,
    "continuous-batching": ContinuousSampler,
    "graphs": GraphSampler,
}


def play(
    sampler: Sampler, chat: Chat, said: Script, params: SamplingParams, marks: list[float] | None = None
) -> Played:
    """All turns of all conversations; `marks` gets the time at which each turn ends.

    Each answer is made text, as an environment reads it, and each reply made tokens.
    """
    prompts = [chat.prompt([{"role": "user", "content": text}]) for text in said.prompts]
    handles = sampler.open(prompts)
    row_of = {handle: row for row, handle in enumerate(handles)}
    sampled: list[list[int]] = [[] for _ in handles]
    read, heard = sum(map(len, prompts)), [0] * len(handles)

    def then(finished: list[tuple[int, Completion]]) -> list[TurnRequest]:
        nonlocal read
        coming = []
        for handle, completion in finished:
            row = row_of[handle]
            chat.decode(completion.ids)
            sampled[row] += completion.ids
            heard[row] += 1
            if heard[row] < said.turns:
                reply = chat.extend(said.replies[heard[row] - 1][row])
                sampler.append(handle, reply)
                read += len(reply)
                coming.append((handle, derive_seed("turn", heard[row], row)))
        if marks is not None and min(heard) == len(marks):
            marks.append(time.perf_counter())
        return coming

    sampler.converse([(handle, derive_seed("turn", 0, row)) for handle, row in row_of.items()], params, then)
    sampler.close(handles)
    return Played(sampled, read + sum(map(len, sampled)))


# ------------------------------------------------------------------------------------------ TRL, which plays itself


def trl(model: Any, chat: Chat, said: Script, path: str, stop_ids: list[int]) -> Contestant:
    """What a training step of GRPOTrainer does before its loss: play, and score with rewards that cost nothing.

    So many calls of the tool are allowed as there are replies.
    """
    count = len(said.prompts)

    class Environment:
        def reset(self, row: int, **_: object) -> None:
            self.row, self.turn = row, -1

        def act(self, text: str) -> str:
            """Answers as the script says.

            Args:
                text: What the model wrote.
            """
            self.turn += 1
            return said.replies[self.turn][self.row]

    def rollout(prompts: list[list[dict[str, str]]], trainer: Any) -> dict[str, Any]:
        """One call of TRL's own `generate` per turn."""
        prompt_ids = trainer.processing_class.apply_chat_template(
            prompts, add_generation_prompt=True, return_dict=False
        )
        rows, masks = [list(ids) for ids in prompt_ids], [[] for _ in prompts]
        for turn in range(said.turns):
            new_BN, _ = trainer._generate_single_turn(rows, None, {}, num_generations=1)
            for row, new in enumerate(new_BN):
                chat.decode(new)
                reply = chat.extend(said.replies[turn][row]) if turn < len(said.replies) else []
                rows[row] += new + reply
                masks[row] += [1] * len(new) + [0] * len(reply)
        answers = [row[len(ids) :] for row, ids in zip(rows, prompt_ids, strict=True)]
        return {"prompt_ids": prompt_ids, "completion_ids": answers, "env_mask": masks, "logprobs": None}

    paths = {"trl-environment": {"environment_factory": Environment}, "trl-rollout-func": {"rollout_func": rollout}}
    rows = [{"prompt": [{"role": "user", "content": text}], "row": n} for n, text in enumerate(said.prompts)]
    trainer = _measure.grpo_trainer(
        model,
        chat.tokenizer,
        rows,
        lambda prompts, **_: [0.0] * len(prompts),
        per_device_train_batch_size=count,
        num_generations=count,
        max_completion_length=10**6,  # of all turns together
        max_tool_calling_iterations=len(said.replies),
        **paths[path],
    )
    trainer.eos_token_ids = stop_ids
    trainer.model.train()

    def contestant(params: SamplingParams) -> Played:
        trainer.generation_config.update(
            max_new_tokens=params.max_new_tokens, do_sample=params.temperature > 0, eos_token_id=stop_ids
        )
        found = trainer._generate_and_score_completions([dict(row) for row in rows])
        on_BT = (found["tool_mask"] * found["completion_mask"]).bool()
        sampled = [ids[on].tolist() for ids, on in zip(found["completion_ids"], on_BT, strict=True)]
        return Played(sampled, int(found["prompt_mask"].sum() + found["completion_mask"].sum()))

    return contestant


# ------------------------------------------------------------------------------------------------------ measuring


class Inside:
    """Where our engine's time goes: the seconds of each turn, and all that were spent in the model's forward."""

    def __init__(self, sampler: Sampler, chat: Chat, said: Script, model: Any) -> None:
        self.sampler, self.chat, self.said, self.model = sampler, chat, said, model
        self.turns: list[list[float]] = []  # [repeat][turn]
        self.outside: list[float] = []  # share of each repeat

    def __call__(self, params: SamplingParams) -> Played:
        marks = [time.perf_counter()]
        with _measure.forwards(self.model) as spent:
            played = play(self.sampler, self.chat, self.said, params, marks)
        self.turns.append([after - before for before, after in pairwise(marks)])
        self.outside.append(1 - sum(spent) / (marks[-1] - marks[0]))
        return played


@cache
def vllm(model: Any, chat: Chat) -> Sampler:
    """One for each model, already started: a second one in a process would take the first one's groups down with it."""
    sampler = VLLMSampler(model, [], memory=0.3)
    play(sampler, chat, script(2, 2), SamplingParams(2))
    return sampler


def contestants(
    model: Any, chat: Chat, said: Script, new_tokens: int, engines: Sequence[str], stop: int | None = None
) -> dict[str, Contestant]:
    """Who plays; without a stop token nothing ends a turn early."""
    stop_ids, made = [model.config.vocab_size if stop is None else stop], {}
    theirs = copy.deepcopy(model)  # TRL replaces the forward of its model
    rows = zip(said.prompts, *said.replies, strict=True)  # the template writes up to eight tokens for each text
    tokens = [sum(len(text.split()) + 8 + new_tokens for text in texts) for texts in rows]
    for name in engines:
        if name.startswith("trl"):
            made[name] = trl(theirs, chat, said, name, stop_ids)
            continue
        if name == "vllm" and "ConvGPT" in type(model).__name__:
            continue  # which it does not know
        more = {"longest": max(tokens)} if name == "graphs" else {}  # else its cache would move when it grows
        sampler: Any = vllm(model, chat) if name == "vllm" else SAMPLERS[name](model, stop_ids, PAD, **more)
        sampler.strict = name == "graphs"  # which ends the benchmark where a step cannot be recorded
        if name == "continuous-batching":
            sampler.room = sum(tokens)
        inside = Inside(sampler, chat, said, model)
        made[name] = inside if name == "slots" else cast(Any, lambda params, s=sampler: play(s, chat, said, params))
    return made


def unequal(played: dict[str, Played]) -> list[str]:
    """Engines that sampled other tokens under greedy decoding than `slots`, or read a context of another length."""
    first = played["slots"]
    return [name for name, own in played.items() if own != first]


def timed(
    made: dict[str, Contestant], params: SamplingParams, repeats: int, device: str
) -> tuple[dict[str, list[float]], dict[str, tuple[int, int]]]:
    """Seconds of each repeat of each contestant; how many tokens there were, and how many of them were sampled.

    On a GPU all play once before that is timed: then kernels are loaded and graphs recorded.
    """
    work: dict[str, tuple[int, int]] = {}

    def once(name: str) -> None:
        played = made[name](params)
        work[name] = (played.context, sum(map(len, played.sampled)))

    for name in made if device == "cuda" else ():
        once(name)
    inside = cast(Inside, made["slots"])
    inside.turns, inside.outside = [], []
    return _measure.alternating({name: partial(once, name) for name in made}, repeats), work


def beside_limits(model: Any, chat: Chat, said: Script, context: int, sampled: int, device: str) -> dict[str, Any]:
    """Bytes that decoding reads at least, and the plan's seconds with launched steps and with CUDA graphs."""
    count, size, shape = len(said.prompts), model.dtype.itemsize, _measure.shape_of(model.config)
    prompt = sum(len(chat.prompt([{"role": "user", "content": text}])) for text in said.prompts)
    work = _measure.episodes_of(count, GROUP, count * said.turns, prompt, sampled, context)
    cost = plan_seconds.Cost(shape, Numbers(size, size, "full", False, False), _measure.fleet(device))
    ways = {"slots": True, "graphs": False} if device == "cuda" else {"slots": True}
    expected = {name: plan_seconds.rollout(cost, work, count, GROUP, count, way) for name, way in ways.items()}
    return {"read": _measure.decoding_bytes(shape, count, work, size), "planned": expected}


def markdown(results: dict[str, Any]) -> str:
    """Turns of all conversations and sampled tokens per second at the median time; below it, our engine from inside."""
    rows, inside = [], []
    limited = all("read" in row for row in results["rows"])
    for row in results["rows"]:
        who = [f"{row['model']} {row['parameters'] / 1e6:.1f}M", str(row["turns"]), f"{row['context']:,}"]
        ours = row["seconds"]["slots"]
        for name, seconds in row["seconds"].items():
            turns = results["conversations"] * row["turns"] / median(seconds)
            speeds = [f"{turns:.1f}", f"{row['sampled'] / median(seconds):.0f}"]
            rows.append([*who, name, *speeds, "" if name == "slots" else _measure.ratio(seconds, ours)])
            if limited:
                expected = row["planned"].get(name)
                share = f"{row['read'] / median(seconds) / results['GB_s'] / 1e9:.1%}"
                rows[-1] += [share, f"{median(seconds) / expected:.2f}" if expected else ""]
        second, last = ([turns[n] for turns in row["turn_seconds"]] for n in (1, -1))
        times = [f"{median(second):.3f}", f"{median(last):.3f}", f"{median(last) / median(second):.2f}"]
        inside.append([*who[:2], *times, f"{median(row['outside']):.1%}"])
    header = ["model", "turns", "context tokens", "engine", "env turns/s", "tok/s", "slots are faster by"]
    header += ["of the bandwidth", "measured / planned"] if limited else []
    tokens = f"{'1 to ' if results['ragged'] else ''}{results['new_tokens']} tokens a turn"
    size = f"{results['conversations']} conversations, {tokens}, {results['dtype']}"
    below = ["slots", "turns", "seconds of turn 2", "of the last turn", "last / second", "outside the model's forward"]
    return (
        f"{_measure.told(results)}\n{size}, medians of {results['repeats']}.\n\n{_measure.table(header, rows)}\n\n"
        f"{_measure.table(below, inside)}"
    )


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--size", choices=SHAPES, default="tiny")
    engines = [*(name for name in SAMPLERS if name != "graphs"), "trl-environment", "trl-rollout-func"]
    engines += ["vllm"] * (find_spec("vllm") is not None)
    choices, only = [*engines, "graphs"], "`slots` always plays, `graphs` (on a GPU) only if it is named"
    parser.add_argument("--engines", nargs="+", choices=choices, default=engines, help=only)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda is timed in bfloat16")
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 5, 10, 20], help="2 or more each")
    parser.add_argument("--conversations", type=int, default=32, help="played side by side")
    parser.add_argument("--new-tokens", type=int, default=24, help="sampled per conversation and turn")
    parser.add_argument("--ragged", action="store_true", help="1 to so many tokens; without paged engines")
    given = parser.parse_args()
    if min(given.turns) < 2:
        parser.error("--turns: what is compared is what is read again, from the second turn on")
    paged = {"continuous-batching", "vllm"} if given.ragged else set()
    if given.engines != engines and paged & set(given.engines):
        parser.error("--ragged: paged engines do not say where a token stands, leave them out")
    given.engines = [name for name in choices if name in {"slots", *given.engines} - paged]
    stop = STOP if given.ragged else None
    _measure.threads()
    if given.device == "cpu":
        hardware.keep_freed_memory()  # as every script does there; here all engines gain by it
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)  # it warns of what is meant here
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32

    rows = []
    for kind, shape in SHAPES[given.size].items():
        model = _measure.model_of(kind, shape, given.device).eval()
        chat = _measure.words(shape["vocab_size"])
        with ragged(model, given.new_tokens) if given.ragged else nullcontext():
            greedy = SamplingParams(given.new_tokens, temperature=0.0)
            compared = [name for name in given.engines if name != "vllm" or dtype == torch.float32]
            made = contestants(model, chat, script(given.conversations, 2), given.new_tokens, compared, stop)
            if wrong := unequal({name: contestant(greedy) for name, contestant in made.items()}):
                sys.exit(
                    f"{kind}: {', '.join(wrong)} and slots differ under greedy decoding in float32: nothing was timed."
                )

            model.to(dtype)
            params = SamplingParams(given.new_tokens)
            for turns in given.turns:
                said = script(given.conversations, turns)
                made = contestants(model, chat, said, given.new_tokens, given.engines, stop)
                seconds, work = timed(made, params, given.repeats, given.device)
                if len(set(work.values())) > 1:
                    sys.exit(f"{kind}, {turns} turns: tokens or sampled ones differ, it was not the same work: {work}.")
                (context, sampled), inside = work["slots"], cast(Inside, made["slots"])
                row = dict(model=kind, parameters=model.num_parameters(), turns=turns, context=context, sampled=sampled)
                row |= beside_limits(model, chat, said, context, sampled, given.device)
                rows.append(row | dict(seconds=seconds, turn_seconds=inside.turns, outside=inside.outside))

    results = (
        _measure.surroundings(given.device)
        | _measure.limits(given.device).told
        | {
            "dtype": str(dtype).removeprefix("torch."),
            **{key: value for key, value in vars(given).items() if key != "json"},
            "rows": rows,
        }
    )
    _measure.publish(results, markdown(results), given.json)


if __name__ == "__main__":
    main()
