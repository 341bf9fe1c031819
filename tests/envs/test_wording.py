"""The words that a model reads: sentences by default, templates of a run, and the compact style to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from envs import make, names
from envs.base import TextEnv
from envs.episode import Episode
from envs.frozen_lake import FrozenLake
from envs.players import next_action, player_names
from envs.protocol import Protocol, format_response, parse
from envs.sokoban import Sokoban
from envs.wording import example_response, system_text

GAMES = [name for name in names() if name not in ("prompts", "deep_coder")]


def of(level: tuple[str, ...], **options: Any) -> FrozenLake:
    env = FrozenLake(size=len(level), **options)
    env.reset(seed=0)
    env.begin(level)
    return env


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize("limits", [{}, {"max_actions_per_turn": 3}, {"think": False}, {"max_turns": 1}])
def test_the_example_is_a_valid_answer(name: str, limits: dict[str, Any]) -> None:
    env = make(name)
    protocol = Protocol.of(env, **limits)
    listed = None if name == "bandit" else env.actions  # whose example names arms that no level has
    parsed = parse(example_response(env, protocol), protocol, listed)
    assert parsed.well_formed and parsed.actions and not parsed.invalid
    text = system_text(env, protocol)
    before, _, example = text.rpartition("For example:\n")
    assert example.endswith(example_response(env, protocol)) and env.rules() in before
    assert example.startswith(env.example_state or example_response(env, protocol))
    assert ("<think>" in text) == protocol.think and "</answer>" in text
    assert (" || " in text) == (protocol.max_actions_per_turn > 1 and env.actions is not None and env.max_turns > 1)


def test_a_template_without_the_form_hears_of_it_after_a_malformed_answer() -> None:
    def said(feedback: str) -> str:
        env = make("lean")
        return Episode(env, Protocol.of(env, feedback=feedback), 5).step("I do not know.").user or ""

    form = "the form <think>...</think><answer>...</answer>."
    assert said("{{ outcome }}") == f"That was not a valid answer. Use {form}"
    assert said("{{ outcome }} {{ form }}") == f"That was not a valid answer. Answer in {form}"


@pytest.mark.parametrize("name", GAMES)
def test_an_episode_in_sentences_says_what_happened_and_what_is_left(name: str) -> None:
    env = make(name)
    if env.max_turns < 3:
        env = make(name, **({"tries": 3} if name == "countdown" else {"pulls": 4, "arms": 2}))
    episode = Episode(env, Protocol.of(env), 5)
    turns = episode.protocol.max_turns
    assert episode.messages[1]["content"].startswith(episode.observation)
    assert f"You have {turns} turns left." in episode.messages[1]["content"]
    form = "the form <think>...</think><answer>...</answer>."
    assert (episode.messages[1]["content"].endswith(f" Answer in {form}")) == (env.actions is None)
    said = episode.step("I do not know.").user or ""
    if env.actions is None:
        assert said.startswith("That was not a valid answer.\n\n") and said.endswith(f" Answer in {form}")
    else:
        assert said.startswith(f"That was not a valid answer. Use {form}\n\n") and not said.endswith(form)
    assert episode.observation in said
    if env.actions is not None:
        said = episode.step("<think>so</think><answer>Fly to\nthe <moon></answer>").user or ""
        assert said.startswith('"Fly to the <moon>" is not one of the actions. The actions are ')
    else:
        assert (episode.step("<think>so</think><answer> </answer>").user or "").startswith("That was not a valid")


@pytest.mark.parametrize("name", GAMES)
def test_thoughts_are_sentences(name: str) -> None:
    """They begin with a capital, end with a point, hold no tag, and stand before an answer that is read as it is."""
    env = make(name)
    protocol = Protocol.of(env)
    for seed in range(12):
        episode = Episode(env, protocol, seed)
        player = "expert" if env.has("expert") else player_names(env)[0]
        while not episode.done and episode.turns < 4:
            action = next_action(env, player)
            thought = env.thought_of(action)
            if name in ("metamath_qa", "deep_coder") or not thought:  # working of a data set, as it is written there
                episode.step(format_response(thought, [action], protocol))
                continue
            assert thought[0].isupper() or thought[0].isdigit() or name == "web_shop", thought
            assert thought.endswith((".", "!")) and "<" not in thought, thought
            parsed = parse(format_response(thought, [action], protocol), protocol, env.actions)
            assert parsed.actions == [action] and not parsed.invalid
            episode.step(format_response(thought, [action], protocol))


def test_what_a_demonstrator_thinks_on_the_ice() -> None:
    env = of(("FFF", "SHG", "FFF"))
    thought = env.thought_of("Down")
    assert thought == (
        "The goal is 2 steps to the right. There is a hole to the right of me."
        " No step towards the goal is safe, so I go down first."
    )
    env = of(("SFG", "FFF", "FFF"))
    assert (
        env.thought_of("Right") == "The goal is 2 steps to the right. To the right is closer and safe, so I go right."
    )


def test_nothing_is_called_safe_on_slippery_ice() -> None:
    """One may slip into the hole beside a move."""
    env = of(("SFG", "HFF", "FFF"), slippery=True)
    assert env.thought_of("Right") == (
        "The goal is 2 steps to the right. There is a hole below me. To the right is closer, so I go right."
    )


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        ("grid", "P O G\n_ _ _\n_ _ _"),
        ("neighbours", "The goal is 2 steps to the right from you. Going Left against the edge, Down leads onto ice"),
        (
            "coordinates",
            "You are at row 0, column 0. The goal is at row 0, column 2. There are holes at row 0, column 1.",
        ),
    ],
)
def test_a_lake_in_words(observation: str, words: str) -> None:
    env = of(("SHG", "FFF", "FFF"), observation=observation)
    assert env.observe().startswith(words)
    assert of(("SHG", "FFF", "FFF"), observation="both").observe().endswith(env.observe() if "\n" in words else "_ _ _")


def test_a_room_in_words() -> None:
    env = make("sokoban", observation="neighbours")
    assert isinstance(env, Sokoban)
    env.reset(seed=0)
    env.begin(("######", "#    #", "# @$.#", "#    #", "#    #", "######"))
    assert env.observe() == (
        "Around you: floor on the left, floor below, a box on the right and floor above.\n"
        "A box is 1 step to the right from you. Around it: you on the left, floor below, a target on the right and"
        " floor above. Its nearest free target is 1 step to the right from it."
    )
    assert env.thought_of("Right") == (
        "The box is 1 step to the right from me. Its target is 1 step to the right from the box."
        " I want to push it to the right, and I am in the right place. I push right."
    )


def test_templates_of_a_run_take_the_place_of_ours() -> None:
    env = make("frozen_lake")
    protocol = Protocol.of(
        env,
        system="{{ rules }} [{{ max_turns }}] {{ example }}",
        example="<think>hm</think><answer>Up</answer>",
        feedback="{% if turn > 1 %}({{ reward }}, {{ valid }}) {% endif %}{{ observation }} #{{ turns_left }}",
    )
    episode = Episode(env, protocol, 1)
    system, user = (message["content"] for message in episode.messages)
    assert system == f"{env.rules()} [8] <think>hm</think><answer>Up</answer>"
    assert user == f"{env.observe()} #8"
    assert (episode.step("no").user or "") == f"(0.0, False) {env.observe()} #7"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"system": "{{ rule }}"}, "protocol.system uses rule; its values are rules, limits"),
        ({"feedback": "{% if %}"}, "protocol.feedback is not a Jinja template"),
        ({"feedback": "{{ reward + 1 }}"}, "`protocol.feedback` cannot be filled (TypeError: unsupported operand"),
        ({"feedback": "{{ reward + 1 }}"}, "where reward is none."),
        ({"feedback": "{{ observation }} {{ actions_left - 1 }}"}, "where actions_left is none."),
        ({"feedback": "{{ observation.__class__ }}"}, "(SecurityError: "),
        ({"system": "{{ rules.__class__.__mro__[1].__subclasses__() }}"}, "(SecurityError: "),
        ({"system": "{{ rules.foo }}"}, "`protocol.system` cannot be filled (UndefinedError: "),
        ({"system": "{% include 'x' %}"}, "`protocol.system` cannot be filled (TypeError: "),
        ({"style": "terse"}, "Known: plain, compact"),
        ({"style": "compact", "example": "x"}, 'belong to style="plain"'),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        Protocol(**wrong)
    assert words in str(error.value)


def test_a_template_that_fails_in_an_environment_is_named() -> None:
    env = make("countdown")  # which lists no actions
    with pytest.raises(RuntimeError, match=r"`protocol.system` cannot be filled \(UndefinedError: "):
        Episode(env, Protocol.of(env, system="{{ actions[0] }}"), 0)


@pytest.mark.parametrize(
    "feedback",
    [
        "{% if turn > 1 %}{{ reward + 1 }} {{ outcome.split()[0] }}{% endif %}{{ observation }}",
        "{{ observation.split('\n')[2].split(' ')[3] }} {{ actions[0] }} {{ 1 / turns_left }}",
        "{{ actions_left + 1 if actions_left is not none else turns_left }}",
    ],
)
def test_templates_that_always_work_are_taken(feedback: str) -> None:
    env = make("frozen_lake")
    episode = Episode(env, Protocol.of(env, feedback=feedback, max_actions=4), 1)
    assert episode.step("no").user


def test_an_empty_template_is_an_empty_message() -> None:
    env = make("frozen_lake")
    episode = Episode(env, Protocol.of(env, system="", feedback=""), 1)
    assert [message["content"] for message in episode.messages] == ["", ""]
    assert system_text(env, Protocol.of(env, example="")).endswith("For example:\n")


@pytest.mark.parametrize("name, actions", [("frozen_lake", "up to 5 actions in a turn, "), ("countdown", "one action")])
@pytest.mark.parametrize("think", [True, False])
def test_ragens_messages_fit_the_answer_that_is_asked_for(name: str, actions: str, think: bool) -> None:
    from posttrain.config import ProtocolSection

    env = make(name)
    section = ProtocolSection.model_validate({"preset": "ragen", "think": think})
    episode = Episode(env, Protocol.of(env, **section.arguments()), 1)
    system, user = (message["content"] for message in episode.messages)
    assert f"You may take {actions}" in system
    assert ("<think>" in user) == think and "Always output: <" in user and "<answer> [your answer] </answer>" in user


def test_the_compact_style_is_what_it_was() -> None:
    env: TextEnv = make("frozen_lake", observation="neighbours")
    episode = Episode(env, Protocol.of(env, style="compact"), 1)
    system, user = (message["content"] for message in episode.messages)
    assert system == (
        "Walk over the frozen lake to the goal. A hole ends the game. Goal: steps from you on 4 x 4 cells. Cells beside"
        " you: _ ice, O hole, G goal, # edge. Actions: Left, Down, Right, Up. At most 8 turns, one action each. Reply:"
        " <think>reasoning</think><answer>Action</answer>"
    )
    assert user == "Goal Left 1 Left G Down _ Right _ Up _\nTurns left 8"
    assert episode.step("x").user == f"Reward 0\nInvalid answer\n{user[:-1]}7"
    assert env.thought() == "safe Left Down Right Up goal Left"
