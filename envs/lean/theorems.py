"""Which theorems are there?  Core Lean, made from templates with parameters, each with a known proof and its words.

The parameters of logic are formulas, those of arithmetic and lists are numbers. The topic `library` needs Lean itself:
its proofs use lemmas of the core library. They were written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from envs.lean.syntax import Expr, format_formula, formula_in_words, parse_formula
from envs.lean.terms import first_goal

TOPICS = ("logic", "arithmetic", "lists", "library")
ATOMS = "pqrst"
LETTERS = "ABC"
# Schemes over formulas, and a proof that fits whatever they are.
LOGIC: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("A ∧ B → B ∧ A", ("intro h", "exact ⟨h.2, h.1⟩")),
    ("A ∨ B → B ∨ A", ("intro h", "rcases h with h1 | h2", "right", "exact h1", "left", "exact h2")),
    ("A → B → A", ("intro h1 h2", "exact h1")),
    ("(A → B) → (B → C) → A → C", ("intro h1 h2 h3", "apply h2", "apply h1", "exact h3")),
    ("(A → B → C) → A ∧ B → C", ("intro f h", "exact f h.1 h.2")),
    ("(A ∧ B → C) → A → B → C", ("intro f h1 h2", "apply f", "constructor", "exact h1", "exact h2")),
    ("A ∧ (B ∨ C) → A ∧ B ∨ A ∧ C", (
        "intro h", "obtain ⟨h1, h2⟩ := h", "rcases h2 with h3 | h4",
        "left", "exact ⟨h1, h3⟩", "right", "exact ⟨h1, h4⟩",
    )),
    ("(A → C) → (B → C) → A ∨ B → C", (
        "intro h1 h2 h", "rcases h with h3 | h4", "exact h1 h3", "exact h2 h4",
    )),
    ("(A → B) → (A → C) → A → B ∧ C", ("intro h1 h2 h", "constructor", "exact h1 h", "exact h2 h")),
    ("(A → B) → ¬B → ¬A", ("intro h1 h2 h3", "apply h2", "exact h1 h3")),
    ("¬(A ∨ B) → ¬A ∧ ¬B", (
        "intro h", "constructor", "intro h1", "exact h (Or.inl h1)", "intro h2", "exact h (Or.inr h2)",
    )),
    ("¬A ∧ ¬B → ¬(A ∨ B)", ("intro h g", "rcases g with h1 | h2", "exact h.1 h1", "exact h.2 h2")),
    ("A ∨ B → ¬A → B", ("intro h n", "rcases h with h1 | h2", "exfalso", "exact n h1", "exact h2")),
    ("A → ¬¬A", ("intro h n", "exact n h")),
    ("¬¬¬A → ¬A", ("intro h a", "apply h", "intro n", "exact n a")),
    ("A → ¬A → B", ("intro h n", "exfalso", "exact n h")),
    ("(A ↔ B) → (B ↔ A)", ("intro h", "exact ⟨h.2, h.1⟩")),
    ("(A ↔ B) → A → B", ("intro h a", "exact h.1 a")),
    ("A ∧ B ↔ B ∧ A", ("constructor", "intro h", "exact ⟨h.2, h.1⟩", "intro h", "exact ⟨h.2, h.1⟩")),
    ("(A → B) ∧ A → A ∧ B", ("intro h", "obtain ⟨f, a⟩ := h", "constructor", "exact a", "exact f a")),
    ("¬¬A → A", ("intro h", "by_cases a : A", "exact a", "exfalso", "exact h a")),
    ("(¬B → ¬A) → A → B", ("intro h a", "by_cases b : B", "exact b", "exfalso", "exact h b a")),
    ("((A → B) → A) → A", (
        "intro h", "by_cases a : A", "exact a", "apply h", "intro a1", "exfalso", "exact a a1",
    )),
)  # fmt: skip


class Theorem(NamedTuple):
    """Theorem(("p q : Prop",), "p ∧ q → q ∧ p", "if p and q, then q and p", ("intro h", "exact ⟨h.2, h.1⟩"))."""

    binders: tuple[str, ...]
    statement: str
    words: str
    proof: tuple[str, ...]
    in_fragment: bool = True

    @property
    def header(self) -> str:
        """Return the theorem in Lean's own form, up to the proof."""
        return " ".join(["theorem t", *(f"({binder})" for binder in self.binders), ":", self.statement])

    @property
    def goal(self) -> str:
        """Return the first goal as Lean prints it."""
        if self.in_fragment:
            return first_goal(self.binders, self.statement)[0].show()
        return "\n".join([*self.binders, f"⊢ {self.statement}"])


def _formula(rng: np.random.Generator) -> Expr:
    """Return an atom in most cases; else two, joined, or one negated."""
    one, other = (("name", ATOMS[int(rng.integers(len(ATOMS)))]) for _ in range(2))
    kind = int(rng.integers(8))
    if kind < 4:
        return one
    return ("not", one) if kind == 4 else ("bin", "∧∨→"[kind - 5], one, other)


def _filled(scheme: Expr, formulas: dict[str, Expr]) -> Expr:
    if scheme[0] == "name":
        return formulas.get(scheme[1], scheme)
    return tuple(_filled(part, formulas) if isinstance(part, tuple) else part for part in scheme)


def _atoms(formula: Expr) -> Iterator[str]:
    """Yield the atoms from left to right."""
    if formula[0] == "name":
        yield formula[1]
    for part in formula[1:]:
        if isinstance(part, tuple):
            yield from _atoms(part)


def logic(rng: np.random.Generator) -> Theorem:
    """Return a scheme with formulas for its letters; atoms are named p, q, ... in the order in which they come."""
    scheme, proof = LOGIC[int(rng.integers(len(LOGIC)))]
    formulas = {letter: _formula(rng) for letter in LETTERS}
    order = list(dict.fromkeys(_atoms(_filled(parse_formula(scheme), formulas))))
    renamed = {atom: ("name", ATOMS[i]) for i, atom in enumerate(order)}
    formulas = {letter: _filled(formula, renamed) for letter, formula in formulas.items()}
    statement = _filled(parse_formula(scheme), formulas)
    steps = []
    for step in proof:  # by_cases alone names a formula of the scheme
        head, colon, letter = step.partition(" : ")
        steps.append(f"{head} : {format_formula(formulas[letter])}" if colon else step)
    return Theorem(
        (f"{' '.join(ATOMS[: len(order)])} : Prop",),
        format_formula(statement),
        formula_in_words(statement),
        tuple(steps),
    )


def _stated(binders: tuple[str, ...], statement: str, *proof: str) -> Theorem:
    """Return a theorem whose words are those of its statement and of the hypotheses among the binders."""
    known = [formula_in_words(parse_formula(b.partition(" : ")[2])) for b in binders if b.startswith("h")]
    words = formula_in_words(parse_formula(statement))
    return Theorem(binders, statement, f"given {' and '.join(known)}, {words}" if known else words, proof)


def arithmetic(rng: np.random.Generator) -> Theorem:
    a, b, c, d = (int(n) for n in rng.integers(1, 10, size=4))
    m, n = a + 1, a * b + c
    k = int(rng.integers(2, 8))
    made: tuple[Callable[[], Theorem], ...] = (
        lambda: _stated(("x y : Nat", f"h : x + {a} = y"), f"x + {a + b} = y + {b}", "omega"),
        lambda: _stated(("x y : Nat", f"h1 : x < y + {a}", f"h2 : y < {b}"), f"x < {a + b}", "omega"),
        lambda: _stated(("x y : Nat",), f"x ≤ y → x + {a} ≤ y + {a + b}", "intro h", "omega"),
        lambda: _stated((), f"∃ x : Nat, x + {a} = {a + n}", f"refine ⟨{n}, ?_⟩", "rfl"),
        lambda: _stated((), f"∃ x : Nat, {m} * x + {b} = {m * k + b}", f"refine ⟨{k}, ?_⟩", "rfl"),
        lambda: _stated(("x : Nat",), f"∃ y : Nat, y = x + {n}", f"refine ⟨x + {n}, ?_⟩", "rfl"),
        lambda: _stated(("x : Nat", f"h : x = {n}"), f"∃ y : Nat, x + y = {n + k}", f"refine ⟨{k}, ?_⟩", "omega"),
        lambda: _stated(
            ("x : Nat", f"h : x < {a} ∨ x < {a + b}"), f"x < {a + b + c}",
            "rcases h with h1 | h2", "omega", "omega",
        ),
        lambda: _stated(
            ("x y : Nat", f"h : x + y = {n} ∧ x = {c}"), f"y = {n - c} ∧ x ≤ {c + d}",
            "obtain ⟨h1, h2⟩ := h", "constructor", "omega", "omega",
        ),
        lambda: _stated(
            ("x : Nat", f"h : ∃ y : Nat, x = {2 * k} * y + {2 * a}"), "∃ z : Nat, x = 2 * z",
            "obtain ⟨y, hy⟩ := h", f"refine ⟨{k} * y + {a}, ?_⟩", "omega",
        ),
        lambda: _stated((), f"{a} + {b} = {a + b} ∧ {c} < {c + d}", "constructor", "rfl", "decide"),
        lambda: _stated((), f"¬{a + b} < {b}", "decide"),
    )  # fmt: skip
    return made[int(rng.integers(len(made)))]()


def lists(rng: np.random.Generator) -> Theorem:
    front, back = ([int(n) for n in rng.integers(10, size=int(rng.integers(1, 4)))] for _ in range(2))
    whole, half = front + back, len(front)
    made: tuple[Callable[[], Theorem], ...] = (
        lambda: _stated((), f"∃ xs : List Nat, xs ++ {back} = {whole}", f"refine ⟨{front}, ?_⟩", "rfl"),
        lambda: _stated((), f"∃ xs : List Nat, {front} ++ xs = {whole}", f"refine ⟨{back}, ?_⟩", "rfl"),
        lambda: _stated((), f"∃ xs : List Nat, xs.reverse = {whole}", f"refine ⟨{whole[::-1]}, ?_⟩", "rfl"),
        lambda: _stated((), f"∃ x : Nat, ({front} ++ {back}).length = x", f"refine ⟨{len(whole)}, ?_⟩", "rfl"),
        lambda: _stated((), f"({front} ++ {back}).length = {len(whole)} ∧ {half} ≤ {len(whole)}",
                      "constructor", "rfl", "decide"),
        lambda: _stated((), f"({front} ++ {back}).reverse = {whole[::-1]}", "rfl"),
    )  # fmt: skip
    return made[int(rng.integers(len(made)))]()


def library(rng: np.random.Generator) -> Theorem:
    """Return statements about all numbers or lists."""
    a, b = (int(n) for n in rng.integers(1, 10, size=2))
    x, y = [("a", "b"), ("m", "n"), ("x", "y"), ("i", "j")][int(rng.integers(4))]
    numbers, two = (f"{x} {y} : Nat",), ("xs ys : List Nat",)
    made = (
        Theorem(numbers, f"{x} * ({y} + {a}) = {x} * {y} + {x} * {a}", f"{x} times {y} + {a} is distributed",
                (f"exact Nat.mul_add {x} {y} {a}",)),
        Theorem(numbers, f"{x} * {y} + {a} = {y} * {x} + {a}", f"{x} times {y} commutes, with {a} added",
                (f"rw [Nat.mul_comm {x} {y}]",)),
        Theorem(numbers, f"{x} * {a} ≤ ({x} + {y}) * {a}", f"{a} times {x} is at most {a} times {x} + {y}", ("omega",)),
        Theorem(two, f"(xs ++ ys ++ [{a}, {b}]).length = xs.length + ys.length + 2",
                f"xs, ys and [{a}, {b}] in a row are as long as their lengths together", ("simp",)),
        Theorem(two, f"(xs ++ [{a}, {b}]).length = xs.length + 2", f"[{a}, {b}] behind xs adds 2 to its length",
                ("simp",)),
        Theorem(two, f"([{a}, {b}] ++ xs).reverse = xs.reverse ++ [{b}, {a}]", f"[{a}, {b}] before xs, reversed",
                ("simp",)),
        Theorem(two, f"(xs.map (fun n => n + {a} * {b})).length = xs.length",
                f"adding {a} * {b} to each element keeps the length", ("simp",)),
    )  # fmt: skip
    return made[int(rng.integers(len(made)))]._replace(in_fragment=False)


MAKERS: dict[str, Callable[[np.random.Generator], Theorem]] = dict(
    zip(TOPICS, (logic, arithmetic, lists, library), strict=True)
)
