"""How do a model and an environment talk?  The limits of an episode, its penalties, and the form of an answer.

The model writes `<think>...</think><answer>Left || Up</answer>`; the first well-formed pair counts. What it wrote is
kept as it is: nothing here rewrites a response.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from envs.base import TextEnv, known
from envs.by_path import by_path

if TYPE_CHECKING:
    from jinja2 import Template

Message = dict[str, Any]  # role and content, which are texts; with tools `tool_calls`, or the `name` of a result
ACTION_SEP = "||"  # between two actions of one answer, as in RAGEN
MAX_PENALISED_TURNS = 3  # of one episode
STYLES = ("plain", "compact")  # see wording.py
TEMPLATES = {  # Jinja templates that a run may write itself, and the values that each is given
    "system": ("rules", "limits", "format", "example", "actions", "max_turns", "max_actions", "max_actions_per_turn"),
    "feedback": (
        *("outcome", "reward", "valid", "observation", "left", "question"),
        *("form", "turn", "turns_left", "actions_left", "actions", "think"),
    ),
}
_TEXT = "\n".join([" ".join("1" * 40)] * 40)  # with as many lines and words as a template may count on
_SAMPLES: dict[str, dict[str, Any]] = {
    name: {**dict.fromkeys(values, _TEXT), "actions": ["1"] * 40} for name, values in TEMPLATES.items()
}
_SAMPLES["system"] |= dict.fromkeys(("max_turns", "max_actions", "max_actions_per_turn"), 3)
_SAMPLES["feedback"] |= {"valid": True, "turns_left": 3, "think": True}
_BETWEEN = re.compile(r"</think>\s*<answer>")


@dataclass(frozen=True)
class Protocol:
    """The limits of an episode and the form of an answer.

    `format_penalty` is subtracted once for every turn that is badly formed or names an unknown action, at most
    MAX_PENALISED_TURNS times an episode: Protocol(max_turns=8, max_actions_per_turn=1, max_actions=8).
    An environment of free text takes one action a turn, whatever `max_actions_per_turn` says.
    With `force_think` every response begins with `opening`, which the model is given instead of writing it.
    `parser` is the path `module:function` of what takes the place of `parse`, whose parameters and result it has.
    `style` says which words the model reads (wording.py). With "plain", the Jinja templates `system` and `feedback`
    take the place of its own, and `example` that of the answer that stands in the system message as an example.
    """

    max_turns: int = 8
    max_actions_per_turn: int = 1
    max_actions: int = 8
    think: bool = True
    format_penalty: float = -0.1
    force_think: bool = False
    parser: str | None = None
    style: str = "plain"
    system: str | None = None
    example: str | None = None
    feedback: str | None = None

    def __post_init__(self) -> None:
        if min(self.max_turns, self.max_actions_per_turn, self.max_actions) < 1:
            raise ValueError("max_turns, max_actions_per_turn and max_actions must be at least 1.")
        if self.format_penalty > 0:
            raise ValueError("format_penalty must not be above 0.")
        known("protocol style", self.style, STYLES)
        for name in TEMPLATES:
            if (source := getattr(self, name)) is not None:
                check_template(name, source)
        if self.style != "plain" and (self.system, self.example, self.feedback) != (None, None, None):
            raise ValueError('protocol.system, example and feedback belong to style="plain": leave them out.')

    @classmethod
    def of(cls, env: TextEnv, max_turns: int | None = None, max_actions: int | None = None, **others: Any) -> Protocol:
        """Return the protocol of a run in an environment.

        None takes the environment's own number of turns, and as many actions as these hold.
        """
        turns = env.max_turns if max_turns is None else max_turns
        most = turns * others.get("max_actions_per_turn", cls.max_actions_per_turn)
        return cls(max_turns=turns, max_actions=most if max_actions is None else max_actions, **others)

    def read(self, text: str, listed: Sequence[str] | None) -> Parsed:
        """Return the actions of a response, by `parser` or else by `parse`."""
        if self.parser is None:
            return parse(text, self, listed)
        try:
            return by_path(self.parser)(text, self, listed)
        except Exception as error:  # the user's own code
            raise RuntimeError(f"`protocol.parser: {self.parser}` raised {type(error).__name__}: {error}") from error

    @property
    def opening(self) -> str:
        """Return the forced beginning of a response, the first tag of the answer format; "" where none is forced."""
        return ("<think>" if self.think else "<answer>") if self.force_think else ""


@dataclass(frozen=True)
class Parsed:
    """What a response asks for: Parsed(actions=["Left"], well_formed=True, invalid=["fly"])."""

    actions: list[str]
    well_formed: bool
    invalid: list[str]


@dataclass(frozen=True)
class Past:
    """A turn that was played: Past("You 0 0 Goal 3 3", actions=["Down"], reward=0.0, valid=True, well_formed=True).

    `invalid` holds what the answer names that is not an action; `effective` is whether an action changed the state.
    """

    observation: str
    actions: list[str]
    reward: float
    valid: bool
    well_formed: bool
    invalid: list[str]
    effective: bool


@dataclass(frozen=True)
class Turn:
    """What a turn came to: Turn(reward=0.0, penalty=-0.1, done=False, valid=False, user="Reward 0 ...").

    `valid` is False when the penalty rule applies, even once its cap is reached; `user` is None when `done`, and after
    a turn that called tools: then the model reads `results`.
    """

    reward: float
    penalty: float
    done: bool
    valid: bool
    user: str | None
    results: tuple[Message, ...] = ()


def parse(text: str, protocol: Protocol, listed: Sequence[str] | None) -> Parsed:
    """Read a response, in time linear in its length; no text raises an error.

    Args:
        listed: the environment's list of actions, whose names count in any case; those beyond the turn's limit are left
            out. None for free text: the action is all that stands in <answer>, unless it is blank.
    """
    start = 0
    if protocol.think:
        opening = text.find("<think>")
        match = _BETWEEN.search(text, opening + len("<think>")) if opening >= 0 else None
        start = match.end() if match else -1
    else:
        opening = text.find("<answer>")
        start = opening + len("<answer>") if opening >= 0 else -1
    end = text.find("</answer>", start) if start >= 0 else -1
    if end < 0:
        return Parsed([], False, [])
    if listed is None:
        return Parsed([text[start:end]] if text[start:end].strip() else [], True, [])
    names = [name for name in map(str.strip, text[start:end].split(ACTION_SEP)) if name]
    spelling = {action.lower(): action for action in listed}
    invalid = [name for name in names if name.lower() not in spelling]
    actions = [spelling[name.lower()] for name in names if name.lower() in spelling]
    return Parsed(actions[: protocol.max_actions_per_turn], True, invalid)


@lru_cache(maxsize=64)
def template(source: str) -> Template:
    """Return a Jinja template, in a sandbox; a value that it is not given is an error."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(source)


def render(name: str, source: str, values: Mapping[str, Any]) -> str:
    """Return the text of the template `protocol.NAME`; RuntimeError where it cannot be made."""
    try:
        return template(source).render(values)
    except Exception as error:  # the user's own template
        raise RuntimeError(f"`protocol.{name}` cannot be filled ({type(error).__name__}: {error})") from error


@lru_cache(maxsize=64)
def values_of(source: str) -> frozenset[str]:
    """Return which values a template asks for."""
    from jinja2.meta import find_undeclared_variables

    return frozenset(find_undeclared_variables(template(source).environment.parse(source)))


@lru_cache(maxsize=64)
def check_template(name: str, source: str) -> None:
    """ValueError where a template cannot be read, asks for a value that it is not given, or cannot be filled."""
    from jinja2 import TemplateError

    values = TEMPLATES[name]
    try:
        unknown = values_of(source) - set(values)
    except TemplateError as error:
        raise ValueError(f"protocol.{name} is not a Jinja template ({error}).") from error
    if unknown:
        raise ValueError(f"protocol.{name} uses {', '.join(sorted(unknown))}; its values are {', '.join(values)}.")
    samples: list[dict[str, Any]] = [_SAMPLES[name]]
    if name == "feedback":
        first, later = {"turn": 1, "reward": None, "outcome": ""}, {"turn": 2, "reward": 0.5}
        left = ({"actions_left": 3}, {"actions_left": None})
        samples = [_SAMPLES[name] | turn | actions for turn in (later, first) for actions in left]
    for sample in samples:
        try:
            render(name, source, sample)
        except RuntimeError as error:
            none = [key for key, value in sample.items() if value is None]
            where = f" where {' and '.join(none)} {'is' if len(none) == 1 else 'are'} none" if none else ""
            raise ValueError(f"{error}{where}.") from error


def thought_span(text: str) -> tuple[int, int] | None:
    """Return where the thought stands in a response, between the first <think> and the first </think> behind it.

    >>> thought_span("<think>so</think><answer>Up</answer>"), thought_span("<answer>Up</answer>")
    ((7, 9), None)
    """
    start = text.find("<think>")
    end = text.find("</think>", start) if start >= 0 else -1
    return (start + len("<think>"), end) if end >= 0 else None


def format_response(thought: str, actions: Sequence[str], protocol: Protocol) -> str:
    """Return a response in the protocol's form."""
    reply = f"<answer>{f' {ACTION_SEP} '.join(actions)}</answer>"
    return f"<think>{thought}</think>{reply}" if protocol.think else reply
