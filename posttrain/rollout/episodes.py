"""How does a model play episodes?  It writes tokens, environments answer with text, and the two take turns.

Token in, token out: later contexts contain the ids that were sampled; what the model wrote is never tokenized again. A
turn is trained in exactly the context in which it was sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    compiled: bool = False,
) -> Sampler:
    """Return an engine for this model that stops at the end of the chat's turns; see `open_engine`."""
    return open_engine(model, [chat.stop_id], chat.pad_id, engine, max_context, vllm_memory, compiled)


def sampler_of(cfg: StarPORun, model: PreTrainedModel, chat: Chat) -> Sampler:
    """Return the engine of a run of phase 3: in this process, or on the servers that its config names."""
    rollout = cfg.rollout
    if not rollout.servers:
        memory = rollout.vllm_gpu_memory_utilization
        return open_sampler(model, chat, rollout.engine, rollout.max_context, memory, rollout.compile)
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
            env.tools = [*env.tools, *tools_of(section.tools)]
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
    games: dict[int, Game] = {}
    programs: list[AgentGame] = []  # that have not been started yet
    trajectories: list[Trajectory] = []
    waiting: list[int] = []
    playing: dict[int, int] = {}  # the episode of each open conversation

    def begin() -> list[Trajectory]:
        """Begin the new episodes; return those of them that cannot be played."""
        new = range(len(trajectories), len(episodes))
        for i in new:
            episode = episodes[i]
            if not isinstance(episode, Episode):
                trajectories.append(episode)
            elif has_agent(episode.env):
                programs.append(AgentGame(chat, episode, context.prompt_tokens(params.max_new_tokens), seeds[i]))
                trajectories.append(programs[-1].trajectory)
            else:
                games[i] = Game(chat, episode, context, params.max_new_tokens)
                trajectories.append(games[i].trajectory)
            trajectories[i].seed = seeds[i]
        begun = [i for i in new if i in games and games[i].begin()]
        started = {*begun, *(i for i in new if isinstance(episodes[i], Episode) and i not in games)}
        new_games = [games[i] for i in new if i in games]
        if new_games and not begun and not new.start and all(game.too_long for game in new_games):
            raise nothing_fits(new_games[0], context, params)
        waiting[:0] = begun[::-1]
        return [trajectories[i] for i in new if i not in started]

    def enter(several: Sequence[int]) -> list[TurnRequest]:
        handles = sampler.open([games[i].segment.ids for i in several])
        playing.update(zip(handles, several, strict=True))
        return [turn(handle) for handle in handles]

    def turn(handle: int) -> TurnRequest:
        i = playing[handle]
        return handle, derive_seed(seeds[i], "turn", trajectories[i].turns)

    def then(finished: list[tuple[int, Completion]]) -> list[TurnRequest]:
        requests: list[TurnRequest] = []
        leaving: list[int] = []  # conversations that end
        renewed: list[int] = []  # episodes that go on in another conversation
        going = take_turns([games[playing[handle]] for handle, _ in finished], [written for _, written in finished])
        for (handle, _), goes_on in zip(finished, going, strict=True):
            game = games[playing[handle]]
            segment, length = game.segment, len(game.segment.ids)
            if not (goes_on and game.look()):
                leaving.append(handle)
                game.finish()
            elif game.segment is segment:
                sampler.append(handle, segment.ids[length:])
                requests.append(turn(handle))
            else:
                leaving.append(handle)
                renewed.append(playing[handle])
        ended = [trajectories[playing[handle]] for handle in leaving if playing[handle] not in renewed]
        for handle in leaving:
            del playing[handle]
        sampler.close(leaving)
        report(ended)
        free = slots - len(playing) - len(renewed)
        return requests + enter(renewed + [waiting.pop() for _ in range(min(free, len(waiting)))])

    def report(ended: list[Trajectory]) -> None:
        while done:
            done(ended)
            if len(trajectories) == len(episodes):
                break
            ended = begin()

    report(begin())
    while waiting or programs:
        if waiting:
            sampler.converse(enter([waiting.pop() for _ in range(min(slots, len(waiting)))]), params, then)
        else:
            begun, programs = programs, []
            play_programs(sampler, begun, params, slots, lambda trajectory: report([trajectory]))
    score_late(trajectories)
    return trajectories


def nothing_fits(game: Game, context: Context, params: SamplingParams) -> UserError:
    """Return what to say where not even a first turn fits into the context."""
    return UserError(
        f"{game.trajectory.crashed}, and a turn of {params.max_new_tokens} more does not fit into"
        f" max_context={context.max_tokens}. Raise it, or lower max_completion_length."
    )
