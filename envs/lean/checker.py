"""Does a tactic apply, and what is left to prove?  A small checker for a fragment of Lean's tactic language.

It is not Lean. It knows propositional logic, linear arithmetic over Nat, closed statements about numbers and lists, and
∃ over both. What it accepts is meant to be accepted by Lean 4 and to leave the same goals; much that Lean accepts, it
refuses. Every rule is an inference rule of logic, so what it calls proved is true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice

from envs.lean.arithmetic import decided, linear_consequence
from envs.lean.syntax import DEEPEST, Expr, Parser, Unreadable, format_formula, mentions, substitute
from envs.lean.terms import (
    FALSE,
    RULES,
    TRUE,
    Goals,
    ProofGoal,
    Rejected,
    check_term,
    closing,
    constant,
    infer,
    rfl,
    same_formula,
    sort_of,
    tupled,
    two_sides,
    unfold,
)  # fmt: skip

MOST_GOALS, MOST_FACTS, LONGEST = 12, 24, 2_000  # goals, hypotheses, and characters of one goal


def _rfl(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    return rfl(goal)


def _decide(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    return closing(goal, decided(goal.target) is True, "decide does not find this true")


def _assumption(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    return closing(goal, goal.target in goal.facts.values(), f"no hypothesis is {format_formula(goal.target)}")


def _contradiction(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    facts = set(goal.facts.values())
    contradicts = FALSE in facts or any(fact[0] == "not" and fact[1] in facts for fact in facts)
    return closing(goal, contradicts, "no hypotheses contradict each other")


def _trivial(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    for tactic in (_assumption, _rfl, _contradiction, _decide):
        try:
            return tactic(goal, parser)
        except Rejected:
            pass
    raise Rejected("trivial does not prove this")


def _omega(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    lists = {name for name, kind in goal.context if kind == ("name", "List")}
    facts = tuple(fact for fact in goal.facts.values() if not mentions(fact, lists))
    if mentions(goal.target, lists):
        raise Rejected("omega knows no lists here")
    return closing(goal, linear_consequence(facts, goal.target), "omega cannot prove this")


def _intro(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    while True:
        premise = unfold(goal.target)
        if premise[0] != "bin" or premise[1] != "→":
            raise Rejected(f"{format_formula(goal.target)} is not an implication")
        goal = goal.having((parser.name(), premise[2]))._replace(target=premise[3])
        if not parser.next:
            return [goal]


def _exact(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    if check_term(parser.expression(), goal):
        raise Rejected("exact leaves no ?_ open; refine does")
    return []


def _refine(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    return check_term(parser.expression(), goal)


def _apply(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    term = parser.expression()
    if constant(term) in RULES:
        premises = RULES[constant(term)](goal.target)
        if premises is None:
            raise Rejected(f"{constant(term)} does not fit here")
        return [goal._replace(target=premise) for premise in premises]
    proved, new = infer(term, goal), []
    while not same_formula(proved, goal.target):
        proved = unfold(proved)
        if proved[0] != "bin" or proved[1] != "→":
            raise Rejected(f"its conclusion {format_formula(proved)} is not {format_formula(goal.target)}")
        new.append(goal._replace(target=proved[2]))
        proved = proved[3]
    return new


def _constructor(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    if goal.target == TRUE:
        return []
    sides = two_sides(goal.target)
    if sides is None:
        raise Rejected(f"constructor does not split {format_formula(goal.target)}")
    return [goal._replace(target=side) for side in sides]


def _side(which: int) -> Callable[[ProofGoal, Parser], list[ProofGoal]]:
    def tactic(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
        if goal.target[:2] != ("bin", "∨"):
            raise Rejected(f"{format_formula(goal.target)} is not a disjunction")
        return [goal._replace(target=goal.target[2 + which])]

    return tactic


def _exfalso(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    return [goal._replace(target=FALSE)]


def _witness(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    """exists e: the witness, then what is left if it is not trivial."""
    if goal.target[0] != "exists":
        raise Rejected(f"{format_formula(goal.target)} has no ∃")
    (left,) = tupled((parser.expression(), ("hole",)), goal)
    try:
        return _trivial(left, parser)
    except Rejected:
        return [left]


def _have(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    name = parser.name()
    claimed = parser.expression() if parser.took(":") else None
    parser.take(":=")
    term = parser.expression()
    if claimed is None:
        claimed = infer(term, goal)
    elif sort_of(claimed, goal) != "Prop" or check_term(term, goal._replace(target=claimed)):
        raise Rejected("have needs a whole proof of a formula")
    return [goal.having((name, claimed))]


def _by_cases(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    name = parser.name()
    parser.take(":")
    formula = parser.expression()
    if sort_of(formula, goal) != "Prop":
        raise Rejected("by_cases needs a formula")
    return [goal.having((name, formula)), goal.having((name, ("not", formula)))]


def _obtain(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    pattern = _pattern(parser)
    parser.take(":=")
    return _rcases(parser.expression(), pattern, goal)


def _rcases_with(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    term = parser.expression()
    parser.take("with")
    return _rcases(term, _pattern(parser), goal)


def _cases(goal: ProofGoal, parser: Parser) -> list[ProofGoal]:
    if infer(parser.expression(), goal) != FALSE:
        raise Unreadable("cases is in the fragment only for False; write rcases h with h1 | h2 or ⟨h1, h2⟩")
    return []


def _pattern(parser: Parser, depth: int = 0) -> Expr:
    """h1 | h2, ⟨h1, h2⟩ and what they are made of."""
    if depth > DEEPEST:
        raise Unreadable("too deeply nested")
    ways: list[Expr] = []
    while not ways or parser.took("|"):
        if parser.took("("):
            ways.append(_pattern(parser, depth + 1))
            parser.take(")")
        elif parser.took("⟨"):
            items = [_pattern(parser, depth + 1)]
            while parser.took(","):
                items.append(_pattern(parser, depth + 1))
            parser.take("⟩")
            ways.append(("tuple", tuple(items)))
        else:
            ways.append(("name", parser.name()))
    return ways[0] if len(ways) == 1 else ("either", tuple(ways))


def _rcases(term: Expr, pattern: Expr, goal: ProofGoal) -> list[ProofGoal]:
    if pattern[0] == "name":
        raise Unreadable("take it apart: h1 | h2 or ⟨h1, h2⟩")
    proved = infer(term, goal)
    taken = _taken(proved, pattern, goal.having(without=term[1] if term[0] == "name" else ""))
    return list(islice(taken, MOST_GOALS + 1))  # n disjunctions make 2**n goals; `apply` refuses so many


def _taken(proved: Expr, pattern: Expr, goal: ProofGoal) -> Iterator[ProofGoal]:
    """Yield the goals after taking apart what was proved."""
    if pattern[0] == "name":
        yield goal.having((pattern[1], proved))
    elif pattern[0] == "either":
        if proved[:2] != ("bin", "∨"):
            raise Rejected(f"{format_formula(proved)} is not a disjunction")
        first, *rest = pattern[1]
        yield from _taken(proved[2], first, goal)
        yield from _taken(proved[3], rest[0] if len(rest) == 1 else ("either", tuple(rest)), goal)
    else:
        items = pattern[1]
        if len(items) < 2:
            raise Unreadable("⟨ ⟩ needs two parts here")
        rest = items[1] if len(items) == 2 else ("tuple", items[1:])
        if proved[0] == "exists":
            if items[0][0] != "name":
                raise Rejected("the witness is a name")
            named = substitute(proved[3], proved[1], items[0])
            yield from _taken(named, rest, goal.having((items[0][1], ("name", proved[2]))))
            return
        sides = two_sides(proved)
        if sides is None:
            raise Rejected(f"{format_formula(proved)} has no two parts")
        for half in _taken(sides[0], items[0], goal):
            yield from _taken(sides[1], rest, half)


TACTICS: dict[str, Callable[[ProofGoal, Parser], list[ProofGoal]]] = {
    "intro": _intro, "intros": _intro, "exact": _exact, "refine": _refine, "apply": _apply,
    "constructor": _constructor, "left": _side(0), "right": _side(1), "exfalso": _exfalso, "exists": _witness,
    "assumption": _assumption, "contradiction": _contradiction, "trivial": _trivial, "rfl": _rfl, "decide": _decide,
    "omega": _omega, "have": _have, "by_cases": _by_cases, "obtain": _obtain, "rcases": _rcases_with, "cases": _cases,
}  # fmt: skip


@lru_cache(maxsize=1 << 15)
def apply(goals: Goals, tactic: str) -> Goals:
    """Return the goals after a tactic, which acts on the first goal.

    Raises:
        Unreadable: the tactic is not in the fragment.
        Rejected: the tactic fails here.
    """
    parser = Parser(tactic)
    head = parser.take()
    if head not in TACTICS:
        raise Unreadable(f"the tactic {head} is not in the fragment")
    if not goals:
        raise Rejected("no goals")
    new = TACTICS[head](goals[0], parser)
    parser.end()
    if len(new) + len(goals) > MOST_GOALS:
        raise Unreadable("there are too many goals")
    for goal in new:
        if len(goal.context) > MOST_FACTS or len(goal.show()) > LONGEST:
            raise Unreadable("the goal becomes too large")
    return (*new, *goals[1:])
