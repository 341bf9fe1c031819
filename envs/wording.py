"""Which words does a model read?  The system message, and a user message for each turn, in one of two styles.

plain     sentences, for language models: Jinja templates, which a run may replace (protocol.system, example, feedback)
compact   few tokens, for models of a few hundred thousand parameters that learn the words from demonstrations
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from envs.base import TextEnv
from envs.protocol import ACTION_SEP, Past, Protocol, format_response, render, values_of
from envs.sentences import counted, listed, upper_first

SYSTEM = """\
{{ rules }}

{{ limits }} {{ format }}

For example:
{{ example }}"""
FEEDBACK = """\
{% if outcome %}{{ outcome }}

{% endif %}{{ observation }}

{% if left %}{{ left }} {% endif %}{{ question }}{% if form %} {{ form }}{% endif %}"""
MANY = 8  # actions that are not all named again
LONGEST_NAME = 40  # characters of an unknown action that are repeated to the model


class View(NamedTuple):
    """What a user message tells: View("You are at row 0 ...", turn=2, turns_left=7, actions_left=None, past=None).

    turn: the coming one, from 1. actions_left: None where the limit of turns comes first. past: the turn before, None
    in the first message.
    """

    observation: str
    turn: int
    turns_left: int
    actions_left: int | None
    past: Past | None


def system_text(env: TextEnv, protocol: Protocol) -> str:
    """Return rules, limits and answer format: the same for every episode of an environment under a protocol."""
    if protocol.style == "compact":
        return _compact_system(env, protocol)
    per_turn = actions_per_turn(env, protocol)
    state = env.example_state
    state += "" if not state else "\n" if state.endswith("?") else ":\n"
    values: dict[str, Any] = dict(
        rules=env.rules(),
        limits=_limits(env, protocol),
        format=answer_format(env, protocol),
        example=state + example_response(env, protocol) if protocol.example is None else protocol.example,
        actions=list(env.actions or ()),
        max_turns=protocol.max_turns,
        max_actions=min(protocol.max_actions, protocol.max_turns * per_turn),
        max_actions_per_turn=per_turn,
    )
    return render("system", SYSTEM if protocol.system is None else protocol.system, values)


def user_text(env: TextEnv, protocol: Protocol, view: View) -> str:
    """Return the user message before a turn: what came of the turn before it, the state, and what is left."""
    if protocol.style == "compact":
        return _compact_user(view)
    past = view.past
    left = counted(view.turns_left, "turn")
    if view.actions_left is not None:
        left += f" and {counted(view.actions_left, 'action')}"
    values: dict[str, Any] = dict(
        outcome="" if past is None else outcome(env, protocol, past),
        reward=None if past is None else round(past.reward, 6),
        valid=past is None or past.valid,
        observation=view.observation,
        left=f"You have {left} left." if protocol.max_turns > 1 else "",
        question=_question(env),
        form="" if env.actions is not None else f"Answer in the form {answer_form(env, protocol)}.",
        turn=view.turn,
        turns_left=view.turns_left,
        actions_left=view.actions_left,
        actions=list(env.actions or ()),
        think=protocol.think,
    )
    return render("feedback", FEEDBACK if protocol.feedback is None else protocol.feedback, values)


def summary_text(env: TextEnv, protocol: Protocol, past: Sequence[Past], first: int, view: View) -> str:
    """Return one user message that tells earlier turns in brief, the first of them number `first`, then the state."""
    compact, lines = protocol.style == "compact", []
    for number, turn in enumerate(past, first):
        actions = f" {ACTION_SEP} ".join(turn.actions)
        if compact:
            lines += [f"Turn {number}", turn.observation]
            lines += [f"Action {actions}"] if actions else []
            lines += [] if turn.valid else ["Invalid answer"]
            lines.append(f"Reward {round(turn.reward, 6):g}")
        else:
            said = [f"Your answer was: {actions}."] if actions else []
            lines += [f"Turn {number}:", turn.observation, " ".join([*said, outcome(env, protocol, turn)]).strip(), ""]
    if past:
        lines.append(f"Turn {view.turn}{'' if compact else ':'}")
    return "\n".join([*lines, user_text(env, protocol, view._replace(past=None))])


def actions_per_turn(env: TextEnv, protocol: Protocol) -> int:
    """Return how many actions a turn may hold; free text is one."""
    return 1 if env.actions is None else protocol.max_actions_per_turn


# -- plain -------------------------------------------------------------------------------------------------------------


def answer_format(env: TextEnv, protocol: Protocol) -> str:
    """Return the sentences that say how to answer."""
    per_turn = actions_per_turn(env, protocol)
    between = "between <answer> and </answer>"
    if per_turn > 1:
        ask = (
            f"write the actions that you choose {between}, in their order and separated by {ACTION_SEP},"
            f" at most {per_turn} of them"
        )
    elif env.actions is not None:
        ask = f"write the one {env.action_word} that you choose {between}"
    else:
        ask = f"write your {env.action_word} {between}"
    when = "In each turn, " if protocol.max_turns > 1 else ""
    if not protocol.think:
        return upper_first(f"{when}{ask}.")
    first = f"{when or 'First, '}{'first ' if when else ''}think step by step and write your reasoning"
    return f"{first} between <think> and </think>. Then {ask}."


def answer_form(env: TextEnv, protocol: Protocol) -> str:
    """Return the bare form of an answer.

    Where the answer is free text, each message before a turn ends with it: an instruct model of half a billion
    parameters left out its thought. Where it is from a list, such a model wrote more names that are not in the list.
    """
    return format_response("...", ["..."] * min(2, actions_per_turn(env, protocol)), protocol)


def example_response(env: TextEnv, protocol: Protocol) -> str:
    """Return an answer in the right form, as an environment gives an example."""
    thought, actions = env.example()
    return format_response(thought, actions[: actions_per_turn(env, protocol)], protocol)


def outcome(env: TextEnv, protocol: Protocol, past: Past) -> str:
    """Return what came of a turn, in sentences; empty where there is nothing to say."""
    said = []
    if not past.well_formed:
        # not all of the instructions again: small models that read these repeat their answer
        said.append("That was not a valid answer.")
        told = protocol.feedback is None or "form" in values_of(protocol.feedback)  # at the end of the message
        said += [] if told and env.actions is None else [f"Use the form {answer_form(env, protocol)}."]
    elif past.invalid:
        names = ", ".join(f'"{" ".join(name.split())[:LONGEST_NAME]}"' for name in past.invalid[:3])
        said.append(f"{names} is not one of the actions. The actions are {listed(env.actions or ())}.")
    elif not past.valid:
        said.append(f"That was not a valid {env.action_word}.")
    if past.actions and past.valid and not past.effective:
        others = [action for action in env.actions or () if action not in past.actions]
        said.append(
            f"{listed(past.actions)} changed nothing." if env.actions else f"Your {env.action_word} changed nothing."
        )
        if 0 < len(others) < MANY:
            said.append(f"Choose another {env.action_word}: {listed(others, 'or')}.")
    if past.reward:
        said.append(f"Your reward was {round(past.reward, 6):g}.")
    return " ".join(said)


def _limits(env: TextEnv, protocol: Protocol) -> str:
    if protocol.max_turns == 1:
        return "You answer once."
    most = f"You have at most {counted(protocol.max_turns, 'turn')}"
    if protocol.max_actions < protocol.max_turns * actions_per_turn(env, protocol):
        most += f" and {counted(protocol.max_actions, 'action')} in all"
    return f"{most}."


def _question(env: TextEnv) -> str:
    return "What do you do?" if env.action_word == "action" else f"What is your {env.action_word}?"


# -- compact -----------------------------------------------------------------------------------------------------------


def _compact_system(env: TextEnv, protocol: Protocol) -> str:
    each = " each" if protocol.max_turns > 1 else ""
    turns = f"At most {protocol.max_turns} turn{'s' if each else ''}"
    limits, example, per_turn = f"{turns}, one action{each}", ["Action"], actions_per_turn(env, protocol)
    if per_turn > 1:
        limits, example = f"{turns}, up to {per_turn} actions{each}", ["Action", "Action"]
    if protocol.max_actions < protocol.max_turns * per_turn:
        limits += f", {protocol.max_actions} actions in all"
    return f"{env.rules()} {limits}. Reply: {format_response('reasoning', example, protocol)}"


def _compact_user(view: View) -> str:
    before = [] if view.past is None else [f"Reward {round(view.past.reward, 6):g}"]
    if view.past is not None and not view.past.valid:
        before.append("Invalid answer")
    left = f"Turns left {view.turns_left}"
    if view.actions_left is not None:
        left += f" Actions left {view.actions_left}"
    return "\n".join([*before, view.observation, left])
