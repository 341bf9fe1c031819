"""How long does a step of the reference run take on the GPU at hand, and how much memory, beside what `--plan` says?

The three scripts with the configs that they read without arguments and a ConvGPT of the published shape. Its weights
are random, all rows nearly as long as the config allows. No more memory is used than a smaller GPU has.
    python benchmarks/long/reference.py H100 [--memory 24] [--steps 8 8 3] [--json FILE]    # named as for --plan
"""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import _measure
import plan

from posttrain.models.chat import Chat
from posttrain.models.convgpt import ConvGPTConfig, ConvGPTForCausalLM

SCRIPTS = ("train_phase1_sft", "train_phase2_dpo", "train_phase3_starpo")
KINDS = {1: "messages", 2: "ultrafeedback"}
LENGTHS = {1: 2048, 2: 1024}  # data.max_length of the configs
OF_TRAINING = ("data.decontaminate=false", "data.eval_rows=8", "trainer.eval_strategy=no", "trainer.save_strategy=no")
OF_GAMES = (
    "algorithm.filter.keep_zero=true",  # such a model wins nothing
    "distillation.sources=[{kind: capybara, path: embedded, rows: 100}]",
    "distillation.decontaminate=false",
    "evaluation.episodes=16",
    "evaluation.final_episodes=16",
    *(f"evaluation.suites.{name}=null" for name in ("math", "recall", "preferences")),
)


def changes(phase: int, folder: Path, steps: int) -> list[str]:
    """What is not as in the config."""
    before = folder / ("base" if phase == 1 else f"phase{phase - 1}/final")
    own = [f"output_dir={folder}/phase{phase}", f"model.name_or_path={before}", "report_to=none"]
    own.append(f"trainer.max_steps={steps}")
    if phase == 3:
        return [*own, *OF_GAMES]
    sources = f"data.sources=[{{kind: {KINDS[phase]}, path: {folder}/rows{phase}.jsonl}}]"
    return [*own, sources, "trainer.logging_steps=2", *OF_TRAINING]


def make_base(folder: Path, steps: list[int]) -> None:
    """Random weights in the published shape; the quickstart's tokenizer fills the first rows of its vocabulary."""
    from transformers import AutoTokenizer

    from posttrain.data.embedded.base_model import build_base

    small = build_base(folder / "small")
    chat = Chat.load(AutoTokenizer.from_pretrained(small), None)
    torch.manual_seed(0)
    shape = ConvGPTConfig(vocab_size=65538, pad_token_id=chat.pad_id, bos_token_id=None, eos_token_id=chat.stop_id)
    ConvGPTForCausalLM(shape).save_pretrained(folder / "base")
    chat.save(folder / "base")
    for phase, count in ((1, 64 * steps[0] + 8), (2, 16 * steps[1] + 8)):
        lines = (json.dumps(row(phase, number, chat)) for number in range(count))
        (folder / f"rows{phase}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def row(phase: int, number: int, chat: Chat) -> dict[str, Any]:
    """A conversation, or a pair of answers, of numbers at random, nearly as long as max_length."""
    rng = random.Random(number)

    def dialogue() -> list[dict[str, str]]:
        said = " ".join(str(rng.randrange(100)) for _ in range(LENGTHS[phase]))
        said = chat.decode(chat.tokenizer(said)["input_ids"][: LENGTHS[phase] - 32])
        return [{"role": "user", "content": f"Numbers of {number}"}, {"role": "assistant", "content": said}]

    if phase == 1:
        return {"messages": dialogue()}
    return {"chosen": dialogue(), "rejected": dialogue(), "score_chosen": 8.0, "score_rejected": 4.0}


def one(phase: int, folder: Path, given: Any) -> dict[str, Any]:
    """In a process of its own: a script from beginning to end, on a GPU of so much memory."""
    total, limit = torch.cuda.get_device_properties(0).total_memory, round(given.memory * 1e9)
    if limit < total:
        torch.cuda.set_per_process_memory_fraction(limit / total)
    free = torch.cuda.mem_get_info

    def less(device: Any = None) -> tuple[int, int]:
        here = min(limit, free(device)[1])
        return min(free(device)[0], here - torch.cuda.memory_reserved(device)), here

    with patch.object(torch.cuda, "mem_get_info", less):
        importlib.import_module(SCRIPTS[phase - 1]).main(changes(phase, folder, given.steps[phase - 1]))
    return {"allocated": _measure.peak("cuda"), "reserved": torch.cuda.max_memory_reserved() / 2**30}


def markdown(results: dict[str, Any]) -> str:
    cells = []
    for row in results["rows"]:
        for each in row["compared"]:
            cells.append([each["what"], *(f"{each[key]:.3g} {each['unit']}" for key in ("found", "predicted"))])
            cells[-1] += [f"**{each['found'] / each['predicted']:.2f}**"]
        memory = f"{row['allocated']:.1f}, {row['reserved']:.1f}"
        cells.append([f"phase{row['phase']}: GiB allocated, reserved", memory, "", ""])
    told = f"{results['memory']:g} GB may be used; planned for {results['device']}."
    return f"{_measure.told(results)}\n{told}\n\n{_measure.table(['', 'measured', 'planned', 'ratio'], cells)}"


def main() -> None:
    parser = _measure.parser(__doc__, repeats=False)
    parser.add_argument("device", help="what --plan calls this GPU: H100, H100:price=2")
    parser.add_argument("--memory", type=float, default=24.0, help="GB that may be used, also by the plan of phase 3")
    parser.add_argument("--steps", type=int, nargs=3, default=[8, 8, 3], help="of the phases")
    parser.add_argument("--only", type=int, choices=[1, 2, 3], help="one phase alone, figures as JSON")
    parser.add_argument("--folder", type=Path, help="where the runs are written; a temporary one unless given")
    given = parser.parse_args()
    if given.only:
        print(json.dumps(one(given.only, given.folder, given)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        make_base(folder, given.steps)
        rows: list[dict[str, Any]] = []
        results = _measure.surroundings("cuda") | {
            **{key: getattr(given, key) for key in ("device", "memory", "steps")},
            "rows": rows,
        }
        for phase in (1, 2, 3):
            command = [sys.executable, __file__, given.device, f"--only={phase}", f"--folder={folder}"]
            command += [f"--memory={given.memory}", "--steps", *map(str, given.steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)  # its progress is shown
            if done.returncode:
                sys.exit(f"Phase {phase} ended with exit code {done.returncode}.")
            figures = json.loads(done.stdout.splitlines()[-1])
            compared = [
                each._asdict()
                for each in plan.of_run(folder / f"phase{phase}", given.device)
                if each.unit == "s"  # its memory is planned for a GPU without a limit
            ]
            rows.append({"phase": phase, "compared": compared} | figures)
            _measure.publish(results, markdown(results), given.json)  # after each phase: GPUs are lent for minutes


if __name__ == "__main__":
    main()
