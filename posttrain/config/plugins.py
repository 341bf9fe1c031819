"""How is a function of your own used?  Name it in YAML as `module:function`.

The module is a file of the folder that the command is run in (`my_rewards.py` is the module `my_rewards`) or one of an
installed package. Nothing is imported from a model's folder or a data file. examples/ has one of each, tested.

`algorithm.advantage`: what each sampled token was worth

    def advantage(earned: posttrain.starpo.Earned, algorithm: posttrain.config.AlgorithmSection) -> torch.Tensor

    earned: rewards of episodes and turns, and the group, episode and turn of everything. algorithm: the section of the
    config, whose keys (`gamma`, `advantage_std`, ...) it may read. Returns a finite float tensor (S,), one number for
    each sampled token. There is no critic, so `earned.values_S` is None.

`algorithm.loss_type`: the policy loss of each sampled token

    def loss(tokens: posttrain.starpo.losses.Tokens, settings: posttrain.starpo.losses.Settings)
        -> tuple[torch.Tensor, torch.Tensor]

    tokens: log-probs under the policy (with gradient) and before the update, advantages, ... of a micro-batch, each
    (S,). settings: `epsilon`, `epsilon_high`, ... of the config. Returns the loss of each token, float with gradient,
    and which tokens are clipped, bool (for the figures alone), both (S,). Weights, the importance of tokens, KL and
    entropy are added by `losses.objective`.

`protocol.parser`: the actions that a model's text asks for

    def parser(text: str, protocol: envs.protocol.Protocol, listed: Sequence[str] | None) -> envs.protocol.Parsed

    text: what the model wrote in one turn, any text. listed: the environment's actions as they are spelled; None where
    an action is free text. Returns Parsed(actions, well_formed, invalid), with at most `protocol.max_actions_per_turn`
    actions, each of which is in `listed`. It must not raise. The words that tell a model how to answer stay those of
    the built-in form.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from envs import TextEnv, by_path as paths
from envs.protocol import Parsed, Protocol, format_response
from posttrain.config.shared import ProtocolSection
from posttrain.types import UserError, one_line

PARAMETERS = {  # of a function that a key may name
    "algorithm.advantage": ("earned", "algorithm"),
    "algorithm.loss_type": ("tokens", "settings"),
    "protocol.parser": ("text", "protocol", "listed"),
}


def is_path(name: str) -> bool:
    """Return whether the value of a key names a function, as `module:function`, and not a built-in choice."""
    return ":" in name


@cache
def by_path(path: str, key: str) -> Callable[..., Any]:
    """Return the function that a key of the config names.

    Args:
        path: e.g. "my_module:function".
        key: where it is written, a key of `PARAMETERS`.

    Raises:
        UserError: there is no such module or function, or it cannot be called with these parameters.
    """
    try:
        function = paths.by_path(path)
    except ValueError as problem:
        raise UserError(f"`{key}: {path}` cannot be used: {problem}") from problem.__cause__
    names = PARAMETERS[key]
    call = f"{path.partition(':')[2]}({', '.join(names)})"
    try:
        inspect.signature(function).bind(*names)
    except TypeError:
        has = f"has the parameters {inspect.signature(function)}" if callable(function) else "is not a function"
        raise UserError(
            f"`{key}: {path}` {has}, and it is called as {call}: write a function with {len(names)} parameters, as"
            " the docstring of posttrain/config/plugins.py describes it."
        ) from None
    except ValueError:  # a function of C, whose parameters nobody can ask for
        pass
    return function


def find_functions(cfg: object) -> None:
    """Refuse a function that a config names and that is not there, or that has other parameters.

    Raises:
        UserError: says which.
    """
    for key in PARAMETERS:
        section, _, name = key.partition(".")
        path = getattr(getattr(cfg, section, None), name, None)
        if isinstance(path, str) and is_path(path):
            by_path(path, key)


def call(path: str, key: str, *arguments: object) -> Any:
    """Return what the function that a key of the config names returns for these arguments.

    Raises:
        UserError: there is no such function, or it raised; says in which line of its file.
    """
    function = by_path(path, key)
    try:
        return function(*arguments)
    except Exception as error:
        if "OutOfMemory" in type(error).__name__:  # torch's own, which says more than this would
            raise
        here, *inside = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in inside if frame.filename == inside[0].filename]  # not what it calls of a library
        place = own[-1] if own else here  # a function of C has no frame
        raise UserError(
            f"`{key}: {path}` raised {one_line(error)} ({Path(place.filename).name}, line {place.lineno})."
        ) from error


def check_parser(section: ProtocolSection, env: TextEnv) -> None:
    """Refuse a `protocol.parser` that cannot be used in an environment, by texts that a model may write.

    Raises:
        UserError: there is no such function, or it raises or does not return actions; says on which text.
    """
    if section.parser is None:
        return
    by_path(section.parser, "protocol.parser")
    protocol, listed = Protocol.of(env, **section.arguments()), env.actions
    action = listed[0] if listed else "1"
    for text in ("", "Up", format_response("why", [action], protocol), "<answer>" * 3, "</answer><answer>"):
        try:
            parsed = protocol.read(text, listed)
        except Exception as error:
            problem = f"raised {one_line(error.__cause__ or error)}"
        else:
            problem = "" if isinstance(parsed, Parsed) else f"returned {type(parsed).__name__}"
            if not problem and listed is not None and (unknown := set(parsed.actions) - set(listed)):
                problem = f"returned the action {unknown.pop()!r}, which the environment does not have,"
            if not problem and len(parsed.actions) > protocol.max_actions_per_turn:
                problem = f"returned {len(parsed.actions)} actions, more than `protocol.max_actions_per_turn`"
        if problem:
            raise UserError(
                f"`protocol.parser: {section.parser}` {problem} for the text {text!r}: return Parsed(actions,"
                " well_formed, invalid) of envs.protocol for any text; posttrain/config/plugins.py describes it."
            )
