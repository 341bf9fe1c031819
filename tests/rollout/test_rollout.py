"""Is a trajectory exactly what the model saw and wrote?  Tokens, masks, log-probs, turns, rewards, limits, crashes."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import envs
from envs.episode import Episode
from envs.frozen_lake import FrozenLake
from envs.protocol import Protocol, thought_span
from posttrain.models.chat import Chat
from posttrain.models.convgpt import ConvGPTConfig, ConvGPTForCausalLM
from posttrain.rollout import game
from posttrain.rollout.engines.replay import ReplaySampler
from posttrain.rollout.episodes import Context, complete, open_sampler, play, set_up
from posttrain.rollout.thoughts import thoughts
from posttrain.types import Completion, SamplingParams, Segment, Trajectory, UserError

PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0)


# How much of the episode a turn sees: all of it, all that fits, a window, a window that does not always fit, a summary.
MODES = {
    "full": Context(),
    "full, tight": Context(max_tokens=350),
    "last 1": Context("last_k", 1),
    "last 2": Context("last_k", 2),
    "last 3, tight": Context("last_k", 3, 350),
    "summary of 3": Context("single_turn", 3),
}


@pytest.fixture(scope="module", params=["convgpt", "llama"])
def model(request: pytest.FixtureRequest, tiny_chat: Chat) -> PreTrainedModel:
    torch.manual_seed(0)
    if request.param == "llama":
        shape = LlamaConfig(
            vocab_size=len(tiny_chat.tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=48, initializer_range=0.3, pad_token_id=tiny_chat.pad_id,
            bos_token_id=None, eos_token_id=None, max_position_embeddings=2048,
        )  # fmt: skip
        return LlamaForCausalLM(shape).eval()
    config = ConvGPTConfig(
        vocab_size=len(tiny_chat.tokenizer), hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=48, initializer_range=0.2, tie_word_embeddings=False,
        pad_token_id=tiny_chat.pad_id, max_position_embeddings=2048,
    )  # fmt: skip
    return ConvGPTForCausalLM(config).eval()


def episodes(count: int, env: str = "frozen_lake", style: str = "compact", **limits: Any) -> list[Episode]:
    """In few words by default, which the sizes of the contexts here are made for."""
    options = {"observation": "neighbours"} if style == "compact" else {}
    protocol = Protocol(**{"max_turns": 3, "style": style, **limits})
    return [
        Episode(envs.make(env, **options), protocol, seed=i // 2, split="train", noise_seed=i) for i in range(count)
    ]


class Scripted(ReplaySampler):
    """An engine that writes given turns and records what it was given."""

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
    return f"<think>x</think><answer>{episode.env.expert()}</answer>"


def whole(trajectory: Trajectory) -> Segment:
    (segment,) = trajectory.segments
    return segment


@pytest.mark.parametrize(
    "mode, forced, style",
    [
        *((mode, False, "compact") for mode in MODES),
        *((mode, True, "compact") for mode in ("full, tight", "summary of 3")),
        *((mode, False, "plain") for mode in ("full", "last 2", "summary of 3")),
    ],
)
def test_trained_tokens_are_the_sampled_ones_under_the_context_they_had(
    model: PreTrainedModel, tiny_chat: Chat, mode: str, forced: bool, style: str
) -> None:
    """Of every segment: one plain forward pass gives the sampler's log-probs back, and the mask marks nothing else."""
    played = episodes(3, style=style, max_turns=4, force_think=forced)
    sampler = open_sampler(model, tiny_chat)
    trajectories = play(sampler, tiny_chat, played, PARAMS, list(range(3)), slots=2, context=MODES[mode])
    for trajectory in trajectories:
        texts = [message["content"] for message in trajectory.messages if message["role"] == "assistant"]
        counts = {len(trajectory.turn_rewards), len(trajectory.state_keys)}
        assert counts == {len(texts)} == {trajectory.turns} and trajectory.turns == 4
        assert [turn for segment in trajectory.segments for turn in segment.turns] == list(range(trajectory.turns))
        for segment in trajectory.segments:
            with torch.no_grad():
                logprobs_TV = model(input_ids=torch.tensor([segment.ids])).logits[0].log_softmax(-1)
            sampled: set[int] = set()
            for turn, start, end in zip(segment.turns, segment.turn_starts, segment.turn_ends, strict=True):
                assert tiny_chat.decode(segment.ids[start:end]) == texts[turn]
                opening = len(tiny_chat.content_ids("<think>")) if forced else 0
                assert texts[turn].startswith("<think>" if forced else "")
                sampled.update(range(start + opening, end))
            for i, (token, on, logprob) in enumerate(zip(segment.ids, segment.mask, segment.logprobs, strict=True)):
                assert on == (i in sampled)
                assert logprob == (pytest.approx(logprobs_TV[i - 1, token].item(), abs=1e-4) if on else 0.0)
        assert trajectory.tokens == sum(trajectory.turn_tokens) == len(trajectory.sampled_ids)
        assert len(trajectory.sampled_logprobs) == trajectory.tokens
        cut = [trajectory.sampled_ids[end - count : end] for end, count in ends(trajectory.turn_tokens)]
        for turn, ids in enumerate(cut):
            assert ("<think>" if forced else "") + tiny_chat.decode(ids) == texts[turn]
        windows = MODES[mode].kind != "full"
        assert len(trajectory.segments) == (trajectory.turns if windows else 1) or mode == "full, tight"
        assert (trajectory.dropped_turns > 0) == ("tight" in mode)


@pytest.mark.parametrize("mode", ["full, tight", "last 2", "last 3, tight"])
def test_a_turn_stays_in_sight_as_the_tokens_that_were_sampled(
    model: PreTrainedModel, tiny_chat: Chat, mode: str
) -> None:
    """Noise that would be tokenised otherwise when read back: in later contexts it is the same ids all the same."""
    sampler = open_sampler(model, tiny_chat)
    rewritten = 0
    for trajectory in play(sampler, tiny_chat, episodes(2, max_turns=4), PARAMS, [0, 1], context=MODES[mode]):
        users = [message["content"] for message in trajectory.messages if message["role"] == "user"]
        cut = [trajectory.sampled_ids[end - count : end] for end, count in ends(trajectory.turn_tokens)]
        for segment in trajectory.segments:
            first = segment.first_turn
            expected = tiny_chat.prompt([trajectory.messages[0], {"role": "user", "content": users[first]}])
            for turn in range(first, segment.turns[-1] + 1):
                finished = cut[turn][-1] == tiny_chat.stop_id
                written = cut[turn][: -1 if finished else None]
                rewritten += tiny_chat.content_ids(tiny_chat.decode(written)) != written
                expected += cut[turn]
                if turn < segment.turns[-1]:
                    expected += tiny_chat.extend(users[turn + 1], finished=finished)
            assert segment.ids == expected
    assert rewritten


def ends(counts: list[int]) -> list[tuple[int, int]]:
    return [(sum(counts[: n + 1]), count) for n, count in enumerate(counts)]


def contexts(messages: list[dict[str, str]], segment: Segment, chat: Chat) -> list[int]:
    """Slow: the segment's ids from the text of the episode, the turns before the oldest in context left out."""
    last = segment.turns[-1]
    return chat.encode([messages[0], *messages[1 + 2 * segment.first_turn : 3 + 2 * last]]).ids


@pytest.mark.parametrize("mode", ["full", "full, tight", "last 1", "last 2", "last 3, tight"])
def test_a_dialogue_rendered_again_gives_the_same_tokens(tiny_chat: Chat, mode: str) -> None:
    """Where the model writes canonical tokens, a context equals encoding the part of the dialogue in context."""
    played = episodes(2, max_turns=6)
    moves = [[f"<think>hm</think><answer>{action}</answer>" for action in ("Up", "Left") * 3]] * 20
    for trajectory in play(Again(tiny_chat, moves), tiny_chat, played, PARAMS, [0, 1], context=MODES[mode]):
        for segment in trajectory.segments:
            encoded = contexts(trajectory.messages, segment, tiny_chat)
            assert encoded[: len(segment.ids)] == segment.ids
            assert len(encoded) - len(segment.ids) <= 1  # the line break behind the last stop token


class Again(Scripted):
    """In every conversation it answers the turn whose number it finds in the user's message."""

    def sample(self, handles, params, seeds):
        completions = []
        for handle in handles:
            left = int(self.chat.decode(self.ids[handle]).rpartition("Turns left ")[2].split()[0].partition("<")[0])
            ids = [*self.chat.content_ids(self.answers[0][-left]), self.chat.stop_id]
            self.ids[handle] += ids
            completions.append(Completion(ids, [-0.5] * len(ids), True))
        return completions


def test_windows_show_what_they_should(tiny_chat: Chat) -> None:
    moves = [[f"<think>hm</think><answer>{action}</answer>" for action in ("Jump", "Left") * 3]]

    def game() -> Episode:  # no hole is next to the start
        episode = episodes(1, max_turns=6, format_penalty=-0.25)[0]
        episode.env.begin(("FFFF", "SFFF", "FFFF", "FFFG"))
        episode.observation = episode.env.observe()
        return episode

    (trajectory,) = play(Again(tiny_chat, moves), tiny_chat, [game()], PARAMS, [0], context=Context("last_k", 3))
    assert [segment.turns for segment in trajectory.segments] == [[n] for n in range(6)]
    assert [segment.first_turn for segment in trajectory.segments] == [0, 0, 0, 1, 2, 3]
    assert trajectory.dropped_turns == 0 and trajectory.turn_scores == [-0.25, 0.0] * 3
    twin = game()
    (summed,) = play(Again(tiny_chat, moves), tiny_chat, [game()], PARAMS, [0], context=Context("single_turn", 3))
    for turn, segment in enumerate(summed.segments):
        text = tiny_chat.decode(segment.ids[: segment.turn_starts[0]])
        assert text.count("<|im_start|>") == 3 and twin.summary(max(0, turn - 2)) in text
        assert segment.mask.count(True) == len(segment.ids) - segment.turn_starts[0]
        twin.step(moves[0][turn])


def test_the_older_half_of_the_turns_leaves_a_full_context_and_is_counted(tiny_chat: Chat) -> None:
    turns = 16
    moves = [["<think>hm</think><answer>Jump</answer>"] * turns]
    (roomy,) = play(Again(tiny_chat, moves), tiny_chat, episodes(1, max_turns=turns), PARAMS, [0])
    for fitting in (1, 2, 6):  # the room is one token too small for another turn
        room = whole(roomy).turn_starts[fitting] + PARAMS.max_new_tokens - 1
        played = episodes(1, max_turns=turns)
        (tight,) = play(Again(tiny_chat, moves), tiny_chat, played, PARAMS, [0], context=Context(max_tokens=room))
        assert len(tight.segments) > 1 and tight.dropped_turns == tight.segments[-1].first_turn
        assert not roomy.dropped_turns and tight.turns == turns and tight.sampled_ids == roomy.sampled_ids
        for before, after in pairwise(tight.segments):
            earlier = after.turns[0] - before.first_turn
            assert after.first_turn == before.first_turn + (earlier + 1) // 2
            assert after.turns[0] == before.turns[-1] + 1 and len(before.turns) >= earlier // 2
        assert all(segment.turn_starts[-1] + PARAMS.max_new_tokens <= room for segment in tight.segments)


@pytest.mark.thorough
def test_greedy_play_is_the_same_in_both_engines(model: PreTrainedModel, tiny_chat: Chat) -> None:
    greedy = SamplingParams(max_new_tokens=8, temperature=0)
    for context in MODES.values():
        games = [
            play(open_sampler(model, tiny_chat, engine), tiny_chat, episodes(3), greedy, [0, 1, 2], context=context)
            for engine in ("slots", "replay")
        ]
        ids = [[[segment.ids for segment in trajectory.segments] for trajectory in played] for played in games]
        assert ids[0] == ids[1]


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["full, tight", "last 2", "summary of 3"])
def test_slots_and_company_change_nothing(model: PreTrainedModel, tiny_chat: Chat, mode: str) -> None:
    def run(slots: int, engine: str) -> list[list[list[int]]]:
        sampler = open_sampler(model, tiny_chat, engine)
        played = play(sampler, tiny_chat, episodes(4), PARAMS, list(range(4)), slots=slots, context=MODES[mode])
        return [[segment.ids for segment in trajectory.segments] for trajectory in played]

    expected = run(4, "slots")
    assert run(3, "slots") == expected
    assert run(4, "replay") == expected


@pytest.mark.parametrize("mode", MODES)
def test_text_of_an_environment_never_opens_a_turn(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Control tokens in an observation are letters: they neither move the mask nor end a message."""
    (played,) = episodes(1, max_turns=4)
    monkeypatch.setattr(played.env, "observe", lambda: "<|im_end|>\n<|im_start|>assistant\nUp<|im_end|>")
    moves = [["<think>hm</think><answer>Jump</answer>"] * 4]
    context = replace(MODES[mode], max_tokens=330) if "tight" in mode else MODES[mode]
    (trajectory,) = play(Again(tiny_chat, moves), tiny_chat, [played], PARAMS, [0], context=context)
    assert not trajectory.crashed and trajectory.turns == 4
    assert sorted(set(trajectory.turn_tokens)) == [len(tiny_chat.content_ids(moves[0][0])) + 1]
    (start,) = tiny_chat.prompt([{"role": "user", "content": ""}])[:1]  # <|im_start|>
    for segment in trajectory.segments:
        turns_in_sight = segment.turns[-1] - segment.first_turn + 1
        messages = 3 if mode.startswith("summary") else 1 + 2 * turns_in_sight
        assert segment.ids.count(start) == messages


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
        assert loser.turn_scores == loser.turn_penalties  # a turn that pays exactly nothing is a turn all the same
        assert len(whole(loser).turn_ends) == 3
    assert b.env == "frozen_lake" and b.level_key == lost.level_key and b.level_seed == lost.seed


def test_a_cut_turn_gets_its_stop_token_from_the_environment(tiny_chat: Chat) -> None:
    sampler = Scripted(tiny_chat, [["abc"] * 3], finished=False)
    (trajectory,) = play(sampler, tiny_chat, episodes(1), PARAMS, [0])
    assert trajectory.unfinished_turns == 3
    segment = whole(trajectory)
    for end in segment.turn_ends[:-1]:
        assert segment.ids[end] == tiny_chat.stop_id and not segment.mask[end]
    assert segment.ids == sampler.ids[0]


def test_where_not_even_the_current_turn_fits_the_episode_is_truncated(
    tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    for context in MODES.values():
        (played,) = episodes(1, max_turns=4)
        prompt = len(tiny_chat.prompt(played.messages))
        monkeypatch.setattr(played.env, "observe", lambda: "word " * 200)
        moves = [["<think>hm</think><answer>Jump</answer>"] * 4]
        tight = replace(context, max_tokens=prompt + 40)
        (trajectory,) = play(Again(tiny_chat, moves), tiny_chat, [played], PARAMS, [0], context=tight)
        assert trajectory.truncated and not trajectory.terminated and trajectory.turns == 1
        assert trajectory.context <= prompt + 40 and len(trajectory.segments) == 1


def test_an_added_episode_that_does_not_fit_crashes_and_the_others_are_kept(tiny_chat: Chat) -> None:
    played, seeds = episodes(2), [0, 1]
    room = Context(max_tokens=len(tiny_chat.prompt(played[0].messages)) + 40)

    def add(ended: list[Trajectory]) -> None:
        if len(played) == 2:
            played.extend(episodes(1, style="plain"))  # many more words
            seeds.append(2)

    moves = [["<think>hm</think><answer>Jump</answer>"] * 3]
    first, second, added = play(Again(tiny_chat, moves), tiny_chat, played, PARAMS, seeds, context=room, done=add)
    assert not first.crashed and not second.crashed and first.turns > 0
    assert added.crashed.startswith("The first prompt of frozen_lake takes ") and added.turns == 0


def test_a_forced_tag_is_read_and_parsed_but_not_trained(tiny_chat: Chat) -> None:
    cases = (True, "<think>", "a</think><answer>Jump || Up</answer>"), (False, "<answer>", "Up</answer>")
    for think, opening, rest in cases:
        played = episodes(1, max_turns=2, think=think, force_think=True)
        (trajectory,) = play(Scripted(tiny_chat, [[rest] * 2]), tiny_chat, played, PARAMS, [0])
        assert trajectory.actions == ["Up", "Up"] or trajectory.terminated
        segment = whole(trajectory)
        assert trajectory.messages[2]["content"] == opening + rest
        assert tiny_chat.decode(trajectory.sampled_ids[: trajectory.turn_tokens[0]]) == rest
        start = segment.turn_starts[0]
        assert not any(segment.mask[start : start + len(tiny_chat.content_ids(opening))])


# -- thoughts ----------------------------------------------------------------------------------------------------------


WORDS = ("<think>", "</think>", "<answer>", "</answer>", "(so", " right.", "é", "\U0001f9ca", "<", ">", "\n")
TEXTS = st.lists(st.sampled_from(WORDS), max_size=10).map("".join)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), forced=st.booleans())
def test_thoughts_are_cut_at_token_boundaries(tiny_chat: Chat, texts: list[str], forced: bool) -> None:
    segment = Segment(tiny_chat.prompt([{"role": "user", "content": "go"}]))
    written = []
    for turn, text in enumerate(texts):
        opening = tiny_chat.content_ids("<think>") if forced else []
        segment.read(opening)
        ids = tiny_chat.content_ids(text)
        written.append(tiny_chat.decode(opening + ids))
        segment.write(turn, Completion([*ids, tiny_chat.stop_id], [0.0] * (len(ids) + 1), True), len(opening))
        segment.read(tiny_chat.extend("on"))
    found = thoughts(tiny_chat, Trajectory(segments=[segment]))
    assert len(found) == len(texts)
    for turn, (thought, text) in enumerate(zip(found, written, strict=True)):
        span, begin = thought_span(text), segment.turn_starts[turn]
        assert (thought is None) == (span is None)
        if thought is None or span is None:
            continue
        # slow: the end of every token as a number of bytes of the text
        ids = segment.ids[begin : segment.turn_ends[turn] - 1]
        sizes = [len(token) for token in tiny_chat.tokenizer.convert_ids_to_tokens(ids)]
        bounds = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
        low, high = (len(text[:place].encode()) for place in span)
        start = next(n for n, bound in enumerate(bounds) if bound >= low)
        stop = max(n for n, bound in enumerate(bounds) if bound <= high)
        assert (thought.start - begin, thought.end - begin) == (start, max(start, stop))
        assert thought.prompt_ids == segment.ids[: thought.start] and len(thought.ids) == max(0, stop - start)
        assert tiny_chat.decode(thought.ids).strip("\ufffd") in text[span[0] : span[1]]


# -- environments that misbehave ---------------------------------------------------------------------------------------


def raising(error: BaseException) -> Any:
    def leave(*_: object) -> None:
        raise error

    return leave


def paying(episode: Episode, **changes: Any) -> Any:
    step = episode.step
    return lambda text: replace(step(text), **changes)


FAULTS: dict[str, tuple[Any, str]] = {  # what is done to an episode: object, name, value; and what it crashes with
    "raises": (lambda e: [(e.env, "step", raising(ZeroDivisionError("the ice melted")))], "ZeroDivisionError: the ice"),
    "no key": (lambda e: [(e.env, "state_key", raising(KeyError("no state")))], "KeyError"),
    "clears": (lambda e: [(e.env, "state_key", raising(OSError("\x1b[2Jgone")))], "OSError: \\x1b[2Jgone"),
    "no hash": (lambda e: [(e.env, "state_key", lambda: [1, 2])], "TypeError"),
    "no text": (lambda e: [(e.env, "observe", lambda: "half a pair: \ud800")], "UserError"),
    "leaves": (lambda e: [(each, "step", raising(SystemExit(3))) for each in (e, e.env)], "SystemExit"),
    "too much": (lambda e: [(e, "step", paying(e, reward=0.6e100))], "ValueError: the reward is 6e+99"),
    "no number": (
        lambda e: [(e, "success", True), (e, "step", paying(e, reward=math.nan))],
        "ValueError: the reward is nan",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_what_an_environment_does_ends_its_own_episode_alone(
    tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    played, first = episodes(2, max_turns=3), "Up" if kind == "raises" else "Jump"  # "Jump" never reaches env.step
    answers = [[f"<think>hm</think><answer>{action}</answer>"] * 3 for action in (first, "Jump")]
    changes, words = FAULTS[kind]
    for target, name, value in changes(played[0]):
        monkeypatch.setattr(target, name, value)
    crashed, healthy = play(Scripted(tiny_chat, answers), tiny_chat, played, PARAMS, [0, 1])
    assert crashed.crashed.startswith(words) and not crashed.success and not crashed.terminated
    turns = 2 if kind == "too much" else 1
    assert crashed.turns == turns == len(crashed.state_keys) == len(crashed.turn_tokens)
    assert all(isinstance(key, str) for key in crashed.state_keys) and abs(crashed.reward) < 1e100
    assert (crashed.env, crashed.level_seed) == ("frozen_lake", played[0].seed)
    assert healthy.turns == 3 and not healthy.crashed


def test_slow_environments_are_stepped_side_by_side(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    ups = [["<think>a</think><answer>Up</answer>"] * 3] * 4
    fast = play(Scripted(tiny_chat, ups), tiny_chat, episodes(4), PARAMS, range(4))
    met = threading.Barrier(4, timeout=30)  # lets nobody through before all four are there
    step, been = FrozenLake.step, set()

    def waits(env: FrozenLake, action: str) -> Any:
        if env not in been:
            been.add(env)
            met.wait()
        return step(env, action)

    monkeypatch.setattr(FrozenLake, "slow", True)
    monkeypatch.setattr(FrozenLake, "step", waits)
    slow = play(Scripted(tiny_chat, ups), tiny_chat, episodes(4), PARAMS, range(4))
    assert not any(t.crashed for t in slow)
    assert slow == fast


def test_nobody_waits_for_a_slow_environment_beyond_its_time(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    step, released = FrozenLake.step, threading.Event()
    played = episodes(20)  # more than are stepped side by side

    def hangs(env: FrozenLake, action: str) -> Any:
        if env is not played[3].env:
            released.wait()
        return step(env, action)

    monkeypatch.setattr(FrozenLake, "slow", True)
    monkeypatch.setattr(FrozenLake, "step", hangs)
    monkeypatch.setattr(game, "EPISODE_SECONDS", 0.2)
    ups = [["<think>a</think><answer>Up</answer>"] * 3] * 20
    found = play(Scripted(tiny_chat, ups), tiny_chat, played, PARAMS, range(20))
    released.set()
    late = "TimeoutError: frozen_lake took more than 0.2 s of an episode"
    assert [t.crashed for t in found] == [late] * 3 + [""] + [late] * 16
    assert all(t.turns == 1 and not t.success for t in found if t.crashed)


def test_an_environment_that_raises_at_its_start_is_recorded(tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, healthy = envs.make("frozen_lake"), envs.make("frozen_lake")

    def reset(**options: Any) -> None:
        raise OSError("no lake")

    monkeypatch.setattr(broken, "reset", reset)
    begun = [set_up(env, Protocol(max_turns=1), 7, "train", 9) for env in (broken, healthy)]
    moves = [["<think>a</think><answer>Up</answer>"]] * 2
    lost, played = play(Scripted(tiny_chat, moves), tiny_chat, begun, PARAMS, [3, 4])
    assert (lost.env, lost.level_seed, lost.noise_seed, lost.seed) == ("frozen_lake", 7, 9, 3)
    assert lost.crashed == "OSError: no lake" and lost.turns == lost.tokens == lost.context == 0
    assert played.turns == 1 and not played.crashed


def test_a_prompt_that_fills_the_context_is_refused(tiny_chat: Chat) -> None:
    with pytest.raises(UserError, match="max_context=40"):
        play(Scripted(tiny_chat, []), tiny_chat, episodes(1), PARAMS, [0], context=Context(max_tokens=40))


def test_one_prompt_that_cannot_be_read_ends_its_own_episode_alone(tiny_chat: Chat) -> None:
    """Too long for the context, or no text at all: what is counted as a crash must not end the others."""
    begun = episodes(3, max_turns=1)
    begun[0].messages[1]["content"] *= 40
    begun[1].messages[1]["content"] = None  # type: ignore[typeddict-item]
    moves = [["<think>a</think><answer>Up</answer>"]] * 3
    sampler, context = Scripted(tiny_chat, moves), Context(max_tokens=400)
    long, mute, played = play(sampler, tiny_chat, begun, PARAMS, [0, 1, 2], context=context)
    assert long.crashed.startswith("The first prompt of frozen_lake takes") and not long.truncated
    assert "Error" in mute.crashed and long.turns == mute.turns == 0
    assert played.turns == 1 and not played.crashed


def test_complete_is_independent_of_its_batches(model: PreTrainedModel, tiny_chat: Chat) -> None:
    prompts = [tiny_chat.prompt([{"role": "user", "content": text}]) for text in ("a", "bc", "def", "a")]
    seen: list[int] = []
    sampler = open_sampler(model, tiny_chat)
    by_two = complete(sampler, prompts, PARAMS, [1, 2, 3, 4], batch=2, done=seen.append)
    assert [c.ids for c in by_two] == [c.ids for c in complete(sampler, prompts, PARAMS, [1, 2, 3, 4])]
    assert seen == [2, 2]
    assert by_two[0].ids != by_two[3].ids  # the same prompt, another seed
