"""Are answers read, rewarded and limited as the protocol says, whatever the model writes?"""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

import re

import pytest
from hypothesis import given, settings, strategies as st

from envs import make
from envs.episode import Episode
from envs.players import demonstrate
from envs.protocol import STYLES, Parsed, Protocol, format_response, parse
from envs.wording import system_text

ACTIONS = ("Left", "Down", "Right", "Up")
COMPACT = Protocol(style="compact")
LAKE = ("SFFF", "FFFF", "FFFF", "FFHG")


def say(*actions: str) -> str:
    return format_response("so", actions, Protocol())


def lake(protocol: Protocol | None = None, level: tuple[str, ...] = LAKE, **options) -> Episode:
    episode = Episode(make("frozen_lake", **options), protocol or Protocol(), seed=0)
    episode.env.begin(level)
    return episode


# -- parse -------------------------------------------------------------------------------------------------------------

FRAGMENTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", " ", "\n", "||", "|", "Up", "lEFT", "fly", "\0"])
    | st.text(max_size=4),
    max_size=24,
).map("".join)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(text=FRAGMENTS, think=st.booleans(), per_turn=st.integers(1, 3))
def test_parse_is_total_and_finds_the_first_pair(text, think, per_turn):
    parsed = parse(text, Protocol(think=think, max_actions_per_turn=per_turn), ACTIONS)
    pattern = r"<think>.*?</think>\s*<answer>(.*?)</answer>" if think else r"<answer>(.*?)</answer>"
    found = re.search(pattern, text, re.DOTALL)
    assert parsed.well_formed == (found is not None)
    names = [name.strip() for name in found[1].split("||") if name.strip()] if found else []
    valid = [name.capitalize() for name in names if name.lower() in ("left", "down", "right", "up")]
    assert parsed.actions == valid[:per_turn]
    assert len(parsed.invalid) == len(names) - len(valid)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("<think>a</think><answer>Up</answer>", Parsed(["Up"], True, [])),
        ("noise <think></think>\n <answer> uP </answer> noise", Parsed(["Up"], True, [])),
        ("<think>a</think><answer>Up</answer><think>b</think><answer>Down</answer>", Parsed(["Up"], True, [])),
        ("<think>a</think><answer>Up||fly || down||Left</answer>", Parsed(["Up", "Down"], True, ["fly"])),
        ("<think>a</think><answer>Upp</answer>", Parsed([], True, ["Upp"])),
        ("<think>a</think><answer></answer>", Parsed([], True, [])),
        ("<answer>Up</answer>", Parsed([], False, [])),
        ("</think><answer>Up</answer>", Parsed([], False, [])),
        ("<think>a</think> so <answer>Up</answer>", Parsed([], False, [])),
        ("<think>a</think><answer>Up", Parsed([], False, [])),
    ],
)
def test_parse_by_example(text, expected):
    assert parse(text, Protocol(max_actions_per_turn=2), ACTIONS) == expected


@pytest.mark.parametrize(
    "inside",
    ["search[red shoes] || Click[Buy]", "\n    def f(x):\n\treturn x  \n", "UP", "a < b </think> <answer>", "\0"],
)
def test_free_text_reaches_the_environment_as_it_was_written(inside):
    for protocol in (Protocol(), Protocol(max_actions_per_turn=3)):
        assert parse(f"<think>a</think><answer>{inside}</answer>", protocol, None) == Parsed([inside], True, [])


def test_a_blank_answer_is_no_free_text_action():
    assert parse("<think>a</think><answer> \n</answer>", Protocol(), None) == Parsed([], True, [])
    assert parse("<think>a</think>", Protocol(), None) == Parsed([], False, [])


def test_parse_is_linear_in_long_hostile_text():
    for text in ("<think>" * 200_000, "<think>" + "</think>" * 200_000, "<think></think>" + " " * 500_000):
        assert not parse(text, Protocol(), ACTIONS).well_formed


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "words", "limits"),
    [
        ("plain", {"frozen_lake": 120, "sokoban": 170}, "at most 8 turns and 10 actions in all"),
        ("compact", {"frozen_lake": 60, "sokoban": 65}, "up to 3 actions each, 10 actions in all"),
    ],
)
def test_the_system_text_is_short_and_complete(style, words, limits):
    for name, most in words.items():
        env = make(name)
        env.style = style
        text = system_text(env, Protocol(style=style))
        assert len(text.split()) <= most
        assert all(action in text for action in env.actions or ())
        assert "8 turns" in text and "<think>" in text and "<answer>" in text
    text = system_text(env, Protocol(max_actions_per_turn=3, max_actions=10, think=False, style=style))
    assert limits in text and "||" in text and "<think>" not in text


@pytest.mark.parametrize("limits", [{}, {"think": False}, {"max_actions_per_turn": 2}])
def test_the_example_in_the_compact_system_text_is_well_formed(limits):
    protocol = Protocol(style="compact", **limits)
    assert parse(system_text(make("frozen_lake"), protocol), protocol, None).well_formed


def test_user_turns_are_sentences_about_reward_state_and_what_is_left():
    episode = lake()
    left = "You have {} turns left. What do you do?"
    assert [message["role"] for message in episode.messages] == ["system", "user"]
    assert episode.messages[1]["content"].endswith(f"\n\n{left.format(8)}")
    grid = "_ _ _ _\nP _ _ _\n_ _ _ _\n_ _ O G"
    assert episode.step(say("Down")).user == f"{grid}\n\n{left.format(7)}"
    assert episode.step("what?").user == (
        "That was not a valid answer. Use the form <think>...</think><answer>...</answer>."
        f"\n\n{grid}\n\n{left.format(6)}"
    )
    assert (
        episode.step(say("Left")).user
        == f"Left changed nothing. Choose another action: Down, Right or Up.\n\n{grid}\n\n{left.format(5)}"
    )
    tight = lake(Protocol(max_actions_per_turn=2, max_actions=5))
    assert "You have 7 turns and 3 actions left." in (tight.step(say("Down", "Up")).user or "")


def test_compact_user_turns_are_short_and_tell_reward_state_and_what_is_left():
    episode = lake(COMPACT, observation="neighbours")
    assert [message["role"] for message in episode.messages] == ["system", "user"]
    assert episode.messages[1]["content"].endswith("\nTurns left 8")
    assert episode.step(say("Down")).user == "Reward 0\nGoal Down 2 Right 3 Left # Down _ Right _ Up _\nTurns left 7"
    user = episode.step("what?").user
    assert user == "Reward 0\nInvalid answer\nGoal Down 2 Right 3 Left # Down _ Right _ Up _\nTurns left 6"
    tight = lake(Protocol(max_actions_per_turn=2, max_actions=5, style="compact"))
    assert tight.step(say("Down", "Up")).user.endswith("\nTurns left 7 Actions left 3")


def test_a_forced_opening_is_the_first_tag_of_the_format():
    assert Protocol().opening == Protocol(think=False).opening == ""
    for think, opening in ((True, "<think>"), (False, "<answer>")):
        protocol = Protocol(think=think, force_think=True)
        assert protocol.opening == opening and format_response("so", ["Up"], protocol).startswith(opening)


def test_a_summary_tells_the_last_turns_and_the_state():
    episode = lake(Protocol(max_turns=4, max_actions_per_turn=2, max_actions=8))
    episode.observation = start = episode.env.observe()
    assert episode.summary(0) == f"{start}\n\nYou have 4 turns left. What do you do?"
    episode.step(say("Down", "Up"))
    episode.step("what?")
    episode.step(say("fly", "Right"))
    told = episode.summary(1)
    form = "<think>...</think><answer>... || ...</answer>"
    assert told.startswith(f"Turn 2:\n{start}\nThat was not a valid answer. Use the form {form}.")
    assert told.endswith(
        f'\n\nTurn 3:\n{start}\nYour answer was: Right. "fly" is not one of the actions. The actions are Left, Down,'
        " Right and Up.\n\nTurn 4:\n_ P _ _\n_ _ _ _\n_ _ _ _\n_ _ O G\n\nYou have 1 turn left. What do you do?"
    )
    assert episode.summary(0).startswith(f"Turn 1:\n{start}\nYour answer was: Down || Up.\n\nTurn 2:\n")
    assert episode.summary(3) == episode.summary(3).rpartition("Turn 4:\n")[2]


def test_a_compact_summary_tells_the_last_turns_and_the_state():
    protocol = Protocol(max_turns=4, max_actions_per_turn=2, max_actions=8, style="compact")
    episode = lake(protocol, observation="neighbours")
    episode.observation = episode.env.observe()
    start = "Goal Down 3 Right 3 Left # Down _ Right _ Up #"
    assert episode.summary(0) == f"{start}\nTurns left 4"
    episode.step(say("Down", "Up"))
    episode.step("what?")
    episode.step(say("fly", "Right"))
    assert episode.summary(1) == (
        f"Turn 2\n{start}\nInvalid answer\nReward 0\n"
        f"Turn 3\n{start}\nAction Right\nInvalid answer\nReward 0\n"
        "Turn 4\nGoal Down 3 Right 2 Left _ Down _ Right _ Up #\nTurns left 1"
    )
    assert episode.summary(0).startswith(f"Turn 1\n{start}\nAction Down || Up\nReward 0\nTurn 2\n")
    assert episode.summary(3) == episode.summary(3).rpartition("Turn 4\n")[2]


# -- episodes ----------------------------------------------------------------------------------------------------------


def test_what_the_model_wrote_is_kept_to_the_letter():
    episode = lake()
    text = " <think>\t</think><answer> lEFT || fly</answer> \u00e9<|im_end|>\n"
    episode.step(text)
    assert episode.messages[2] == {"role": "assistant", "content": text}
    assert episode.actions == ["Left"]


def test_an_invalid_turn_leaves_the_state_and_costs_a_turn_and_a_capped_penalty():
    episode = lake(Protocol(max_turns=6, max_actions=6))
    before = episode.state_key()
    turns = [episode.step(text) for text in ("", "<think>a</think><answer>fly</answer>", "Up", "Up")]
    assert episode.state_key() == before and not episode.done and episode.actions == []
    assert [turn.penalty for turn in turns] == [-0.1, -0.1, -0.1, 0.0]
    assert [turn.valid for turn in turns] == [False] * 4 and all(turn.reward == 0 for turn in turns)
    assert (episode.turns, episode.invalid_turns) == (4, 4)
    assert episode.step(say("Down")).valid and episode.step("Up").done
    assert episode.truncated and not episode.terminated and not episode.success


def test_known_actions_beside_unknown_ones_are_played_and_the_turn_is_penalised():
    episode = lake(Protocol(max_actions_per_turn=2))
    turn = episode.step(say("fly", "Down"))
    assert episode.actions == ["Down"] and turn.penalty == -0.1 and not turn.valid


def test_turns_without_reward_count():
    episode = lake()
    turns = [episode.step(say("Left")) for _ in range(8)]
    assert [turn.reward for turn in turns] == [0.0] * 8 and [turn.done for turn in turns] == [False] * 7 + [True]
    assert (episode.turns, len(episode.actions), episode.effective_actions) == (8, 8, 0)
    assert episode.truncated and not episode.terminated


def test_success_on_the_last_turn_is_terminated_not_truncated():
    level = ("FFFF", "FFFF", "FFFF", "FSFG")
    episode = lake(Protocol(max_turns=2, max_actions=2), level)
    episode.step(say("Right"))
    last = episode.step(say("Right"))
    assert last == type(last)(reward=1.0, penalty=0.0, done=True, valid=True, user=None)
    assert episode.success and episode.terminated and not episode.truncated and episode.failure == ""


def test_a_hole_ends_the_game_and_is_named():
    episode = lake(level=("FFFF", "FFFF", "FFFF", "FSHG"))
    turn = episode.step(say("Right"))
    assert turn.done and turn.reward == 0 and turn.valid
    assert episode.terminated and not episode.success and episode.failure == "hole"
    with pytest.raises(RuntimeError, match="over"):
        episode.step(say("Right"))


def test_a_turn_of_several_actions_is_summed_and_stops_at_the_end():
    episode = lake(Protocol(max_actions_per_turn=4), ("FFFF", "FFFF", "FFFF", "FSFG"))
    turn = episode.step(say("Right", "Right", "Left", "Left"))
    assert turn.reward == 1.0 and episode.actions == ["Right", "Right"] and episode.success
    room = Episode(make("sokoban", size=5), Protocol(max_actions_per_turn=4), seed=0)
    room.env.begin(("#####", "#@ $#", "#$ .#", "#  .#", "#####"))
    assert room.step(say("Right", "Left", "Up")).reward == pytest.approx(-0.3)
    assert (len(room.actions), room.effective_actions) == (3, 2)


def test_the_action_limit_ends_an_episode():
    episode = lake(Protocol(max_actions_per_turn=3, max_actions=4))
    assert not episode.step(say("Down", "Down", "Up")).done
    assert episode.step(say("Up", "Up", "Up")).done
    assert len(episode.actions) == 4 and episode.turns == 2 and episode.truncated


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_finite_number_is_the_environments_fault(monkeypatch, reward):
    episode = Episode(make("frozen_lake"), Protocol(), 0)
    step = episode.env.step
    monkeypatch.setattr(episode.env, "step", lambda action: (step(action)[0], reward, *step(action)[2:]))
    with pytest.raises(ValueError, match=f"the reward is {reward}"):
        episode.step("<think>a</think><answer>Up</answer>")
    assert episode.turns == 0 and episode.past == []


def test_a_environments_own_verdicts_count(monkeypatch):
    episode = lake()
    info = {"success": False, "action_is_valid": False, "action_is_effective": False, "failure": ""}
    monkeypatch.setattr(episode.env, "step", lambda action: ("nothing", 0.5, False, True, info))
    turn = episode.step(say("Down"))
    assert (turn.reward, turn.penalty, turn.valid, turn.done) == (0.5, -0.1, False, True)
    assert episode.truncated and not episode.terminated


@pytest.mark.parametrize(
    "fields, says",
    [({"max_turns": 0}, "max_turns"), ({"format_penalty": 1.0}, "penalty")],
)
def test_impossible_protocols_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Protocol(**fields)


# -- demonstrations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, mix", [("frozen_lake", {"nearer": 0.5, "safe": 0.5}), ("sokoban", {"push": 0.5, "go": 0.5})]
)
@pytest.mark.parametrize("style", STYLES)
def test_demonstrations_follow_from_their_number_and_are_well_formed_and_true(name, mix, style):
    protocol = Protocol(style=style)
    texts = [demonstrate(make(name), protocol, seed, "train", mix) for seed in range(20)]
    assert texts == [demonstrate(make(name), protocol, seed, "train", mix) for seed in range(20)]
    for seed, messages in enumerate(texts):
        replay = Episode(make(name), protocol, seed, "train")
        for message in messages[2:]:
            if message["role"] == "assistant":
                action = message["content"].partition("<answer>")[2].removesuffix("</answer>")
                assert message["content"] == format_response(replay.env.thought_of(action), [action], protocol)
                assert replay.env.thought_of(action).startswith(replay.env.thought())
                assert replay.step(message["content"]).valid
        assert replay.done and replay.messages == messages


def test_shares_are_kept_and_the_expert_may_play():
    counts = {"safe": 0, "other": 0}
    for seed in range(200):
        for message in demonstrate(make("frozen_lake"), COMPACT, seed, "train", {"safe": 0.5, "random": 0.5}):
            if message["role"] == "assistant":
                thought, action = re.fullmatch(r"<think>(.*)</think><answer>(.*)</answer>", message["content"]).groups()
                counts["safe" if action in thought.partition("safe")[2] else "other"] += 1
    # random alone is safe in about 0.64 of the turns; half of the turns are always safe
    assert 0.77 < counts["safe"] / sum(counts.values()) < 0.87
    expert = demonstrate(make("sokoban"), Protocol(think=False), 1, "test", {"expert": 1.0})
    replay = Episode(make("sokoban"), Protocol(think=False), 1, "test")
    for message in expert[2::2]:
        replay.step(message["content"])
    assert replay.success and expert[2]["content"].startswith("<answer>")


def test_a_mixture_must_make_sense():
    with pytest.raises(ValueError, match='Did you mean "safe"'):
        demonstrate(make("frozen_lake"), Protocol(), 0, "train", {"save": 1.0})
    for mix in ({"safe": 0.5}, {}, {"nearer": 1.5, "safe": -0.5}):
        with pytest.raises(ValueError, match="sum to 1"):
            demonstrate(make("frozen_lake"), Protocol(), 0, "train", mix)
