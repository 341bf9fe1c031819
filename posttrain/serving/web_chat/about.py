"""What does the page say about a model?  A short name, what it was trained on, and messages to begin with."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from posttrain.config import ChatRun
from posttrain.models import model_card
from posttrain.serving.generation import Generator
from posttrain.types import HUB_NAME

GENERAL = (  # for a model whose card names no messages of its training data
    "Tom has 3 apples and buys 4. How many?",
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in two sentences what a neural network is.",
    "Translate into German: The weather is nice today.",
    "Name three things to do on a rainy Sunday.",
)
BUILT = ("runs", "final", ".", "..", "/")  # parts of a path that say nothing about a model


@dataclass(frozen=True)
class About:
    """A model as the page shows it: About("quickstart/phase1", "0.5 million parameters. SFT on ...", "", ["Hello"]).

    card: the address of its card on the Hub, "" for a folder.
    """

    title: str
    trained: str
    card: str
    examples: list[str]


def describe_models(generators: Mapping[str, Generator], cfg: ChatRun) -> dict[str, About]:
    """Return what the page says about each model, by name; `examples` of the config are for the first one."""
    titles = [_title(name) for name in generators]
    if len(set(titles)) < len(titles):
        titles = list(generators)
    described = {}
    for (name, generator), title in zip(generators.items(), titles, strict=True):
        records = model_card.history(name)
        configured = cfg.examples if not described else []
        # those of the config are written for this model and make one conversation
        shown = list(dict.fromkeys([*configured, *(model_card.card_examples(records) or GENERAL)]))
        size = sum(parameter.numel() for parameter in generator.model.parameters()) / 1e6
        published = bool(HUB_NAME.fullmatch(name)) and not Path(name).exists()
        trained = "; ".join(filter(None, map(_phase, records)))
        if not trained:
            trained = "Its training is described on its card" if published else "Its folder does not name its training"
        words = f"{size:,.{0 if size >= 10 else 1 if size >= 1 else 2}f} million parameters. {trained}."
        described[name] = About(
            title, words, f"https://huggingface.co/{name}" if published else "", shown[: model_card.MOST_EXAMPLES]
        )
    return described


def _title(name: str) -> str:
    """Return a model's name without what all paths have.

    >>> [_title(name) for name in ("runs/quickstart/phase3/final", "owner/SmolLM2-135M", "/models/mine")]
    ['quickstart/phase3', 'SmolLM2-135M', 'mine']
    """
    parts = [part for part in PurePath(name).parts if part not in BUILT]
    return "/".join(parts[-2:] if parts and parts[-1].startswith("phase") else parts[-1:]) or name


def _phase(record: Mapping[str, Any]) -> str:
    """Return what a phase trained on, as "SFT on 120 rows of a.jsonl" or "StarPO in frozen_lake"."""
    if record.get("phase") not in model_card.METHODS:
        return ""
    method, _ = model_card.METHODS[record["phase"]]
    if record["phase"] == "phase3":
        suffixes = (", test levels: success", ", test prompts: success")
        played = [name for each in record.get("results", []) for name in _before(each.get("name", ""), suffixes)]
        return f"{method} in {_joined(played)}" if played else method
    sources = record.get("data", [])
    rows = sum(source.get("train", 0) for source in sources)
    what = "pairs" if record["phase"] == "phase2" else "rows"
    if all(source["path"] == "embedded" for source in sources):
        kinds = dict.fromkeys(source["kind"] for source in sources)
        return f"{method} on {rows:,} generated {what} ({', '.join(kinds)})"
    names = dict.fromkeys(model_card.public_name(source["path"]) for source in sources)
    return f"{method} on {rows:,} {what} of {_joined(list(names))}"


def _before(text: str, suffixes: Sequence[str]) -> Iterator[str]:
    for suffix in suffixes:
        if text.endswith(suffix):
            yield text.removesuffix(suffix)


def _joined(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def about_html(about: About, heading: str, setting: str) -> str:
    """Return what a model was trained on and how it is sampled. heading: tag of its name, as h2; "" leaves it out."""
    name = f"<{heading}>{html.escape(about.title)}</{heading}>" if heading else ""
    card = f' <a href="{html.escape(about.card)}" target="_blank" rel="noreferrer">Its card</a>' if about.card else ""
    trained = f'<p data-model="{html.escape(about.title)}">{html.escape(about.trained)}{card}</p>'  # names.js reads it
    return f"{name}{trained}<p>Sampling: {html.escape(setting)}</p>"
