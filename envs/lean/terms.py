"""What does a proof term prove?  Goals of the fragment, and the terms that close them or leave holes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from envs.lean.arithmetic import decided
from envs.lean.syntax import RELATIONS, Expr, Unreadable, format_formula, parse_formula, substitute

FALSE, TRUE = ("name", "False"), ("name", "True")
SORTS = ("Prop", "Nat", "List")


class Rejected(ValueError):
    """The tactic was read, and does not apply here."""


class ProofGoal(NamedTuple):
    """What is known and what is to be proved: Goal(context=(("p", ("name", "Prop")), ("h", ("name", "p"))), target)."""

    context: tuple[tuple[str, Expr], ...]
    target: Expr

    def having(self, *new: tuple[str, Expr], without: str = "") -> ProofGoal:
        kept = [entry for entry in self.context if entry[0] != without]
        for name, kind in new:
            if any(name == other for other, _ in kept):
                raise Unreadable(f"the name {name} is in use; the fragment wants a new one")
            kept.append((name, kind))
        return self._replace(context=tuple(kept))

    def kind(self, name: str) -> Expr:
        for other, kind in self.context:
            if other == name:
                return kind
        raise Rejected(f"there is no {name}")

    @property
    def facts(self) -> dict[str, Expr]:
        return {name: kind for name, kind in self.context if kind[1] not in SORTS}

    def show(self) -> str:
        """Return the goal as Lean prints it: neighbours of one type on one line."""
        lines: list[tuple[str, str]] = []
        for name, kind in self.context:
            shown = "List Nat" if kind == ("name", "List") else format_formula(kind)
            if lines and lines[-1][1] == shown:
                lines[-1] = (f"{lines[-1][0]} {name}", shown)
            else:
                lines.append((name, shown))
        return "\n".join([*(f"{names} : {shown}" for names, shown in lines), f"⊢ {format_formula(self.target)}"])


Goals = tuple[ProofGoal, ...]


def first_goal(binders: tuple[str, ...], statement: str) -> Goals:
    """Return the first goal of a theorem: start(("p q : Prop", "h : p ∧ q"), "q")."""
    goal = ProofGoal((), TRUE)
    for binder in binders:
        names, _, kind = binder.partition(" : ")
        parsed = ("name", "List") if kind == "List Nat" else ("name", kind) if kind in SORTS else parse_formula(kind)
        goal = goal.having(*((name, parsed) for name in names.split()))
    return (goal._replace(target=parse_formula(statement)),)


def sort_of(expr: Expr, goal: ProofGoal) -> str:
    """Return Prop, Nat or List; Unreadable where the expression has no sort here."""
    kind = expr[0]
    if expr in (TRUE, FALSE):
        return "Prop"
    if kind == "num":
        return "Nat"
    if kind == "name" and (sort := str(goal.kind(expr[1])[1])) in SORTS:
        return sort
    if kind == "list" and all(sort_of(item, goal) == "Nat" for item in expr[1]):
        return "List"
    if kind == "proj" and sort_of(expr[1], goal) == "List" and expr[2] in ("length", "reverse"):
        return "Nat" if expr[2] == "length" else "List"
    if kind == "not" and sort_of(expr[1], goal) == "Prop":
        return "Prop"
    if kind == "exists" and sort_of(expr[3], goal.having((expr[1], ("name", expr[2])))) == "Prop":
        return "Prop"
    if kind == "bin":
        sorts = {sort_of(expr[2], goal), sort_of(expr[3], goal)}
        if expr[1] in RELATIONS and (sorts == {"Nat"} or (sorts == {"List"} and expr[1] in ("=", "≠"))):
            return "Prop"
        if expr[1] in ("+", "*") and sorts == {"Nat"}:
            return "Nat"
        if expr[1] == "++" and sorts == {"List"}:
            return "List"
        if expr[1] in ("∧", "∨", "→", "↔") and sorts == {"Prop"}:
            return "Prop"
    raise Unreadable("this has no type in the fragment")


def unfold(formula: Expr) -> Expr:
    """Return ¬A as A → False and a ≠ b as a = b → False, at the top."""
    if formula[0] == "not":
        return ("bin", "→", formula[1], FALSE)
    if formula[0] == "bin" and formula[1] == "≠":
        return ("bin", "→", ("bin", "=", *formula[2:]), FALSE)
    return formula


@lru_cache(maxsize=1 << 14)
def normal(formula: Expr) -> Expr:
    """Return the same everywhere, with ≥ and > turned round: equal for what Lean takes for equal by definition."""
    formula = unfold(formula)
    if formula[0] == "exists":
        return (*formula[:3], normal(formula[3]))
    if formula[0] != "bin":
        return formula
    sign, left, right = formula[1], normal(formula[2]), normal(formula[3])
    if sign in ("≥", ">"):
        sign, left, right = {"≥": "≤", ">": "<"}[sign], right, left
    return ("bin", sign, left, right)


def same_formula(one: Expr, other: Expr) -> bool:
    return normal(one) == normal(other)


def two_sides(formula: Expr) -> tuple[Expr, Expr] | None:
    """Return the two sides of a conjunction, and the two implications of an equivalence."""
    if formula[0] == "bin" and formula[1] == "∧":
        return formula[2], formula[3]
    if formula[0] == "bin" and formula[1] == "↔":
        return ("bin", "→", formula[2], formula[3]), ("bin", "→", formula[3], formula[2])
    return None


# -- proof terms -------------------------------------------------------------------------------------------------------


def infer(term: Expr, goal: ProofGoal) -> Expr:
    """Return what a proof term proves."""
    kind = term[0]
    if kind == "name":
        if term[1] == "trivial":
            return TRUE
        statement = goal.kind(term[1])
        if statement[1] in SORTS:
            raise Rejected(f"{term[1]} is not a proof")
        return statement
    if kind == "proj":
        if term == ("proj", TRUE, "intro"):
            return TRUE
        whole = infer(term[1], goal)
        sides, sign = two_sides(whole), whole[1]
        which = {"1": 0, "2": 1} | ({"left": 0, "right": 1} if sign == "∧" else {"mp": 0, "mpr": 1})
        if sides is None or term[2] not in which:
            raise Rejected(f".{term[2]} does not fit here")
        return sides[which[term[2]]]
    if kind == "app":
        statement, holes = _applied(term, goal)
        if holes:
            raise Rejected("?_ cannot stand here")
        return statement
    raise Unreadable("write out what this proves, or give it where its type is known")


RULES = {  # constants with all their arguments: the premises for a target; None where it does not fit
    "And.intro": lambda target: two_sides(target) if target[1] == "∧" else None,
    "Iff.intro": lambda target: two_sides(target) if target[1] == "↔" else None,
    "Or.inl": lambda target: (target[2],) if target[:2] == ("bin", "∨") else None,
    "Or.inr": lambda target: (target[3],) if target[:2] == ("bin", "∨") else None,
    "False.elim": lambda target: (FALSE,),
}


def constant(term: Expr) -> str:
    if term[0] == "proj" and term[1][0] == "name":
        return f"{term[1][1]}.{term[2]}"
    return term[1] if term[0] == "name" else ""


def check_term(term: Expr, goal: ProofGoal) -> list[ProofGoal]:
    """Return whether a proof term proves the target of a goal; the goals of its holes."""
    kind, target = term[0], goal.target
    if kind == "hole":
        return [goal]
    if kind == "fun":
        premise = unfold(target)
        if premise[0] != "bin" or premise[1] != "→":
            raise Rejected(f"fun does not prove {format_formula(target)}")
        return check_term(term[2], goal.having((term[1], premise[2]))._replace(target=premise[3]))
    if kind == "tuple":
        return tupled(term[1], goal)
    if term == ("name", "rfl"):
        return rfl(goal)
    head, arguments = (term[1], term[2]) if kind == "app" else (term, ())
    name = constant(head)
    if name in RULES:
        premises = RULES[name](target)
        if premises is None or len(premises) != len(arguments):
            raise Rejected(f"{name} does not fit here")
        return [new for a, p in zip(arguments, premises, strict=True) for new in check_term(a, goal._replace(target=p))]
    if name == "absurd" and len(arguments) == 2:
        proved = infer(arguments[0], goal)
        return check_term(arguments[1], goal._replace(target=("not", proved)))
    if head[0] == "proj" and head[2] == "elim":
        proved = infer(head[1], goal)
        if proved == FALSE and not arguments:
            return []
        if proved[:2] == ("bin", "∨") and len(arguments) == 2:
            ways = [("bin", "→", side, target) for side in proved[2:]]
            return [new for a, w in zip(arguments, ways, strict=True) for new in check_term(a, goal._replace(target=w))]
    proved, holes = _applied(term, goal)
    if not same_formula(proved, target):
        raise Rejected(f"this proves {format_formula(proved)}, not {format_formula(target)}")
    return holes


def _applied(term: Expr, goal: ProofGoal) -> tuple[Expr, list[ProofGoal]]:
    """Return `infer` of an application whose arguments may have holes."""
    if term[0] != "app":
        return infer(term, goal), []
    statement, holes = infer(term[1], goal), []
    for argument in term[2]:
        statement = unfold(statement)
        if statement[0] != "bin" or statement[1] != "→":
            raise Rejected(f"{format_formula(statement)} is not an implication")
        holes += check_term(argument, goal._replace(target=statement[2]))
        statement = statement[3]
    return statement, holes


def tupled(items: tuple[Expr, ...], goal: ProofGoal) -> list[ProofGoal]:
    if len(items) < 2:
        raise Rejected("⟨ ⟩ needs two parts here")
    rest = items[1] if len(items) == 2 else ("tuple", items[1:])
    if goal.target[0] == "exists":
        _, name, kind, body = goal.target
        if sort_of(items[0], goal) != kind:
            raise Rejected(f"the witness must be a {'number' if kind == 'Nat' else 'list'}")
        return check_term(rest, goal._replace(target=substitute(body, name, items[0])))
    sides = two_sides(goal.target)
    if sides is None:
        raise Rejected(f"⟨ ⟩ does not prove {format_formula(goal.target)}")
    return check_term(items[0], goal._replace(target=sides[0])) + check_term(rest, goal._replace(target=sides[1]))


def closing(goal: ProofGoal, true: bool, why: str) -> list[ProofGoal]:
    if not true:
        raise Rejected(why)
    return []


def rfl(goal: ProofGoal) -> list[ProofGoal]:
    """Return whether two sides are the same, or closed terms of the same value."""
    target = goal.target
    fits = target[0] == "bin" and target[1] in ("=", "↔", "≤")
    equal = fits and (target[2] == target[3] or (target[1] == "=" and decided(target) is True))
    return closing(goal, equal, f"the two sides of {format_formula(target)} are not the same")
