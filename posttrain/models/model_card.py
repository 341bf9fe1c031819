"""What does a visitor of a model's page on the Hub need to know?  The README.md of `final/`.

Each phase leaves a record in the manifest of what it saves: what it started from, data with licences and rows,
settings, results, commit. The card describes all phases that made the model, in order. Checkpoints of a run hold no
record: theirs is that of the run's `final`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import chain, islice, zip_longest
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import yaml
from huggingface_hub import HfApi, ModelCardData, metadata_load, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from posttrain.config import read_yaml
from posttrain.files import DATA_FILES, parse_json, read_text
from posttrain.runtime import HTTP_ERROR, checkpoint
from posttrain.types import HUB_NAME, UserError, markdown_text, value_at

METHODS = {
    "phase1": ("SFT", "supervised fine-tuning on the assistant's tokens"),
    "phase2": ("DPO", "direct preference optimization (arXiv 2305.18290)"),
    "phase3": ("StarPO", "multi-turn reinforcement learning in text environments (arXiv 2504.20073)"),
    "merge": ("merge", "an average of the weights of several models"),
}
SETTINGS = (
    "model.tuning",
    "trainer.learning_rate",
    "trainer.num_train_epochs",
    "trainer.max_steps",
    "trainer.per_device_train_batch_size",
    "trainer.gradient_accumulation_steps",
    "trainer.beta",
    "trainer.bf16",
    "algorithm.preset",
    "algorithm.advantage",
    "algorithm.loss_type",
    "rollout.groups",
    "rollout.num_generations",
    "data.max_length",
    "rollout.max_context",
    "seed",
)


CHECKPOINT = re.compile(r"(?:checkpoint|best)-[0-9]+")  # folders of a run beside `final`
# Where a phase writes its data's lines of the card before its first step. Phase 3 has them only with distillation.
DATA_OF_PHASE = {
    "phase1": "rows/sources.json",
    "phase2": "pairs/sources.json",
    "phase3": "distillation/sources.json",
}
MOST_EXAMPLES = 6  # messages that a card shows and a chat offers


@dataclass(frozen=True)
class CardResult:
    """A figure on held-out items: Result("sokoban, test levels: success", .54, 300, .48, .6): low and high.

    Shares of independent items have a 95 % interval, a mean loss does not.
    """

    name: str
    value: float
    items: int
    low: float | None = None
    high: float | None = None


def phase_record(
    phase: str,
    config: dict[str, Any],
    step: int,
    *,
    data: Iterable[dict[str, Any]] = (),
    results: Iterable[CardResult] = (),
) -> dict[str, Any]:
    """Return the record of a phase for the model card, as JSON values.

    Args:
        phase: as "phase1".
        config: the run's config.
        step: the last step.
        data: path, kind, licence, train and held_out rows of each source, and examples of its messages.
        results: figures on held-out items.
    """
    base, revision = config["model"]["name_or_path"], config["model"].get("revision")
    return _begun(phase, config, step, data) | {
        "commit": commit(),
        "results": [asdict(result) for result in results],
        "licence": None if history(base) else _licence(base, revision),  # of the model that phase 1 began with
    }


def _begun(phase: str, config: dict[str, Any], step: int, data: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the part of a record that is known before the phase has ended."""
    base, revision = config["model"]["name_or_path"], config["model"].get("revision")
    return {
        "phase": phase,
        "base": f"{base} at {revision}" if revision else base,
        "step": step,
        "settings": {key: value for key in SETTINGS if (value := value_at(config, key)) is not None} | _taught(config),
        "published": _published(base),
        "data": [source | {"published": _published(source["path"])} for source in data],
    }


def merge_record(folders: Sequence[str], shares: Sequence[float], method: str) -> dict[str, Any]:
    """Return the record of a merge for the model card, in the form of `phase_record`.

    Args:
        folders: of the models, or those of adapters that were merged into their base models.
        shares: of each model; they sum to 1.
        method: "linear" or "slerp".
    """
    licences = {_licence(folder, None) for folder in folders}
    return {
        "phase": "merge",
        "base": folders[0],
        "step": 0,
        "commit": commit(),
        "settings": {"method": method},
        "merged": [{"model": folder, "share": share} for folder, share in zip(folders, shares, strict=True)],
        "published": False,
        "data": [],
        "results": [],
        "licence": licences.pop() if len(licences) == 1 else None,
    }


def _taught(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run with another model as its teacher; {} for any other run."""
    if (teacher := value_at(config, "distillation.teacher")) is None:
        return {}
    keys = ("distillation.teacher_coef", "distillation.reward")
    return {"distillation.teacher": public_name(teacher)} | {key: value_at(config, key) for key in keys}


def _published(name: str) -> bool:
    """Return whether a name is one of the Hub: OWNER/NAME, not a file or folder here, nor a file that is gone."""
    return bool(HUB_NAME.fullmatch(name)) and not Path(name).exists() and not name.endswith(DATA_FILES)


def history(name_or_path: str) -> list[dict[str, Any]]:
    """Return the records of the phases that made a checkpoint folder; [] for a model from elsewhere.

    A folder checkpoint-12 or best-12 has those of the run that it lies in, with its own step. Results are left out
    where they were measured at another step.
    """
    folder = Path(name_or_path)
    if not (folder / checkpoint.MANIFEST).is_file():
        return []
    try:
        meta = checkpoint.read_manifest(folder)["meta"]
        place = folder.resolve()
        if "history" not in meta and "step" in meta and CHECKPOINT.fullmatch(place.name):
            return _history_of_run(place.parent, meta["step"])
        return list(meta.get("history", []))
    except UserError:
        return []


def _history_of_run(run: Path, step: int) -> list[dict[str, Any]]:
    """Return the records of a run's checkpoint: those of `final`, or what is known of a run that was cut before it.

    Raises:
        UserError: the settings of the run cannot be read.
    """
    if records := history(str(run / "final")):
        last = records[-1]
        return records if last["step"] == step else [*records[:-1], last | {"step": step, "results": []}]
    config = read_yaml(run / checkpoint.RUN_CONFIG)
    if not isinstance(base := value_at(config, "model.name_or_path"), str):
        return []
    phase = next((phase for phase, file in DATA_OF_PHASE.items() if (run / file).is_file()), "phase3")
    data = _data_of_run(run / DATA_OF_PHASE[phase])
    if phase == "phase3":
        data = [source | {"kind": f"{source['kind']}, prompts alone"} for source in data]
    # Neither this code's commit nor a request to the Hub for a licence: the run may be older, or from elsewhere.
    unknown = {"commit": "not recorded", "results": [], "licence": None}
    return [*history(base), _begun(phase, config, step, data) | unknown]


def _data_of_run(file: Path) -> list[dict[str, Any]]:
    try:
        return list(parse_json(read_text(file, "")))
    except (UserError, ValueError):  # it is missing or damaged
        return []


def card_examples(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return up to six messages that the first phase with such was trained on, of each of its sources in turn."""
    for one in records:
        of_sources = [source.get("examples", []) for source in one.get("data", [])]
        found = filter(None, chain.from_iterable(zip_longest(*of_sources)))
        if messages := list(islice(dict.fromkeys(found), MOST_EXAMPLES)):
            return messages
    return []


def suite_results(row: Mapping[str, float], first: str = "evaluation") -> list[CardResult]:
    """Return the figures of `evaluation.suites` in a row of metrics.

    first: the first part of the metrics' names.
    """
    results = []
    for key, items in row.items():
        if key.startswith(f"{first}/") and key.endswith("/n"):
            figures = key.removesuffix("n")
            metric, name = ("seq_rep_4", "repeated 4-grams") if "repetition" in key else ("accuracy", "right")
            value, low, high = (row[figures + part] for part in (metric, "low", "high"))
            suite = figures.removeprefix(f"{first}/").removesuffix("/")
            results.append(CardResult(f"{suite}, held-out prompts: {name}", value, int(items), low, high))
    return results


@dataclass(frozen=True)
class Published:
    """Additions to the card of a published model: its name, an evaluation, metadata."""

    name: str = "FOLDER_OR_HUB_NAME"
    rows: Sequence[tuple[str, str, str]] = ()  # measured, value, items
    commit: str = ""  # of the code that measured
    pictures: Mapping[str, str] = field(default_factory=dict)  # file -> what it shows
    metadata: Mapping[str, Any] = field(default_factory=dict)  # of ModelCardData


def render_card(
    records: Sequence[dict[str, Any]], model_type: str, *, adapter: bool = False, publication: Published | None = None
) -> str:
    """Return the card, metadata and text, of a model that these phases made, one after another.

    Args:
        records: of the phases, the first one first.
        model_type: architecture, as "llama".
        adapter: whether to write the card of the last phase's LoRA adapter alone, which needs the model before it.
        publication: name and evaluation of a model to publish.
    """
    publication = publication or Published()
    start = records[-1] if adapter else records[0]
    base, published = start["base"].partition(" at ")[0], start.get("published", False)
    sets = [source["path"] for one in records for source in one["data"] if source.get("published")]
    metadata = ModelCardData(
        base_model=base if published else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        license=records[0]["licence"],
        datasets=list(dict.fromkeys(sets)) or None,
        tags=[*(METHODS[one["phase"]][0].lower() for one in records), model_type],
        ignore_metadata_errors=True,
        **publication.metadata,
    )
    return CARDS.get_template("model_card.md.j2").render(
        metadata=metadata.to_yaml(),
        title=Path(public_name(base)).name or base,
        base=base,
        published=published,
        adapter=adapter,
        records=records,
        publication=publication,
        limits=_limits(records, bool(publication.rows)),
        examples=card_examples(records),
        own=model_type == "convgpt",  # which transformers does not know
        version=version("transformers"),
        METHODS=METHODS,
    )


def commit() -> str | None:
    """Return the commit of this code, with "+" for changes on top of it; None outside a git checkout of it."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        if subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True).returncode:
            return None  # installed into an environment inside another project's checkout
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True)
    except OSError:  # no git
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "") if head.returncode == 0 else None


def _limits(records: Sequence[dict[str, Any]], evaluated: bool) -> list[str]:
    lines = []
    if any(source["path"] == "embedded" for one in records for source in one["data"]):
        lines.append("Some of its data is generated by the training code and simple: it shows little about real tasks.")
    for result in records[-1]["results"]:
        if result["name"].endswith("success") and result["value"] < 0.9:
            lines.append(f"{result['name']}: it fails in {1 - result['value']:.0%} of the phase's own tests.")
    lengths = [one["settings"][key] for one in records for key in ("data.max_length", "rollout.max_context")
               if key in one["settings"]]  # fmt: skip
    if lengths:
        lines.append(f"No training row was longer than {max(lengths):,} tokens.")
    if len(records) > 1:
        lines.append("What an earlier phase taught may have weakened since: measure what you rely on.")
    other = "What no figure above covers was" if evaluated else "Facts, safety and bias were"
    lines.append(f"{other} not measured.")
    return lines


def public_name(place: str) -> str:
    """Return how a card names a model or a data file: an absolute path, which is private, by its end.

    >>> [public_name(each) for each in ("runs/mine/phase1/final", "/home/ana/runs/phase1/final", "/home/ana/a.jsonl")]
    ['runs/mine/phase1/final', 'phase1/final', 'a.jsonl']
    """
    path = PureWindowsPath(place) if PureWindowsPath(place).drive else PurePosixPath(place)
    if not path.root and not place.startswith("~"):
        return place
    return f"{path.parent.name}/{path.name}" if path.name == "final" else path.name


CARDS = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
CARDS.filters |= {"count": "{:,}".format, "text": markdown_text, "place": public_name}


def _licence(name_or_path: str, revision: str | None) -> str | None:
    """Return the licence that the base model's own card names: beside the weights, in the cache, or on the Hub."""
    card: Any = Path(name_or_path) / "README.md"
    if not Path(name_or_path).is_dir():
        if not HUB_NAME.fullmatch(name_or_path):  # a folder that is gone by now
            return None
        card = try_to_load_from_cache(name_or_path, "README.md", revision=revision)
        if not isinstance(card, str):
            try:
                data = HfApi().model_info(name_or_path, revision=revision, timeout=10).card_data
            except (OSError, ValueError, HTTP_ERROR, HfHubHTTPError):
                return None
            licence = data.get("license") if data else None
            return licence if isinstance(licence, str) else None
    try:
        licence = (metadata_load(card) or {}).get("license")
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return None
    return licence if isinstance(licence, str) else None
