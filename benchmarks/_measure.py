"""What every benchmark needs: contestants that take turns, ratios with their range, and where it all was measured.

Then what a device reaches, beside which work is compared, and what the plan expects of it. The last part is what
several of them share: shapes of models, a tokenizer of words, TRL's trainer.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers

if TYPE_CHECKING:
    from posttrain.config.starpo import StarPORun
    from posttrain.models.chat import Chat
    from posttrain.plan.devices import Fleet
    from posttrain.plan.shape import Shape
    from posttrain.plan.work import Episodes

PAD = 0
ENDLESS = dict(pad_token_id=PAD, bos_token_id=None, eos_token_id=None)  # so all sample the same number of tokens
COMMON = ENDLESS | dict(initializer_range=0.06, max_position_embeddings=4096)
TINY = COMMON | dict(vocab_size=512, num_attention_heads=4, num_key_value_heads=4)
LARGER = COMMON | dict(vocab_size=32000, num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True)
SHAPES: dict[str, dict[str, dict[str, Any]]] = {  # the tiny ConvGPT is as wide and deep as the quickstart's
    "tiny": {
        "convgpt": TINY
        | dict(hidden_size=256, num_hidden_layers=3, head_dim=16, intermediate_size=192, tie_word_embeddings=False),
        "llama": TINY | dict(hidden_size=128, num_hidden_layers=4, intermediate_size=384),
    },
    "40m": {"llama": LARGER | dict(hidden_size=512, num_hidden_layers=8, intermediate_size=1536)},
    "convgpt-164m": {"convgpt": COMMON | dict(vocab_size=65538)},  # the defaults are the published checkpoint
    "qwen2.5-0.5b": {
        "qwen2": COMMON
        | dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14)
        | dict(num_key_value_heads=2, tie_word_embeddings=True)
    },
}


def parser(doc: str | None, repeats: bool = True) -> argparse.ArgumentParser:
    """An argument parser that every benchmark begins with."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    if repeats:
        made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--json", type=writable, help="also write every figure to this file")
    return made


def writable(name: str) -> Path:
    """Return the path of a file that can be written; it is asked before hours of measuring."""
    path = Path(name)
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{name} cannot be written")
    return path


def threads() -> None:
    """One thread, unless OMP_NUM_THREADS says otherwise."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def alternating(contestants: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat of each contestant; they take turns, in reversed order every second time."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats):
        for name in sorted(contestants, reverse=repeat % 2 == 1):
            start = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def environments() -> list[str]:
    """The names of the environments that this machine can open; of the others it is said why not."""
    import envs

    found = []
    for name in envs.names():
        try:
            envs.make(name)
            found.append(name)
        except ValueError as problem:
            print(f"{name} is left out: {problem}", file=sys.stderr)
    return found


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """How many times as fast ours is: the ratio of medians, and in brackets the range of single repeats."""
    single = [a / b for a, b in zip(theirs, ours, strict=True)]
    return f"**{median(theirs) / median(ours):.1f}x** ({min(single):.1f}-{max(single):.1f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({os.cpu_count()} cores)"


def surroundings(device: str = "cpu") -> dict[str, Any]:
    """Where this is measured."""
    return {
        "commit": commit(),
        "machine": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": metadata.version("trl"),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if device == "cuda" else None,
    }


def told(results: Mapping[str, Any]) -> str:
    """The line above every table."""
    return (
        f"Commit {results['commit']}, {results['machine']}, {results['threads']} thread(s), load {results['load']:.1f},"
        f" torch {results['torch']}, transformers {results['transformers']}."
    )


def publish(results: dict[str, Any], markdown: str, file: Path | None) -> None:
    """Print the table and write the figures behind it."""
    print(markdown)
    if file:
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def alone(script: str, options: Sequence[str]) -> dict[str, Any]:
    """The JSON that a script prints last, run in a process of its own: so its peak memory is that of one contestant.

    The figures also go to stderr at once: they are not lost if the benchmark is stopped at a later contestant.
    """
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(options)}:\n{done.stderr[-2000:]}")
    line = done.stdout.splitlines()[-1]
    print(f"{' '.join(options)}\n{line}", file=sys.stderr, flush=True)
    return json.loads(line)


def peak(device: str) -> float:
    """GiB that this process has held at most: on the GPU, or in all."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


# ------------------------------------------------------------------------------------- what a device reaches, the plan


class Limits(NamedTuple):
    """What a device reaches: Limits(bandwidth=2.98e12, peak=7.7e14)"""

    bandwidth: float  # bytes a second of a copy that no cache holds, read and written
    peak: float  # FLOPs a second of a large product

    @property
    def told(self) -> dict[str, float]:
        """As benchmarks write them."""
        return {"GB_s": self.bandwidth / 1e9, "TFLOP_s": self.peak / 1e12}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(action: Callable[[], object], device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start


def limits(device: str, bf16: bool | None = None) -> Limits:
    """Measure both; the best of a few, as a datasheet. bf16: of the product; as a GPU and not a CPU unless given."""
    gpu = device == "cuda"
    dtype = torch.bfloat16 if (gpu if bf16 is None else bf16) else torch.float32

    def rate(action: Callable[[], object], amount: float) -> float:
        action()
        return amount / min(seconds_of(action, device) for _ in range(5))

    side = 8192 if gpu else 1024
    with torch.no_grad():
        numbers = torch.zeros(1 << (28 if gpu else 25), device=device)
        copied = torch.empty_like(numbers)
        matrix = torch.randn(side, side, device=device).to(dtype)
        bandwidth = rate(lambda: copied.copy_(numbers), 2 * numbers.nbytes)
        return Limits(bandwidth, rate(lambda: matrix @ matrix, 2 * side**3))


@cache
def fleet(device: str) -> Fleet:
    """The device for the plan: this CPU as `--plan cpu` probes it, a card of its table, or another card as measured."""
    from posttrain.plan import devices

    if device == "cpu":
        return devices.fleets("cpu")[0]
    name = torch.cuda.get_device_name()
    for each in devices.DEVICES:  # "A100-40" is "NVIDIA A100-SXM4-40GB"
        if all(re.search(rf"\b{part}(GB)?\b", name) for part in each.name.split("-")):
            return devices.Fleet(each)
    found, memory = limits(device), torch.cuda.mem_get_info()[1] / 1e9
    bandwidth, peak = found.bandwidth / 1e9, found.peak / 1e12
    return devices.Fleet(devices.Device(name, memory, bandwidth, peak, peak / 8, link=32, network=1.56))


def plan_option(device: str) -> str:
    """The device as `--plan` is given it: cpu, H100, or GPU:memory=48,bandwidth=768,peak=150."""
    from posttrain.plan import devices

    if device == "cpu":
        return device
    found = fleet(device).device
    if found in devices.DEVICES:
        return found.name
    return f"GPU:memory={found.memory:.0f},bandwidth={found.bandwidth:.0f},peak={found.peak:.0f}"


def shape_of(config: Any) -> Shape:
    """The sizes of a model, for the plan's formulas."""
    import posttrain.models.convgpt  # noqa: F401  registers ConvGPT with the Auto classes
    from posttrain.config.shared import ModelSection
    from posttrain.plan.shape import Shape

    return Shape.of(copy.deepcopy(config), ModelSection(name_or_path="unused"))


def forward_flops(shape: Shape, lengths: Iterable[float], labels: float) -> float:
    """The plan's FLOPs of a forward pass over rows of these lengths, with so many labels; an update takes three."""
    from posttrain.plan import seconds

    blocks = sum(seconds.forward_flops(shape, length, length / 2) for length in lengths)
    return blocks + seconds.head_flops(shape, labels)


def episodes_of(
    conversations: int, samples: int, turns: float, prompt: float, sampled: float, context: float
) -> Episodes:
    """The work of a rollout for the plan, from the turns and the tokens of all conversations together."""
    from posttrain.plan.work import Episodes

    replies = (context - prompt - sampled) / max(1.0, turns - conversations)
    of_one, groups = turns / conversations, -(-conversations // samples)
    return Episodes(groups, samples, of_one, prompt / conversations, sampled / turns, replies)


def decoding_bytes(shape: Shape, rows: float, work: Episodes, size: int) -> float:
    """What decoding reads at least: the weights once a step of all rows, and each row's own keys and values.

    size: bytes of a number.
    """
    positions = (work.prompt + work.context) / 2
    return size * work.turns * work.new * (shape.blocks + shape.top + rows * positions * shape.cache)


@contextmanager
def forwards(model: Any) -> Iterator[list[float]]:
    """The seconds of each forward pass, of the whole model or of its body alone."""
    spent: list[float] = []
    open_calls: list[float] = []  # the body's call is part of the model's

    def now() -> float:
        synchronize(model.device.type)
        return time.perf_counter()

    def begin(*_: object) -> None:
        open_calls.append(now())

    def end(*_: object) -> None:
        start = open_calls.pop()
        if not open_calls:
            spent.append(now() - start)

    hooks = [module.register_forward_pre_hook(begin) for module in (model, model.base_model)]
    hooks += [module.register_forward_hook(end) for module in (model, model.base_model)]
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


# ---------------------------------------------------------------------------------------------------- shared by several


def model_of(kind: str, shape: Mapping[str, Any], device: str = "cpu") -> Any:
    """Random weights, the same in every process."""
    import posttrain.models.convgpt  # noqa: F401  registers ConvGPT with the Auto classes

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **shape)
    return transformers.AutoModelForCausalLM.from_config(config).to(device)


CONTROL = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
# A tool's result reads like a user's message and the list of tools is not written at all: TRL, whose environments
# answer as tools, then reads the very tokens that everybody reads.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }} "
    "{{ message.content }}{% for call in message.tool_calls or [] %} {{ call.function.name }}"
    " {{ call.function.arguments }}{% endfor %} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def words(vocabulary: int) -> Chat:
    """A tokenizer for which each of the words w7, w8, ... is one token, with a template that asks for little."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from posttrain.models.chat import Chat

    class Caller(PreTrainedTokenizerFast):
        """Finds in every answer a call of the tool `act`, as a model finds that has learnt to call it."""

        def parse_response(self, response: list[int], *_: object, **__: object) -> dict[str, Any]:
            call = {"name": "act", "arguments": {"text": self.decode(response)}}
            return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}

    known = [*CONTROL, "system", "user", "assistant"]
    known += [f"w{n}" for n in range(len(known), vocabulary)]
    level = Tokenizer(models.WordLevel({word: n for n, word in enumerate(known)}, unk_token="<unk>"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    level.add_special_tokens(CONTROL)
    tokenizer = Caller(tokenizer_object=level, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = {"defaults": {}}  # read by nobody, but TRL wants one beside a template of ours
    return Chat.load(tokenizer, None)


def grpo_trainer(
    model: Any, tokenizer: Any, rows: list[dict[str, Any]], reward: Callable[..., list[float | None]], **given: Any
) -> Any:
    """`GRPOTrainer` of TRL, in float32 if nothing else is given, without gradient checkpointing or logs.

    `given` are settings of its config, and `rollout_func`, `environment_factory`, `optimizers` or `callbacks`.
    """
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    parts = ("rollout_func", "environment_factory", "optimizers", "callbacks")
    settings: dict[str, Any] = {"epsilon_high": 0.28, "bf16": False}
    settings |= {key: value for key, value in given.items() if key not in parts}
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=model.device.type == "cpu",
        gradient_checkpointing=False,
        loss_type="dapo",
        beta=0.0,
        **settings,
    )
    return GRPOTrainer(
        model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **{key: given[key] for key in parts if key in given},
    )


def rollout_func(cfg: StarPORun, chat: Chat) -> Callable[[list[str], Any], dict[str, Any]]:
    """How GRPOTrainer plays a run's first environment: TRL's own `generate`, once a turn, for those that are not over.

    A prompt is the seed of a level. Environment, protocol and the tokens between two answers are ours.
    """
    from envs.episode import Episode
    from envs.protocol import Protocol
    from posttrain.rollout.episodes import open_env

    protocol = Protocol.of(open_env(cfg.envs[0]), **cfg.protocol.arguments())
    assert not protocol.opening

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        episodes = [Episode(open_env(cfg.envs[0]), protocol, int(seed)) for seed in prompts]
        prompt_ids = [chat.prompt(episode.messages) for episode in episodes]
        answers: list[list[int]] = [[] for _ in episodes]
        masks: list[list[int]] = [[] for _ in episodes]
        rewards = [0.0] * len(episodes)
        while going := [i for i, episode in enumerate(episodes) if not episode.done]:
            contexts = [prompt_ids[i] + answers[i] for i in going]
            new_BN, _ = trainer._generate_single_turn(contexts, None, {}, num_generations=1)
            for i, new in zip(going, new_BN, strict=True):
                turn = episodes[i].step(chat.decode(new))
                rewards[i] += turn.reward + turn.penalty
                finished = new[-1] in trainer.eos_token_ids
                reply = [] if turn.user is None else chat.extend(turn.user, finished=finished)
                answers[i] += new + reply
                masks[i] += [1] * len(new) + [0] * len(reply)
        made = {"prompt_ids": prompt_ids, "completion_ids": answers, "env_mask": masks, "logprobs": None}
        return made | {"reward": rewards}

    return rollout
