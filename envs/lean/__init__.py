"""Can the model prove it?  Theorems of core Lean, proved one tactic a turn.

A level is a theorem. The state is what the accepted tactics leave to prove; backends.py says who judges them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from envs.base import TextEnv, known
from envs.lean.backends import Backend, Unavailable, backend_named, replay_tactics, tactic_refusal
from envs.lean.search import fresh, next_tactic
from envs.lean.terms import FALSE, ProofGoal, two_sides, unfold
from envs.lean.theorems import MAKERS, TOPICS, Theorem
from envs.sentences import listed
from envs.web import LONGEST_WAIT

__all__ = ["Lean", "Unavailable"]

KINDS = {"→": "an implication", "∧": "a conjunction", "∨": "a disjunction", "↔": "an equivalence"}


class Lean(TextEnv):
    """Prove a theorem of core Lean, one tactic a turn.

    ## Action space
    Free text: one tactic of Lean 4 on one line, at most 300 characters. What could do more than prove, such as `sorry`
    or a command, is invalid.

    ## Observation space
    Text: the theorem in words, the open goals as Lean prints them, and why the last tactic was rejected or refused.

    ## Rewards
    "proof": 1 for the proof, -0.1 for a rejected tactic. "ragen": -0.1 for each tactic, +1 for an accepted and -1 for a
    rejected one, and +10 for the proof. 0 for an invalid action.

    ## Starting state
    A theorem from a template of one of `topics`.

    ## Episode end
    Terminated by the proof (success); no game is lost. Truncation is left to the protocol, after `max_turns`: 12.

    ## Arguments
    - `topics=("logic", "arithmetic", "lists")`: any of these, and "library", which needs Lean itself.
    - `backend="auto"`: or "fragment" (a small checker of this package), "local" (Lean on this machine), or the address
      of a server. "auto" takes LEAN_SERVER_API_URL, else a local toolchain, else the fragment.
    - `timeout=30.0`: seconds that Lean may take for one tactic, at most 3,600.
    - `reward="proof"`: or "ragen".
    - `render_mode=None`: or "ansi".
    """

    name = "lean"
    action_word = "tactic"
    actions = None
    max_turns = 12

    def __init__(
        self,
        topics: list[str] | tuple[str, ...] = ("logic", "arithmetic", "lists"),
        backend: str = "auto",
        timeout: float = 30.0,
        reward: str = "proof",
        render_mode: str | None = None,
    ):
        if not topics or isinstance(topics, str) or not 0 < timeout <= LONGEST_WAIT:
            raise ValueError(
                f"lean needs topics, a list of {', '.join(TOPICS)}, and timeout above 0 and at most {LONGEST_WAIT:g},"
                f" not topics={topics!r}, timeout={timeout}."
            )
        self.topics = tuple(known("topic of lean", topic, TOPICS) for topic in topics)
        self.reward = known("reward", reward, ("proof", "ragen"))
        self.backend: Backend = backend_named(backend, timeout)
        self.slow = self.backend.slow
        if "library" in self.topics and not self.slow:
            raise ValueError(
                "lean's topic library needs Lean itself; the built-in checker knows its fragment alone. Leave it out of"
                " topics, or choose the backend local or a server."
            )
        super().__init__(render_mode)
        self.config = self.topics

    @classmethod
    def draw(cls, config: tuple[str, ...], rng: np.random.Generator) -> Iterator[Theorem]:
        while True:
            yield MAKERS[config[int(rng.integers(len(config)))]](rng)

    @classmethod
    def key_of(cls, level: Theorem) -> str:
        return level.header

    def begin(self, level: Theorem) -> None:
        self.level = level
        self.tactics: tuple[str, ...] = ()
        self.goals: tuple[str, ...] = (level.goal,)
        self.message = ""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        tactic, before, gained = action.strip(), self.goals, 0.0
        refused = tactic_refusal(tactic)
        if refused:
            self.message = f"Refused: {refused}"
        elif before:
            verdict = self.backend.check(self.level, (*self.tactics, tactic))
            refused = verdict.error if verdict.unreadable else ""
            if verdict.error:
                self.message = f"{'Refused' if refused else 'Rejected'}: {verdict.error}"
            else:
                self.tactics, self.goals, self.message = (*self.tactics, tactic), verdict.goals, ""
            gained = 0.0 if refused else self._paid(accepted=not verdict.error)
        info = {
            "success": not self.goals,
            "action_is_valid": not refused,
            "action_is_effective": self.goals != before,
            "failure": "",
        }
        return self.observe(), gained, not self.goals, False, info

    def _paid(self, accepted: bool) -> float:
        proved = accepted and not self.goals
        if self.reward == "proof":
            return float(proved) if accepted else -0.1
        return round(-0.1 + (1 if accepted else -1) + 10 * proved, 6)

    # -- text ------------------------------------------------------------------------------------------------------

    def observe(self) -> str:
        lines = [f"Prove: {self.level.words}."]
        for number, goal in enumerate(self.goals, 1):
            lines += [f"Goal {number} of {len(self.goals)}"] if len(self.goals) > 1 else []
            lines.append(goal)
        lines += [] if self.goals else ["No goals: proved."]
        lines += [self.message] if self.message else []
        return "\n".join(lines)

    def rules(self) -> str:
        examples = "intro h; exact e; apply h; constructor; left; right; obtain ⟨a, b⟩ := h; rcases h with a | b;"
        more = "refine ⟨e, ?_⟩; by_cases h : p; exfalso; assumption; rfl; decide; omega"
        parts = [
            "Prove the theorem in Lean 4, one tactic a turn. You see what is known and, after ⊢, what is to be proved;"
            " a tactic works on the first goal. A rejected tactic changes nothing.",
            f"Tactics: {examples} {more}.",
        ]
        if not self.slow:
            parts.append("A checker of this fragment of Lean judges: other tactics are refused. New names must be new.")
        return " ".join([*parts, "Refused: sorry, axioms, native_decide, commands, more than one line."])

    def state_key(self) -> str:
        return "\n\n".join([self.level.header, *self.goals])

    # -- players ---------------------------------------------------------------------------------------------------

    def _goal(self) -> ProofGoal | None:
        """Return the first open goal, where the fragment can follow the proof."""
        if not self.level.in_fragment:
            return None
        try:
            goals = replay_tactics(self.level, self.tactics)
        except ValueError:  # Lean accepted what the fragment does not
            return None
        return goals[0] if goals else None

    def expert(self) -> str:
        """Return the known proof's next tactic; off its way, one found by search, or one that changes nothing."""
        proof, done = self.level.proof, len(self.tactics)
        if self.tactics == proof[:done] and done < len(proof):
            return proof[done]
        goal = self._goal()
        for on_the_way, tactic in enumerate(proof if goal else ()):
            if replay_tactics(self.level, proof[:on_the_way])[:1] == (goal,):
                return tactic
        return (next_tactic((goal,)) if goal else "") or "assumption"

    def _by_shape(self, goal: ProofGoal | None) -> str:
        """Return what the form of the goal suggests, whatever is known."""
        if goal is None:
            return "assumption"
        if unfold(goal.target)[:2] == ("bin", "→"):
            return f"intro {fresh(goal)[0]}"
        if two_sides(goal.target) is not None:
            return "constructor"
        if goal.target[:2] == ("bin", "∨"):
            return "left"
        return "exfalso" if goal.target == FALSE else "assumption"

    def players(self) -> dict[str, str]:
        """`shape` looks at the goal alone, `close` hopes that one step ends it; `random` tries anything."""
        goal = self._goal()
        names = list(goal.facts) if goal else []
        new = fresh(goal, 2) if goal else ["h1", "h2"]
        some = ["assumption", "constructor", "left", "right", "exfalso", "omega", "rfl", f"intro {new[0]}"]
        some += [f"exact {name}" for name in names] + [f"apply {name}" for name in names]
        some += [f"obtain ⟨{new[0]}, {new[1]}⟩ := {name}" for name in names]
        closing = self.choose(("assumption", "omega", "rfl", "decide", "contradiction"))
        return {"random": self.choose(some), "shape": self._by_shape(goal), "close": closing}

    def example(self) -> tuple[str, tuple[str, ...]]:
        return "The goal is an implication, so I introduce what is assumed.", ("intro h",)

    def thought(self) -> str:
        """Return the form of the goal and of what is known, which decides between the tactics."""
        goal = self._goal()
        if goal is None:
            return ""
        forms = [f"goal is {_form(goal.target)}"]
        forms += [f"{name} is {_form(fact)}" for name, fact in goal.facts.items() if _form(fact) != "a fact"]
        forms += ["it is known"] if goal.target in goal.facts.values() else []
        return ", ".join(forms) if self.style == "compact" else f"The {listed(forms)}."


def _form(formula: tuple[Any, ...]) -> str:
    if formula == FALSE:
        return "False"
    if formula[0] in ("not", "exists"):
        return "a negation" if formula[0] == "not" else "an existence"
    return KINDS.get(formula[1], "a fact")
