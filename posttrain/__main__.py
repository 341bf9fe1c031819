"""The command `posttrain`: every script and tool of the project under one name.

posttrain                              list the commands
posttrain sft --config quickstart/phase1_sft
posttrain env check frozen_lake
"""

from __future__ import annotations

import difflib
import runpy
import sys

COMMANDS = {
    "sft": ("train_phase1_sft", "phase 1: supervised fine-tuning with TRL"),
    "dpo": ("train_phase2_dpo", "phase 2: preferences with TRL"),
    "rl": ("train_phase3_starpo", "phase 3: StarPO, multi-turn reinforcement learning in environments"),
    "eval": ("evaluate_model", "compare checkpoints: mathematics, repetition, recall, preferences, environments"),
    "chat": ("inference_with_improved_settings", "talk to a model in the terminal or the browser, or watch it play"),
    "serve": ("posttrain.serving.serve", "an OpenAI-compatible server for a model"),
    "report": ("posttrain.report.__main__", "the page of a run: curves, tables, episodes"),
    "pairs": ("posttrain.evaluation.pairs", "preference pairs and best answers of a model's own"),
    "publish": ("posttrain.serving.publish.__main__", "upload a model with its card to the Hub"),
    "data": ("posttrain.data.__main__", "what becomes of the rows of a data file"),
    "gguf": ("posttrain.models.gguf", "write the weights of a GGUF file as a folder that every script loads"),
    "plan": ("", "memory, hours and cost of a phase before it starts: posttrain plan sft|dpo|rl"),
    "check-model": ("posttrain.plan.check_model", "what a model must pass, and what it can do"),
    "harness": ("posttrain.evaluation.harness", "benchmarks of lm-evaluation-harness"),
    "env": ("", "environments: posttrain env check|play|demos NAME"),
}
ENV_COMMANDS = {"check": "envs.check", "play": "envs.play", "demos": "envs.demos"}
PHASES = ("sft", "dpo", "rl")


def main() -> None:
    """Run the command that the arguments name; exit code 2 where there is none of this name."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        width = max(map(len, COMMANDS))
        print("\n".join(f"  {name:{width}}  {line}" for name, (_, line) in COMMANDS.items()))
        return
    name, *rest = words
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        sys.exit(_refuse(f"posttrain has no command {name}.{hint} `posttrain` alone lists them."))
    module = COMMANDS[name][0]
    if name == "env":
        if not rest or rest[0] not in ENV_COMMANDS:
            sys.exit(
                _refuse(f"Write posttrain env and one of {', '.join(ENV_COMMANDS)}, e.g. posttrain env check NAME.")
            )
        module, name, rest = ENV_COMMANDS[rest[0]], f"env {rest[0]}", rest[1:]
    elif name == "plan":
        if not rest or rest[0] not in PHASES:
            sys.exit(_refuse(f"Write posttrain plan and one of {', '.join(PHASES)}, e.g. posttrain plan sft."))
        module, rest = COMMANDS[rest[0]][0], ["--plan", *rest[1:]]
    sys.argv = [f"posttrain {name}", *rest]
    runpy.run_module(module, run_name="__main__")


def _refuse(words: str) -> int:
    print(f"error: {words}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
