"""Does phase 3 train a model that calls a tool, from the config to metrics, transcripts and checkpoint?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_phase3 import rows, settings, train
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from envs.tools import tool_of
from posttrain.models.chat import Chat
from posttrain.runtime import checkpoint
from posttrain.types import UserError

CALCULATOR = "examples.own_tool:calculate"
CALL = {"function": {"name": "calculate", "arguments": {"expression": "2+3"}}}


def dialogue(number: int) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": f"What is 2+3? ({number})"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "5"},
    ]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A tiny model that has read one call and its answer many times."""
    torch.manual_seed(0)
    schemas = [tool_of(CALCULATOR).schema]
    ours = Chat.load(tiny_tokenizer, None)
    texts = [ours.decode(ours.encode(dialogue(n), schemas).ids).replace("<|im_end|>", "") for n in range(40)]
    words = tiny_tokenizer.train_new_from_iterator(texts, 600)
    chat = Chat.load(words, None)
    config = LlamaConfig(
        vocab_size=len(chat.tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=128, pad_token_id=chat.pad_id, bos_token_id=None,
        eos_token_id=chat.stop_id, max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(80):
        row = chat.encode(dialogue(step), schemas)
        ids, on = torch.tensor([row.ids]), torch.tensor([row.mask])
        model(input_ids=ids, labels=ids.masked_fill(~on, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def write(out: Path) -> None:
        model.save_pretrained(out)
        chat.save(out)

    return checkpoint.save(tmp_path_factory.mktemp("caller"), write, phase="phase2", chat_template_sha256=chat.hash)


def recorded(completions: Any, log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
    """Record what TRL's log_metric and log_extra take."""
    log_metric("answers", len(completions))
    log_extra("messages", [len(said) for said in completions])
    return [0.0] * len(completions)


def run_file(tmp_path: Path, caller: Path, tool: str = CALCULATOR, **sections: Any) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is 2+3? ({n})", "answer": "5"}) + "\n" for n in range(60)))
    env = {
        "name": "prompts",
        "tools": [tool],
        "max_calls": 2,
        "options": {"path": str(path), "rewards": ["math", "length", f"{__name__}:recorded"]},
    }
    return settings(
        tmp_path / "run.yaml", caller, envs=[env], protocol={"max_turns": None, "max_actions": None, "style": "plain"},
        rollout={"max_completion_length": 48, **sections.pop("rollout", {})}, trainer={"max_steps": 1},
        evaluation={"episodes": 4, "final_episodes": 4}, **sections,
    )  # fmt: skip


def test_a_run_with_a_tool(tmp_path: Path, caller: Path) -> None:
    train(run_file(tmp_path, caller, transcripts={"every": 1}))
    table = rows(tmp_path / "run")
    played = [row for row in table if "rollout/tool_calls" in row]
    assert played and all(row["rollout/tool_calls"] > 0.5 and row["rollout/crashed"] == 0 for row in played)
    assert all(0 <= row["rollout/failed_tool_calls"] <= 1 for row in played)
    assert max(row["rollout/turns"] for row in played) > 1.5
    transcripts = [json.loads(line) for line in (tmp_path / "run" / "transcripts.jsonl").read_text().splitlines()]
    assert all(row["rollout/prompts/logged_answers"] == 16 for row in played)
    assert all(row["extra"] == {"messages": len(row["messages"]) - 1} for row in transcripts)
    results = [m for row in transcripts for m in row["messages"] if m["role"] == "tool"]
    assert any(m["content"] == "5" and m["name"] == "calculate" for m in results)
    assert checkpoint.verify(tmp_path / "run" / "final")["meta"]["phase"] == "phase3"


@pytest.mark.parametrize(
    ("tool", "rollout", "words"),
    [
        ("examples.own_tool:divide", {}, r"envs\.0 \(prompts\): the tool examples.own_tool:divide cannot be used"),
        ("examples.own_tool:_value", {}, "has no schema"),
        (CALCULATOR, {"context": "last_k", "context_turns": 2}, "write `rollout.context: full`"),
    ],
)
def test_bad_tools_are_said_before_anything_is_trained(
    tmp_path: Path, caller: Path, tool: str, rollout: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        train(run_file(tmp_path, caller, tool, rollout=rollout))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
