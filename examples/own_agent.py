"""An agent that nobody rewrote for training: a ReAct loop on the openai client, with a calculator.

    python examples/own_agent.py "What is 12 * 12?"

It asks the server in OPENAI_BASE_URL with the key in OPENAI_API_KEY, whichever that is. docs/own.md trains the model
behind it.
"""

import ast
import operator
import re
import sys
from typing import Any

import openai

RULES = """Answer the question with a calculator. Write an action, for example
Action: calculate[2 * (3 + 4)]
and stop: the next message begins with its result. When you know the answer, write it as in
Final: 14"""
EXAMPLE = [
    {"role": "user", "content": "What is 2 * (3 + 4)?"},
    {"role": "assistant", "content": "Action: calculate[2 * (3 + 4)]"},
    {"role": "user", "content": "Result: 14"},
    {"role": "assistant", "content": "Final: 14"},
]
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression, read as a tree: nothing in it is run."""

    def value(node: Any) -> float:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        raise ValueError("only numbers, + - * / and parentheses are known")

    try:
        return f"{value(ast.parse(expression.strip(), mode='eval').body):g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError) as error:
        return f"Error: {error}"


def main(question: str) -> None:
    client = openai.OpenAI()
    messages: list[Any] = [{"role": "system", "content": RULES}, *EXAMPLE, {"role": "user", "content": question}]
    for _ in range(6):
        reply = client.chat.completions.create(model="policy", messages=messages, stop=["Result:"])
        answer = reply.choices[0].message.content or ""
        if final := re.search(r"Final: *(.+)", answer):
            print(final.group(1).strip())
            return
        action = re.search(r"Action: *calculate\[(.+)\]", answer)
        result = calculate(action.group(1)) if action else "Write an action or the final answer."
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"Result: {result}"}]
    print("No answer after six turns.")  # it has lost, which is not an error


if __name__ == "__main__":
    main(sys.argv[1])
