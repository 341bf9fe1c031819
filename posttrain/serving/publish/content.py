"""Which files are published, and with which content?  Without any request."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from posttrain import files, models
from posttrain.evaluation import digest
from posttrain.models import model_card
from posttrain.runtime import checkpoint
from posttrain.serving.publish import measured, privacy
from posttrain.types import UserError

PHASES = ("phase3", "phase2", "phase1")  # a pipeline's model is that of its last finished phase
# Files of a model's folder that are needed to load it, and its training settings.
MODEL = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    checkpoint.WEIGHTS_INDEX,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.jinja",
    f"{checkpoint.CHAT_TEMPLATES}/*.jinja",
    models.CODE,
    checkpoint.RUN_CONFIG,
)
CHANGED = {".json", ".yaml", ".md", ".txt"}  # files in which paths are cut
PICTURES = (".png", ".gif")
CARD, RESULTS = "README.md", "results.json"
OWN = (CARD.lower(), measured.FOLDER, *measured.PICTURES, measured.MOVING, checkpoint.MANIFEST, checkpoint.RUN_CONFIG)
DAMAGED = "Measure again: python evaluate_model.py --overwrite"


@dataclass
class Content:
    """The files of a repository: Content({"config.json": b"...", "model.safetensors": Path(...)}, notes=[...])."""

    files: dict[str, bytes | Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    free_text: list[str] = field(default_factory=list)  # "hardware: two CPU cores"

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        content = self.files[name]
        return len(content) if isinstance(content, bytes) else content.stat().st_size

    def write(self, folder: Path) -> None:
        """Write the files into an empty folder."""
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"--folder {folder} is not empty. Name another one.")
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                (folder / name).write_bytes(content)
            else:
                shutil.copyfile(content, folder / name)


def model_of(run: Path) -> Path:
    """Return the folder `final` of a phase or pipeline (its last phase), or `run` itself if it is that folder."""
    for folder in (run, run / "final", *(run / phase / "final" for phase in PHASES)):
        if (folder / "config.json").is_file():
            return folder
    raise UserError(
        f"{run} holds no finished model. Name a phase's folder (runs/mine/phase3), its folder `final`, or the folder "
        "that holds phase1, phase2 and phase3."
    )


def gather_content(run: Path, repo: str, include: Sequence[str] = (), evaluation: Path | None = None) -> Content:
    """Return the files that are published.

    Args:
        run: as in `model_of`.
        repo: OWNER/NAME.
        include: further files or folders of the phase.
        evaluation: folder of results.json, if not the run's own.
    """
    folder = model_of(run)
    manifest = checkpoint.verify(folder)
    records = manifest["meta"].get("history")
    if not records:
        raise UserError(
            f"{folder} does not record its training, which the card needs. Publish the folder `final` that a"
            " phase has written."
        )
    content = Content()
    for name in manifest["files"]:
        if any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in MODEL):
            _add(content, name, folder / name)
        elif name != CARD:
            content.notes.append(f"{name} is left out.")
    cleaned = privacy.cut_values(manifest["meta"])
    _seal(content, manifest, cleaned)
    figures = _measured(folder, evaluation, content)
    model_type = str(files.read_json(folder / "config.json", "Use another checkpoint.").get("model_type"))
    if model_type == "convgpt" and models.CODE not in content.files:
        raise UserError(
            f"{folder} lacks {models.CODE}, without which a ConvGPT cannot be loaded: an earlier version of this"
            " project saved it. Train its last phase again."
        )
    index = measured.index(figures, repo.partition("/")[2])
    publication = model_card.Published(repo, figures.rows, figures.commit, figures.pictures, index)
    card = model_card.render_card(cleaned["history"], model_type, publication=publication)
    content.files[CARD] = privacy.cut_paths(card).encode()
    content.files |= {name: _cut(name, made, content) for name, made in figures.files.items()}
    for name in include:
        _include(content, folder.parent, name)
    for name, what in content.files.items():
        privacy.refuse_private(name, what)
    content.free_text = list_free_text(content, cleaned["history"])
    return content


def list_free_text(content: Content, records: Sequence[dict[str, Any]]) -> list[str]:
    """Return texts that a person wrote, as they will be published: only a reader can see whether they contain names."""
    written: list[tuple[str, str]] = []
    if settings := content.files.get(checkpoint.RUN_CONFIG):
        text = settings.decode() if isinstance(settings, bytes) else settings.read_text(encoding="utf-8")
        written += privacy.free_text(yaml.safe_load(text))
    for one in records:
        written += [("base", one["base"])]
        written += [("merged", each["model"]) for each in one.get("merged", ())]
        written += [(key, source[key]) for source in one["data"] for key in ("path", "licence")]
    return list(dict.fromkeys(f"{key}: {' '.join(str(text).split())}" for key, text in written))


def _add(content: Content, name: str, file: Path) -> None:
    """Add a file; a text without the paths in it."""
    if file.suffix not in CHANGED or file.name in privacy.VOCABULARY:
        content.files[name] = file
        return
    text = _cut(name, file.read_bytes(), content)
    content.files[name] = file if text == file.read_bytes() else text


def _cut(name: str, raw: bytes, content: Content) -> bytes:
    """Return a text without paths; other content unchanged."""
    if Path(name).suffix not in CHANGED:
        return raw
    privacy.refuse_secrets(name, raw)  # before a cut can hide a part of one
    text = raw.decode("utf-8", errors="surrogateescape")
    try:  # by value: a path may have spaces, and an escape looks like a path
        reader = {".json": json.loads, ".yaml": yaml.safe_load}.get(Path(name).suffix)
        values = reader(text) if reader else None
    except (ValueError, yaml.YAMLError):
        values = None
    if isinstance(values, dict | list):
        cut, without = text, privacy.cut_values(values)
        if without != values:
            cut = _json(without) if name.endswith(".json") else yaml.safe_dump(without, sort_keys=False)
    else:
        cut = privacy.cut_paths(text)
    if cut != text:
        content.notes.append(f"{name}: paths of a machine are cut to their last part, addresses are left out.")
    return cut.encode("utf-8", errors="surrogateescape")


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _seal(content: Content, manifest: dict[str, Any], meta: dict[str, Any]) -> None:
    """Add the manifest, with the checksums of the cut files and without the card, which users edit on the Hub."""
    listed = {}
    for name, what in content.files.items():
        listed[name] = manifest["files"][name]
        if isinstance(what, bytes):
            listed[name] = {"sha256": hashlib.sha256(what).hexdigest(), "bytes": len(what)}
    text = checkpoint.sealed(manifest | {"meta": meta, "files": listed})
    content.files[checkpoint.MANIFEST] = text.encode()


def _measured(folder: Path, evaluation: Path | None, content: Content) -> measured.CardFigures:
    """Return the figures of exactly these weights in results.json."""
    if evaluation is not None and not (evaluation / RESULTS).is_file():
        raise UserError(f"--results {evaluation}: there is no {RESULTS} in it. Name the output_dir of an evaluation.")
    for place in (evaluation,) if evaluation is not None else (folder.parent, folder.parent.parent):
        if (place / RESULTS).is_file():
            results = files.read_json(place / RESULTS, DAMAGED)
            try:
                figures = measured.of_run(results, digest(str(folder)), place)
            except (LookupError, TypeError, AttributeError) as error:
                raise UserError(f"{place / RESULTS} is damaged ({type(error).__name__}: {error}). {DAMAGED}") from error
            if not figures.rows:
                content.notes.append(f"{place / RESULTS} has no figures of these weights; neither has the card.")
            return figures
    content.notes.append("The run has no results.json (--results FOLDER): the card has only the phases' figures.")
    return measured.CardFigures()


def _include(content: Content, run: Path, name: str) -> None:
    """Add a file or folder of the run that --include names."""
    place = run / name
    if not place.exists() or not place.resolve().is_relative_to(run.resolve()):
        raise UserError(f"--include {name}: there is no such file or folder in {run}.")
    if place.resolve() == run.resolve():
        raise UserError(f"--include {name}: name files or folders of {run}, not all of it.")
    paths = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
    for file in paths:
        if not file.resolve().is_relative_to(run.resolve()):
            raise UserError(f"--include {name}: {file.name} is a link to a place outside of {run}.")
        target = file.resolve().relative_to(run.resolve()).as_posix()
        if target in content.files or target.split("/")[0].lower() in (*OWN, "final"):
            raise UserError(f"--include {name}: the command itself writes or publishes {target}.")
        if file.suffix.lower() in PICTURES:
            content.files[target] = measured.without_metadata(file)
        elif file.suffix.lower() != ".html" and privacy.is_utf8(file):
            content.files[target] = file  # checked unchanged
        else:  # the data of a page is compressed
            raise UserError(
                f"--include {name}: {file.name} is neither text nor a PNG, GIF or safetensors file, so its content "
                "cannot be checked. Leave it out, or unpack it."
            )
