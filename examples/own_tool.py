"""A tool of your own: a calculator that a model may call before it answers.

Written in a config as `envs: [{name: prompts, tools: [examples.own_tool:calculate], ...}]` (docs/own.md). The model is
told what types and docstring say. A wrong argument or an exception becomes an error that the model reads.

    python -m examples.own_tool questions.jsonl          # sums that are hard without it, as rows for `prompts`
    python -m examples.own_tool questions.jsonl words    # described in words, so that the sum has to be found as well
"""

from __future__ import annotations

import ast
import json
import operator
import random
import sys
from pathlib import Path

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
LONGEST = 200


def calculate(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: numbers with + - * / // % and parentheses, for example "3 * (2 + 4.5)"
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    value = _value(ast.parse(expression.strip().replace(",", ""), mode="eval").body)
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> float | int:
    """Return the value of a tree of numbers and operators; nothing in it is executed."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError(f"{ast.unparse(node)} is neither a number nor arithmetic")


SUMS = {"What is {a} * {b} + {c}?": "{a} * {b} + {c}", "What is {a} * {b} - {c}?": "{a} * {b} - {c}"}
IN_WORDS = {
    "What is {c} more than {a} times {b}?": "{a} * {b} + {c}",
    "What is {c} less than {a} times {b}?": "{a} * {b} - {c}",
    "Subtract {a} times {b} from {d}.": "{d} - {a} * {b}",
    "Add {c} to {a} and multiply the sum by {b}.": "({c} + {a}) * {b}",
    "From {d} take away {c}, and then {a} times {b}.": "{d} - {c} - {a} * {b}",
}


def write_questions(file: Path, kinds: dict[str, str] = SUMS, count: int = 2000) -> None:
    """Write questions with their answers as rows for `prompts`: "What is 47 * 38 + 156?"."""
    rng = random.Random(0)
    with file.open("w", encoding="utf-8") as rows:
        for _ in range(count):
            question, expression = rng.choice([*kinds.items()])
            a, b, c, d = rng.randint(11, 99), rng.randint(11, 99), rng.randint(100, 999), rng.randint(10_000, 20_000)
            row = [text.format(a=a, b=b, c=c, d=d) for text in (question, expression)]
            rows.write(json.dumps({"question": row[0], "answer": calculate(row[1])}) + "\n")


if __name__ == "__main__":
    write_questions(Path(sys.argv[1]), IN_WORDS if sys.argv[2:] == ["words"] else SUMS)
