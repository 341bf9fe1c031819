"""Who checks a proof?  Lean itself, local or behind a server, or the small checker of a fragment.

A backend answers one question: what do these tactics leave of this theorem? The text of a tactic is refused before any
of them sees it where it could do anything but prove: leave a gap, add an axiom, run code, or begin another command.
Commands need no new line in Lean, and libraries bring their own. So a tactic stands in brackets that it cannot close:
what follows a finished tactic is a syntax error, whatever it is called.
"""

from __future__ import annotations

import logging
import os
import re
import reprlib
import shutil
import threading
import time
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from envs.lean import checker, terms
from envs.lean.syntax import Unreadable
from envs.lean.theorems import Theorem
from envs.web import FAILURES, BadStatus, NoAnswer, is_address, post_json

LONGEST = 300  # characters of one tactic
LONGEST_MESSAGE = 200  # characters of what Lean says that are passed on
GOALS_SHOWN = 2_000  # characters
LONGEST_READ = 20_000  # characters of what Lean says that are read
TRIES = 3  # of a request to a server that refuses it
SOUND_AXIOMS = frozenset(("propext", "Classical.choice", "Quot.sound"))
HEADS = frozenset(
    """intro intros exact apply refine constructor left right cases rcases obtain rintro have show suffices exfalso
    assumption contradiction trivial rfl decide omega simp simp_all simpa rw rwa induction injection unfold split subst
    by_cases by_contra exists use specialize generalize revert clear rename_i symm ext funext congr change absurd nofun
    ac_rfl all_goals any_goals try first repeat case next norm_num norm_cast push_cast linarith nlinarith ring ring_nf
    positivity field_simp push_neg tauto aesop interval_cases gcongr grind""".split()
)
FORBIDDEN = frozenset(
    """sorry admit stop native_decide bv_decide axiom theorem lemma def example instance abbrev opaque inductive
    coinductive structure class macro macro_rules syntax notation notation3 infix infixl infixr prefix postfix elab
    elab_rules by_elab unsafe partial nonrec implemented_by extern csimp set_option open import namespace section end
    variable universe include omit attribute export deriving mutual local scoped private protected public meta module
    prelude noncomputable init_quot alias recall seal unseal unif_hint binder_predicate grind_pattern proof_wanted
    library_note extend_docs tactic_extension docs_to_verso show_panel_widgets irreducible_def suppress_compilation
    unsuppress_compilation count_heartbeats add_aesop_rules erase_aesop_rules do where termination_by decreasing_by eval
    IO System EIO ST Lean Elab Meta MetaM TacticM Macro Syntax unsafeCast unsafeIO dbg_trace dbgTrace trace panic
    dbgSleep ofReduceBool ofReduceNat trustCompiler""".split()
)
# families of commands: declare_syntax_cat, register_option, builtin_initialize, run_cmd, simproc_decl, add_decl_doc ...
COMMANDS = re.compile(
    r"(?:declare|register|builtin|run|compile|assert|add_decl|set_library|set_premise|gen_injective)_.*|initialize.*"
    r"|.*(?:simproc|sorry|admit|native).*|.*_decl",
    re.IGNORECASE,
)
WORD = re.compile(r"[^\W\d][\w'!]*\??")
INSTALL = (
    "Install a toolchain with elan (https://github.com/leanprover/elan: `elan default stable`) and `pip install"
    " lean-interact`, which builds its REPL with git and lake on first use; or run a Kimina Lean server"
    " (https://github.com/project-numina/kimina-lean-server) and give its address, backend=http://localhost:8000."
)


class Verdict(NamedTuple):
    """What is left: Verdict(goals=("h : p\\n⊢ p",), error=""); nothing left and no error is a proof."""

    goals: tuple[str, ...]
    error: str = ""
    unreadable: bool = False


class Backend(Protocol):
    slow: bool

    def check(self, theorem: Theorem, tactics: tuple[str, ...]) -> Verdict:
        """Return what the tactics leave of the theorem, or why the last of them is rejected."""
        ...


class Unavailable(NoAnswer):
    """The error that no backend answered: the proof has no verdict."""


def tactic_refusal(tactic: str) -> str:
    """Return why a text is not passed on; empty for one that is."""
    tactic = tactic.strip()
    if not tactic or len(tactic) > LONGEST:
        return f"write one tactic of at most {LONGEST} characters"
    if not tactic.isprintable():
        return "write one tactic on one line"
    for mark in ("--", "/-", "-/", '"', "`", "#", "@[", "«", "»", "$"):
        if mark in tactic:
            return f"{mark} is refused"
    if ";" in tactic.replace("<;>", ""):
        return "write one tactic a turn, without ;"
    words = WORD.findall(tactic)
    if "%" in re.sub(r"\s%\s", " ", tactic):  # an operator has blanks around it
        return "% is refused"
    if not words or words[0] not in HEADS or not tactic.startswith(words[0]):
        return f"{words[0] if words else tactic[:12]} is not an allowed tactic"
    for word in words:
        if word in FORBIDDEN or COMMANDS.fullmatch(word) or word.endswith("?"):
            return f"{word} is refused"
    if "'" in WORD.sub("", tactic):  # a character such as ')' would not be a bracket to Lean
        return "' is refused but in names"
    depths = list(accumulate((c == "(") - (c == ")") for c in tactic))
    return "" if min(depths) >= 0 and depths[-1] == 0 else "its brackets ( ) do not match"


# -- the fragment ------------------------------------------------------------------------------------------------------


class Fragment:
    """The small checker of checker.py."""

    slow = False

    def check(self, theorem: Theorem, tactics: tuple[str, ...]) -> Verdict:
        try:
            return Verdict(tuple(goal.show() for goal in replay_tactics(theorem, tactics)))
        except Unreadable as problem:
            return Verdict((), f"not in the fragment: {problem}", unreadable=True)
        except terms.Rejected as problem:
            return Verdict((), str(problem))


@lru_cache(maxsize=1 << 14)
def replay_tactics(theorem: Theorem, tactics: tuple[str, ...]) -> terms.Goals:
    """Return the goals of the fragment after these tactics."""
    if not tactics:
        return terms.first_goal(theorem.binders, theorem.statement)
    return checker.apply(replay_tactics(theorem, tactics[:-1]), tactics[-1])


# -- Lean --------------------------------------------------------------------------------------------------------------


def script(theorem: Theorem, tactics: Sequence[str]) -> str:
    """Return the whole proof as a file, with the question on which axioms it rests in the last line.

    The `skip;` keeps the brackets from being read as an argument of the line before.
    """
    lines = [f"  skip; ({tactic})" for tactic in tactics] or ["  skip"]
    return "\n".join([f"{theorem.header} := by", *lines, "#print axioms t"])


def verdict(messages: Any, last_line: int) -> Verdict:
    """Read Lean's messages about a `script` whose last line has this number."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Unavailable(f"Lean's answer has no list of messages but {reprlib.repr(messages)}.")
    axioms, goals, errors = "", "", []  # a second "unsolved goals" is about a `by` inside of a tactic
    for message in messages:
        text, position = message.get("data", ""), message.get("pos")
        line = position.get("line", 0) if isinstance(position, dict) else 0
        if not isinstance(text, str) or not isinstance(line, int):
            raise Unavailable(f"Lean's answer has a message without text or line: {reprlib.repr(message)}.")
        text = text[:LONGEST_READ]
        if line >= last_line:
            axioms = text
        elif message.get("severity") == "error" and text.startswith("unsolved goals") and not goals:
            goals = text.removeprefix("unsolved goals").strip()
        elif message.get("severity") == "error" or "declaration uses" in text:
            errors.append(text)
    if errors:
        return Verdict((), " ".join(errors[0].split())[:LONGEST_MESSAGE])
    if goals:
        shown = re.sub(r"^case .*\n", "", goals, flags=re.MULTILINE)[:GOALS_SHOWN]
        return Verdict(tuple(goal.strip() for goal in shown.split("\n\n") if goal.strip()))
    named = re.search(r"depends on axioms: \[([^\]]*)\]", axioms)
    used = set(re.split(r"[,\s]+", named[1].strip())) if named else set()
    if not (named or "does not depend on any axioms" in axioms) or used - SOUND_AXIOMS:
        return Verdict((), f"the proof rests on {', '.join(sorted(used - SOUND_AXIOMS)) or 'what Lean does not say'}")
    return Verdict(())


TOO_SLOW = Verdict((), "the tactic takes too long")


class Server:
    """A Kimina Lean server: its /api/check, and the /verify of its older versions."""

    slow = True

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout, self.old = url.rstrip("/"), timeout, False

    def check(self, theorem: Theorem, tactics: tuple[str, ...]) -> Verdict:
        code = script(theorem, tactics)
        answer = self._ask(code)
        results = answer.get("results") if isinstance(answer, dict) else None
        result = results[0] if isinstance(results, list) and results else None
        if not isinstance(result, dict):
            raise Unavailable(f"The Lean server at {self.url} answers without a result: {reprlib.repr(answer)}.")
        if error := result.get("error"):
            message = error[:200] if isinstance(error, str) else reprlib.repr(error)
            if "timed out" in message or "timeout" in message.lower():
                return TOO_SLOW
            raise Unavailable(f"The Lean server at {self.url} reports {message!r}.")
        response = result.get("response")
        if not isinstance(response, dict) or "message" in response:
            raise Unavailable(f"The Lean server at {self.url} has no verdict: {reprlib.repr(response)}.")
        return verdict(response.get("messages") or [], code.count("\n") + 1)

    def _ask(self, code: str) -> Any:
        seconds = max(1, int(self.timeout))
        new = {"snippets": [{"id": "t", "code": code}], "timeout": seconds, "debug": False, "reuse": True}
        old = {"codes": [{"custom_id": "t", "proof": code}], "timeout": seconds}
        problem: Exception | None = None
        for attempt in range(TRIES):
            time.sleep(0.1 * 4 ** (attempt - 1) if attempt else 0)
            path, body = ("/verify", old) if self.old else ("/api/check", new)
            try:
                return self._post(path, body)
            except BadStatus as error:
                problem = error
                if error.status in (404, 405) and not self.old:
                    self.old = True
                    continue
                if error.status < 500:
                    break
            except TimeoutError as error:
                problem = error
                break
            except FAILURES as error:  # no connection, no HTTP, or no JSON
                problem = error
        why = repr(problem)[:200]
        raise Unavailable(f"The Lean server at {self.url} does not answer as it should: {why}. {INSTALL}")

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        key = os.environ.get("LEAN_SERVER_API_KEY", "").strip()
        if not (key.isascii() and key.isprintable()):
            raise Unavailable("LEAN_SERVER_API_KEY is not a key: it has characters that cannot be sent.")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return post_json(self.url + path, body, 1.5 * self.timeout + 1, headers)


class Local:
    """Lean on this machine, by lean-interact's REPL: one process for all environments, which take turns."""

    slow = True

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def check(self, theorem: Theorem, tactics: tuple[str, ...]) -> Verdict:
        from lean_interact import Command
        from lean_interact.interface import LeanError

        code = script(theorem, tactics)
        try:
            with _LOCAL:
                answer = repl().run(Command(cmd=code), timeout=self.timeout)
        except TimeoutError:
            return TOO_SLOW
        except (ConnectionError, OSError) as problem:
            raise Unavailable(f"The local Lean REPL ended ({problem}). {INSTALL}") from problem
        if isinstance(answer, LeanError):
            raise Unavailable(f"The local Lean REPL reports {answer.message[:200]!r}.")
        messages = [message.model_dump(by_alias=True) for message in answer.messages]
        return verdict(messages, code.count("\n") + 1)


_LOCAL = threading.Lock()


@cache
def repl() -> Any:
    """Return the REPL process, of the version of Lean that is on the path."""
    import subprocess

    from lean_interact import AutoLeanServer, LeanREPLConfig

    output = subprocess.run(["lean", "--version"], capture_output=True, text=True, timeout=60).stdout
    version = re.search(r"version (\d+\.\d+\.\d+(?:-rc\d+)?)", output)
    config = LeanREPLConfig(lean_version=f"v{version[1]}" if version else None, memory_hard_limit_mb=8192)
    return AutoLeanServer(config)


def toolchain() -> bool:
    """Return whether Lean can be run here."""
    return bool(shutil.which("lean") and shutil.which("lake") and find_spec("lean_interact"))


def backend_named(backend: str, timeout: float) -> Backend:
    """Return the backend of that name; "auto" takes a server, then a toolchain, then the fragment, and says so."""
    if backend == "auto":
        backend = os.environ.get("LEAN_SERVER_API_URL", "") or ("local" if toolchain() else "")
        if not backend:
            _warn_of_fragment()
            backend = "fragment"
    if backend == "fragment":
        return Fragment()
    if is_address(backend):
        return Server(backend, timeout)
    if backend == "local":
        if not toolchain():
            raise ValueError(f"lean cannot be made with backend=local: there is no Lean on the path. {INSTALL}")
        return Local(timeout)
    raise ValueError(f'lean has no backend "{backend}". Known: auto, fragment, local, http://localhost:8000.')


@cache
def _warn_of_fragment() -> None:
    logging.getLogger(__name__).warning(
        "lean: no toolchain and no server here, so the built-in checker of a fragment takes Lean's place"
    )
