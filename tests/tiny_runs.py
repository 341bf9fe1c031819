"""What does a run need to take seconds?  A tiny model, a few dozen rows and a config."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import Any

import preloaded
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from posttrain import config
from posttrain.models.chat import Chat

ROOT = Path(__file__).parents[1]


def tiny_base(folder: Path, tokenizer: PreTrainedTokenizerFast, width: int = 32) -> Path:
    """A Llama of 40,000 random numbers with the tokenizer of the tests, as a model of somebody else's."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    copy.deepcopy(tokenizer).save_pretrained(folder)
    return folder


def taught(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The tiny model learns to answer: two words that are different or the same, and a sum that is right or wrong."""
    net, chat, rng = AutoModelForCausalLM.from_pretrained(folder), Chat.load(copy.deepcopy(tokenizer), None), Random(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(150):
        rows = []
        for n in (rng.randrange(6) for _ in range(8)):
            few = rng.choices("abcdefgh", k=12) if rng.random() < 0.5 else ["a", "b"] * 6
            said = rng.choice(
                [
                    (f"Tell me about {n}.", " ".join(few)),
                    (f"{n % 2} + 1 = ?", rf"\boxed{{{rng.choice([1, 2])}}}"),  # right in half of the cases, soon learnt
                ]
            )
            rows.append(
                chat.encode(
                    [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]
                )
            )
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
        labels = ids.masked_fill(~torch.tensor([mask + [False] * (width - len(mask)) for _, mask in rows]), -100)
        net(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    net.save_pretrained(folder)


def conversations(file: Path, count: int = 80) -> Path:
    rows = []
    for n in range(count):
        a, b = n % 9, n // 9
        says = [f"{a} + {b} = ?", f"{a} + {b} = {a + b}"]
        says += ["And <|im_end|> now?", f"It is {a + b}."] if n % 3 == 0 else []
        roles = ("user", "assistant") * 2
        rows.append({"messages": [{"role": role, "content": text} for role, text in zip(roles, says, strict=False)]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def preferences(file: Path, count: int = 48) -> Path:
    rows = []
    for n in range(count):
        question = [{"role": "user", "content": f"{n} + 1 = ?"}]
        good, bad = f"{n} + 1 = {n + 1}", f"{n} {n} {n} {n}"
        rows.append(
            {
                "prompt": question[0]["content"],
                "chosen": [*question, {"role": "assistant", "content": good}],
                "rejected": [*question, {"role": "assistant", "content": bad}],
                "score_chosen": 8.0,
                "score_rejected": 2.0,
            }
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def settings(file: Path, kind: str, model: Path, data: Path, **trainer: Any) -> Path:
    """A config file whose run takes twelve steps, a figure a step and a checkpoint every four."""
    steps = {"max_steps": 12, "save_steps": 4, "logging_steps": 1, "learning_rate": 1e-3, "bf16": False}
    config = {
        "output_dir": str(file.with_name("run")),
        "device": "cpu",
        "report_to": "none",
        "model": {"name_or_path": str(model)},
        "data": {
            "sources": [{"kind": kind, "path": str(data)}],
            "eval_rows": 8,
            "max_length": 96,
            "decontaminate": False,
        },
        "trainer": {**steps, "per_device_train_batch_size": 4, "save_total_limit": 10, **trainer},
    }
    file.write_text(yaml.safe_dump(config))
    return file


def rows_of(run: Path, figure: str = "loss") -> dict[int, float]:
    """Step -> figure, from metrics.jsonl; no step may stand there twice."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    pairs = [(row["step"], row[figure]) for row in rows if figure in row]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@contextmanager
def not_root() -> Iterator[None]:
    """Access to files as an ordinary user has it; whoever is none already becomes `nobody` for a while."""
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)


def python(*command: str, env: dict[str, str] | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run Python as a user would, one thread, in the repository's root."""
    return preloaded.run(command, str(ROOT), env, timeout)


def called(main: Callable[[list[str]], None], *words: str) -> subprocess.CompletedProcess[str]:
    """What `python` returns, of a script's `main` that runs in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        config.run(lambda: main(list(words)))
    assert isinstance(end.value.code, int)
    return subprocess.CompletedProcess(words, end.value.code, out.getvalue(), err.getvalue())


UNHEARD = """
import os, runpy, sys
if sys.argv.pop(1) == "closed":
    os.close(1)
    os.close(2)
    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None  # as Python begins then
else:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def unheard(how: str, *command: str) -> int:
    """The exit code of `python COMMAND` whose stdout and stderr are "closed" (`>&-`), or "unread" (`| true`)."""
    return python("-c", UNHEARD, how, *command).returncode
