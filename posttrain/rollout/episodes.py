"""How does a model play episodes?  It writes tokens, environments answer with text, and the two take turns.

Token in, token out: later contexts contain the ids that were sampled; what the model wrote is never tokenized again. A
turn is trained in exactly the context in which it was sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

import envs
from envs import TextEnv
from envs.episode import Episode
from envs.process_state import keep_process_state
from envs.prompts import Prompts
from envs.protocol import Protocol
from envs.tools import tools_of
from posttrain.config import EnvSection, ProtocolSection, StarPORun
from posttrain.models import Chat
from posttrain.rollout.agents.game import AgentGame
from posttrain.rollout.agents.play import play_programs
from posttrain.rollout.engine import open_engine, open_servers
from posttrain.rollout.engines.base import Sampler, TurnRequest
from posttrain.rollout.engines.vllm_server import Policy
from posttrain.rollout.game import RAISED, Context, Game, take_turns
from posttrain.rollout.late_rewards import score_late
from posttrain.types import Completion, SamplingParams, Trajectory, UserError, derive_seed, one_line

FULL = Context()


def open_sampler(
    model: PreTrainedModel,
    chat: Chat,
    engine: str = "auto",
    max_context: int | None = None,
    vllm_memory: float = 0.3,
    graphs: bool = True,
    conversations: int | None = None,
) -> Sampler:
    """Return an engine for this model that stops at the end of the chat's turns; see `open_engine`."""
    return open_engine(model, [chat.stop_id], chat.pad_id, engine, max_context, vllm_memory, graphs, conversations)


def sampler_of(cfg: StarPORun, model: PreTrainedModel, chat: Chat) -> Sampler:
    """Return the engine of a run of phase 3: in this process, or on the servers that its config names."""
    rollout = cfg.rollout
    if not rollout.servers:
        memory, graphs = rollout.vllm_gpu_memory_utilization, rollout.cuda_graphs is not False
        longest, conversations = rollout.max_context, rollout.conversations
        return open_sampler(model, chat, rollout.engine, longest, memory, graphs, conversations)
    policy = Policy(model, chat.tokenizer, [chat.stop_id], rollout.max_context)
    return open_servers(policy, rollout.servers, Path(cfg.output_dir))


def complete(
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    seeds: Sequence[int],
    *,
    batch: int = 256,
    done: Callable[[int], None] | None = None,
) -> list[Completion]:
    """Return an answer to each prompt, `batch` at a time; it depends on its prompt, `params` and its seed alone.

    done: is called after each batch with its number of answers.
    """
    completions: list[Completion] = []
    for start in range(0, len(prompts), batch):
        handles = sampler.open(prompts[start : start + batch])
        completions += sampler.sample(handles, params, seeds[start : start + batch])
        sampler.close(handles)
        if done:
            done(len(handles))
    return completions


def open_env(section: EnvSection, **more: object) -> TextEnv:
    """Return a new environment as the config describes it; `more` are further options. ValueError if one is wrong."""
    with keep_process_state(section.name):
        env = envs.make(section.name, **section.options, **more)
        if section.tools and has_agent(env):
            raise ValueError("the program of `agent` has its own tools: leave out `tools`.")
        if section.tools:
            env.tools = tools_of(section.tools, env.tools)
    env.label, env.max_calls, env.call_seconds = section.title, section.max_calls, section.call_seconds
    return env


def has_agent(env: TextEnv) -> bool:
    """Return whether a program plays an environment, by asking for the model's turns itself."""
    return isinstance(env, Prompts) and env.agent is not None


def most_turns(sections: Sequence[EnvSection], protocol: ProtocolSection) -> int:
    """Return how many turns an episode in these environments has at most, those that call tools included."""
    made = [open_env(section) for section in sections]
    return max(Protocol.of(env, **protocol.arguments()).max_turns + bool(env.tools) * 2 * env.max_calls for env in made)


def set_up(
    env: TextEnv, protocol: Protocol, seed: int, split: str, noise_seed: int | None = None
) -> Episode | Trajectory:
    """Return an episode in its first state, or a trajectory that records the crash if the environment raised."""
    try:
        with keep_process_state(env.title):
            return Episode(env, protocol, seed, split, noise_seed)
    except RAISED as error:  # counted and left out of training, as if it had raised later
        crashed = one_line(error)
        return Trajectory(env=env.title, level_seed=seed, noise_seed=noise_seed, crashed=crashed)


def new_episode(
    section: EnvSection, limits: ProtocolSection, seed: int, split: str, noise_seed: int | None = None
) -> Episode | Trajectory:
    """Return `set_up` of an environment as the config describes it, with the run's limits."""
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
    """Play every episode to its end and return the trajectories in the order of `episodes`.

    If not even the system message and the current turn fit into the context, an episode is truncated; at its first turn
    it crashes, and a UserError is raised if all do at the start. An environment that raises ends its own episode alone.

    Args:
        episodes: of `set_up`; a Trajectory among them, which records a crash, is returned as it is.
        slots: how many episodes are played at a time; when one ends, the next one begins.
        done: is called with the episodes that have just ended; what it appends to `episodes` and `seeds` is played.
    """
    playing = Playing(sampler, chat, episodes, params, seeds, slots, context, done)
    playing.run()
    score_late(playing.trajectories)
    return playing.trajectories


@dataclass
class Playing:
    """Episodes that are being played, under the arguments of `play`."""

    sampler: Sampler
    chat: Chat
    episodes: Sequence[Episode | Trajectory]
    params: SamplingParams
    seeds: Sequence[int]
    slots: int
    context: Context
    done: Callable[[list[Trajectory]], None] | None

    def __post_init__(self) -> None:
        self.trajectories: list[Trajectory] = []
        self._games: dict[int, Game] = {}
        self._programs: list[AgentGame] = []  # that have not been started yet
        self._waiting: list[int] = []
        self._episode: dict[int, int] = {}  # of each open conversation

    def run(self) -> None:
        self._report(self._begin())
        while self._waiting or self._programs:
            if self._waiting:
                first = [self._waiting.pop() for _ in range(min(self.slots, len(self._waiting)))]
                self.sampler.converse(self._enter(first), self.params, self._then)
            else:
                begun, self._programs = self._programs, []
                play_programs(self.sampler, begun, self.params, self.slots, lambda ended: self._report([ended]))

    def _begin(self) -> list[Trajectory]:
        """Begin the new episodes; return those of them that cannot be played."""
        new = range(len(self.trajectories), len(self.episodes))
        answer_tokens, programs = self.params.max_new_tokens, set[int]()
        for i in new:
            episode = self.episodes[i]
            if not isinstance(episode, Episode):
                self.trajectories.append(episode)
            elif has_agent(episode.env):
                longest = self.context.prompt_tokens(answer_tokens)
                self._programs.append(AgentGame(self.chat, episode, longest, self.seeds[i]))
                self.trajectories.append(self._programs[-1].trajectory)
                programs.add(i)
            else:
                self._games[i] = Game(self.chat, episode, self.context, answer_tokens)
                self.trajectories.append(self._games[i].trajectory)
            self.trajectories[i].seed = self.seeds[i]
        begun = [i for i in new if i in self._games and self._games[i].begin()]
        new_games = [self._games[i] for i in new if i in self._games]
        if new_games and not begun and not new.start and all(game.too_long for game in new_games):
            raise UserError(
                f"{new_games[0].trajectory.crashed}, and a turn of {answer_tokens} more does not fit into"
                f" max_context={self.context.max_tokens}. Raise it, or lower max_completion_length."
            )
        self._waiting[:0] = begun[::-1]
        return [self.trajectories[i] for i in new if i not in programs.union(begun)]

    def _enter(self, several: Sequence[int]) -> list[TurnRequest]:
        handles = self.sampler.open([self._games[i].segment.ids for i in several])
        self._episode.update(zip(handles, several, strict=True))
        return [self._turn(handle) for handle in handles]

    def _turn(self, handle: int) -> TurnRequest:
        i = self._episode[handle]
        return handle, derive_seed(self.seeds[i], "turn", self.trajectories[i].turns)

    def _then(self, finished: list[tuple[int, Completion]]) -> list[TurnRequest]:
        requests: list[TurnRequest] = []
        leaving: list[int] = []  # conversations that end
        renewed: list[int] = []  # episodes that go on in another conversation
        games = [self._games[self._episode[handle]] for handle, _ in finished]
        going = take_turns(games, [written for _, written in finished])
        for (handle, _), game, goes_on in zip(finished, games, going, strict=True):
            segment, length = game.segment, len(game.segment.ids)
            if not (goes_on and game.look()):
                leaving.append(handle)
                game.finish()
            elif game.segment is segment:
                self.sampler.append(handle, segment.ids[length:])
                requests.append(self._turn(handle))
            else:
                leaving.append(handle)
                renewed.append(self._episode[handle])
        ended = [self.trajectories[i] for i in map(self._episode.pop, leaving) if i not in renewed]
        self.sampler.close(leaving)
        self._report(ended)
        free = self.slots - len(self._episode) - len(renewed)
        return requests + self._enter(renewed + [self._waiting.pop() for _ in range(min(free, len(self._waiting)))])

    def _report(self, ended: list[Trajectory]) -> None:
        while self.done:
            self.done(ended)
            if len(self.trajectories) == len(self.episodes):
                break
            ended = self._begin()
