"""What is an episode that is being played?  Its contexts, the turns sampled in them, and what the environment answered.

A context is one of three kinds:

    full          the whole conversation, one segment; if the next prompt and its answer do not fit, the older half of
                  the turns is dropped and a new segment begins
    last_k        system, then the last k turns as a conversation, the next one included: a segment for each turn
    single_turn   system, then one user message that summarizes the last k - 1 turns: a segment for each turn; last_k
                  where the environment writes its messages itself, to which nothing is added
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

from envs.episode import Episode
from envs.process_state import ProcessState, keep_process_state
from envs.protocol import Turn
from posttrain.models import Chat, Message, Said
from posttrain.types import Completion, Segment, Trajectory, UserError, one_line

RAISED = (Exception, SystemExit)  # errors of an environment that end its own episode alone
SIDE_BY_SIDE = 16  # slow environments that are stepped in parallel
EPISODE_SECONDS = 600.0  # that a slow environment may take for all turns of an episode
Answer = tuple[str, Turn]  # the state before the environment's step, and the result of the step
LARGEST_REWARD = 1e100  # of an episode; squares of larger ones overflow


@dataclass(frozen=True)
class Context:
    """How much of its episode a turn is sampled after: Context("last_k", turns=3, max_tokens=1024).

    kind, and turns, which is k: see the top of this file. max_tokens: of prompt and answer together; None: no limit.
    """

    kind: Literal["full", "last_k", "single_turn"] = "full"
    turns: int | None = None
    max_tokens: int | None = None

    def prompt_tokens(self, answer_tokens: int) -> float:
        """Return how long a prompt may be before an answer of so many tokens."""
        return math.inf if self.max_tokens is None else self.max_tokens - answer_tokens


class Game:
    """An episode that is being played, and its trajectory so far.

    The loop: `look` (choose the context of the next turn), sample after `segment.ids`, `take_turn`. answer_tokens: the
    most that a turn may have.
    """

    def __init__(self, chat: Chat, episode: Episode, context: Context, answer_tokens: int) -> None:
        self.chat, self.episode = chat, episode
        own = episode.own_words and context.kind == "single_turn"
        self.context = replace(context, kind="last_k") if own else context
        self.prompt_tokens = context.prompt_tokens(answer_tokens)
        self.too_long = False
        self.seconds_left = EPISODE_SECONDS
        self.completions: list[Completion] = []
        self.next_prompt: list[int] = []  # the ids between the last turn and the next one
        self.said = Said("", [])  # the last turn, as far as it calls tools
        self.tools: dict[str, Any] = {}  # of the chat's methods
        if episode.env.tools:
            self.tools["tools"] = [tool.schema for tool in episode.env.tools]
            chat.check_tools(self.tools["tools"])
            if context.kind != "full":
                raise UserError(
                    f"{episode.env.title} has tools, which need the whole conversation: write context: full."
                )
        episode.env.late = episode.env.can_be_late
        self.opening = chat.content_ids(chat.lead + episode.protocol.opening) if episode.protocol.opening else []
        self.trajectory = Trajectory(
            env=episode.env.title,
            level_key=episode.level_key,
            level_seed=episode.seed,
            noise_seed=episode.noise_seed,
        )

    @property
    def segment(self) -> Segment:
        return self.trajectory.segments[-1]

    def prompt(self, first: int) -> list[int]:
        """Return the ids after which the next turn is sampled if turn `first` is the oldest in context.

        The user message of that turn may begin with the reward of the turn before, which is not in context.
        """
        *head, question = self.episode.messages[: self.episode.first_messages]
        if self.context.kind == "single_turn":
            summary = {"role": "user", "content": self.episode.summary(first)}
            return self.chat.prompt([*head, summary], **self.tools) + self.opening
        later = self.episode.messages[self.episode.first_messages :]
        users = [question, *(message for message in later if message["role"] == "user")]
        ids = self.chat.prompt([*head, users[first]], **self.tools) + self.opening
        for completion, user in zip(self.completions[first:], users[first + 1 :], strict=True):
            ids += completion.ids + self.reply(user["content"], completion)
        return ids

    def reply(self, said: str | Sequence[Message], completion: Completion) -> list[int]:
        """Return the ids between a sampled turn and the next one: a user message, or what tools answered."""
        return self.chat.extend(said, finished=completion.finished, **self.tools) + self.opening

    def look(self) -> bool:
        """Make `segment` the context of the next turn, at most `prompt_tokens` long; return False if nothing fits."""
        segments, turn = self.trajectory.segments, len(self.completions)
        oldest = start = segments[-1].first_turn if segments else 0
        if self.context.kind == "full":
            if segments and len(self.segment.ids) + len(self.next_prompt) <= self.prompt_tokens:
                self.segment.read(self.next_prompt)
                return True
            if segments and self.tools:  # what tools answered cannot be left out
                self.trajectory.truncated = self.trajectory.out_of_context = True
                return False
            start += (turn - oldest + 1) // 2  # with one turn dropped at a time, every later turn would begin a segment
        else:
            assert self.context.turns is not None
            oldest = start = max(oldest, turn - self.context.turns + 1)
        for first in range(start, turn + 1):
            ids = self.prompt(first)
            if len(ids) <= self.prompt_tokens:
                segments.append(Segment(ids, first_turn=first))
                self.trajectory.dropped_turns += first - oldest
                return True
        self.trajectory.truncated = self.trajectory.out_of_context = True
        return False

    def begin(self) -> bool:
        """Do the first `look`; return False and record a crash if its prompt does not fit or an error is raised."""
        try:
            if self.look():
                return True
            length = len(self.prompt(0))
            self.too_long, self.trajectory.truncated, self.trajectory.out_of_context = True, False, False
            self.trajectory.crashed = f"The first prompt of {self.episode.env.title} takes {length} tokens"
        except RAISED as error:  # an environment may return anything, even an observation that is not text
            self.trajectory.crashed = one_line(error)
        self.finish()
        return False

    def text(self, written: Sequence[int]) -> str:
        """Return the response that these sampled ids make, with the forced tag before them."""
        return self.chat.decode([*self.opening, *written]).removeprefix(self.chat.lead)

    def take_turn(self, completion: Completion) -> bool:
        """Record a sampled turn and let the environment answer; return whether the episode goes on."""
        return self.record_answer(completion, self.answer(self.record(completion)))

    def record(self, completion: Completion) -> str:
        """Record a sampled turn and return its text."""
        trajectory = self.trajectory
        self.segment.write(trajectory.turns, completion, len(self.opening))
        self.completions.append(completion)
        trajectory.versions.append(completion.version)
        trajectory.unfinished_turns += not completion.finished
        text = self.text(completion.ids[:-1] if completion.finished else completion.ids)
        if self.tools:
            self.said = self.chat.read_calls(text)
        return text

    @property
    def slow(self) -> bool:
        """Return whether the answer to the recorded turn may take a while: it runs in a thread."""
        return self.episode.env.slow or bool(self.said.calls)

    def answer(self, text: str) -> Answer | BaseException:
        """Return the environment's answer to a text, or what it raised; it may run in a thread."""
        began = time.monotonic()
        try:
            with keep_process_state(self.trajectory.env) if not self.slow else nullcontext():
                state = self.episode.state_key()
                if self.said.calls:
                    return state, self.episode.call(text, *self.said)
                return state, self.episode.step(text)
        except RAISED as error:
            return error
        finally:
            self.seconds_left -= time.monotonic() - began

    def record_answer(self, completion: Completion, answer: Answer | BaseException) -> bool:
        """Record the environment's answer to a turn; return whether the episode goes on."""
        trajectory = self.trajectory
        key, reward, penalty, over = "", 0.0, 0.0, True
        try:
            if isinstance(answer, BaseException):
                raise answer
            state, turn = answer
            hash(state)
            if not abs(sum(trajectory.turn_rewards) + turn.reward) < LARGEST_REWARD:
                raise ValueError(f"the reward is {turn.reward}")
            if not turn.done:
                self.next_prompt = self.reply(turn.results or turn.user or "", completion)
            key, reward, penalty, over = state, turn.reward, turn.penalty, turn.done
        except RAISED as error:  # it may raise or return anything; the episode ends, counted and left out of training
            trajectory.crashed = one_line(error)
        trajectory.state_keys.append(key)
        trajectory.turn_rewards.append(reward)
        trajectory.turn_penalties.append(penalty)
        return not over

    def finish(self) -> None:
        """Record how the episode ended."""
        trajectory, episode = self.trajectory, self.episode
        trajectory.success = episode.success and not trajectory.crashed
        trajectory.terminated = episode.terminated
        trajectory.truncated = trajectory.truncated or episode.truncated
        trajectory.invalid_turns = episode.invalid_turns
        trajectory.malformed_turns = episode.malformed_turns
        trajectory.actions = list(episode.actions)
        trajectory.effective_actions = episode.effective_actions
        trajectory.failure = episode.failure
        trajectory.messages = list(episode.messages)
        if self.tools:
            trajectory.calls, trajectory.failed_calls = episode.calls, episode.failed_calls
        if (
            episode.own_words and self.completions and not self.completions[-1].finished
        ):  # an answer that was cut off did not end
            trajectory.terminated, trajectory.truncated = False, True
        if episode.env.late and self.completions and not trajectory.crashed:
            trajectory.unscored = episode.env


def take_turns(games: Sequence[Game], completions: Sequence[Completion]) -> list[bool]:
    """Return `Game.take_turn` of each; tools and slow environments (a sandbox, a server) answer in parallel.

    A slow environment that takes longer than the time left of its episode has crashed: its answer is not waited for.
    """
    texts = [game.record(completion) for game, completion in zip(games, completions, strict=True)]
    slow = [i for i, game in enumerate(games) if game.slow]
    before = ProcessState.now()  # threads in parallel cannot know which of them made a change
    answers: dict[int, Answer | BaseException] = {}
    began: dict[int, float] = {}
    left = {i: games[i].seconds_left for i in slow}
    places = threading.Semaphore(SIDE_BY_SIDE)

    def wait(i: int) -> None:
        with places:
            began[i] = time.monotonic()
            answers[i] = games[i].answer(texts[i])

    threads = {i: threading.Thread(target=wait, args=(i,), daemon=True) for i in slow}
    for thread in threads.values():
        thread.start()
    for i, game in enumerate(games):
        if i not in threads:
            answers[i] = game.answer(texts[i])
    late: dict[int, BaseException] = {}
    while waiting := [i for i in slow if i not in answers and i not in late]:
        threads[waiting[0]].join(0.05)
        for i in waiting:
            if i in began and i not in answers and time.monotonic() - began[i] > left[i]:
                late[i] = TimeoutError(f"{games[i].trajectory.env} took more than {EPISODE_SECONDS} s of an episode")
                places.release()  # in place of its thread, which may never end
    if slow and ProcessState.now() != before:
        before.put_back(games[slow[0]].trajectory.env)
    return [game.record_answer(completions[i], late[i] if i in late else answers[i]) for i, game in enumerate(games)]
