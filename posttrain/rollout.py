"""How does a model live through episodes?  Worlds speak text, models speak tokens; here they take turns.

Token in, token out: a trajectory is the prompt's ids, the sampled ids and the ids of the world's replies, appended in
the order they happened. Nothing is ever tokenised a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from envs.protocol import Episode
from posttrain.chat import Chat
from posttrain.sampler import Sampler, open_engine
from posttrain.types import Completion, SamplingParams, Trajectory, UserError, address


def open_sampler(model: PreTrainedModel, chat: Chat, engine: str = "auto") -> Sampler:
    """An engine for this model that stops where this chat's turns end."""
    return open_engine(model, [chat.stop_id], chat.pad_id, engine)


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


def play(
    sampler: Sampler,
    chat: Chat,
    episodes: Sequence[Episode],
    params: SamplingParams,
    seeds: Sequence[int],
    *,
    slots: int = 256,
    max_context: int | None = None,
    done: Callable[[int], None] | None = None,
) -> list[Trajectory]:
    """Play every episode to its end, at most `slots` at a time; a finished one makes room for a waiting one.

    An episode whose next turn would not fit into `max_context` tokens is truncated; one whose first turn would not is a
    UserError. A world that raises ends its own episode (`crashed` says how) and no other.
    """
    trajectories: list[Trajectory] = [
        Trajectory(ids=chat.prompt(episode.messages), mask=[], logprobs=[], seed=seed)
        for episode, seed in zip(episodes, seeds, strict=True)
    ]
    for episode, trajectory in zip(episodes, trajectories, strict=True):
        length = len(trajectory.ids)
        if max_context is not None and length + params.max_new_tokens > max_context:
            raise UserError(
                f"The first prompt of {episode.world.name} takes {length} tokens, and a turn of {params.max_new_tokens}"
                f" more does not fit into max_context={max_context}. Raise it, or lower max_completion_length."
            )
        trajectory.mask, trajectory.logprobs = [False] * length, [0.0] * length
        trajectory.world, trajectory.level_key = episode.world.name, episode.level_key()
    waiting = list(range(len(episodes)))[::-1]
    active: dict[int, int] = {}
    while waiting or active:
        entering = [waiting.pop() for _ in range(min(slots - len(active), len(waiting)))]
        opened = sampler.open([trajectories[i].ids for i in entering])
        active.update(zip(entering, opened, strict=True))
        turn_seeds = [address(seeds[i], "turn", len(trajectories[i].turn_ends)) for i in active]
        completions = sampler.sample(list(active.values()), params, turn_seeds)
        leaving = []
        for i, completion in zip(active, completions, strict=True):
            reply = _take_turn(chat, episodes[i], trajectories[i], completion, params, max_context)
            if reply is None:
                leaving.append(i)
                _finish(episodes[i], trajectories[i])
            else:
                sampler.append(active[i], reply)
        sampler.close([active.pop(i) for i in leaving])
        if done:
            done(len(leaving))
    return trajectories


def _take_turn(
    chat: Chat,
    episode: Episode,
    trajectory: Trajectory,
    completion: Completion,
    params: SamplingParams,
    max_context: int | None,
) -> list[int] | None:
    """Record what was sampled, let the world answer; the world's reply as ids, or None when the episode is over."""
    trajectory.ids += completion.ids
    trajectory.mask += [True] * len(completion.ids)
    trajectory.logprobs += completion.logprobs
    trajectory.turn_ends.append(len(trajectory.ids))
    trajectory.unfinished_turns += not completion.finished
    written = completion.ids[:-1] if completion.finished else completion.ids
    key = ""
    try:
        key = episode.state_key()
        turn = episode.step(chat.decode(written))
        reply = [] if turn.done else chat.extend(turn.user or "", finished=completion.finished)
    except Exception as error:  # a world may raise or say anything; its episode ends, is counted, and teaches nothing
        trajectory.crashed = f"{type(error).__name__}: {error}"
        trajectory.state_keys.append(key)
        trajectory.turn_rewards.append(0.0)
        trajectory.turn_penalties.append(0.0)
        return None
    trajectory.state_keys.append(key)
    trajectory.turn_rewards.append(turn.reward)
    trajectory.turn_penalties.append(turn.penalty)
    if turn.done:
        return None
    if max_context is not None and len(trajectory.ids) + len(reply) + params.max_new_tokens > max_context:
        trajectory.truncated = True
        return None
    trajectory.ids += reply
    trajectory.mask += [False] * len(reply)
    trajectory.logprobs += [0.0] * len(reply)
    return reply


def _finish(episode: Episode, trajectory: Trajectory) -> None:
    trajectory.success = episode.success and not trajectory.crashed
    trajectory.terminated = episode.terminated
    trajectory.truncated = trajectory.truncated or episode.truncated
    trajectory.invalid_turns = episode.invalid_turns
    trajectory.actions = list(episode.actions)
    trajectory.effective_actions = episode.effective_actions
    trajectory.failure = episode.failure
    trajectory.messages = list(episode.messages)
