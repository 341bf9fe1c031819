"""Does a stock GRPOTrainer play and learn from our environments by its `environment_factory`?"""

# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false
from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytest.importorskip("trl", reason="TRL is not installed: pip install -r requirements.txt")

import envs
from envs.adapters.trl import OVER, TRLGame, environment, rows, success
from envs.episode import Episode
from envs.protocol import Protocol

CALL = '<tool_call>\n{{"name": "act", "arguments": {}}}\n</tool_call><|im_end|>'


def episode_of(game: Any) -> Episode:
    """Public methods of a game are tools, so that its episode is private."""
    return game._episode


def test_a_game_is_the_episode_that_the_project_plays() -> None:
    game = environment("frozen_lake", size=5)()
    told = game.reset(seed=7, split="test", prompt="ignored")
    env = envs.make("frozen_lake", size=5)
    episode = Episode(env, Protocol.of(env, think=False), 7, "test", episode_of(game).noise_seed)
    assert told == f"{env.rules()} At most {env.max_turns} calls of act, one action each.\n\n{episode.observation}"
    reward = 0.0
    for action in ["Left", "fly", "", "up || down", "Right", "\ud800", "x" * 60_000, *["Up"] * 9]:
        heard = game.act(action)
        if episode.done:
            assert heard == OVER
            continue
        turn = episode.step(f"<answer>{action}</answer>")
        reward += turn.reward + turn.penalty
        assert heard == turn.user or heard.endswith(OVER)
    assert game.get_reward() == pytest.approx(reward) and reward < 0 and episode.done


def test_the_class_is_what_trl_asks_for() -> None:
    from transformers.utils import get_json_schema

    kind = environment("sokoban", max_turns=3)
    schema = get_json_schema(kind().act)["function"]
    assert schema["name"] == "act" and schema["parameters"]["required"] == ["action"]
    assert kind.__name__ == "Sokoban" and kind().act("Up") == OVER and kind().get_reward() == 0
    tools = {name for name in vars(TRLGame) | vars(kind) if not name.startswith("_")}
    assert tools == {"reset", "act", "get_reward"}, "every other public method would be a tool"
    with pytest.raises(ValueError, match="Did you mean"):
        environment("sokobn")
    with pytest.raises(ValueError, match='no option of the environment sokoban "sise"'):
        environment("sokoban", sise=3)


def test_a_reward_that_is_no_number_is_never_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    game = environment("frozen_lake")()
    game.reset(seed=1)
    game.act("fly")
    before, kind = game.get_reward(), type(episode_of(game).env)
    info = dict.fromkeys(("success", "action_is_valid", "action_is_effective"), True) | {"failure": ""}
    monkeypatch.setattr(kind, "step", lambda self, action: (self.observe(), float("nan"), False, False, info))
    with pytest.raises(ValueError, match=r"frozen_lake failed \(the reward is nan\)"):
        game.act("Left")
    assert game.get_reward() == before and game.act("Left") == OVER


def test_an_action_that_is_no_text_is_refused_in_words() -> None:
    game = environment("frozen_lake")()
    game.reset(seed=1)
    for action in (None, 5, ["Left"]):
        with pytest.raises(ValueError, match=f"The action must be one text, not {type(action).__name__}"):
            game.act(action)  # pyright: ignore[reportArgumentType]
    assert episode_of(game).turns == 0


def test_samples_of_a_group_share_the_level_and_not_their_noise() -> None:
    kind = environment("frozen_lake", slippery=True, max_turns=30)
    games = [kind() for _ in range(8)]
    assert len({game.reset(seed=3) for game in games}) == 1
    walks = {tuple(game.act("Down") for _ in range(4)) for game in games}
    assert len(walks) > 1
    games[0].reset(seed=3)
    assert games[0].get_reward() == 0


def test_rows_are_levels() -> None:
    found = rows("frozen_lake", 3, "validation", first=10)
    assert list(found["seed"]) == [10, 11, 12] and set(found["split"]) == {"validation"}
    assert found[0]["environment"] == "frozen_lake" and found[0]["prompt"][0]["role"] == "user"


class ScriptedModel(LlamaForCausalLM):
    """Random weights, but what it writes is chosen here: in each answer the call of a tool, or a last word."""

    tokenizer: Any
    says: Any

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
        written = [self.tokenizer.encode(self.says(self.tokenizer.decode(row))) for row in input_ids]
        longest, pad = max(map(len, written)), self.tokenizer.pad_token_id
        answers = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in written], device=input_ids.device)
        return torch.cat([input_ids, answers], dim=1)


@pytest.fixture
def tool_tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with a template that can call tools, and which TRL knows."""
    from trl import chat_template_utils

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = (Path(chat_template_utils.__file__).parent / "chat_templates/qwen2_5.jinja").read_text()
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def scripted_model(tokenizer: Any, says: Any) -> ScriptedModel:
    """A tiny one, which answers a context with `says(context)`."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8192,
    )
    model = ScriptedModel(shape)
    model.tokenizer, model.says = tokenizer, says
    return model


def trainer_of(tokenizer: Any, folder: Path, says: Any, monkeypatch: pytest.MonkeyPatch, **given: Any) -> Any:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    from trl import GRPOConfig, GRPOTrainer

    model = scripted_model(tokenizer, says)
    args = GRPOConfig(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=4000,
        max_tool_calling_iterations=8,
        learning_rate=1e-3,
        reward_weights=[0.0],
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    return GRPOTrainer(model, reward_funcs=[success], args=args, processing_class=tokenizer, **given)


@pytest.mark.thorough
def test_a_stock_trainer_plays_and_takes_a_step(
    tool_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    def says(context: str) -> str:
        heard.append(context)
        if OVER in context:
            return "Done.<|im_end|>"
        action = ("Left", "Down", "Right", "Up")[len(heard) * 7 // 3 % 4]
        return CALL.format(json.dumps({"action": action}))

    kind = environment("frozen_lake", size=3)
    data = rows("frozen_lake", 8)
    trainer = trainer_of(tool_tokenizer, tmp_path, says, monkeypatch, environment_factory=kind, train_dataset=data)
    before = [weight.clone() for weight in trainer.model.parameters()]
    trainer.train()
    log = next(row for row in trainer.state.log_history if "reward" in row)
    games = trainer.environments
    assert len(games) == 8 and all(type(game) is kind and episode_of(game).done for game in games)
    assert {episode_of(game).seed for game in games} <= set(range(8)) and len(
        {g.level_key() for g in envs_of(games)}
    ) == 1
    gained = [game.get_reward() for game in games]
    assert len(set(gained)) > 1 and log["rewards/FrozenLake/mean"] == pytest.approx(sum(gained) / 8, abs=1e-5)
    assert log["reward"] == pytest.approx(log["rewards/FrozenLake/mean"])
    assert log["rewards/success/mean"] == sum(episode_of(game).success for game in games) / 8
    assert log["tools/failure_frequency"] == 0 and log["tools/call_frequency"] > 1
    assert "You walk over a frozen lake" in heard[0] and "act" in heard[0] and "turns left" in heard[-1]
    after = list(trainer.model.parameters())
    assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True)), "nothing was learnt"


def envs_of(games: list[Any]) -> list[Any]:
    return [episode_of(game).env for game in games]


def test_several_environments_in_one_run(
    tool_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import concatenate_datasets

    names = ("frozen_lake", "sokoban")
    data = concatenate_datasets([rows(name, 4) for name in names])
    factories = {name: environment(name, max_turns=2) for name in names}
    heard: list[str] = []

    def says(context: str) -> str:
        heard.append(context)
        return "Done.<|im_end|>" if OVER in context else CALL.format('{"action": "Up"}')

    trainer = trainer_of(tool_tokenizer, tmp_path, says, monkeypatch, environment_factory=factories, train_dataset=data)
    inputs = [data[index] for index in (0, 5, 1, 6, 2, 7, 3, 4)]
    trainer.model.train()
    trainer._generate_and_score_completions(inputs)
    assert [episode_of(game).env.name for game in trainer.environments] == list(names) * 4
    assert all(episode_of(game).done and episode_of(game).turns <= 2 for game in trainer.environments)
    assert {context.count('"name": "act", "description"') for context in heard} == {1}, "each prompt has the tool once"
