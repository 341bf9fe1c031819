"""How does a model live through episodes?  Environments speak text, models speak tokens; here they take turns.

Token in, token out: what was sampled stands in every later context as the ids that were sampled; nothing the model
wrote is ever tokenised again. A turn is trained under exactly the context it was sampled under:

    full          the whole conversation grows, one segment; where the next prompt and its answer would not fit, the
                  older half of the turns leaves and a new segment begins
    last_k        system, then the last k turns as a conversation, the coming one included: a segment a turn
    single_turn   system, then one user message that tells the last k - 1 turns in brief: a segment a turn
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedModel

import envs
from envs import TextEnv
from envs.episode import Episode
from envs.process_state import ProcessState, keep_process_state
from envs.protocol import Protocol, Turn, thought_span
from posttrain.config import EnvSection, ProtocolSection, StarPORun
from posttrain.models import Chat
from posttrain.rollout.engine import open_engine, open_servers
from posttrain.rollout.engines.base import Sampler, TurnRequest
from posttrain.rollout.engines.vllm_server import Policy
from posttrain.rollout.late_rewards import score_late
from posttrain.types import Completion, SamplingParams, Segment, Trajectory, UserError, derive_seed, one_line

RAISED = (Exception, SystemExit)  # what an environment can do that ends its own episode alone
SIDE_BY_SIDE = 16  # slow environments that are stepped at the same time
EPISODE_SECONDS = 600.0  # that a slow environment may take of an episode, over all of its turns
Answer = tuple[str, Turn]  # the state that a turn was answered in, and what came of it
LARGEST_REWARD = 1e100  # of an episode; squares of more are no numbers


@dataclass(frozen=True)
class Context:
    """What of its episode a turn is sampled under: Context("last_k", turns=3, max_tokens=1024).

    kind and turns, which is k: see the top of this file. max_tokens: of the prompt and the answer; None for no limit.
    """

    kind: Literal["full", "last_k", "single_turn"] = "full"
    turns: int | None = None
    max_tokens: int | None = None

    def prompt_tokens(self, answer_tokens: int) -> float:
        """The most that a prompt may have before an answer of so many tokens."""
        return math.inf if self.max_tokens is None else self.max_tokens - answer_tokens


FULL = Context()


def open_sampler(
    model: PreTrainedModel,
    chat: Chat,
    engine: str = "auto",
    max_context: int | None = None,
    vllm_memory: float = 0.3,
    compiled: bool = False,
) -> Sampler:
    """An engine for this model that stops where this chat's turns end."""
    return open_engine(model, [chat.stop_id], chat.pad_id, engine, max_context, vllm_memory, compiled)


def sampler_of(cfg: StarPORun, model: PreTrainedModel, chat: Chat) -> Sampler:
    """The engine of a run of phase 3: here, or on the servers that its config names."""
    wanted = cfg.rollout
    if not wanted.servers:
        memory = wanted.vllm_gpu_memory_utilization
        return open_sampler(model, chat, wanted.engine, wanted.max_context, memory, wanted.compile)
    policy = Policy(model, chat.tokenizer, [chat.stop_id], wanted.max_context)
    return open_servers(policy, wanted.servers, Path(cfg.output_dir))


def complete(
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    seeds: Sequence[int],
    *,
    batch: int = 256,
    done: Callable[[int], None] | None = None,
) -> list[Completion]:
    """One answer per prompt, `batch` at a time; row i depends on its prompt, the settings and `seeds[i]` alone."""
    completions: list[Completion] = []
    for start in range(0, len(prompts), batch):
        handles = sampler.open(prompts[start : start + batch])
        completions += sampler.sample(handles, params, seeds[start : start + batch])
        sampler.close(handles)
        if done:
            done(len(handles))
    return completions


def open_env(section: EnvSection, **more: Any) -> TextEnv:
    """A new environment as the config describes it. more: further options; ValueError where one is unknown or wrong."""
    with keep_process_state(section.name):
        env = envs.make(section.name, **section.options, **more)
    env.label = section.title
    return env


def most_turns(sections: Sequence[EnvSection], protocol: ProtocolSection) -> int:
    """The turns of the longest episode in any of these environments."""
    return max(Protocol.of(open_env(section), **protocol.arguments()).max_turns for section in sections)


def set_up(
    env: TextEnv, protocol: Protocol, seed: int, split: str, noise_seed: int | None = None
) -> Episode | Trajectory:
    """An episode in its first state; or, of an environment that raised on the way there, the record of that."""
    try:
        with keep_process_state(env.title):
            return Episode(env, protocol, seed, split, noise_seed)
    except RAISED as error:  # it is counted and teaches nothing, as if it had raised later
        crashed = one_line(error)
        return Trajectory(env=env.title, level_seed=seed, noise_seed=noise_seed, crashed=crashed)


def new_episode(
    section: EnvSection, limits: ProtocolSection, seed: int, split: str, noise_seed: int | None = None
) -> Episode | Trajectory:
    """`set_up` of an environment as the config describes it, under the run's limits."""
    env = open_env(section)
    return set_up(env, Protocol.of(env, **limits.arguments()), seed, split, noise_seed)


def play(
    sampler: Sampler,
    chat: Chat,
    episodes: Sequence[Episode | Trajectory],
    params: SamplingParams,
    seeds: Sequence[int],
    *,
    slots: int = 256,
    context: Context = FULL,
    done: Callable[[list[Trajectory]], None] | None = None,
) -> list[Trajectory]:
    """Play every episode to its end, at most `slots` at a time; a finished one makes room for a waiting one at once.

    An episode is truncated where even the system message and the current turn do not fit into the context. One whose
    first turn does not is a crash like that of an environment, and a UserError where it is so with all of them. An
    environment that raises ends its own episode (`crashed` says how) and no other; what `set_up` recorded instead of an
    episode comes back as it is.

    `done` is given the episodes that have just ended, at times none. It may add to `episodes` and `seeds` what is to be
    played as well.
    """
    games: dict[int, Game] = {}
    trajectories: list[Trajectory] = []
    waiting: list[int] = []
    playing: dict[int, int] = {}  # the episode of each open conversation

    def begin() -> list[Trajectory]:
        """Take up the episodes that are new; of these, those that cannot be played."""
        new = range(len(trajectories), len(episodes))
        for i in new:
            episode = episodes[i]
            if isinstance(episode, Episode):
                games[i] = Game(chat, episode, context, params.max_new_tokens)
            trajectories.append(games[i].trajectory if isinstance(episode, Episode) else episode)
            trajectories[i].seed = seeds[i]
        begun = [i for i in new if i in games and games[i].begin()]
        tried = [games[i] for i in new if i in games]
        if tried and not begun and all(game.too_long for game in tried):
            raise UserError(
                f"{tried[0].trajectory.crashed}, and a turn of {params.max_new_tokens} more does not fit into"
                f" max_context={context.max_tokens}. Raise it, or lower max_completion_length."
            )
        waiting[:0] = begun[::-1]
        return [trajectories[i] for i in new if i not in set(begun)]

    def enter(several: Sequence[int]) -> list[TurnRequest]:
        handles = sampler.open([games[i].segment.ids for i in several])
        playing.update(zip(handles, several, strict=True))
        return [turn(handle) for handle in handles]

    def turn(handle: int) -> TurnRequest:
        i = playing[handle]
        return handle, derive_seed(seeds[i], "turn", trajectories[i].turns)

    def then(finished: list[tuple[int, Completion]]) -> list[TurnRequest]:
        going, leaving, renewed = [], [], []
        told = take_turns([games[playing[handle]] for handle, _ in finished], [said for _, said in finished])
        for (handle, _), goes_on in zip(finished, told, strict=True):
            game = games[playing[handle]]
            segment, read = game.segment, len(game.segment.ids)
            if not (goes_on and game.look()):
                leaving.append(handle)
                game.finish()
            elif game.segment is segment:
                sampler.append(handle, segment.ids[read:])
                going.append(turn(handle))
            else:
                leaving.append(handle)
                renewed.append(playing[handle])
        ended = [trajectories[playing[handle]] for handle in leaving if playing[handle] not in renewed]
        for handle in leaving:
            del playing[handle]
        sampler.close(leaving)
        tell(ended)
        free = slots - len(playing) - len(renewed)
        return going + enter(renewed + [waiting.pop() for _ in range(min(free, len(waiting)))])

    def tell(ended: list[Trajectory]) -> None:
        while done:
            done(ended)
            if len(trajectories) == len(episodes):
                break
            ended = begin()

    tell(begin())
    sampler.converse(enter([waiting.pop() for _ in range(min(slots, len(waiting)))]), params, then)
    score_late(trajectories)
    return trajectories


class Game:
    """An episode that is being played, and its trajectory so far.

    The loop is: `look` (does another prompt fit, and which?), sample after `segment.ids`, `take_turn`.
    answer_tokens: the most that a turn may take.
    """

    def __init__(self, chat: Chat, episode: Episode, context: Context, answer_tokens: int) -> None:
        self.chat, self.episode = chat, episode
        self.context, self.prompt_tokens = context, context.prompt_tokens(answer_tokens)
        self.too_long = False
        self.seconds_left = EPISODE_SECONDS
        self.said: list[Completion] = []
        self.coming: list[int] = []  # what stands between the last turn and the next one
        episode.env.late = episode.env.can_be_late
        self.opening = chat.content_ids(episode.protocol.opening) if episode.protocol.opening else []
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
        """The ids after which the coming turn is sampled when turn `first` is the oldest in context.

        Its user message may begin with the reward of the turn before, which is no longer in context.
        """
        *head, question = self.episode.messages[: self.episode.first_messages]
        if self.context.kind == "single_turn":
            told = {"role": "user", "content": self.episode.summary(first)}
            return self.chat.prompt([*head, told]) + self.opening
        later = self.episode.messages[self.episode.first_messages :]
        users = [question, *(message for message in later if message["role"] == "user")]
        ids = self.chat.prompt([*head, users[first]]) + self.opening
        for completion, user in zip(self.said[first:], users[first + 1 :], strict=True):
            ids += completion.ids + self.reply(user["content"], completion)
        return ids

    def reply(self, user: str, completion: Completion) -> list[int]:
        """What stands between a sampled turn and the next one."""
        return self.chat.extend(user, finished=completion.finished) + self.opening

    def look(self) -> bool:
        """Make `segment` the context of the coming turn, at most `prompt_tokens` long; False where nothing fits."""
        segments, turn = self.trajectory.segments, len(self.said)
        oldest = start = segments[-1].first_turn if segments else 0
        if self.context.kind == "full":
            if segments and len(self.segment.ids) + len(self.coming) <= self.prompt_tokens:
                self.segment.read(self.coming)
                return True
            start += (turn - oldest + 1) // 2  # if one turn left at a time, every later turn would begin a segment
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
        """The first `look`; False, and a crash on record, where its prompt does not fit or cannot be written at all."""
        try:
            if self.look():
                return True
            length = len(self.prompt(0))
            self.too_long, self.trajectory.truncated, self.trajectory.out_of_context = True, False, False
            self.trajectory.crashed = f"The first prompt of {self.episode.env.title} takes {length} tokens"
        except RAISED as error:  # an environment may say anything, even no text
            self.trajectory.crashed = one_line(error)
        self.finish()
        return False

    def text(self, written: Sequence[int]) -> str:
        """The response that these sampled ids make, with the forced tag in front of them."""
        return self.chat.decode([*self.opening, *written])

    def take_turn(self, completion: Completion) -> bool:
        """Record what was sampled and let the environment answer; False when the episode is over."""
        return self.hear(completion, self.answer(self.say(completion)))

    def say(self, completion: Completion) -> str:
        """Record what was sampled; the text of it."""
        trajectory = self.trajectory
        self.segment.write(trajectory.turns, completion, len(self.opening))
        self.said.append(completion)
        trajectory.versions.append(completion.version)
        trajectory.unfinished_turns += not completion.finished
        return self.text(completion.ids[:-1] if completion.finished else completion.ids)

    def answer(self, text: str) -> Answer | BaseException:
        """What the environment makes of the text, or what it raised. Touches nothing else: it may run in a thread."""
        began = time.monotonic()
        try:
            with keep_process_state(self.trajectory.env) if not self.episode.env.slow else nullcontext():
                return self.episode.state_key(), self.episode.step(text)
        except RAISED as error:
            return error
        finally:
            self.seconds_left -= time.monotonic() - began

    def hear(self, completion: Completion, said: Answer | BaseException) -> bool:
        """Record what the environment answered; False when the episode is over."""
        trajectory = self.trajectory
        key, reward, penalty, over = "", 0.0, 0.0, True
        try:
            if isinstance(said, BaseException):
                raise said
            found, turn = said
            hash(found)
            if not abs(sum(trajectory.turn_rewards) + turn.reward) < LARGEST_REWARD:
                raise ValueError(f"the reward is {turn.reward}")
            if not turn.done:
                self.coming = self.reply(turn.user or "", completion)
            key, reward, penalty, over = found, turn.reward, turn.penalty, turn.done
        except RAISED as error:  # it may raise or say anything; its episode ends, is counted, teaches nothing
            trajectory.crashed = one_line(error)
        trajectory.state_keys.append(key)
        trajectory.turn_rewards.append(reward)
        trajectory.turn_penalties.append(penalty)
        return not over

    def finish(self) -> None:
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
        if episode.own_words and self.said and not self.said[-1].finished:  # an answer that was cut off did not end
            trajectory.terminated, trajectory.truncated = False, True
        if episode.env.late and self.said and not trajectory.crashed:
            trajectory.unscored = episode.env


def take_turns(games: Sequence[Game], said: Sequence[Completion]) -> list[bool]:
    """`Game.take_turn` of each; environments that wait for a sandbox or a server wait side by side.

    An environment that takes more of an episode's time than there is has crashed: nobody waits for it any longer.
    """
    texts = [game.say(completion) for game, completion in zip(games, said, strict=True)]
    waits = [i for i, game in enumerate(games) if game.episode.env.slow]
    before = ProcessState.now()  # threads side by side cannot tell whose change they see
    answers: dict[int, Answer | BaseException] = {}
    begun: dict[int, float] = {}
    left = {i: games[i].seconds_left for i in waits}
    places = threading.Semaphore(SIDE_BY_SIDE)

    def wait(i: int) -> None:
        with places:
            begun[i] = time.monotonic()
            answers[i] = games[i].answer(texts[i])

    threads = {i: threading.Thread(target=wait, args=(i,), daemon=True) for i in waits}
    for thread in threads.values():
        thread.start()
    for i, game in enumerate(games):
        if i not in threads:
            answers[i] = game.answer(texts[i])
    late: dict[int, BaseException] = {}
    while waiting := [i for i in waits if i not in answers and i not in late]:
        threads[waiting[0]].join(0.05)
        for i in waiting:
            if i in begun and i not in answers and time.monotonic() - begun[i] > left[i]:
                late[i] = TimeoutError(f"{games[i].trajectory.env} took more than {EPISODE_SECONDS} s of an episode")
                places.release()  # its thread may never do so
    if waits and ProcessState.now() != before:
        before.put_back(games[waits[0]].trajectory.env)
    return [game.hear(said[i], late[i] if i in late else answers[i]) for i, game in enumerate(games)]


class Thought(NamedTuple):
    """The reasoning of one turn: ids[:start] of its segment end with <think>, ids[start:end] is the thought.

    Tokens do not end where tags do. One that straddles the end of <think> belongs to the prompt, one that straddles
    the start of </think> to neither: the thought is cut at the nearest token boundaries inside it, and may be empty.
    """

    segment: Segment
    start: int
    end: int

    @property
    def prompt_ids(self) -> list[int]:
        return self.segment.ids[: self.start]

    @property
    def ids(self) -> list[int]:
        return self.segment.ids[self.start : self.end]


def thoughts(chat: Chat, trajectory: Trajectory) -> list[Thought | None]:
    """The reasoning of every turn; None where it has no <think>...</think>."""
    found = []
    for segment in trajectory.segments:
        for begin, end in zip(segment.turn_starts, segment.turn_ends, strict=True):
            ids = segment.ids[begin:end]
            text = chat.decode(ids)
            span = thought_span(text)
            if span is None:
                found.append(None)
                continue
            start = begin + _tokens_for(chat, ids, text[: span[0]])
            stop = begin + _tokens_for(chat, ids, text[: span[1] + 1]) - 1  # without the token that begins "</think>"
            found.append(Thought(segment, start, max(start, stop)))
    return found


def _tokens_for(chat: Chat, ids: list[int], text: str) -> int:
    """How many of these tokens it takes until their text begins with `text`."""
    return bisect_left(range(len(ids)), True, key=lambda count: chat.decode(ids[:count]).startswith(text))
