"""How does a proof go on from here?  A bounded search for tactics of the fragment, for an expert that can come back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from envs.lean.checker import apply
from envs.lean.syntax import Unreadable, format_formula
from envs.lean.terms import FALSE, Goals, ProofGoal, Rejected, two_sides, unfold

CLOSING = ("assumption", "contradiction", "rfl", "omega", "decide")
DEPTH = 9  # tactics of one goal
EFFORT = 400  # tactics tried for one goal
WITNESSES = 100  # numbers tried for an ∃


def fresh(goal: ProofGoal, count: int = 1) -> list[str]:
    """Return names h1, h2, ... that are not in use."""
    used, names, number = {name for name, _ in goal.context}, [], 1
    while len(names) < count:
        if f"h{number}" not in used:
            names.append(f"h{number}")
        number += 1
    return names


def _sure(goal: ProofGoal) -> str:
    """Return a step that loses nothing, if there is one: take apart what is known, then what is to be proved."""
    for name, fact in goal.facts.items():
        if fact == FALSE:
            return f"cases {name}"
        if two_sides(fact) is not None or fact[0] == "exists":
            return "obtain ⟨{}, {}⟩ := {}".format(*fresh(goal, 2), name)
        if fact[:2] == ("bin", "∨"):
            return "rcases {} with {} | {}".format(name, *fresh(goal, 2))
    premise = unfold(goal.target)
    if premise[:2] == ("bin", "→"):
        return f"intro {fresh(goal)[0]}"
    return "constructor" if two_sides(goal.target) is not None else ""


def _risky(goal: ProofGoal) -> Iterator[str]:
    """Yield steps that may lead nowhere."""
    if goal.target[0] == "exists" and goal.target[2] == "Nat":
        for number in range(WITNESSES):
            try:
                (left,) = apply((goal,), f"refine ⟨{number}, ?_⟩")
            except (Rejected, Unreadable):
                return
            if any(_closes(left, tactic) for tactic in ("rfl", "omega")):
                yield f"refine ⟨{number}, ?_⟩"
                return
    yield from (f"apply {name}" for name in goal.facts)
    if goal.target[:2] == ("bin", "∨"):
        yield from ("left", "right")
    for name, fact in goal.facts.items():  # a known implication whose premise is known
        for other, premise in goal.facts.items():
            if fact[:3] == ("bin", "→", premise) and fact[3] not in goal.facts.values():
                yield f"have {fresh(goal)[0]} := {name} {other}"
    if goal.target != FALSE:
        yield "exfalso"
        if goal.target[0] == "name" and ("not", goal.target) not in goal.facts.values():
            yield f"by_cases {fresh(goal)[0]} : {format_formula(goal.target)}"


def _closes(goal: ProofGoal, tactic: str) -> bool:
    try:
        return not apply((goal,), tactic)
    except (Rejected, Unreadable):
        return False


@lru_cache(maxsize=1 << 12)
def prove(goal: ProofGoal) -> tuple[str, ...] | None:
    """Return tactics that prove a goal; None where the search finds none."""
    effort = [EFFORT]
    for depth in range(1, DEPTH + 1):
        proof = _prove(goal, depth, effort)
        if proof is not None or effort[0] <= 0:
            return proof
    return None


def _prove(goal: ProofGoal, depth: int, effort: list[int]) -> tuple[str, ...] | None:
    for tactic in CLOSING:
        if _closes(goal, tactic):
            return (tactic,)
    if depth <= 1 or effort[0] <= 0:
        return None
    sure = _sure(goal)
    for tactic in (sure,) if sure else _risky(goal):
        effort[0] -= 1
        try:
            goals = apply((goal,), tactic)
        except (Rejected, Unreadable):
            continue
        proofs: list[str] = [tactic]
        for new in goals:
            proof = _prove(new, depth - 1, effort)
            if proof is None:
                break
            proofs += proof
        else:
            return tuple(proofs)
    return None


def next_tactic(goals: Goals) -> str:
    """Return the first tactic of a proof of the first goal; empty where none is found."""
    proof = prove(goals[0]) if goals else None
    return proof[0] if proof else ""
