"""What does somebody who finds a model of ours on the Hub need to know?  The README.md of `final/`.

Each phase leaves a record in the manifest of what it saves: what it started from, data with licences and rows,
settings, results, commit. The card of a model tells of all phases that made it, in order.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import yaml
from huggingface_hub import HfApi, ModelCardData, metadata_load, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

from posttrain.files import DATA_FILES
from posttrain.runtime import HTTP_ERROR, checkpoint
from posttrain.types import HUB_NAME, UserError

METHODS = {
    "phase1": ("SFT", "supervised fine-tuning on the assistant's tokens"),
    "phase2": ("DPO", "direct preference optimization (arXiv 2305.18290)"),
    "phase3": ("StarPO", "multi-turn reinforcement learning in text environments (arXiv 2504.20073)"),
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


@dataclass(frozen=True)
class Result:
    """A figure on held-out items: Result("sokoban, test levels: success", .54, 300, .48, .6): low and high.

    Shares of independent items have a 95 % interval; a mean loss has none.
    """

    name: str
    value: float
    items: int
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Record:
    """What one phase did; `data` holds a dict a source with path, kind, licence, train and held_out rows."""

    phase: str
    base: str
    step: int
    commit: str | None
    settings: dict[str, Any]
    published: bool = False  # whether the base is a model on the Hub: told when it was read
    data: list[dict[str, Any]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    licence: str | None = None  # of the base model, where it is known


def record(
    phase: str,
    config: dict[str, Any],
    step: int,
    *,
    data: Iterable[dict[str, Any]] = (),
    results: Sequence[Result] = (),
) -> dict[str, Any]:
    """The record of a phase as JSON."""
    base, revision = config["model"]["name_or_path"], config["model"].get("revision")
    found = {key: value for key in SETTINGS if (value := _at(config, key)) is not None}
    first = not history(base)
    licence = _licence(base, revision) if first else None
    name = f"{base} at {revision}" if revision else base
    sources = [source | {"published": _published(source["path"])} for source in data]
    done = Record(phase, name, step, commit(), found, _published(base), sources, list(results), licence)
    return asdict(done)


def _published(name: str) -> bool:
    """Whether a name is one of the Hub: of the form OWNER/NAME, not a file or folder here, nor a file that is gone."""
    return bool(HUB_NAME.fullmatch(name)) and not Path(name).exists() and not name.endswith(DATA_FILES)


def history(name_or_path: str) -> list[dict[str, Any]]:
    """The records of the phases that made a checkpoint folder; none for a model of somebody else's."""
    folder = Path(name_or_path)
    if not (folder / checkpoint.MANIFEST).is_file():
        return []
    try:
        return list(checkpoint.read_manifest(folder)["meta"].get("history", []))
    except UserError:
        return []


def former_results(row: Mapping[str, float]) -> list[Result]:
    """The figures of `evaluation.suites` in a row of phase 3's metrics: what phases 1 and 2 taught, as it is now."""
    found = []
    for key, items in row.items():
        if key.startswith("evaluation/") and key.endswith("/n"):
            figures = key.removesuffix("n")
            metric, name = ("seq_rep_4", "repeated 4-grams") if "repetition" in key else ("accuracy", "right")
            value, low, high = (row[figures + part] for part in (metric, "low", "high"))
            suite = figures.removeprefix("evaluation/").removesuffix("/")
            found.append(Result(f"{suite}, held-out prompts: {name}", value, int(items), low, high))
    return found


@dataclass(frozen=True)
class Published:
    """What the card of a published model says beyond that of its folder: its name, an evaluation, metadata."""

    name: str = "FOLDER_OR_HUB_NAME"
    evaluation: Sequence[str] = ()  # lines of Markdown
    metadata: Mapping[str, Any] = field(default_factory=dict)  # of ModelCardData


def render(
    records: Sequence[dict[str, Any]], model_type: str, *, adapter: bool = False, told: Published | None = None
) -> str:
    """The card, metadata and text, of a model that these phases made, one after another.

    With `adapter` it is the card of the last phase's LoRA adapter alone, which needs the model that phase began with.
    """
    told = told or Published()
    first, last = records[0], records[-1]
    base = (last if adapter else first)["base"].partition(" at ")[0]
    published = (last if adapter else first).get("published", False)
    short, method = METHODS[last["phase"]]
    sources = [source for one in records for source in one["data"]]
    sets = [source["path"] for source in sources if source.get("published")]
    data = ModelCardData(
        base_model=base if published else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        license=first["licence"],
        datasets=list(dict.fromkeys(sets)) or None,
        tags=[*(METHODS[one["phase"]][0].lower() for one in records), model_type],
        ignore_metadata_errors=True,
        **told.metadata,
    )
    title = Path(shown(base)).name or base
    parts = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {_text(title)}, {short}\n",
        f"{'A LoRA adapter for' if adapter else 'A fine-tuned version of'} {_base_link(base, published)}."
        f" The last phase was {method}.\n",
        "## Training\n",
        table(
            ("phase", "method", "from", "optimizer step", "settings", "code"),
            [
                (
                    one["phase"],
                    METHODS[one["phase"]][0],
                    shown(one["base"]),
                    str(one["step"]),
                    ", ".join(f"{key.rpartition('.')[2]} {_short(value)}" for key, value in one["settings"].items()),
                    one["commit"] or "no git checkout",
                )
                for one in records
            ],
        ),
        "All settings of the last phase are in `run_config.yaml`.\n",
    ]
    if sources:
        parts += [
            "## Data\n",
            table(
                ("phase", "data set", "kind", "licence", "rows trained on", "rows held out"),
                [
                    (one["phase"], shown(s["path"]), s["kind"], s["licence"], f"{s['train']:,}", f"{s['held_out']:,}")
                    for one in records
                    for s in one["data"]
                ],
            ),
        ]
    parts += ["## Results\n", *_results(records), *told.evaluation, "## Limits\n"]
    parts += _limits(records, bool(told.evaluation))
    parts += ["## Use\n", _use(model_type, adapter).replace("FOLDER_OR_HUB_NAME", told.name)]
    return "\n".join(parts)


def commit() -> str | None:
    """The commit of this code, with "+" for changes on top of it; None outside a git checkout of it."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        if subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True).returncode:
            return None  # installed into an environment that lies in somebody's own checkout
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True)
    except OSError:  # no git
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "") if head.returncode == 0 else None


def _results(records: Sequence[dict[str, Any]]) -> list[str]:
    rows = []
    for one in records:
        for result in one["results"]:
            interval = "" if result["low"] is None else f" [{result['low']:.3g}, {result['high']:.3g}]"
            rows.append((one["phase"], result["name"], f"{result['value']:.3g}{interval}", f"{result['items']:,}"))
    if not rows:
        return ["Nothing was measured on held-out items.\n"]
    return [
        table(("after", "measured", "value [95 % interval]", "held-out items"), rows),
        "Each figure was measured at the end of its phase; later phases may have changed those of earlier ones.\n",
    ]


def _limits(records: Sequence[dict[str, Any]], evaluated: bool) -> list[str]:
    lines = []
    if any(source["path"] == "embedded" for one in records for source in one["data"]):
        lines.append("Some of its data is generated by the training code and simple: it says little about real tasks.")
    for result in records[-1]["results"]:
        if result["name"].endswith("success") and result["value"] < 0.9:
            lines.append(f"{result['name']}: it fails in {1 - result['value']:.0%} of the phase's own test levels.")
    lengths = [one["settings"][key] for one in records for key in ("data.max_length", "rollout.max_context")
               if key in one["settings"]]  # fmt: skip
    if lengths:
        lines.append(f"No training row was longer than {max(lengths):,} tokens.")
    if len(records) > 1:
        lines.append("What an earlier phase taught may have weakened since: measure what you rely on.")
    other = "What no figure above covers was" if evaluated else "Facts, safety and bias were"
    lines.append(f"{other} not measured.")
    return [*(f"- {_text(line)}" for line in lines), ""]


def _use(model_type: str, adapter: bool) -> str:
    own = model_type == "convgpt"  # which transformers does not know
    lines = ["from transformers import pipeline", "", 'chat = pipeline("text-generation", "FOLDER_OR_HUB_NAME")']
    if adapter:
        lines = ["from peft import AutoPeftModelForCausalLM", "", "model = AutoPeftModelForCausalLM.from_pretrained("]
        lines[-1] += '"FOLDER_OR_HUB_NAME")'
        if own:
            lines.insert(0, "import posttrain.models.convgpt  # the training code: transformers does not know ConvGPT")
    else:
        if own:
            lines[-1] = lines[-1].replace('")', '",\n                trust_remote_code=True, revision="COMMIT")')
        lines.append('print(chat([{"role": "user", "content": "Hello!"}])[0]["generated_text"][-1])')
    text = "\n".join(["```python", *lines, "```", ""])
    if own and not adapter:
        text += (
            "\n`trust_remote_code` runs `modeling_convgpt.py`, which lies beside the weights: read it first, and write "
            "for `COMMIT` the commit that you have read (a local folder has none: leave `revision` out). It was "
            f"written for transformers {version('transformers')}.\n"
        )
    return text


def shown(place: str) -> str:
    """How a card names a model or a data file: of an absolute path, which tells of a machine, by its end.

    >>> shown("runs/mine/phase1/final"), shown("/home/ana/runs/phase1/final"), shown("/home/ana/rows.jsonl")
    ('runs/mine/phase1/final', 'phase1/final', 'rows.jsonl')
    """
    path = PureWindowsPath(place) if PureWindowsPath(place).drive else PurePosixPath(place)
    if not path.root and not place.startswith("~"):
        return place
    return f"{path.parent.name}/{path.name}" if path.name == "final" else path.name


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown, every cell as text."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_text(cell) for cell in line)} |" for line in lines) + "\n"


def _text(text: str) -> str:
    """One line that Markdown shows as it is."""
    plain = " ".join(str(text).split()).replace("\\", "\\\\").replace("|", "\\|")
    return plain.replace("<", "&lt;").replace("`", "\\`").replace("[", "\\[") if plain != "---" else plain


def _base_link(base: str, published: bool) -> str:
    return f"[{_text(base)}](https://huggingface.co/{base})" if published else f"the local model `{shown(base)}`"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _at(config: dict[str, Any], path: str) -> Any:
    """_at({"a": {"b": 1}}, "a.b") -> 1; None where a key is missing."""
    found: Any = config
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _licence(name_or_path: str, revision: str | None) -> str | None:
    """The licence that the base model's own card names: beside the weights, in the cache, or on the Hub."""
    card: Any = Path(name_or_path) / "README.md"
    if not Path(name_or_path).is_dir():
        if not HUB_NAME.fullmatch(name_or_path):  # a folder that is gone by now
            return None
        card = try_to_load_from_cache(name_or_path, "README.md", revision=revision)
        if not isinstance(card, str):
            try:
                told = HfApi().model_info(name_or_path, revision=revision, timeout=10).card_data
            except (OSError, ValueError, HTTP_ERROR, HfHubHTTPError):
                return None
            found = told.get("license") if told else None
            return found if isinstance(found, str) else None
    try:
        found = (metadata_load(card) or {}).get("license")
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return None
    return found if isinstance(found, str) else None
