"""Does what is published arrive whole, privately, and without a path or a secret of this machine?

Against a stand-in of the Hub's HTTP interface (hub_stand_in.py), by huggingface_hub's own client and its LFS protocol;
its newer one (Xet) needs a store that no test can stand in for.
"""

from __future__ import annotations

import copy
import io
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from hub_stand_in import TOKEN, Hub, Repo, running
from huggingface_hub import ModelCard
from PIL import Image, PngImagePlugin
from safetensors.torch import load_file, save_file
from test_evaluate import tiny_model
from tiny_runs import ROOT, python

from posttrain.config.shared import ModelSection
from posttrain.evaluation.store import digest
from posttrain.models import loading as models, model_card
from posttrain.models.chat import Chat
from posttrain.runtime import checkpoint
from posttrain.serving.publish import content, privacy
from posttrain.serving.publish.__main__ import main
from posttrain.types import UserError

SECRET = "hf_" + "Q" * 34
REPO = "ana/toy"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_chat: Chat) -> Path:
    """A pipeline's folder: two phases, whose settings name folders of a machine, and an evaluation of the last one."""
    run, chat = tmp_path_factory.mktemp("runs") / "mine", copy.deepcopy(tiny_chat)
    for phase in ("phase1", "phase3"):
        base = "/home/ana/secret models/base" if phase == "phase1" else str(run / "phase1" / "final")
        config = {"model": {"name_or_path": base}, "kept": "/home/ana/secret models/x y", "seed": 0}
        config["output_dir"] = str(run / phase)
        data = {"path": "/home/ana/clinic/rows.jsonl", "kind": "messages", "licence": "mine", "train": 9, "held_out": 1}
        told = model_card.phase_record(phase, config, 3, data=[data])
        source = ModelSection(name_or_path="x")
        models.save(run / phase / "final", tiny_model(chat, 0), chat, config, source=source, history=[told])
    (run / "phase3" / "metrics.jsonl").write_text(json.dumps({"step": 1, "file": "/home/ana/clinic/x"}) + "\n")
    (run / "results.json").write_text(json.dumps(results(digest(str(run / "phase3" / "final")))))
    (run / "plots").mkdir()
    meta = PngImagePlugin.PngInfo()
    meta.add_text("Source", f"/home/ana/clinic {SECRET}")
    Image.new("RGB", (4, 3), "red").save(run / "plots" / "headline.png", pnginfo=meta)
    return run


def results(known: str) -> dict[str, Any]:
    share = {"low": 0.4, "high": 0.6, "setting": "greedy"}
    of_the_hub = {"path": "openai/gsm8k", "name": "main", "split": "test", "hub": True, "rows": 9}
    benchmark: dict[str, Any] = {"version": 3, "n": 9, "of": 9, "fewshot": 5, "chat_template": True, "part_of": None}
    benchmark |= {"harness": "0.4.13", "date": "2026-11-23", "data_set": of_the_hub}
    figure: dict[str, Any] = {"metric": "exact_match", "filter": "strict-match", "value": 0.25, "stderr": 0.01}
    benchmark["metrics"] = [figure, figure | {"filter": "none", "value": None}]
    part = benchmark | {"n": 3}
    inner = benchmark | {"part_of": "gsm8k"}
    local = benchmark | {"data_set": {"path": "json"}, "metrics": [figure | {"filter": "none"}]}
    mine = {"digest": known, "tasks": {"gsm8k": benchmark, "part": part, "mine": local, "inner": inner}}
    hub: dict[str, Any] = benchmark["data_set"]
    for name, change in (("folder", {"hub": False}), ("sliced", {"rows": 99}), ("train", {"split": "train"})):
        mine["tasks"][name] = benchmark | {"data_set": hub | change}
    mine["tasks"]["former"] = benchmark | {"data_set": {"path": "openai/gsm8k", "split": "test"}}
    return {
        "digests": {"base": "another", "phase3": known},
        "commit": "c0ffee",
        "config": {"suites": {"envs": {"split": "test"}}},
        "checkpoints": {
            name: {
                "math": {
                    source: {"accuracy": 0.5, "n": n, **share} for source, n in (("gsm8k", 1319), ("embedded", 9))
                },
                "envs": {"sokoban": {"success": value, "episodes": 300, **share}},
            }
            for name, value in (("base", 0.01), ("phase3", 0.54))
        },
        "benchmarks": {"phase3": mine, "x": {"digest": "another", "tasks": {"never": benchmark}}},
    }


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "mine"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def publish(run: Path, *options: str, repo: str = REPO) -> None:
    main([str(run), "--repo", repo, *options])


def as_bytes(what: bytes | Path) -> bytes:
    return what if isinstance(what, bytes) else what.read_bytes()


def reseal(folder: Path, **meta: Any) -> None:
    before = checkpoint.read_manifest(folder)["meta"]
    (folder / checkpoint.MANIFEST).unlink()
    checkpoint.seal(folder, **before | meta)


def test_a_dry_run_sends_nothing_and_lists_each_file_with_its_size(
    made: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def connect(*_: Any) -> None:
        raise AssertionError("a dry run opened a connection")

    monkeypatch.setattr(socket.socket, "connect", connect)
    publish(made, "--folder", str(tmp_path / "look"))
    told = capsys.readouterr().out
    look = tmp_path / "look"
    written = {path.relative_to(look).as_posix(): path.stat().st_size for path in look.rglob("*") if path.is_file()}
    lines = [line.split() for line in told.splitlines() if line.endswith(" bytes")]
    sizes = {name: int(size.replace(",", "")) for name, size, _ in lines}
    assert sizes == written
    assert {*sizes} == {
        *("README.md", "chat_template.jinja", "config.json", "generation_config.json", "manifest.json"),
        *("model.safetensors", "modeling_convgpt.py", "run_config.yaml", "tokenizer.json", "tokenizer_config.json"),
        *(".eval_results/gsm8k.yaml", ".eval_results/gsm8k-exact_match-strict-match.yaml", "headline.png"),
    }
    assert f"of {made}/phase3/final" in told and "Nothing was sent" in told and hub.log == []
    shown = (ROOT / "docs" / "serving.md").read_text()  # a listing of the quickstart, which has no benchmarks
    assert all(f"\n    {name} " in shown for name in sizes if not name.startswith(".eval_results"))


def test_all_chat_templates_of_a_tokenizer_are_published(run: Path) -> None:
    final = run / "phase3" / "final"
    for name in ("additional_chat_templates/tools.jinja", "additional_chat_templates/notes.txt", "other/tools.jinja"):
        (final / name).parent.mkdir(exist_ok=True)
        (final / name).write_text("{{ messages }}")
    reseal(final)
    gathered = content.gather_content(run, REPO)
    assert "additional_chat_templates/tools.jinja" in gathered.files
    assert "additional_chat_templates/notes.txt is left out." in gathered.notes
    assert "other/tools.jinja is left out." in gathered.notes


def test_what_arrives_is_what_was_listed_private_and_can_be_loaded(made: Path, hub: Hub, tmp_path: Path) -> None:
    publish(made, "--yes")
    there = hub.repos[REPO]
    assert there.private and there.commits == 2
    planned = content.gather_content(made, REPO)
    assert there.files == {".gitattributes": there.files[".gitattributes"]} | {
        name: as_bytes(what) for name, what in planned.files.items()
    }
    planned.write(tmp_path / "copy")
    checkpoint.verify(tmp_path / "copy")
    section = ModelSection(name_or_path=str(tmp_path / "copy"))
    models.load(section, device="cpu", chat_template=None)
    weights = load_file(tmp_path / "copy" / "model.safetensors")
    assert weights.keys() == load_file(made / "phase3/final/model.safetensors").keys()


def test_results_are_those_of_these_weights_in_the_forms_of_the_hub(made: Path, hub: Hub) -> None:
    publish(made / "phase3", "--yes")
    files = hub.repos[REPO].files
    card = ModelCard(files["README.md"].decode())
    (index,) = card.data.to_dict()["model-index"]
    assert index["name"] == "toy"
    found = {one["dataset"]["type"]: one["metrics"][0] for one in index["results"]}
    local = {"mine", "folder", "sliced", "train", "former"}  # not known to be the whole test split of the Hub
    assert {*found} == {"sokoban", *local} and found["sokoban"]["value"] == 0.54
    assert found["sokoban"]["args"] == {"low": 0.4, "high": 0.6, "interval": 0.95, "episodes": 300}
    entries = {
        name: huggingface_hub.parse_eval_result_entries(yaml.safe_load(text))[0]
        for name, text in files.items()
        if name.startswith(".eval_results/")
    }
    assert len(entries) == 2 and "train: exact_match, strict-match (split train, " in card.text
    evaluation = card.text.partition("## Evaluation")[2]
    assert "held-out items" not in evaluation and "What no figure above covers was not measured" in evaluation
    assert "Facts" not in evaluation
    ours = entries[".eval_results/gsm8k.yaml"]
    assert (ours.dataset_id, ours.task_id, ours.value) == ("openai/gsm8k", "gsm8k", 0.5)
    assert "n 1319" in str(ours.notes) and "c0ffee" in str(ours.notes)
    theirs = entries[".eval_results/gsm8k-exact_match-strict-match.yaml"]
    assert (theirs.dataset_id, theirs.task_id, theirs.value) == ("openai/gsm8k", "gsm8k", 0.25)
    assert "5 examples, chat template" in str(theirs.notes) and "standard error 0.01" in str(theirs.notes)
    for told in ("0.54 \\[0.4, 0.6]", "300", "3 of 9", f'"{REPO}"', "headline.png"):
        assert told in card.text, told
    assert "never" not in card.content and "inner" not in card.content and "0.01 \\[" not in card.text


def test_figures_of_other_weights_are_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "results.json").write_text(json.dumps(results("weights of yesterday")))
    publish(run)
    told = capsys.readouterr().out
    assert "has no figures of these weights" in told and ".eval_results" not in told and "headline.png" not in told
    (run / "results.json").unlink()
    publish(run)
    assert "The run has no results.json" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"there is no results\.json in it"):
        publish(run, "--results", str(run))
    (run.parent / "evaluation").mkdir()
    known = digest(str(run / "phase3" / "final"))
    (run.parent / "evaluation" / "results.json").write_text(json.dumps(results(known)))
    publish(run, "--results", str(run.parent / "evaluation"))
    assert ".eval_results/gsm8k.yaml" in capsys.readouterr().out
    (run / "results.json").write_text('{"digests": 3}')
    with pytest.raises(UserError, match="damaged"):
        publish(run)


def test_an_upload_that_is_cut_changes_nothing_and_the_next_one_ends_it(made: Path, hub: Hub) -> None:
    hub.drop_after = 2
    with pytest.raises(UserError, match=r"cut off.*The repository has not changed"):
        publish(made, "--yes")
    there = hub.repos[REPO]
    assert there.commits == 1 and set(there.files) == {".gitattributes"}
    hub.drop_after = None
    publish(made, "--yes")
    whole, commits = dict(there.files), there.commits
    assert whole["model.safetensors"] == (made / "phase3/final/model.safetensors").read_bytes() and commits == 2
    hub.log.clear()
    publish(made, "--yes")  # again: the same, and nothing is sent twice
    assert there.files == whole and there.commits == 2
    assert not any(path.startswith("/part/") or "/commit/" in path for _, path in hub.log)


def test_a_repository_that_exists(made: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    old = {"model-00001-of-2.safetensors": b"x", "model.safetensors.index.json": b"{}", "notes.txt": b"mine"}
    hub.repos[REPO] = Repo(private=False, files=dict(old))
    with pytest.raises(UserError, match=r"is public.*--public"):
        publish(made, "--yes")
    assert hub.repos[REPO].files == old and not any("upload" in path for _, path in hub.log)
    publish(made, "--yes", "--public")
    files = hub.repos[REPO].files
    assert files["notes.txt"] == b"mine" and not {*old} - {"notes.txt"} & {*files}
    assert "Removed from ana/toy" in capsys.readouterr().out


def test_no_permission_no_token_no_hub(
    made: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repos["bob/his"] = Repo(private=False)
    for name, public in (("bob/new", ()), ("bob/his", ("--public",))):
        with pytest.raises(UserError, match=f"may not write to {name}"):
            publish(made, "--yes", *public, repo=name)
    assert set(hub.repos["bob/his"].files) == {".gitattributes"}
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with pytest.raises(UserError, match="does not know this token") as refused:
        publish(made, "--yes")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nowhere")
    with pytest.raises(UserError, match="no Hub token on this machine"):
        publish(made, "--yes")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="cut off"):
        publish(made, "--yes")
    assert not any(secret in text for secret in (SECRET, TOKEN) for text in (str(refused.value), *capsys.readouterr()))
    for name in ("toy", "a/b/c", "ana/../x", "ana/"):
        with pytest.raises(UserError, match="not a name on the Hub"):
            publish(made, repo=name)


@pytest.mark.thorough
def test_the_command_goes_where_the_environment_says(made: Path, hub: Hub, tmp_path: Path) -> None:
    env = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path)}
    done = python("-m", "posttrain.serving.publish", str(made), "--repo", REPO, "--yes", env=env)
    assert done.returncode == 0, done.stderr
    assert f"private: {hub.address}/{REPO}/commit/{hub.repos[REPO].sha}" in done.stdout and hub.repos[REPO].private
    assert TOKEN not in done.stdout + done.stderr


def test_no_path_of_a_machine_is_in_anything_that_is_published(run: Path, hub: Hub) -> None:
    folder = run / "phase3" / "final"
    config = json.loads((folder / "config.json").read_text())
    config["_name_or_path"] = "/mnt/ana's disk/my models/base"
    (folder / "config.json").write_text(json.dumps(config))
    reseal(folder, phase="/scratch/ana/phase3")
    known = json.loads((run / "results.json").read_text())
    known["digests"]["phase3"] = known["benchmarks"]["phase3"]["digest"] = digest(str(folder))
    known["commit"] = "/home/ana/clinic/code"
    (run / "results.json").write_text(json.dumps(known))
    with pytest.raises(UserError, match=r"metrics\.jsonl holds a path of a machine \(line 1\)"):
        publish(run, "--yes", "--include", "metrics.jsonl")
    publish(run, "--yes")
    files = hub.repos[REPO].files
    for name, raw in files.items():
        text = raw.decode("utf-8", errors="replace")
        for path in (*"/home /mnt /scratch clinic secret ana's disk".split(), SECRET, str(run), str(Path.cwd())):
            assert path not in text, f"{path} in {name}"
    assert json.loads(files["config.json"])["_name_or_path"] == "base"
    assert "rows.jsonl" in files["README.md"].decode()
    assert files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    "place", ["run_config.yaml", "chat_template.jinja", "tokenizer_config.json", "tokenizer.json", "weights", "record"]
)
def test_a_secret_stops_everything(run: Path, hub: Hub, place: str) -> None:
    folder = run / "phase3" / "final"
    if place == "weights":
        file = folder / "model.safetensors"
        save_file(load_file(file), file, metadata={"format": "pt", "key": SECRET})
        reseal(folder)
    elif place == "record":
        history = checkpoint.read_manifest(folder)["meta"]["history"]
        history[0]["data"][0]["licence"] = SECRET
        reseal(folder, history=history)
    else:
        (folder / place).write_text((folder / place).read_text().replace("0", f"0 {SECRET} ", 1) + f"\n# {SECRET}\n")
        reseal(folder)
    with pytest.raises(UserError, match=r"Nothing is published: .* holds a token of the Hub \(line \d+\)") as refused:
        publish(run, "--yes")
    assert SECRET not in str(refused.value) and hub.log == []


def test_secrets_that_only_this_machine_knows(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DB_PASS", "MYSQL_PWD", "PASSPHRASE", "WANDB_API_KEY"):
        monkeypatch.setenv(name, f"{len(name)} of them")
        with pytest.raises(UserError, match=f"holds the value of the variable {name}"):
            privacy.refuse_secrets("a.txt", f"{len(name)} of them".encode())
    monkeypatch.setenv("PWD", str(run))  # a folder
    privacy.refuse_secrets("a.txt", f"in {run}".encode())
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    (run / "phase3" / "transcripts.jsonl").write_text('{"text": "0123456789abcdef"}\n')
    assert "transcripts.jsonl" not in content.gather_content(run, REPO).files  # only --include adds it
    with pytest.raises(UserError, match=r"transcripts\.jsonl holds the value of the variable WANDB_API_KEY"):
        publish(run, "--include", "transcripts.jsonl")
    state = run / "phase3" / "checkpoint-4"
    state.mkdir()
    monkeypatch.setattr(privacy, "CHUNK", 1 << 13)  # a large file is read in pieces
    (state / "training_args.bin").write_bytes(b"x" * 8190 + str(Path.cwd()).encode() + b"q\n")
    with pytest.raises(UserError, match=r"training_args\.bin holds a path of a machine"):
        publish(run, "--include", "checkpoint-4")
    (run / "phase3" / "episodes").mkdir()
    (run / "phase3" / "episodes" / "link.jsonl").symlink_to(run / "results.json")
    with pytest.raises(UserError, match=r"link\.jsonl is a link to a place outside"):
        publish(run, "--include", "episodes")
    (run / "phase3" / "transcripts.html").touch()
    with pytest.raises(UserError, match="neither text nor"):
        publish(run, "--include", "transcripts.html")
    (run / "phase3" / "plain.log").write_text("step 1\n")
    (run / "phase3" / "README.md").write_text("The best model of all\n")
    (run / "phase3" / "run_config.yaml").write_text("{}\n")
    assert "plain.log" in content.gather_content(run, REPO, ["plain.log"]).files
    for own in ("README.md", "run_config.yaml", "final", "final/README.md"):
        with pytest.raises(UserError, match="the command itself writes"):
            publish(run, "--include", own)
    with pytest.raises(UserError, match="not all of it"):
        publish(run, "--include", ".")
    for outside in ("../phase1", "/etc/hostname", "nothing"):
        with pytest.raises(UserError, match="there is no such file or folder"):
            publish(run, "--include", outside)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("from /home/ana/rows.jsonl.", "from rows.jsonl."),
        ("a: '/Users/ana/x y'", "a: 'x y'"),
        ('{"p":"file:///tmp/q/base"}', '{"p":"base"}'),
        ("PATH=/usr/bin:/opt/ana/bin", "PATH=bin:bin"),
        ("~/models/base and ~ana/models/base", "base and base"),
        ("../../ana/data.csv", "data.csv"),
        (r"C:\Users\ana\rows.csv", "rows.csv"),
        ("in /kaggle/working/ana-client/runs and /p/x", "in runs and x"),
        (r"D:\work\ana\rows.csv or \\server\ana\base", "rows.csv or base"),
        ("/home/ana or /Users/ana or ~ana/", "home or home or home"),
        ("/home/müller/geheim/rows.jsonl", "rows.jsonl"),
        ("data at /home/ana maria/rows.jsonl and /home/bo/My Drive/x y", "data at rows.jsonl and x y"),
        (r"in C:\Users\Ana Maria\rows.csv now", "in rows.csv now"),
        ("cc -I/home/ana/x", "cc -Ix"),
        ("é/home/ana/x or x:/home/ana or ana@host:/home/ana/x", "éx or home or x"),
        ("runs/../../../home/ana/x or a/../b/c or ana@gpu7.x:kunde/rows.jsonl", "x or c or rows.jsonl"),
        ("(1+2)/3/4 and 3 / 4 and \\frac{1}{2} and //cdn", None),
        ("https://huggingface.co/home/x and runs/home/x and 1/2 or and/or", None),
        ("| runs/quickstart/base | ./data/x | </data> <answer>/</answer>", None),
    ],
)
def test_paths_are_cut_to_their_last_part(text: str, left: str | None) -> None:
    assert privacy.cut_paths(text) == (text if left is None else left)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("s3://klinik-anna/rows/train.jsonl, gs://b and hdfs://nn1:8020/user/ana/x.", "train.jsonl, (address) and x."),
        ("ssh://ana@gpu7.clinic.de/data/x and git+ssh://git@host/a/b.git", "x and b.git"),
        ("at http://gpu7:8000/v1, https://10.1.2.3/x or HTTP://[fd00::7]:80.", "at (address), (address) or (address)."),
        (
            "https://wiki.corp/ana http://me@db.internal:9/ (see http://node12.)",
            "(address) (address) (see (address).)",
        ),
        ("http://gpu7/home/ana/x", "(address)"),
        ("host 10.0.0.3:29500, 192.168.178.20.", "host (address), (address)."),
        ("fe80::1, 2001:db8:1::7 and fd12:3456:789a::1", "(address), (address) and (address)"),
        ("gpu7.intern:8200 or node-3.svc.local:22", "(address) or (address)"),
        ("ask ana.maria+x@klinik-nord.de, or a@b.co.uk.", "ask (address), or (address)."),
        ("ana@klinik.de:work/ana/rows.jsonl", "rows.jsonl"),
        ("https://huggingface.co/a/b http://www.apache.org/licenses/LICENSE-2.0 hf://datasets/a/b", None),
        ("http://localhost:8000 http://127.0.0.1:8000/v1 0.0.0.0 http://[::1]:3 127.0.0.1:80 ::1", None),
        ("http://example.com/x https://a.example.org http://example ana@example.com x@mail.example.net", None),
        ("torch 2.9.1, 3.5.2, 1.2.3.4.5, 300.1.2.3 and v10.0.0.3 at 12:30:45 or std::vector a::b a@b x.y@z", None),
        ("self.local threading.local() a.home .internal @app.route('/x')", None),
    ],
)
def test_addresses_are_left_out(text: str, left: str | None) -> None:
    assert privacy.cut_paths(text) == (text if left is None else left)
    assert privacy.cut_values({"a": [text]}) == {"a": [text if left is None else left]}
    if left is not None:
        with pytest.raises(UserError, match=r"a\.log holds (an address of a machine or a person|a path)"):
            privacy.refuse_private("a.log", f"one\n{text}".encode())
    else:
        privacy.refuse_private("a.log", text.encode())


def test_settings_that_name_a_server_a_folder_or_a_run_are_cut_whatever_their_form() -> None:
    options = {"url": "https://envs.klinik.de/play", "rules": "Play."}
    given = {"envs": [{"name": "openenv", "options": options}], "servers": ["http://gpu7.intern:8200"]}
    cut = privacy.cut_values(given | {"output_dir": "runs/Ana Maria/my run", "run_name": "ana 3"})
    assert cut["envs"][0]["options"] == {"url": "", "rules": "Play."} and cut["servers"] == []
    assert (cut["output_dir"], cut["run_name"]) == ("my run", None)
    public = {"url": "https://huggingface.co/datasets/a/b", "endpoint": None, "host": 3, "servers": 4}
    assert privacy.cut_values(public) == public
    assert privacy.cut_values({"output_dir": "/data/Ana Maria/the run/"})["output_dir"] == "the run"


def test_what_was_written_by_hand_is_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "phase3" / "final"
    settings = yaml.safe_load((folder / "run_config.yaml").read_text())
    settings |= {"hardware": "the A100 of ward 7", "run_name": "ward 7", "optim": "adamw_torch_fused"}
    settings |= {"chat": {"system": "You are Ana's nurse."}, "notes": "for\nMr. B", "kind": "messages"}
    (folder / "run_config.yaml").write_text(yaml.safe_dump(settings))
    history = checkpoint.read_manifest(folder)["meta"]["history"]
    history[0]["data"][0]["licence"] = "property of the clinic"
    reseal(folder, history=history)
    publish(run)
    told = capsys.readouterr().out
    listed = [
        line.strip() for line in told.partition("check that it may be public:\n")[2].splitlines() if line[:1] == " "
    ]
    assert {
        *("hardware: the A100 of ward 7", "system: You are Ana's nurse.", "notes: for Mr. B", "output_dir: phase3"),
        *("licence: property of the clinic", "path: rows.jsonl", "base: final"),
    } <= {*listed}
    assert not [line for line in listed if "ward 7" in line and "A100" not in line] and "adamw" not in told


@pytest.mark.thorough
def test_long_lines_are_read_in_linear_time() -> None:
    """With the square of their length this would take hours."""
    code = """
from posttrain.serving.publish import privacy
for shape in ("/", "~/", "../", "a@a.", "http://", "/home/a "):
    text = shape * (300_000 // len(shape))
    privacy.cut_paths(text)
    try:
        privacy.refuse_private("a.log", text.encode())
    except privacy.UserError:
        pass
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "what"),
    [
        *((key, "an API key") for key in (
            "gsk_" + "a" * 52, "xai-" + "a" * 80, "pplx-" + "a" * 48, "dapi" + "a1" * 16, "dop_v1_" + "a1" * 32,
            "nvapi-" + "a" * 64, "wandb_v1_" + "a" * 40, "pypi-" + "A" * 80, "npm_" + "a" * 36, "r8_" + "a" * 37,
            "sk_live_" + "a" * 24, "ya29." + "a" * 60,
        )),
        ("glrt-" + "a1" * 10, "a token of GitHub or GitLab"),
        ("ASIA" + "A" * 16, "a key of a cloud"),
        ("https://hooks.slack.com/services/T0/B0/x", "a token of Slack"),
        ("machine api.wandb.ai\n  login user\n  password a1a1a1a1", r"a password of \.netrc"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "a private key"),
        ("-----BEGIN PGP PRIVATE KEY BLOCK-----", "a private key"),
        ("hf_oauth_eyJ" + "a" * 30, "a token of the Hub"),
        ("x_eyJ" + "a" * 20 + ".eyJ" + "b" * 20 + ".c", "a web token"),
        ("dckr_pat_" + "a" * 27, "an access token"),
        ("SG." + "a" * 22 + "." + "b" * 43, "an access token"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "a secret after its name"),
        ("AccountKey=" + "a" * 86 + "==", "a secret after its name"),
        ("wandb: " + "a1" * 20, "a secret after its name"),
        ('api_key = "0123456789abcdef"', "a secret after its name"),
        ("Authorization: Bearer abcdefghijklmnop123456", "a secret after its name"),
        ("password: hunter2", "a password"),
        ("DB_PASS=hunter22", "a password"),
        ("pwd = 'hunter-22'", "a password"),
        ("redis://:secretpw@h:6379", "a password in an address"),
        ("https://0123456789abcdef01@host/x", "a password in an address"),
        ("xapp-1-A0123-12345-abcdef", "a token of Slack"),
        ("KAGGLE_KEY=a1b2c3d4", "a secret after its name"),
        ('{"username": "ana", "key": "0123456789abcdef0123456789abcdef"}', "a secret after its name"),
        ("secret_key_base: 1234567890abcdef1234", "a secret after its name"),
        ("Authorization: Token 1234567890abcdef1234", "a secret after its name"),
        ("Authorization: Basic YW5hOmh1bnRlcjI=", "a secret after its name"),
        ('it is sk/test"key-12', "the value of the variable MYKEY"),
        (json.dumps({"a": 'sk/test"key-12'}), "the value of the variable MYKEY"),
        (json.dumps({"a": "hf_" + "Q" * 34}).replace("hf_", "\\u0068f_"), "a token of the Hub"),
        ("see /lustre/ana/x", "a path"),
        (json.dumps({"m": "see /home/m\u00fcller/My Drive/x"}), "a path"),
        (json.dumps({"m": "/dbfs/ana/x"}).replace("/", "\\u002f"), "a path"),
        ('{"a": 1}\nsee /storage/ana/x', "a path"),
    ],
)  # fmt: skip
def test_text_is_checked_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, what: str) -> None:
    monkeypatch.setenv("MYKEY", 'sk/test"key-12')
    for name in ("train.log", "notes", "rows.jsonl"):
        (tmp_path / name).write_text(f"\n{text}\n")
        with pytest.raises(UserError, match=rf"{name} holds {what}.*\(line [23]\)"):
            privacy.refuse_private(name, tmp_path / name)


def test_words_about_tokens_are_not_secrets() -> None:
    settings = {"eos_token": "<|im_end|>", "token": "Ġinternational", "api_key_env": "MY_KEY", "tokens": "12,345"}
    settings |= {"tokens_field": "max_completion_tokens", "tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"commit": "a1" * 20}
    prose = "The secret: practice. Password: one with 3 letters. wandb: off, key = past_key_values[0], bearer of news"
    names = "wandb: posttrain-quickstart-phase-3\ntoken: mkurman/ConvGPT-0.2B\nkey: gsm8k/main-2026-11-23\n"
    numbers = '"token": 12345678901234567890, "kl_per_token": 1.23456789e-05, "pass": 0.12345678\nPWD=/app/run-12345'
    for text in (json.dumps(settings), yaml.safe_dump(settings), prose, names, numbers):
        privacy.refuse_secrets("a.txt", text.encode())


def test_nothing_that_is_written_here_is_taken_for_a_secret() -> None:
    kinds = ("*.md", "*.py", "docs/*.md", "configs/**/*.yaml", "posttrain/**/*", "envs/**/*", "tests/*.py")
    found = {path for kind in kinds for path in ROOT.glob(kind) if path.is_file() and "__pycache__" not in path.parts}
    files = found - {Path(__file__)}  # which holds secrets of every form
    assert len(files) > 300
    for path in files:
        privacy.refuse_secrets(path.name, path.read_bytes())


def test_a_vocabulary_is_read_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its strings times its lines are 400 million; the line of a string is looked for where there is something."""
    calls, line = [], privacy.line_of
    monkeypatch.setattr(privacy, "line_of", lambda *given: calls.append(given) or line(*given))
    vocabulary: dict[str, Any] = {f"word{number}": number for number in range(20_000)}
    vocabulary |= {"resetPassword": 123456, "login": 7, "token": 12345678901234567}
    whole = {"model": {"vocab": vocabulary}}
    privacy.refuse_private("tokenizer.json", json.dumps(whole, indent=2).encode())
    privacy.refuse_private("vocab.json", json.dumps(vocabulary, indent=2).encode())
    assert not calls
    monkeypatch.setenv("MYKEY", 'sk/test"key-12')
    vocabulary['sk/test"key-12'] = 8
    with pytest.raises(UserError, match=r"holds the value of the variable MYKEY \(line 20007\)"):
        privacy.refuse_private("tokenizer.json", json.dumps(whole, indent=2).encode())
    assert len(calls) == 1


def test_what_is_neither_text_nor_a_picture_is_refused_and_pictures_are_pixels(run: Path) -> None:
    phase = run / "phase3"
    meta = PngImagePlugin.PngInfo()
    meta.add_text("Path", f"/home/ana/{SECRET}", zip=True)
    meta.add_itxt("More", SECRET, zip=True)
    frames = [Image.new("RGB", (9, 9), colour) for colour in ("red", "blue")]
    frames[0].save(phase / "curve.PNG", pnginfo=meta)
    frames[0].save(phase / "play.gif", save_all=True, append_images=frames[1:], comment=SECRET.encode(), duration=50)
    found = content.gather_content(run, REPO, ["curve.PNG", "play.gif"]).files
    with (
        Image.open(io.BytesIO(as_bytes(found["curve.PNG"]))) as curve,
        Image.open(io.BytesIO(as_bytes(found["play.gif"]))) as play,
    ):
        assert curve.info == {} and curve.convert("RGB").getpixel((1, 1)) == (255, 0, 0)
        assert getattr(play, "n_frames", 1) == 2 and play.info["duration"] == 50 and "comment" not in play.info
    for name, raw in (("all.ZIP", b"PK\x03\x04\xff"), ("a.txt", b"\x1f\x8b\x08"), ("b.log", "a".encode("utf-16"))):
        (phase / name).write_bytes(raw)
        with pytest.raises(UserError, match="neither text nor a PNG"):
            content.gather_content(run, REPO, [name])
    (phase / "fake.png").write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match="not a picture that can be read"):
        content.gather_content(run, REPO, ["fake.png"])


def test_which_model_of_a_run(made: Path, run: Path, tmp_path: Path) -> None:
    assert content.model_of(made) == content.model_of(made / "phase3") == made / "phase3" / "final"
    assert content.model_of(made / "phase1" / "final") == made / "phase1" / "final"
    with pytest.raises(UserError, match="holds no finished model"):
        content.model_of(tmp_path / "nothing")
    folder = run / "phase3" / "final"
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        publish(run)
    reseal(folder, history=[])
    with pytest.raises(UserError, match="does not record its training"):
        publish(run)
    (run / "phase1" / "final" / models.CODE).unlink()
    reseal(run / "phase1" / "final")
    with pytest.raises(UserError, match="lacks modeling_convgpt"):
        publish(run / "phase1")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(UserError, match="not empty"):
        publish(made, "--folder", str(tmp_path / "full"))
