"""Can the model answer your prompts?  Rows of a file or of the Hub, and rewards by functions that score answers.

A reward function has the signature of TRL's GRPOTrainer and is called for many answers at once. The model answers in
its own way: no rules and no answer format are added to a prompt.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envs.base import DRAWS, SPLITS, LateReward, TextEnv, known
from envs.hub_sets import EMBEDDED
from envs.prompts.agents import OUTPUT, AgentProgram, agent_of
from envs.prompts.calls import Answered, TrainerState, call_rewards
from envs.prompts.columns import columns_for, columns_read_by, reply_of
from envs.prompts.logged import Logged
from envs.prompts.rewards import own_reward_of, reward_of, with_own_titles
from envs.prompts.rows import EVERY_COLUMN, Conversation, Rows, Table, conversation_of, table_of, without_prompt
from envs.protocol import Message
from envs.sentences import listed
from envs.tools import environment_of, first_environment, methods_of, text_in
from envs.web import NoAnswer

__all__ = ["AgentProgram", "Prompts", "TrainerState"]

ON_ERROR = ("skip", "stop")


class PromptLevel(NamedTuple):
    """A row, by its number: PromptLevel(12, key="What is 2 + 3?", split="train")."""

    number: int
    key: str
    split: str


class Prompts(TextEnv):
    """Answer prompts of your own, scored by reward functions of your own.

    ## Action space
    Free text: the whole answer, as the model writes it.

    ## Observation space
    Text: the prompt of a row; in later turns the next user message.

    ## Rewards
    The weighted sum of `rewards`, at the last turn. A function that raises, hangs, or returns NaN or a wrong number of
    values gives no reward, nor do functions that all return None: the episode has crashed, or the run stops
    (`on_error`).

    ## Starting state
    A row of `path`.

    ## Episode end
    Terminated by the answer to the last user message of the row, or where `reply` returns None. Success: the first of
    `rewards` gives at least `success`, else `failure` "wrong answer", or "not judged" where it gives None. Truncation
    is left to the protocol, after `max_turns`: the most user messages of a row, or `turns`.

    ## Arguments
    - `path="embedded"`: problems that are generated; or a data set of the Hub, a file or a folder.
    - `config=None`: the configuration of a data set of the Hub, such as "main".
    - `rows=None`: rows that are read at most, of each split.
    - `prompt=None`: the column, a text or messages; None takes the first of prompt, messages (whose every user message
      is answered), question, problem, instruction, query and input; with `environment` or `agent` of the first two.
    - `template=None`: a Jinja template that makes the prompt of the row's columns: "{{ question }} Think first."
    - `system=None`: a system message before it; None takes the columns system and system_prompt, unless `template` is
      set.
    - `rewards=None`: names of rewards.py, paths `module:function`, or mappings with `name`, `weight` and options; None
      takes math, or the `get_reward` of `environment` alone.
    - `environment=None`: `module:name` of a class or function that makes an environment, as TRL's
      `environment_factory`. Each episode has its own: what reset(**row) returns is added to the prompt's last message,
      its public methods are tools, `get_reward` is one more reward, and reward functions are given `environments`.
    - `reply=None`: `module:function` that writes the next user message: reply(messages, **columns) -> str or None; it
      is given the columns that it has parameters for.
    - `turns=None`: answers in an episode with `reply`; 4 when None.
    - `agent=None`: a program that answers instead of the model alone, and talks to it by OpenAI's interface: the
      command as a list, whose parts may be templates over the columns, or a mapping with `command` and limits; see
      agents.py. `rewards` are then given the columns `output` (what it printed) and `exit_code` as well.
    - `success=1.0`: what the first reward must give at least.
    - `on_error="skip"`: or "stop".
    - `timeout=60.0`: seconds that a reward function of yours may take for all answers of a rollout; a built-in one has
      limits for each answer.
    - `render_mode=None`: or "ansi".

    Splits train, validation and test of a data set are kept; one that is missing is held out of train by hash of the
    prompt (not its system message), or of what fills `template`. Rows with one prompt are one level. The columns of
    `environment`'s reset count in both, all with `agent`; these need no prompt. `info["rewards"]`: of each function.
    """

    name = "prompts"
    actions = None
    action_word = "answer"
    can_be_late = True

    def __init__(
        self,
        path: str = EMBEDDED,
        config: str | None = None,
        rows: int | None = None,
        prompt: str | None = None,
        template: str | None = None,
        system: str | None = None,
        rewards: Sequence[str | Mapping[str, Any]] | None = None,
        environment: str | None = None,
        reply: str | None = None,
        turns: int | None = None,
        agent: str | Sequence[Any] | Mapping[str, Any] | None = None,
        success: float = 1.0,
        on_error: str = "skip",
        timeout: float = 60.0,
        render_mode: str | None = None,
    ):
        self.make_environment = None if environment is None else environment_of(environment)
        self.environment: Any = None
        if self.make_environment and environment:
            self.environment = first_environment(self.make_environment, environment)
        rewarding = hasattr(self.environment, "get_reward")
        rewards = ([] if rewarding else ["math"]) if rewards is None else rewards
        if not (rewards or rewarding) or isinstance(rewards, str):
            raise ValueError("prompts needs rewards, a list: rewards: [math], or rewards: [my_module:my_function].")
        if timeout <= 0 or (rows or 1) < 1 or (turns or 1) < 1:
            raise ValueError(
                f"prompts needs timeout > 0, rows >= 1 and turns >= 1, not {timeout:g}, {rows} and {turns}."
            )
        if turns is not None and reply is None:
            raise ValueError("prompts: turns counts the answers of an episode with reply: set reply, or leave it out.")
        if agent is not None and (environment or reply):
            raise ValueError(
                "prompts: agent is a program that talks to the model by itself: leave out environment and reply."
            )
        super().__init__(render_mode)
        self.trainer_state = TrainerState(1, 1)  # outside of training that of its end
        self.completion_ids: list[int] | None = None  # the tokens after the prompt, where a model of this process wrote
        self.on_error, self.timeout, self.success_at = known("on_error", on_error, ON_ERROR), timeout, success
        reads = EVERY_COLUMN if agent is not None else columns_read_by(self.environment.reset) if environment else None
        self.config = Rows(path, config, rows, prompt, template, system, reads)
        self.table: Table = table_of(self.config)  # what cannot be read is said at once
        train, validation, test = (len(self.table.numbers[split]) for split in SPLITS)
        self.more_levels = (
            f"Of its rows {train:,} are for training, {validation:,} for validation and {test:,} for the test."
            f" {self._remedy()}"
        )
        self.reply = None if reply is None else reply_of(reply, self.table.columns)
        self.reset_columns: tuple[str, ...] = ()
        self.begun = False  # the environment that was made here is that of the first episode
        if environment:
            self.reset_columns = columns_for(self.environment.reset, f"reset of {environment}", self.table.columns)
        self.methods = methods_of(self.environment) if environment else []
        self.tools = list(self.methods)
        self.rewards_key = json.dumps([environment, *rewards], default=_written, sort_keys=True)
        self.columns = [*self.table.columns, *(["environments"] if environment else []), *(OUTPUT if agent else ())]
        given = [reward_of(each, self.columns) for each in rewards]
        self.rewards = with_own_titles([*given, *([own_reward_of(self.environment)] if rewarding else [])])
        self.agent: AgentProgram | None = None if agent is None else agent_of(agent, given)
        if self.agent and (taken := [name for name in OUTPUT if name in self.table.columns]):
            raise ValueError(
                f"prompts: the rows of path={path} have a column {taken[0]}, which rewards are given of the program:"
                " rename that column."
            )
        if self.agent:
            self.agent.words(self.table.rows[0])  # a template that cannot be filled is said at once
        self.max_turns = (turns or 4) if self.reply else self.agent.turns if self.agent else self.table.most_turns

    def _remedy(self) -> str:
        """Return what to do where a split has too few rows, or none."""
        if not self.table.alike and self.config.rows is not None and self.config.rows <= len(self.table.rows):
            return f"Raise rows (now {self.config.rows:,})."
        if not self.table.alike:
            words = {"validation": "validation", "test": "the test"}
            places = [f"to its {split} split" for split in words if split in self.table.own]
            held_out = [f"for {of}" for split, of in words.items() if split not in self.table.own]
            if held_out:
                places.append(f"for training: a tenth of them is {' and a tenth '.join(held_out)}")
            elif "train" not in self.table.own:
                places.append("for training")
            return f"Add rows {listed(places, 'or')}."
        read = " and the same values of what reset reads" if self.make_environment else " and the same other columns"
        return (
            f"The {self.table.alike:,} rows that are to be divided all have the same prompt"
            f"{read if self.config.reads is not None else ''}, so they are in one split: write rows that differ, or a"
            f" file for each split. {without_prompt(self.table.rows, self.config)}".rstrip()
        )

    @classmethod
    def draw(cls, config: Rows, rng: np.random.Generator) -> Iterator[PromptLevel]:
        """Yield rows of all splits, and at last one of each: of a small split that stands beside a large one."""
        table = table_of(config)
        drawn: list[int] = rng.integers(len(table.rows), size=DRAWS - len(SPLITS)).tolist()
        of_each = [numbers[int(rng.integers(len(numbers)))] for numbers in table.numbers.values() if numbers]
        for number in (*drawn, *of_each):
            yield PromptLevel(number, table.keys[number], table.splits[number])

    @classmethod
    def key_of(cls, level: PromptLevel) -> str:
        return level.key

    @classmethod
    def split_of(cls, level: PromptLevel) -> str:
        return level.split

    def begin(self, level: PromptLevel) -> None:
        self.level, self.completion_ids = level, None
        # Functions of the user may change what they are given: an episode has a row of its own, as in TRL.
        self.row: dict[str, Any] = copy.deepcopy(self.table.rows[level.number])
        self.conversation: Conversation = conversation_of(self.row, self.config)
        if self.make_environment:
            self._begin_environment()
        self.said: list[Message] = list(self.conversation.prompt)
        self.waiting = list(self.conversation.later)
        self.over = self.succeeded = False
        self.lost_by = ""

    def _begin_environment(self) -> None:
        """Begin the episode of a new environment in TRL's style; its methods take the place of the former one's."""
        assert self.make_environment is not None
        if self.begun:
            others = [tool for tool in self.tools if tool not in self.methods]
            self.environment = self.make_environment()
            self.methods = methods_of(self.environment)
            self.tools = [*self.methods, *others]
        self.begun = True
        opening = self.environment.reset(**{name: self.row[name] for name in self.reset_columns})
        said = "" if opening is None else text_in(opening)
        if said is None:
            raise ValueError(f"reset returned {opening!r:.80}; it returns a text for the prompt, text parts, or None")
        *before, last = self.conversation.prompt
        prompt = [*before, last | {"content": last["content"] + said}]
        self.conversation = self.conversation._replace(prompt=prompt, given=prompt)

    def messages(self) -> list[Message]:
        return list(self.conversation.prompt)

    def observe(self) -> str:
        """Return the prompt or the next user message; after the last answer the one that it answers."""
        return next(message["content"] for message in reversed(self.said) if message["role"] == "user")

    def rules(self) -> str:
        return ""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.agent:
            raise NoAnswer("prompts: with `agent` a program plays, in posttrain rl and posttrain eval alone.")
        played, gained, parts = not self.over, 0.0, {}
        if played:
            self.said.append({"role": "assistant", "content": action})
            following = self._next_message()
            if following is None:
                self.over = True
            else:
                self.said.append({"role": "user", "content": following})
        if played and self.over and not self.late:
            (reward,) = self.score([self])
            if isinstance(reward, Exception):
                raise reward
            gained, parts, self.succeeded = reward.reward, reward.parts, reward.success
        info = {
            "success": self.succeeded,
            "action_is_valid": True,
            "action_is_effective": played,
            "failure": "" if self.late else self.lost_by,
            "rewards": parts,
        }
        return self.observe(), gained, self.over, False, info

    def played(self, prompt: Sequence[Message], said: Sequence[Message], output: str, exit_code: int | None) -> None:
        """Take what a program and the model said, for the reward functions.

        Args:
            prompt: the messages before the first answer that was sampled in this context.
            said: the answers, and what the program wrote between them.
            output: the end of what it printed.
            exit_code: None where it was stopped.
        """
        self.conversation = Conversation(list(prompt), [], list(prompt))
        self.said, self.over = [*prompt, *said], True
        self.row = self.row | {"output": output, "exit_code": exit_code}

    def _next_message(self) -> str | None:
        if self.reply is None:
            return self.waiting.pop(0) if self.waiting else None
        if sum(message["role"] == "assistant" for message in self.answered.said) >= self.max_turns:
            return None
        return self.reply.to(list(self.said), self.row)

    def heard(self, messages: Sequence[Message]) -> None:
        self.said += messages

    @property
    def answered(self) -> Answered:
        """What its reward functions are given: with tools always messages, as TRL does."""
        prompt = self.conversation.prompt
        given = list(prompt) if self.tools else self.conversation.given
        row = self.row if self.environment is None else self.row | {"environments": self.environment}
        said = self.said[len(prompt) :]
        ids = self.completion_ids
        if ids is None:
            ids = list("".join(message["content"] for message in said).encode("utf-8", "replace"))
        return Answered(given, said, row, self.level.number, ids)

    @classmethod
    def score(cls, envs: Sequence[TextEnv]) -> list[LateReward | Exception]:
        """Return the rewards of episodes that are over; an exception for one whose functions gave none."""
        scored: dict[int, LateReward | Exception] = {}
        groups: dict[Any, list[Prompts]] = {}
        for env in envs:
            assert isinstance(env, Prompts)
            kind = (env.config, env.rewards_key, env.timeout, env.on_error, env.trainer_state)
            groups.setdefault(kind, []).append(env)
        for (_, _, timeout, on_error, state), members in groups.items():
            rewards, answered = members[0].rewards, [env.answered for env in members]
            logged = Logged(len(members))
            found = call_rewards(rewards, answered, timeout, on_error == "stop", state, logged)
            metrics = logged.metrics()
            for place, (env, parts) in enumerate(zip(members, found, strict=True)):
                if isinstance(parts, Exception):
                    scored[id(env)] = parts
                    continue
                total = sum(reward.weight * parts.get(reward.title, 0.0) for reward in rewards)
                first = parts.get(rewards[0].title)
                env.succeeded = first is not None and first >= env.success_at
                env.lost_by = "" if env.succeeded else "wrong answer" if first is not None else "not judged"
                scored[id(env)] = LateReward(total, env.succeeded, parts, env.lost_by, metrics, logged.extra(place))
        return [scored[id(env)] for env in envs]

    def state_key(self) -> str:
        said = (message for message in self.said if message["role"] != "tool" and "tool_calls" not in message)
        return "\n".join(f"{message['role']}: {message['content']}" for message in said)


def _written(option: Any) -> Any:
    """Return what JSON has no form for, such as a date of YAML, as a part of a key."""
    return dict(option) if isinstance(option, Mapping) else repr(option)
