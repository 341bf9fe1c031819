"""Train a small language model into an agent, phase by phase, and see what it does.

    posttrain sft --config quickstart/phase1_sft     with a reference config, found by name from any folder
    posttrain rl --config mine.yaml seed=1           with a file of your own, and a key of it changed
    posttrain COMMAND --help                         its options, and every key of its config file

The scripts at the root of the repository are the same code.
"""

from __future__ import annotations

import difflib
import runpy
import sys
from typing import NamedTuple, NoReturn


class Command(NamedTuple):
    module: str  # what runs; empty where the next word decides
    line: str


COMMANDS = {
    "sft": Command("train_phase1_sft", "phase 1: supervised fine-tuning"),
    "dpo": Command("train_phase2_dpo", "phase 2: direct preference optimization"),
    "rl": Command("train_phase3_starpo", "phase 3: StarPO, multi-turn reinforcement learning in environments"),
    "eval": Command("evaluate_model", "compare checkpoints on the same prompts, levels and seeds"),
    "chat": Command("inference_with_improved_settings", "talk to a model in terminal or browser, or watch it play"),
    "serve": Command("posttrain.serving.serve", "an OpenAI-compatible server for a model"),
    "report": Command("posttrain.report.__main__", "the page of a run: curves, tables, episodes"),
    "pairs": Command("posttrain.evaluation.pairs", "preference pairs and best answers that a model wrote itself"),
    "publish": Command("posttrain.serving.publish.__main__", "upload a model with its card to the Hugging Face Hub"),
    "data": Command("posttrain.data.__main__", "what becomes of the rows of a data file"),
    "export": Command("posttrain.serving.export", "write a model as GGUF, for Ollama, merged, or as an adapter"),
    "merge": Command("posttrain.serving.merge", "average the weights of checkpoints or phases: linear or SLERP"),
    "gguf": Command("posttrain.models.gguf", "write the weights of a GGUF file as a folder that every script loads"),
    "plan": Command("", "memory, hours and cost of a phase before it starts: posttrain plan sft|dpo|rl"),
    "check-model": Command("posttrain.plan.check_model", "whether a model can be trained, and what to write where not"),
    "harness": Command("posttrain.evaluation.harness", "benchmarks of lm-evaluation-harness"),
    "env": Command("", "check, play or record an environment: posttrain env check|play|demos"),
}
SECOND = {  # of the commands that take another word: what runs, and the arguments put before the user's
    "env": {"check": ("envs.check", []), "play": ("envs.play", []), "demos": ("envs.demos", [])},
    "plan": {name: (COMMANDS[name].module, ["--plan"]) for name in ("sft", "dpo", "rl")},
}
HELP = ("-h", "--help", "help")


def main() -> None:
    """Run the command that the arguments name; exit code 2 for an unknown name, 130 after Ctrl-C."""
    words = sys.argv[1:]
    if not words or words[0] in HELP:
        print(f"usage: posttrain COMMAND ...\n\n{__doc__}\ncommands:")
        print("\n".join(f"  {name:12} {command.line}" for name, command in COMMANDS.items()))
        return
    if words[0] in ("-V", "--version"):
        from posttrain import __version__

        print(f"posttrain {__version__}")
        return
    name, *rest = words
    if name not in COMMANDS:
        _refuse(f"posttrain has no command {name}.{_meant(name, COMMANDS)} `posttrain` alone lists them.")
    module, before = COMMANDS[name].module, []
    if name in SECOND:
        choices = SECOND[name]
        if rest and rest[0] in HELP:
            print(f"usage: posttrain {name} {'|'.join(choices)} ...\n\n{COMMANDS[name].line}")
            return
        if not rest or rest[0] not in choices:
            meant = _meant(rest[0], choices) if rest else ""
            _refuse(f"`posttrain {name}` takes one of {', '.join(choices)} as its next word.{meant}")
        module, before = choices[rest[0]]
        name, rest = (f"env {rest[0]}" if name == "env" else rest[0]), rest[1:]
    sys.argv = [f"posttrain {name}", *before, *rest]
    try:
        runpy.run_module(module, run_name="__main__")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _meant(name: str, known: dict) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f" Did you mean {close[0]}?" if close else ""


def _refuse(words: str) -> NoReturn:
    print(f"error: {words}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
