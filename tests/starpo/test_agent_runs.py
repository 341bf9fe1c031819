"""Does phase 3 train the model behind an agent program, from the config to metrics, transcripts and checkpoint?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_phase3 import rows, settings, train
from test_tool_runs import caller as caller  # a fixture

from posttrain.config import StarPORun
from posttrain.runtime import checkpoint
from posttrain.types import UserError

ASK = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
messages = [{"role": "user", "content": row["prompt"]}]
for _ in range(2):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": messages, "max_tokens": 12}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Shorter."}]
print(len(answer))
"""


def run_file(tmp_path: Path, caller: Path, **sections: Any) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is 2+3? ({n})"}) + "\n" for n in range(60)))
    (tmp_path / "agent.py").write_text(ASK)
    agent = {"command": ["python", str(tmp_path / "agent.py")], "parallel": 4}
    options = {"path": str(path), "rewards": [f"{__name__}:short"], "agent": agent}
    return settings(
        tmp_path / "run.yaml", caller, envs=[{"name": "prompts", "options": options}],
        protocol={"max_turns": None, "max_actions": None, "style": "plain"}, trainer={"max_steps": 1},
        rollout={"max_completion_length": 24, "num_generations": 4, "groups": 2, **sections.pop("rollout", {})},
        evaluation={"episodes": 4, "final_episodes": 4}, **sections,
    )  # fmt: skip


def short(prompts: Any, completions: Any, output: list[str], **columns: Any) -> list[float]:
    return [-float(text) for text in output]


def test_a_run_with_a_program(tmp_path: Path, caller: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(run_file(tmp_path, caller, transcripts={"every": 1}))
    assert "Next: posttrain serve" in capsys.readouterr().out
    table = rows(tmp_path / "run")
    (played,) = [row for row in table if "rollout/turns" in row]
    assert played["rollout/turns"] == 2 and played["rollout/crashed"] == 0 and played["rollout/reward"] < 0
    assert played["policy/sampler_gap"] < 1e-3
    transcripts = [json.loads(line) for line in (tmp_path / "run" / "transcripts.jsonl").read_text().splitlines()]
    assert all([m["role"] for m in each["messages"]] == ["user", "assistant"] * 2 for each in transcripts[-1:])
    assert checkpoint.verify(tmp_path / "run" / "final")["meta"]["phase"] == "phase3"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"context": "last_k", "context_turns": 2}, "played by a program"),
        ({"engine": "vllm_server", "servers": ["http://localhost:1"], "max_staleness": 1}, "max_staleness"),
    ],
)
def test_what_a_program_cannot_have_is_refused(tmp_path: Path, caller: Path, change: Any, words: str) -> None:
    given = yaml.safe_load(run_file(tmp_path, caller, rollout=change).read_text())
    with pytest.raises(ValueError, match=words):
        StarPORun.model_validate(given)


def test_a_program_that_never_asks_ends_the_run_before_it_trains(tmp_path: Path, caller: Path) -> None:
    file = run_file(tmp_path, caller)
    (tmp_path / "agent.py").write_text("raise SystemExit('no key of mine')")
    with pytest.raises(
        UserError,
        match=r"asked for no answer, and it ended with exit code 1: no key of mine.*serve",
    ):
        train(file)
    assert not list((tmp_path / "run").glob("best-*"))


@pytest.mark.parametrize("flags", [[], ["--advise"]])
def test_programs_that_cannot_play_are_not_waited_for_one_after_the_other(
    tmp_path: Path, caller: Path, flags: list[str]
) -> None:
    file = run_file(tmp_path, caller)
    told = f"open({str(tmp_path / 'begun')!r}, 'a').write('.')\n"
    (tmp_path / "agent.py").write_text(f"{told}raise SystemExit(1)")
    with pytest.raises(UserError, match=r"in every episode of the first 4, .*asked for no answer"):
        train(file, "evaluation.episodes=64", *flags)
    assert len((tmp_path / "begun").read_text()) < 12
