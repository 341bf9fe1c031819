"""Does the checker accept proofs and nothing else, and do the backends of Lean read what Lean says?"""

# pyright: reportAttributeAccessIssue=false, reportOptionalIterable=false, reportOptionalSubscript=false
from __future__ import annotations

import copy
import itertools
import json
import random
import select
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from envs import SPLITS, make
from envs.hostile import HOSTILE_TEXTS
from envs.lean import Unavailable, arithmetic, backends, checker, search, terms, theorems
from envs.lean.syntax import OPERATORS, Unreadable, format_formula, formula_in_words, parse_formula
from envs.lean.theorems import Theorem

SWAP = Theorem(("p q : Prop",), "p ∧ q → q ∧ p", "if (p and q), then (q and p)", ("intro h", "exact ⟨h.2, h.1⟩"))


def at(theorem: Theorem = SWAP, **options):
    env = make("lean", **({"backend": "fragment"} | options))
    env.reset(seed=0)
    env.begin(theorem)
    return env


def left(binders: tuple[str, ...], statement: str, *tactics: str) -> list[str]:
    """The targets that are open after some tactics."""
    goals = terms.first_goal(binders, statement)
    for tactic in tactics:
        goals = checker.apply(goals, tactic)
    return [format_formula(goal.target) for goal in goals]


# -- the environment ---------------------------------------------------------------------------------------------------


def test_an_episode_reads_as_documented():
    env = at()
    assert env.observe() == "Prove: if (p and q), then (q and p).\np q : Prop\n⊢ p ∧ q → q ∧ p"
    observation, reward, over, cut, info = env.step("exact h")
    assert observation.endswith("⊢ p ∧ q → q ∧ p\nRejected: there is no h") and (reward, over, cut) == (
        -0.1,
        False,
        False,
    )
    assert info["action_is_valid"] and not info["action_is_effective"]
    assert env.step("  intro h\n")[0].endswith("p q : Prop\nh : p ∧ q\n⊢ q ∧ p")
    observation = env.step("constructor")[0]
    assert observation.endswith("Goal 1 of 2\np q : Prop\nh : p ∧ q\n⊢ q\nGoal 2 of 2\np q : Prop\nh : p ∧ q\n⊢ p")
    env.step("exact h.2")
    observation, reward, over, cut, info = env.step("exact h.left")
    assert (reward, over, cut, info["success"]) == (1.0, True, False, True) and "No goals: proved." in observation
    assert env.step("exact h")[1:3] == (0.0, True) and env.goals == ()


def test_rewards_of_ragen():
    env = at(reward="ragen")
    assert [env.step(tactic)[1] for tactic in ("right", "intro h", "exact ⟨h.2, h.1⟩")] == [-1.1, 0.9, 10.9]


def test_known_proofs_are_proofs_and_their_words_are_there():
    rng = np.random.default_rng(0)
    for topic in ("logic", "arithmetic", "lists"):
        seen = {theorems.MAKERS[topic](rng) for _ in range(400)}
        assert len(seen) > 200
        for theorem in seen:
            assert left(theorem.binders, theorem.statement, *theorem.proof) == [], theorem
            assert len(theorem.proof) <= 8 and len(theorem.words) > 5 and theorem.statement not in theorem.words
            assert not any(backends.tactic_refusal(tactic) for tactic in theorem.proof)


@pytest.mark.parametrize("split", SPLITS)
def test_the_expert_comes_back_from_detours(split):
    env, back = make("lean", backend="fragment"), 0
    for seed in range(25):
        env.reset(seed=seed, options={"split": split})
        for _ in range(2):
            env.step(env.players()["shape"])
        for _ in range(env.max_turns - 2):
            if env.step(env.expert())[2]:
                break
        back += not env.goals
    assert back >= 20  # `left` and `exfalso` may lose what cannot be won back


def test_without_lean_the_fragment_takes_its_place_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(backends, "toolchain", lambda: False)
    monkeypatch.delenv("LEAN_SERVER_API_URL", raising=False)
    backends._warn_of_fragment.cache_clear()
    env = make("lean")
    assert not env.slow and "no toolchain" in caplog.text and "checker of this fragment" in env.rules()
    with pytest.raises(ValueError, match="elan"):
        make("lean", backend="local")
    monkeypatch.setenv("LEAN_SERVER_API_URL", "http://localhost:9")
    env = make("lean", topics=["library"])
    assert env.slow and "fragment" not in env.rules()


# -- what is refused before anybody sees it ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tactic",
    [
        "sorry", "exact sorry", "exact (sorry)", "admit", "exact sorryAx _ false", "native_decide", "decide +native",
        "exact Lean.ofReduceBool _ _ rfl", "run_tac pure ()", "exact by_elab sorry", "stop", "exact?", "apply?",
        "#eval 1", "exact h #eval 1", "exact h theorem u : False := h", "exact h axiom a : False", "intro h; exact h",
        "intro h\nexact h", "intro h\u2028exact h", "exact h -- sorry", "exact h /- ", 'exact "a"', "open Lean in rfl",
        "set_option maxHeartbeats 0 in simp", "unsafe exact h", "exact (unsafeCast h)", "exact IO.mkRef", "", "  ",
        "exact «h»", "exact decl_name%", "x" * 400, "elab", "123", "\ud800",
        "exact h simproc_decl f (_) := fun e => e", "exact h dsimproc f (_) := e",
        "exact h builtin_dsimproc_decl f (_) := e", "exact h coinductive C : Prop",
        "exact h alias a := b", "exact h init_quot", "exact h end C", "exact h unseal a", "exact h omit x",
        "exact h include x", "exact h register_option a : Nat := 1",
        "exact h grind_pattern a => x",
        "exact h declare_simp_like_tactic a", "exact h compile_inductive Nat", "exact h register_simp_attr a",
        "exact h meta def x := 1", "exact h public section", "exact h add_decl_doc x", "exact h suppress_compilation",
        "exact h) unheard_of_command (h", "exact h)", "exact (h", "exact f '(' ) unheard_of (a ')'", "exact 1'('",
    ],
)  # fmt: skip
def test_what_leaves_gaps_or_runs_code_is_refused(tactic):
    env = at()
    env.step("intro h")
    before = env.state_key()
    _, reward, over, _, info = env.step(tactic)
    assert (reward, over, info["action_is_valid"]) == (0.0, False, False) and env.state_key() == before
    assert backends.tactic_refusal(tactic)


def test_what_proves_is_not_refused():
    for tactic in (
        "omega", "simp [Nat.add_comm]", "constructor <;> assumption", "refine ⟨?_, by omega⟩", "exact f % 2",
        "exact (h' (f.2 a!'))", "exact Nat.decidable_end_of_run", "rw [Nat.add_comm, ← Nat.add_assoc] at h₁' ⊢",
        "induction n with | zero => rfl | succ n ih => simp [ih]", "rcases h with ⟨a, b⟩ | c",
        "exact absurd (h1 h2) (fun h => h3 h)",
    ):  # fmt: skip
        assert not backends.tactic_refusal(tactic)


def test_a_tactic_stands_in_brackets_that_it_cannot_close():
    code = backends.script(Theorem(("p : Prop",), "p → p", "", ()), ("intro h", "exact h unheard_of_command (x)"))
    assert code.splitlines()[1:3] == ["  skip; (intro h)", "  skip; (exact h unheard_of_command (x))"]
    for tactic in ("exact h) unheard_of_command (h", "exact f '(' ) unheard_of_command (a ')'", "exact '(' ) a"):
        assert "refused" in backends.tactic_refusal(tactic) or "do not match" in backends.tactic_refusal(tactic)


def test_hostile_texts_are_read_in_time_and_change_nothing():
    rng, start = np.random.default_rng(0), time.monotonic()
    pieces = [
        "exact ", "have h : ", "obtain ", "⟨", "(", "¬", "h.1", "fun x => ", "∃ x : Nat, ", "x ↔ ", "9" * 20, "|",
        " := ", "h",
    ]  # fmt: skip
    texts = [text.format(marker="m") for text in HOSTILE_TEXTS]
    texts += [f"exact {piece * 280}"[:300] for piece in pieces] + [
        "have g : " + "(1 = 1 ↔ " * 24 + "1 = 1" + ")" * 24 + " := h"
    ]
    texts += ["".join(rng.choice(pieces, int(rng.integers(2, 40)))) for _ in range(1500)]
    env = at(Theorem(("p : Prop", "x : Nat", "h : ¬p ∧ x < 2"), "∃ y : Nat, y = x ∧ ¬p", "", ()))
    for text in texts:
        before = env.state_key()
        info = env.step(text)[4]
        assert not info["success"] and (info["action_is_effective"] or env.state_key() == before)
        env.begin(env.level)
    assert time.monotonic() - start < 10


def test_few_characters_that_ask_for_millions_of_goals_are_refused_in_time():
    letters = "abcdefghijklmnoqrstuvw"
    split = f"rcases k with ⟨{','.join(f'{letter}|{letter}' for letter in letters)}⟩"
    start = terms.first_goal(("p : Prop",), "p")
    goals = checker.apply(start, f"by_cases k : {'∧'.join(['(p∨p)'] * len(letters))}")
    began = time.monotonic()
    with pytest.raises(Unreadable, match="too many goals"):
        checker.apply(goals, split)
    with pytest.raises(Unreadable, match="too many goals"):
        checker.apply(goals, split.replace("rcases k with", "obtain") + " := k")
    assert len(checker.apply(goals[:1], "rcases k with ⟨a|a,b|b,c|c,d⟩")) == 8 and time.monotonic() - began < 1


def test_omega_gives_up_where_numbers_or_cases_grow():
    rng, began, asked = random.Random(0), time.monotonic(), 0
    for _ in range(60):
        names = "abcdefghij"[: rng.choice((4, 6, 8, 10))]

        def term() -> str:
            return "+".join(f"{rng.randint(1, 10**9 - 1)}*{name}" for name in rng.sample(names, 2))  # noqa: B023

        facts = [f"{term()}{rng.choice('≠≤')}{term()}" for _ in range(9)] + [f"{term()}≤{term()}" for _ in range(5)]
        asked += not arithmetic.linear_consequence(tuple(map(parse_formula, facts)), parse_formula("a≤b"))
    assert asked > 50 and time.monotonic() - began < 10
    x, y = (("x", 1),), (("x", -1),)
    assert arithmetic.infeasible([(x, -3), (y, 2)], [100]) and not arithmetic.infeasible([(x, -3), (y, 2)], [0])
    for large, found in ((7, True), (1 << (2 * arithmetic.BITS), False)):
        rows = [((("x", sign * large), ("y", sign)), constant) for sign, constant in ((1, -3), (-1, 2))]
        assert arithmetic.infeasible(rows, [100]) is found


# -- the fragment ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "p → q → r", "(p → q) → r", "p ∧ q ∨ r", "p ∧ (q ∨ r)", "¬(p ∧ q)", "¬p ∧ q", "¬x = y", "p → q ↔ r",
        "(p ↔ q) ∧ r",
        "x + 2 * y ≤ 3 * (x + y)", "x + (y + 1) = 2", "([1, 2] ++ xs).length = 3", "¬¬p", "p ∧ ¬(q → r)",
    ],
)  # fmt: skip
def test_formulas_are_printed_as_they_are_read(text):
    assert format_formula(parse_formula(text)) == text
    assert format_formula(parse_formula(text.replace("→", "->").replace("∧", "/\\").replace("≤", "<="))) == text


def test_words_are_plain():
    assert formula_in_words(parse_formula("(p → q) → ¬q → ¬p")) == "if (if p, then q) and not q, then not p"
    assert formula_in_words(parse_formula("∃ x : Nat, x + 2 = 5")) == "there is a number x such that (x + 2) equals 5"


@pytest.mark.parametrize(
    ("statement", "tactics", "open_goals"),
    [
        ("p → q → p", ("intro a b",), ["p"]),
        ("p ∨ q → q ∨ p", ("intro h", "rcases h with a | b", "right", "exact a"), ["q ∨ p"]),
        ("(p → q → r) → p ∧ q → r", ("intro f h", "apply f"), ["p", "q"]),
        ("(p → q → r) → p ∧ q → r", ("intro f h", "exact f h.1 h.right"), []),
        ("p ∧ (q ∧ r) → r", ("intro h", "obtain ⟨a, b, c⟩ := h", "exact c"), []),
        ("p ∧ q → q ∧ p", ("exact fun h => ⟨h.2, h.1⟩",), []),
        ("p → ¬p → q", ("intro a b", "exact absurd a b"), []),
        ("p ∨ p → p", ("intro h", "exact h.elim (fun a => a) (fun a => a)"), []),
        ("(p ↔ q) → q → p", ("intro h b", "exact h.mpr b"), []),
        ("p → ∃ x : Nat, x = 3 ∧ p", ("intro a", "exists 3", "exact ⟨rfl, a⟩"), []),
        ("p ∨ ¬p", ("by_cases h : p", "exact Or.inl h", "exact Or.inr h"), []),
        ("p → p ∧ p", ("intro a", "refine ⟨?_, a⟩"), ["p"]),
        ("p → p", ("intro a", "have b : p := a", "assumption"), []),
        ("False → p", ("intro h", "cases h"), []),
    ],
)
def test_tactics_do_as_in_lean(statement, tactics, open_goals):
    assert left(("p q r : Prop",), statement, *tactics) == open_goals


@pytest.mark.parametrize(
    ("binders", "statement", "tactic"),
    [
        (("p q : Prop", "h : p ∨ q"), "p", "exact h.1"),
        (("p q : Prop", "h : p → q"), "q", "exact h"),
        (("p q : Prop", "h : p"), "p ∧ q", "exact ⟨h, h⟩"),
        (("p : Prop",), "p", "trivial"),
        (("p : Prop",), "p", "exact absurd rfl rfl"),
        (("x y : Nat", "h : x ≤ y"), "x < y", "omega"),
        (("x : Nat", "h : 2 * x = 7"), "x = 3", "rfl"),
        ((), "∃ x : Nat, x + 3 = 5", "refine ⟨3, rfl⟩"),
        ((), "[1, 2] ++ [3] = [1, 3, 2]", "rfl"),
        (("y : Nat",), "∃ x : Nat, ¬∃ y : Nat, ¬x = y", "refine ⟨y, ?_⟩"),  # it would capture y
        (("xs ys : List Nat", "h : xs = ys"), "ys = xs", "omega"),
        (("p : Prop",), "p → p", "intro p"),
        (("p q : Prop",), "p ∨ q → p", "exact fun h => h.elim"),
        (("p : Prop", "h : ¬p"), "False", "apply h ?_"),  # the hole would be lost
        (("p q : Prop", "h : p → q"), "p", "have k := h ?_"),
    ],
)
def test_what_does_not_follow_is_not_accepted(binders, statement, tactic):
    with pytest.raises((terms.Rejected, Unreadable)):
        left(binders, statement, tactic)


def test_omega_uses_that_numbers_are_whole_and_not_negative():
    assert left(("x : Nat", "h : 2 * x < 3", "g : ¬x = 0"), "x = 1", "omega") == []
    assert left(("x y : Nat",), "¬2 * x = 2 * y + 1", "omega") == []
    assert left(("x : Nat",), "¬x < 0", "omega") == []
    assert left(("x y : Nat", "h : x < 2 ∨ y < 2", "g : 2 ≤ x ∧ x = y"), "False", "omega") == []


def truth(formula, values) -> bool:
    if formula[0] == "name":
        return values.get(formula[1], False)
    if formula[0] == "not":
        return not truth(formula[1], values)
    one, other = truth(formula[2], values), truth(formula[3], values)
    return {"∧": one and other, "∨": one or other, "→": not one or other, "↔": one == other}[formula[1]]


def test_whatever_is_proved_is_true():
    """Random formulas, valid or not, under random play and under the search: a proof means a tautology."""
    rng, proved = np.random.default_rng(3), 0

    def formula(depth: int):
        if depth == 0 or rng.random() < 0.2:
            return ("name", "pq"[int(rng.integers(2))]) if rng.random() < 0.95 else ("name", "False")
        if rng.random() < 0.2:
            return ("not", formula(depth - 1))
        return ("bin", "∧∨→↔"[int(rng.integers(4))], formula(depth - 1), formula(depth - 1))

    env = at()
    for _ in range(300):
        statement = formula(3)
        valid = all(truth(statement, {"p": p, "q": q}) for p, q in itertools.product((True, False), repeat=2))
        env.begin(Theorem(("p q : Prop",), format_formula(statement), "", ()))
        found = search.prove(terms.first_goal(env.level.binders, env.level.statement)[0])
        for turn in range(12):
            env.step(env.players()["random"] if turn % 2 else env.expert())
        proved += found is not None
        assert valid or (env.goals and found is None), format_formula(statement)
    assert proved > 25


def valid(goal: terms.ProofGoal) -> bool:
    """Whether a goal over p, q, r holds in every row of its truth table."""
    rows = [dict(zip("pqr", row, strict=True)) | {"True": True} for row in itertools.product((True, False), repeat=3)]
    return all(truth(goal.target, row) or not all(truth(f, row) for f in goal.facts.values()) for row in rows)


def test_no_tactic_leaves_only_goals_that_hold_of_one_that_does_not():
    """Tactics with random proof terms, step by step; holes must come back as goals."""
    rng, accepted = random.Random(1), 0

    def formula(depth: int) -> str:
        if depth == 0 or rng.random() < 0.25:
            return rng.choice(["p", "q", "r", "False", "True"])
        return rng.choice(
            [f"¬({formula(depth - 1)})", f"({formula(depth - 1)}) {rng.choice('∧∨→↔')} ({formula(depth - 1)})"]
        )

    def term(depth: int, names: list[str]) -> str:
        if depth == 0:
            return rng.choice([*names, "?_", "trivial"])
        one, other = (term(depth - 1, names) for _ in range(2))
        forms = [
            "⟨{}, {}⟩", "({}).1", "({}).mpr", "({} ({}))", "(Or.inl {})", "(absurd {} {})", "(False.elim {})",
            "(fun z => {})",
        ]  # fmt: skip
        return rng.choice(forms).format(one, other)

    for _ in range(250):
        names = [f"h{number}" for number in range(3)]
        start = terms.first_goal(("p q r : Prop", *(f"{name} : {formula(2)}" for name in names)), formula(2))
        for _ in range(12):
            head = rng.choice(
                ["exact {}", "refine {}", "apply {}", "have k := {}", "have k : False := {}", "obtain ⟨a, b⟩ := {}"]
            )
            try:
                new = checker.apply(start, head.format(term(rng.randrange(4), names)))
            except (terms.Rejected, Unreadable):
                continue
            accepted += 1
            assert valid(start[0]) or not all(map(valid, new))
    assert accepted > 120


def test_linear_consequences_hold_in_all_small_numbers():
    rng, found = np.random.default_rng(5), 0

    def term():
        return f"{rng.integers(1, 4)} * {'xy'[int(rng.integers(2))]} + {rng.integers(4)}"

    def atom() -> str:
        return f"{term()} {['=', '<', '≤', '≠'][int(rng.integers(4))]} {term()}"

    for _ in range(300):
        facts, goal = tuple(parse_formula(f"{atom()} ∨ {atom()}") for _ in range(2)), parse_formula(atom())
        if arithmetic.linear_consequence(facts, goal):
            found += 1
            for x, y in itertools.product(range(12), repeat=2):
                number = {"x": ("num", x), "y": ("num", y)}
                values = [arithmetic.decided(theorems._filled(each, number)) for each in (*facts, goal)]
                assert values[2] or not (values[0] and values[1])
    assert found > 10 and len(OPERATORS) == 13


# -- Lean behind a server ----------------------------------------------------------------------------------------------
# What Lean's REPL answers to the scripts of a proof, recorded by hand.

UNSOLVED = "unsolved goals\ncase left\np q : Prop\nh : p ∧ q\n⊢ q\n\ncase right\np q : Prop\nh : p ∧ q\n⊢ p"


def said(severity: str, line: int, data: str) -> dict:
    return {"severity": severity, "pos": {"line": line, "column": 2}, "data": data}


RECORDED: dict[str, list[dict]] = {
    "intro h": [said("error", 1, "unsolved goals\np q : Prop\nh : p ∧ q\n⊢ q ∧ p")],
    "intro h|constructor": [said("error", 1, UNSOLVED)],
    "left": [said("error", 2, "tactic 'left' failed,\n  not a disjunction")],
    "intro h|exact ⟨h.2, h.1⟩": [said("info", 4, "'t' does not depend on any axioms")],
    "simp": [said("warning", 1, "declaration uses 'sorry'")],
    "trivial": [said("info", 3, "'t' depends on axioms: [propext, evil]")],
    "tauto": [said("info", 3, "'t' depends on axioms: [propext,\n Classical.choice]")],
    "rfl": [],  # no word about axioms
}


def with_message(**message) -> bytes:
    return json.dumps({"results": [{"response": {"messages": [message]}}]}).encode()


RAW = {  # what is sent instead of an answer in HTTP
    "no status": b"LOL NOPE\r\n\r\n",
    "broken off": b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"results"',
    "long header": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\n\r\n{}",
    "drips": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
}
REPLIES = {
    "nonsense": b"<html>", "not utf-8": b"\xff\xfe{", "empty": b'{"results": []}', "a list": b"[1, 2]",
    "deep": b"[" * 200_000, "large": b" " * (5 << 20), "large number": b'{"results": [' + b"9" * 6000 + b"]}",
    "deep error": json.dumps({"results": [{"error": json.loads("[" * 900 + "]" * 900)}]}).encode(),
    "no list": b'{"results": [{"response": {"messages": {"a": 1}}}]}',
    "line in words": with_message(data="x", severity="error", pos={"line": "five"}),
    "data in a list": with_message(data=["x"], severity="error", pos={"line": 1}),
}  # fmt: skip


class Recorded(BaseHTTPRequestHandler):
    """Answers as a Kimina server; `server.mode` says how it misbehaves."""

    def left_within(self, seconds: float) -> bool:
        """Wait for so many seconds, or until the client hangs up; return whether it did."""
        return bool(select.select([self.connection], [], [], seconds)[0])

    def do_GET(self):  # of who follows a redirect
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        self.answer(200, b"{}")

    def do_POST(self):
        self.server.asked.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mode = self.server.mode
        if mode == "stalls":
            self.left_within(20)
            return None
        if mode == "redirects":
            self.send_response(302)
            self.send_header("Location", f"{self.server.url}/elsewhere")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if mode == "old" and self.path != "/verify":
            return self.answer(404, b"{}")
        if mode == "once" and len(self.server.asked) == 1:
            return self.answer(503, b"")
        if mode in RAW:
            with suppress(OSError):  # it hangs up in the middle
                self.connection.sendall(RAW[mode])
                while mode == "drips" and not self.left_within(0.1):
                    self.connection.sendall(b" ")
            self.close_connection = True
            return
        if mode in REPLIES:
            return self.answer(200, REPLIES[mode])
        code = body["snippets"][0]["code"] if self.path == "/api/check" else body["codes"][0]["proof"]
        played = "|".join(line.strip().removeprefix("skip; (").removesuffix(")") for line in code.splitlines()[1:-1])
        result = {"id": "t", "error": None, "response": {"env": 0, "messages": RECORDED.get(played)}}
        if mode == "slow":
            result = {"id": "t", "error": "Lean REPL command timed out in 1 seconds"}
        if mode == "broken":
            result = {"id": "t", "response": {"message": "Unknown environment."}}
        return self.answer(200, json.dumps({"results": [result]}).encode())

    def answer(self, status: int, data: bytes):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorded)
    server.mode, server.asked = "", []
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_proof_is_checked_by_the_server(server):
    env = at(backend=server.url)
    assert env.slow and env.observe().endswith("⊢ p ∧ q → q ∧ p")
    assert env.step("left")[1] == -0.1 and "Rejected: tactic 'left' failed, not a disjunction" in env.observe()
    assert env.step("intro h")[0].endswith("⊢ q ∧ p")
    other = copy.deepcopy(env)
    assert other.step("constructor")[4]["action_is_effective"]
    assert [goal.splitlines()[-1] for goal in other.goals] == ["⊢ q", "⊢ p"] and "case" not in other.observe()
    _, reward, over, _, info = env.step(env.expert())
    assert (reward, over, info["success"]) == (1.0, True, True)


def test_a_proof_on_axioms_or_with_gaps_is_none(server):
    for tactic, says in (("simp", "uses 'sorry'"), ("trivial", "rests on evil"), ("rfl", "does not say")):
        env = at(backend=server.url)
        _, reward, over, _, _ = env.step(tactic)
        assert (reward, over) == (-0.1, False) and says in env.observe()
    assert at(backend=server.url).step("tauto")[4]["success"]


def test_the_older_interface_and_a_server_that_is_busy_once(server):
    server.mode = "old"
    env = at(backend=server.url)
    env.step("intro h")
    env.step("exact ⟨h.2, h.1⟩")
    assert not env.goals and server.asked == ["/api/check", "/verify", "/verify"]
    server.mode, server.asked[:] = "once", []
    assert at(backend=server.url).step("intro h")[4]["action_is_effective"]


def test_a_tactic_that_takes_too_long_is_rejected(server):
    server.mode = "slow"
    assert "Rejected: the tactic takes too long" in at(backend=server.url).step("intro h")[0]


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["stalls", "broken", *RAW, *REPLIES])
def test_a_server_without_a_verdict_is_no_verdict(server, mode, monkeypatch):
    monkeypatch.setattr(backends, "TRIES", 1)
    server.mode = mode
    env = at(backend=server.url, timeout=0.2)
    before, start = env.state_key(), time.monotonic()
    with pytest.raises(Unavailable, match=r"Lean('s answer| server)") as caught:
        env.step("intro h")
    assert len(str(caught.value)) < 1_000 and "\n" not in str(caught.value)
    assert env.state_key() == before and time.monotonic() - start < 3


def test_a_key_is_sent_to_the_server_alone(server, monkeypatch):
    monkeypatch.setenv("LEAN_SERVER_API_KEY", "secret\n")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert at(backend=server.url).step("intro h")[4]["action_is_effective"]
    server.mode = "redirects"
    with pytest.raises(Unavailable, match="status 302"):
        at(backend=server.url).step("intro h")
    assert set(server.asked) == {"/api/check"}
    monkeypatch.setenv("LEAN_SERVER_API_KEY", "sec\nret")
    with pytest.raises(Unavailable, match="cannot be sent") as caught:
        at(backend=server.url).step("intro h")
    assert "ret" not in str(caught.value).split("is not a key")[1]


def test_a_server_that_died_is_named_with_what_to_do():
    env = at(backend="http://127.0.0.1:9", timeout=1.0)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9 does not answer.*elan"):
        env.step("intro h")


def test_a_gap_inside_of_a_tactic_is_no_goal():
    inner = {"severity": "error", "pos": {"line": 2, "column": 9}, "data": "unsolved goals\n⊢ p"}
    outer = {"severity": "error", "pos": {"line": 1, "column": 9}, "data": "unsolved goals\n⊢ q"}
    assert backends.verdict([outer, inner], 4).error.startswith("unsolved goals")
    assert backends.verdict([outer], 4).goals == ("⊢ q",)


# -- Lean itself -------------------------------------------------------------------------------------------------------

lean = pytest.mark.skipif(not backends.toolchain(), reason="no Lean on the path")


@pytest.mark.slow
@lean
@pytest.mark.parametrize("topic", theorems.TOPICS)
def test_known_proofs_are_proofs_in_lean(topic):
    backend, rng = backends.backend_named("local", 60.0), np.random.default_rng(1)
    for theorem in {theorems.MAKERS[topic](rng) for _ in range(40)}:
        assert backend.check(theorem, theorem.proof) == backends.Verdict(()), theorem


@pytest.mark.slow
@lean
def test_the_fragment_accepts_what_lean_accepts_and_leaves_the_same_goals():
    env, backend = at(), backends.backend_named("local", 60.0)
    for seed in range(40):
        env.reset(seed=seed)
        for _ in range(6):
            env.step(env.players()["random"])
            if env.tactics:
                assert backend.check(env.level, env.tactics) == backends.Verdict(env.goals)
            if not env.goals:
                break
