"""Does the card say what the run's files say, and can the Hub read it?"""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, ModelCardData

from posttrain.models import model_card
from posttrain.models.model_card import CardResult
from posttrain.runtime import checkpoint


def source(path: str, kind: str, licence: str, train: int = 0, held_out: int = 0) -> dict[str, Any]:
    return {"path": path, "kind": kind, "licence": licence, "train": train, "held_out": held_out}


CONFIG: dict[str, Any] = {
    "seed": 3,
    "model": {"name_or_path": "mkurman/ConvGPT-0.2B-SYNTH-250B-EC", "revision": None, "tuning": "lora"},
    "trainer": {"learning_rate": 2e-4, "num_train_epochs": 3},
    "data": {"max_length": 2048},
}
CAPYBARA = source("trl-lib/Capybara", "capybara", "Apache-2.0 (as LDJnr/Capybara)", train=11000, held_out=200)
MINE = source("data/mine | yours.jsonl", "messages", "your own", train=40, held_out=4)


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr(model_card.HfApi, "model_info", refuse)


def card_of(records: list[dict[str, Any]]) -> Any:
    return ModelCard(model_card.render_card(records, "convgpt"))


def test_a_card_tells_of_base_data_settings_results_and_commit() -> None:
    results = [
        CardResult("held-out rows: loss", 1.234, 204),
        CardResult("held-out pairs: share", 0.8, 200, 0.739, 0.85),
    ]
    one = model_card.phase_record("phase1", CONFIG, 120, data=[CAPYBARA, MINE], results=results)
    card = card_of([one])
    assert card.data.to_dict() == {
        "base_model": "mkurman/ConvGPT-0.2B-SYNTH-250B-EC",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "datasets": ["trl-lib/Capybara"],
        "tags": ["sft", "convgpt"],
    }
    for told in (
        "[mkurman/ConvGPT-0.2B-SYNTH-250B-EC](https://huggingface.co/mkurman/ConvGPT-0.2B-SYNTH-250B-EC)",
        "| phase1 | trl-lib/Capybara | capybara | Apache-2.0 (as LDJnr/Capybara) | 11,000 | 200 |",
        "data/mine \\| yours.jsonl",
        "learning_rate 0.0002",
        "tuning lora",
        "| phase1 | held-out rows: loss | 1.23 | 204 |",
        "0.8 \\[0.739, 0.85]",
        str(model_card.commit()),
        'pipeline("text-generation", "FOLDER_OR_HUB_NAME",',
        'trust_remote_code=True, revision="COMMIT")',
        "No training row was longer than 2,048 tokens.",
    ):
        assert told in card.text, told
    assert "None" not in card.content


def test_what_the_hub_is_sent_is_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ModelCard.validate` asks the Hub; here its request is looked at."""
    sent: list[dict[str, Any]] = []

    class Session:
        def post(self, url: str, json: dict[str, Any], headers: dict[str, str]) -> Any:
            sent.append(json)
            return type("Response", (), {"status_code": 200})()

    monkeypatch.setattr("huggingface_hub.repocard.get_session", Session)
    monkeypatch.setattr("huggingface_hub.repocard.hf_raise_for_status", lambda response: None)
    card = card_of([model_card.phase_record("phase1", CONFIG, 1, data=[CAPYBARA])])
    card.validate()
    assert sent == [{"repoType": "model", "content": str(card)}]
    assert ModelCardData(**card.data.to_dict()).to_dict() == card.data.to_dict()


@pytest.mark.parametrize("home", ["/home/ana maria/secret", "~/secret", "C:\\Users\\Ana\\secret", "D:/Ana/secret"])
def test_no_absolute_path_stands_in_a_card(home: str) -> None:
    slash = "\\" if "\\" in home else "/"
    base, data = (slash.join([home, *parts]) for parts in (("runs", "phase1", "final"), ("rows.jsonl",)))
    config = CONFIG | {"model": CONFIG["model"] | {"name_or_path": base}}
    text = card_of([model_card.phase_record("phase2", config, 3, data=[source(data, "messages", "own")])]).content
    assert "ana" not in text.lower() and "secret" not in text
    assert "the local model `phase1/final`" in text and "| phase1/final |" in text and "| rows.jsonl |" in text


def test_examples() -> None:
    assert doctest.testmod(model_card).attempted and not doctest.testmod(model_card).failed


def test_the_licence_is_the_one_that_the_base_models_card_names(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    config = CONFIG | {"model": {"name_or_path": str(base)}}
    card = card_of([model_card.phase_record("phase1", config, 1)])
    assert card.data.license == "apache-2.0"
    assert card.data.base_model is None  # a folder is not a name on the Hub
    for broken in ("", "no metadata", "---\nlicense: [\n---\n", "---\n- 1\n---\n"):
        (base / "README.md").write_text(broken)
        assert "license" not in card_of([model_card.phase_record("phase1", config, 1)]).data.to_dict()


def test_the_phases_before_are_told_of(tmp_path: Path) -> None:
    one = model_card.phase_record("phase1", CONFIG, 120, data=[CAPYBARA])
    folder = checkpoint.save(tmp_path / "final", lambda out: (out / "x").write_text("x"), history=[one])
    assert model_card.history(str(folder)) == [one]
    config = CONFIG | {"model": {"name_or_path": str(folder), "tuning": "full"}}
    won = CardResult("sokoban, test levels: success", 0.54, 300, 0.48, 0.6)
    three = model_card.phase_record("phase3", config, 90, results=[won])
    card = card_of([*model_card.history(str(folder)), three])
    assert card.data.tags == ["sft", "starpo", "convgpt"]
    assert card.data.base_model == "mkurman/ConvGPT-0.2B-SYNTH-250B-EC"
    assert "it fails in 46% of the phase's own tests" in card.text
    assert "What an earlier phase taught may have weakened" in card.text


def test_hostile_names_stay_text() -> None:
    hostile = source("<script>alert(1)</script>|`x`", "messages", "[mine](http://x)\n# Title", train=1)
    card = card_of([model_card.phase_record("phase1", CONFIG, 1, data=[hostile])])
    assert not any(bad in card.content for bad in ("<script>", "\n# Title", "|`x`", " [mine]("))


def test_what_was_local_when_it_was_read_is_not_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    source = {"path": "data/mine.jsonl", "kind": "messages", "licence": "mine", "train": 36, "held_out": 4}
    settings = {"model": {"name_or_path": "models/mine"}}
    told = model_card.phase_record("phase1", settings, 10, data=[source])
    (tmp_path / "models" / "mine").rmdir()
    card = model_card.render_card([told], "llama")
    assert "huggingface.co/models/mine" not in card and "the local model `models/mine`" in card
    assert "base_model:" not in card and "datasets:" not in card
    gone = model_card.phase_record("phase2", {"model": {"name_or_path": "runs/phase1/final"}}, 10)
    assert gone["licence"] is None


def test_examples_of_the_first_data_that_has_some_are_shown_in_turn() -> None:
    with_some = [
        source("embedded", "openmathinstruct", "generated here")
        | {"examples": ["2+3?", "4+5?", "6+7?", "8+9?", "1+1?"]},
        source("embedded", "capybara", "generated here") | {"examples": ["Hello", "<b>Tell</b>", "Hello"]},
    ]
    later = source("embedded", "ultrafeedback", "generated here") | {"examples": ["Never shown"]}
    records = [
        model_card.phase_record(phase, CONFIG, 1, data=data)
        for phase, data in (("phase1", with_some), ("phase2", [later]))
    ]
    found = model_card.card_examples(records)
    assert found == ["2+3?", "Hello", "4+5?", "<b>Tell</b>", "6+7?", "8+9?"]
    content = card_of(records).content
    assert "- 2+3?\n- Hello\n" in content and "<b>" not in content and "Never shown" not in content
    assert model_card.card_examples([{"data": [{"path": "a"}]}, {}]) == []
