"""Which rows phases 1 and 2 train on, and whose prompts phase 3 asks again."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from posttrain.config.shared import Env, Field, Section, wrong
from posttrain.files import DATA_FILES_IN_WORDS

SFT_KINDS = ("openmathinstruct", "gsm8k", "capybara", "messages", "demonstrations")
DPO_KINDS = ("ultrafeedback", "preferences")
_KIND_OPTIONS: dict[str, dict[str, Any]] = {
    "openmathinstruct": {"code": "drop", "max_per_question": 4},
    "gsm8k": {},
    "capybara": {"min_turns": 1},
    "ultrafeedback": {"min_margin": 0.0},
    "messages": {},
    "preferences": {"min_margin": 0.0},
    "demonstrations": {"envs": [], "player": None, "thought": "cues", "style": "plain"},
    "prompts": {},
}
# The sets on the Hub that have a kind of their own.
HUB_KINDS = {
    "nvidia/OpenMathInstruct-1": "openmathinstruct",
    "openai/gsm8k": "gsm8k",
    "trl-lib/Capybara": "capybara",
    "HuggingFaceH4/ultrafeedback_binarized": "ultrafeedback",
}


class Source(Section):
    """One data set: Source(kind="capybara", path="trl-lib/Capybara", rows=12000)."""

    kind: Literal[
        "openmathinstruct",
        "gsm8k",
        "capybara",
        "ultrafeedback",
        "messages",
        "preferences",
        "demonstrations",
        "prompts",
    ] = Field(
        "how its rows are read; messages, preferences and prompts recognise many formats. Left out: what the phase"
        " reads, preferences in phase 2 and prompts in phase 3, or that of a known set on the Hub",
        "messages",
    )
    path: str = Field(f"a local file ({DATA_FILES_IN_WORDS}), Hub id, or `embedded` (generated here)", min_length=1)
    rows: int | None = Field("rows kept after filtering, sampled by seed; null keeps all", None, ge=1)
    weight: float = Field("how often an epoch contains its rows: 2 for twice, 0.5 for half of them", 1.0, gt=0, le=1000)
    code: Literal["drop", "mask"] | None = Field(
        "openmathinstruct: drop solutions with code, or keep them with the interpreter's output masked", None
    )
    max_per_question: int | None = Field("openmathinstruct: solutions kept of one question", None, ge=1)
    min_turns: int | None = Field("capybara: shortest dialogue, in assistant turns", None, ge=1)
    min_margin: float | None = Field(
        "ultrafeedback, preferences: score_chosen - score_rejected is above it", None, ge=0
    )
    envs: list[Env] | None = Field(
        "demonstrations: the environments that are played, each a name or {name, options}", None
    )
    player: str | None = Field(
        "demonstrations: who plays, `expert` or shares as in `expert:0.9,random:0.1`; null: the expert, in"
        " frozen_lake and sokoban weak scripted policies",
        None,
    )
    style: Literal["plain", "compact"] | None = Field("demonstrations: the words, as in `protocol.style`", None)
    thought: Literal["cues", "plan", "next_state", "none"] | None = Field(
        "demonstrations: what is thought before an action (docs/environments.md)", None
    )

    @model_validator(mode="after")
    def _own_options(self) -> Source:
        own = _KIND_OPTIONS[self.kind]
        for name in {option for options in _KIND_OPTIONS.values() for option in options}:
            if name in own and getattr(self, name) is None:
                object.__setattr__(self, name, own[name])  # the section is frozen otherwise
            elif name not in own and getattr(self, name) is not None:
                kinds = " and ".join(kind for kind, options in _KIND_OPTIONS.items() if name in options)
                raise wrong(f"`{name}` belongs to the kind {kinds}, not to {self.kind}")
        if self.kind == "demonstrations" and not self.envs:
            raise wrong("name the environments that are demonstrated, e.g. `envs: [frozen_lake]`")
        return self


class DataSection(Section):
    sources: list[Source] = Field("one or more data sets, mixed", min_length=1)
    eval_fraction: float = Field("share of the questions (prompts) held out for the evaluation loss", 0.02, gt=0, lt=1)
    eval_rows: int | None = Field(
        "hold out this many rows instead of a share, but at most a tenth of all rows", None, ge=1
    )
    max_length: int = Field("longest row in tokens", 2048, ge=8)
    seed: int = Field("chooses rows and the held-out split; independent of the run's seed", 0, ge=0)
    decontaminate: bool = Field("drop rows that share 13 words in a row with an evaluation set", True)
    flip_labels: bool = Field("control run of phase 2: a coin decides which answer of a pair is the chosen one", False)


def kinds_filled_in(otherwise: str) -> BeforeValidator:
    """Return a validator of sources, or of a section with some: each may be a path alone, or have no kind."""

    def fill_one(source: Any) -> Any:
        source = {"path": source} if isinstance(source, str) else source
        if not isinstance(source, dict) or source.get("kind", "auto") != "auto":
            return source
        known = HUB_KINDS.get(source["path"]) if isinstance(source.get("path"), str) else None
        return source | {"kind": known or ("demonstrations" if "envs" in source else otherwise)}

    def fill(values: Any) -> Any:
        if isinstance(values, dict) and "sources" in values:
            sources = values["sources"]
            return values | {"sources": fill([sources] if isinstance(sources, str) else sources)}
        return [fill_one(one) for one in values] if isinstance(values, list) else values

    return BeforeValidator(fill)


def _of_kind(*kinds: str) -> AfterValidator:
    def check(data: DataSection) -> DataSection:
        for n, source in enumerate(data.sources):
            if source.kind not in kinds:
                raise wrong(f"sources.{n}.kind is {source.kind}, but this phase reads {', '.join(kinds)}")
        if data.flip_labels and kinds != DPO_KINDS:
            raise wrong("flip_labels is for pairs, which only phase 2 has")
        return data

    return AfterValidator(check)
