"""Does a damaged, unfinished or occupied folder always show, and does a whole one always verify?"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_runs import ROOT, not_root

from posttrain.runtime import checkpoint
from posttrain.types import UserError


def write_files(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 8)
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "sub").mkdir()
    (folder / "sub" / "x.txt").write_text("x")


def fail(folder: Path) -> None:
    (folder / "half").write_text("half")
    raise OSError("No space left on device")


def test_save_gives_a_folder_that_verifies_and_leaves_nothing_else(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path / "run" / "final", write_files, phase="phase1", step=7)
    manifest = checkpoint.verify(folder)
    assert manifest["meta"] == {"phase": "phase1", "step": 7}
    assert set(manifest["files"]) == {"model.safetensors", "config.json", "sub/x.txt"}
    assert manifest["files"]["model.safetensors"]["bytes"] == 2048
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["final"]


def test_save_replaces_an_older_checkpoint_as_a_whole(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path / "final", write_files)
    checkpoint.save(folder, lambda out: (out / "only.txt").write_text("new"))
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "only.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    checkpoint.verify(folder)


def test_a_failed_write_leaves_the_old_checkpoint_and_its_remains_go_with_the_next(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path / "final", write_files)
    with pytest.raises(UserError, match="No space left"):
        checkpoint.save(folder, fail)
    checkpoint.verify(folder)
    checkpoint.save(folder, write_files)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_every_flipped_byte_and_every_cut_is_noticed(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path / "final", write_files)
    rng = random.Random(5)
    for _ in range(100):
        victim = folder / rng.choice(["model.safetensors", "config.json", "sub/x.txt"])
        whole = victim.read_bytes()
        place = rng.randrange(len(whole))
        if rng.random() < 0.5:
            victim.write_bytes(whole[:place])
        else:
            victim.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << rng.randrange(8))]) + whole[place + 1 :])
        with pytest.raises(UserError, match="damaged"):
            checkpoint.verify(folder)
        victim.write_bytes(whole)
    checkpoint.verify(folder)


@pytest.mark.slow
def test_every_flipped_bit_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "checkpoint-1", write_files)
    folder = checkpoint.save(tmp_path / "checkpoint-2", write_files, phase="phase1")
    manifest = folder / "manifest.json"
    whole = manifest.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            manifest.write_bytes(flipped)
            if manifest.read_bytes().decode(errors="replace").split() == whole.decode().split():
                continue  # one kind of white space for another
            with pytest.raises(UserError, match="damaged"):
                checkpoint.read_manifest(folder)
    assert checkpoint.latest_good(tmp_path, say=lambda _: None) == tmp_path / "checkpoint-1"


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "final", write_files, n=1).rename(tmp_path / ".final.partial-7-old")
    with pytest.raises(UserError, match="No space left"):
        checkpoint.save(tmp_path / "final", fail)
    assert checkpoint.verify(tmp_path / "final")["meta"] == {"n": 1}


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (shutil.rmtree, "no such folder"),
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "manifest.json").unlink(), "not a complete checkpoint"),
        (lambda f: (f / "manifest.json").write_text('{"files": {'), "cannot be read"),
        (lambda f: (f / "manifest.json").write_text("[]"), "cannot be read"),
        (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe"), "cannot be read"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, harm, words: str) -> None:
    folder = checkpoint.save(tmp_path / "final", write_files)
    harm(folder)
    with pytest.raises(UserError, match=words):
        checkpoint.verify(folder)


def test_latest_good_goes_by_number_and_reports_the_broken_ones(tmp_path: Path) -> None:
    for step in (5, 20, 100):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        write_files(folder)
        checkpoint.seal(folder, step=step)
    (tmp_path / "checkpoint-120").mkdir()  # a kill while it was written: no manifest
    (tmp_path / "checkpoint-100" / "config.json").write_text('{"a": 2}')
    heard: list[str] = []
    assert checkpoint.latest_good(tmp_path, say=heard.append) == tmp_path / "checkpoint-20"
    assert ["checkpoint-120" in heard[0], "checkpoint-100" in heard[1], len(heard)] == [True, True, 2]
    assert checkpoint.latest_good(tmp_path / "empty", say=heard.append) is None


def test_only_numbers_make_a_checkpoint(tmp_path: Path) -> None:
    for name in ("7", "10", "old", "9-copy", "٣"):
        (tmp_path / f"checkpoint-{name}").mkdir()
    (tmp_path / "a-checkpoint").mkdir()
    (tmp_path / "checkpoint-11").write_text("a file")
    assert [step for step, _ in checkpoint.numbered(tmp_path)] == [7, 10]


def test_weights_follow_the_umask_like_all_else(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        write_files(folder)
        (folder / "model.safetensors").chmod(0o600)  # as safetensors does

    for umask, mode in ((0o022, 0o644), (0o027, 0o640)):
        before = os.umask(umask)
        try:
            folder = checkpoint.save(tmp_path / f"{umask}", write)
        finally:
            os.umask(before)
        assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {mode}


def test_weights_are_what_the_index_names(tmp_path: Path) -> None:
    parts = [tmp_path / f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for part in (*parts, tmp_path / "model_zz.safetensors"):
        part.write_bytes(b"x")
    with pytest.raises(UserError, match="it holds no"):
        checkpoint.weight_files(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": parts[0].name, "b": parts[1].name, "c": parts[0].name}}))
    assert checkpoint.weight_files(tmp_path) == parts
    parts[1].unlink()
    with pytest.raises(UserError, match=r"00002-of-00002\.safetensors, which .* names, is missing"):
        checkpoint.weight_files(tmp_path)
    outside = '{"weight_map": {"a": "../secret.safetensors"}}'
    for wrong in (outside, '{"weight_map": [1]}', '{"weight_map": {}}', "[]", "{"):
        index.write_text(wrong)
        with pytest.raises(UserError, match=r"safetensors\.index"):
            checkpoint.weight_files(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert checkpoint.weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_a_folder_that_may_not_be_written_is_found_at_once(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own folder is closed to other users
        run = Path(place) / "run"
        run.mkdir()
        (run / ".lock").touch(0o666)  # left by a run of another user
        for folder in (Path(place), run):
            folder.chmod(0o755)
        (run / ".lock").chmod(0o666)
        with not_root(), pytest.raises(UserError, match="Nothing can be written to output_dir"):
            checkpoint.claim(run, resume=False)
        run.chmod(0)
        with not_root(), pytest.raises(UserError, match="cannot be read"):
            checkpoint.in_use(run, resume=False)
        run.chmod(0o755)


def test_kill_during_save_leaves_the_old_checkpoint_whole(tmp_path: Path) -> None:
    """The process dies by SIGKILL at random moments of one save after another."""
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from posttrain.runtime import checkpoint
        folder, n = Path(sys.argv[1]), 0
        def write(out):
            for k in range(20):
                (out / f"part{k}.bin").write_bytes(bytes([n % 256]) * 20000)
        while True:
            checkpoint.save(folder, write, n=n)
            n += 1
            print(n, flush=True)
        """
    )
    rng = random.Random(1)
    for _ in range(6):
        command = [sys.executable, "-c", program, str(tmp_path / "final")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
            assert process.stdout is not None
            process.stdout.readline()  # at least one save is complete
            try:
                process.wait(timeout=rng.uniform(0.0, 0.2))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
            process.wait()
        survivors = [tmp_path / "final", *tmp_path.glob(".final.partial-*-old")]
        good = [folder for folder in survivors if folder.is_dir() and (folder / "manifest.json").exists()]
        assert good
        manifest = checkpoint.verify(good[0])
        assert len(manifest["files"]) == 20


def test_claim_refuses_a_folder_in_use_and_changes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"--resume.*output_dir="):
        checkpoint.claim(out, resume=False)
    assert [path.name for path in out.iterdir()] == ["metrics.jsonl"]
    checkpoint.claim(out, resume=True)
    with pytest.raises(UserError, match="nothing to resume"):
        checkpoint.claim(tmp_path / "other", resume=True)
    with pytest.raises(UserError, match="is a file"):
        checkpoint.claim(out / "metrics.jsonl", resume=False)
    with pytest.raises(UserError, match="Nothing can be written"):
        checkpoint.claim(out / "metrics.jsonl" / "below", resume=False)


def test_claim_refuses_while_another_process_writes(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from posttrain.runtime import checkpoint; "
    program += "checkpoint.claim(Path(sys.argv[1]), False); print('claimed', flush=True); sys.stdin.read()"
    out = tmp_path / "run"
    command = [sys.executable, "-c", program, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"claimed\n"
        with pytest.raises(UserError, match="Another process"):
            checkpoint.claim(out, resume=False)
        process.kill()
    checkpoint.claim(out, resume=False)  # the lock went with the process, however it ended
    checkpoint.claim(out, resume=False)  # and a process may claim twice what is its own


def test_a_run_that_failed_before_its_first_step_leaves_its_name_free(tmp_path: Path) -> None:
    out = tmp_path / "run"
    (out / "pairs" / "train").mkdir(parents=True)
    (out / "run_config.yaml").write_text("seed: 0")
    (out / "metrics.jsonl").write_text("")
    checkpoint.in_use(out, resume=False)
    checkpoint.in_use(out, resume=True)
    (out / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="already holds a run"):
        checkpoint.in_use(out, resume=False)


def test_a_full_disk_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_: Path) -> None:
        raise RuntimeError("write of 4096 bytes failed")  # what safetensors and torch raise is no OSError

    with pytest.raises(RuntimeError, match="4096"):  # there is room, so it was something else
        checkpoint.save(tmp_path / "final", no_room)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(UserError, match=r"is full.*--resume"):
        checkpoint.save(tmp_path / "final", no_room)
    with pytest.raises(UserError, match="another reason"), checkpoint.full_disk_in_words(tmp_path):
        raise UserError("another reason")


def test_free_space(tmp_path: Path) -> None:
    checkpoint.needs_free_space(tmp_path / "not" / "yet" / "there", 1)
    with pytest.raises(UserError, match="Too little disk space"):
        checkpoint.needs_free_space(tmp_path / "not" / "yet" / "there", 10**18)


def test_a_full_disk_leaves_the_old_checkpoint_usable(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for the full disk: writes beyond 4 KB fail with an OSError."""
    checkpoint.save(tmp_path / "final", write_files, n=1)
    program = textwrap.dedent(
        """
        import resource, signal, sys
        from pathlib import Path
        from posttrain.runtime import checkpoint
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        checkpoint.save(Path(sys.argv[1]), lambda out: (out / "big").write_bytes(b"x" * 100000), n=2)
        """
    )
    command = [sys.executable, "-B", "-c", program, str(tmp_path / "final")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "UserError: Nothing more could be written" in done.stderr
    assert checkpoint.verify(tmp_path / "final")["meta"] == {"n": 1}


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path / "final", write_files, chat_template_sha256="ab" * 32)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest.pop("seal") and manifest == checkpoint.verify(folder)
    assert manifest["format"] == 1
