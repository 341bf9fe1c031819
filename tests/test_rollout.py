"""Is a trajectory exactly what the model saw and wrote?  Tokens, masks, log-probs, turns, rewards, limits, crashes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import envs
from envs.protocol import Episode, Protocol
from posttrain.chat import Chat
from posttrain.convgpt import ConvGPTConfig, ConvGPTForCausalLM
from posttrain.rollout import complete, open_sampler, play
from posttrain.types import Completion, SamplingParams, Trajectory, UserError

PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0)


@pytest.fixture(scope="module")
def model(tiny_chat: Chat) -> ConvGPTForCausalLM:
    torch.manual_seed(0)
    config = ConvGPTConfig(
        vocab_size=len(tiny_chat.tokenizer), hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=48, initializer_range=0.2, tie_word_embeddings=False,
        pad_token_id=tiny_chat.pad_id, max_position_embeddings=2048,
    )  # fmt: skip
    return ConvGPTForCausalLM(config).eval()


def episodes(count: int, world: str = "frozen_lake", **protocol: Any) -> list[Episode]:
    return [
        Episode(envs.make(world), Protocol(**{"max_turns": 3, **protocol}), seed=i // 2, split="train", noise_seed=i)
        for i in range(count)
    ]


class Scripted:
    """An engine that writes what it is told, turn by turn, and keeps what it was given."""

    def __init__(self, chat: Chat, answers: list[list[str]], finished: bool = True) -> None:
        self.chat, self.answers, self.finished = chat, answers, finished
        self.ids: list[list[int]] = []
        self.turn: list[int] = []
        self.closed: set[int] = set()

    def open(self, prompts):
        start = len(self.ids)
        self.ids += [list(prompt) for prompt in prompts]
        self.turn += [0] * len(prompts)
        return list(range(start, len(self.ids)))

    def append(self, handle, ids):
        assert handle not in self.closed
        self.ids[handle] += ids

    def close(self, handles):
        self.closed |= set(handles)

    def sample(self, handles, params, seeds):
        completions = []
        for handle in handles:
            assert handle not in self.closed
            ids = self.chat.content_ids(self.answers[handle][self.turn[handle]])
            ids += [self.chat.stop_id] if self.finished else []
            self.turn[handle] += 1
            self.ids[handle] += ids
            completions.append(Completion(ids, [-0.5] * len(ids), self.finished))
        return completions


def winning(episode: Episode) -> str:
    return f"<think>x</think><answer>{episode.world.expert()}</answer>"


def test_trajectories_hold_what_was_sampled(model: ConvGPTForCausalLM, tiny_chat: Chat) -> None:
    trajectories = play(open_sampler(model, tiny_chat), tiny_chat, episodes(6), PARAMS, list(range(6)), slots=4)
    for trajectory in trajectories:
        assert len(trajectory.ids) == len(trajectory.mask) == len(trajectory.logprobs)
        with torch.no_grad():
            logprobs = model(torch.tensor([trajectory.ids])).logits[0].log_softmax(-1)
        starts = [i for i, on in enumerate(trajectory.mask) if on and not trajectory.mask[i - 1]]
        assert len(starts) == len(trajectory.turn_ends) == len(trajectory.turn_rewards) == len(trajectory.state_keys)
        said = [message["content"] for message in trajectory.messages if message["role"] == "assistant"]
        for start, end, text in zip(starts, trajectory.turn_ends, said, strict=True):
            assert all(trajectory.mask[start:end])
            assert tiny_chat.decode(trajectory.ids[start:end]) == text
        for i, (token, on, logprob) in enumerate(
            zip(trajectory.ids, trajectory.mask, trajectory.logprobs, strict=True)
        ):
            if on:
                assert logprobs[i - 1, token].item() == pytest.approx(logprob, abs=1e-4)
            else:
                assert logprob == 0.0


def test_a_dialogue_rendered_again_gives_the_same_tokens(tiny_chat: Chat) -> None:
    """Where the model writes canonical tokens, appending turn by turn equals encoding the finished dialogue."""
    played = episodes(2)
    moves = [[f"<think>hm</think><answer>{action}</answer>" for action in ("Up", "Left", "Down")]] * 2
    for trajectory in play(Scripted(tiny_chat, moves), tiny_chat, played, PARAMS, [0, 1]):
        encoded = tiny_chat.encode(trajectory.messages)
        assert encoded.ids[: len(trajectory.ids)] == trajectory.ids
        assert encoded.mask[: len(trajectory.ids)] == trajectory.mask


def test_slots_and_company_change_nothing(model: ConvGPTForCausalLM, tiny_chat: Chat) -> None:
    def run(slots: int, engine: str) -> list[Trajectory]:
        sampler = open_sampler(model, tiny_chat, engine)
        return play(sampler, tiny_chat, episodes(5), PARAMS, list(range(5)), slots=slots)

    expected = [t.ids for t in run(5, "slots")]
    assert [t.ids for t in run(2, "slots")] == expected
    assert [t.ids for t in run(5, "replay")] == expected


def test_rewards_penalties_and_endings(tiny_chat: Chat) -> None:
    won, lost, silent = episodes(1, max_turns=8)[0], episodes(1)[0], episodes(1)[0]
    shortest = []
    probe = episodes(1, max_turns=8)[0]
    while not probe.done:
        shortest.append(winning(probe))
        probe.step(shortest[-1])
    assert probe.success
    answers = [shortest, ["<think>a</think><answer>Jump</answer>"] * 3, ["nothing"] * 3]
    a, b, c = play(Scripted(tiny_chat, answers), tiny_chat, [won, lost, silent], PARAMS, [0, 1, 2])
    assert (a.success, a.terminated, a.truncated, a.reward) == (True, True, False, 1.0)
    assert a.actions == won.actions and a.effective_actions == len(a.actions)
    for loser in (b, c):
        assert (loser.success, loser.terminated, loser.truncated) == (False, False, True)
        assert loser.turn_penalties == [-0.1] * 3 and loser.invalid_turns == 3
        assert loser.reward == pytest.approx(-0.3) and loser.turn_rewards == [0.0] * 3
    assert b.world == "frozen_lake" and b.level_key == lost.level_key()


def test_a_cut_turn_gets_its_stop_token_from_the_environment(tiny_chat: Chat) -> None:
    sampler = Scripted(tiny_chat, [["abc"] * 3], finished=False)
    (trajectory,) = play(sampler, tiny_chat, episodes(1), PARAMS, [0])
    assert trajectory.unfinished_turns == 3
    for end in trajectory.turn_ends[:-1]:
        assert trajectory.ids[end] == tiny_chat.stop_id and not trajectory.mask[end]
    assert trajectory.ids == sampler.ids[0]


def test_a_full_context_truncates(tiny_chat: Chat) -> None:
    prompt = len(tiny_chat.prompt(episodes(1)[0].messages))
    sampler = Scripted(tiny_chat, [["abc"] * 3])
    (trajectory,) = play(sampler, tiny_chat, episodes(1), PARAMS, [0], max_context=prompt + 30)
    assert trajectory.truncated and not trajectory.terminated and len(trajectory.turn_ends) == 1
    assert len(trajectory.ids) <= prompt + 30


def test_a_world_that_raises_ends_its_own_episode_only(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    played = episodes(2)

    def broken(action: str) -> None:
        raise ZeroDivisionError("the ice melted")

    monkeypatch.setattr(played[0].world, "step", broken)
    moves = [["<think>a</think><answer>Up</answer>"] * 3] * 2
    crashed, healthy = play(Scripted(tiny_chat, copy.deepcopy(moves)), tiny_chat, played, PARAMS, [0, 1])
    assert crashed.crashed == "ZeroDivisionError: the ice melted"
    assert not crashed.success and not crashed.terminated and len(crashed.turn_ends) == 1
    assert not healthy.crashed and (healthy.terminated or healthy.truncated)


def test_a_world_may_misbehave_anywhere(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    played = episodes(3)

    def broken() -> str:
        raise KeyError("no state")

    monkeypatch.setattr(played[0].world, "state_key", broken)
    monkeypatch.setattr(played[1], "_user_text", lambda *args: "half a pair: \ud800")
    moves = [["<think>a</think><answer>Jump</answer>"] * 3] * 3
    one, two, healthy = play(Scripted(tiny_chat, moves), tiny_chat, played, PARAMS, [0, 1, 2])
    assert one.crashed.startswith("KeyError") and two.crashed.startswith("UserError")
    assert not healthy.crashed and len(healthy.turn_ends) == 3
    for trajectory in (one, two):
        lengths = {len(trajectory.turn_ends), len(trajectory.turn_rewards), len(trajectory.state_keys)}
        assert lengths == {1} and trajectory.world == "frozen_lake"


def test_a_prompt_that_fills_the_context_is_refused(tiny_chat: Chat) -> None:
    with pytest.raises(UserError, match="max_context=40"):
        play(Scripted(tiny_chat, []), tiny_chat, episodes(1), PARAMS, [0], max_context=40)


def test_complete_is_independent_of_its_batches(model: ConvGPTForCausalLM, tiny_chat: Chat) -> None:
    prompts = [tiny_chat.prompt([{"role": "user", "content": text}]) for text in ("a", "bc", "def", "a")]
    seen: list[int] = []
    sampler = open_sampler(model, tiny_chat)
    by_two = complete(sampler, prompts, PARAMS, [1, 2, 3, 4], batch=2, done=seen.append)
    assert [c.ids for c in by_two] == [c.ids for c in complete(sampler, prompts, PARAMS, [1, 2, 3, 4])]
    assert seen == [2, 2]
    assert by_two[0].ids != by_two[3].ids  # the same prompt, another seed
