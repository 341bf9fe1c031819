"""What does a person see first?  report.html, section by section, from the files of a run."""

from __future__ import annotations

import shlex
from pathlib import Path

from posttrain import files
from posttrain.config import command
from posttrain.report import figures, levels, samples, training_log, verdict
from posttrain.report.markup import document, text
from posttrain.report.rows import Pictures, packed
from posttrain.report.tables import Results
from posttrain.types import Record, UserError, one_line

OPEN = ("In one sentence each", "Results")
TOP = "The first test levels of the evaluation, which nobody chose, played by the model before and after."
RECORDED = (
    "Samples of one group each, so the same level several times, and episodes in which something went wrong. Arrow "
    "keys walk through the list; in the turns of an episode they step its pictures. Tokens can be shaded by log-prob, "
    "entropy, advantage and loss mask; a click or the arrow keys on them tell their figures."
)
RECORDED = f'<p class="quiet">{RECORDED}</p><div id="recorded"></div>'


def build(folder: Path) -> Path:
    """Write report.html beside results.json and return its path."""
    folder = Path(folder)
    results, transcripts = read(folder)
    try:
        pictures = Pictures()
        top = levels.top(results, transcripts, pictures)
        sections, shown = _sections(results, transcripts, folder, pictures)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
        raise UserError(f"{_damaged(folder)} (found {one_line(error)})") from error
    data = packed("data", {"top": top, **shown, "pictures": pictures.coded})
    path = folder / "report.html"
    path.write_text(_document(folder, results, top is not None, sections, data), encoding="utf-8")
    return path


def _document(folder: Path, results: Results, pictured: bool, sections: list[tuple[str, str]], data: str) -> str:
    filled = [(f"s{number}", title, body) for number, (title, body) in enumerate(sections) if body]
    links = "".join(f'<a href="#{place}">{text(title)}</a>' for place, title, _ in filled)
    cards = "".join(_card(place, title, body) for place, title, body in filled)
    name = folder.resolve().name
    body = (
        f'<header><p class="kicker">{text(name)}</p><h1>What each phase changed</h1>'
        f'<p class="lead">{text(" → ".join(results["checkpoints"]))}, on held-out questions and levels, the same for '
        f"every checkpoint. Intervals are at 95 %.</p></header><nav>{links}</nav>"
        + (f'<section id="top"><h2>Before and after</h2><p class="quiet">{TOP}</p></section>' if pictured else "")
        + "<noscript><p>The pictures, episodes and values on this page need JavaScript.</p></noscript>"
        + cards
    )
    return document(f"{name}: what each phase changed", body, data, "player.js", "viewer.js", "charts.js", "page.js")


def _card(place: str, title: str, body: str) -> str:
    """A section; those that few readers look for are folded, and page.js unfolds the one that a link leads to."""
    head = f"<h2>{text(title)}</h2>"
    if title not in OPEN:
        return f'<section id="{place}"><details class="fold"><summary>{head}</summary>{body}</details></section>'
    return f'<section id="{place}">{head}{body}</section>'


def _sections(
    results: Results, transcripts: list[Record], folder: Path, pictures: Pictures
) -> tuple[list[tuple[str, str]], Record]:
    """Title and body of each section (an empty body has nothing to show), and the episodes that page.js puts there."""
    folders = training_log.phase_folders(results, folder)
    steps = verdict.steps(folder, results, transcripts)
    same_level, pairs = levels.pairs(results, transcripts, pictures)
    recorded = training_log.episodes(folders, pictures)
    sections = [
        ("In one sentence each", figures.phases(results, steps)),
        ("Results", figures.headline(results, steps)),
        ("Goals", figures.goals(results)),
        ("The environments, beside other players", figures.environments(results)),
        ("The same level, before and after", same_level),
        ("Episodes recorded while training", RECORDED if recorded else ""),
        ("Learning curves", training_log.curves(results, folders)),
        ("Samples", samples.answers(results, transcripts)),
        ("The data of phases 1 and 2", training_log.data(results, folders)),
        ("What it cost", training_log.cost(results, folders)),
        ("Every paired difference", figures.differences(results)),
        ("Every sampling setting", figures.settings(results)),
        ("Standard benchmarks", figures.benchmarks(results)),
        ("What to type next", commands(results, folder)),
        ("How this was measured", provenance(results)),
    ]
    return sections, {"pairs": pairs, "recorded": recorded}


def read(folder: Path) -> tuple[Results, list[Record]]:
    """results.json and transcripts.jsonl; UserError when they are not what the evaluator writes."""
    for file in (folder / "results.json", folder / "transcripts.jsonl"):
        if not file.is_file():
            raise UserError(
                f"{file} does not exist, so there is nothing to report. `python evaluate_model.py "
                f"output_dir={folder}` writes it."
            )
    remedy = f"Measure again: python evaluate_model.py output_dir={folder} --overwrite"
    results = files.read_json(folder / "results.json", remedy)
    transcripts = files.read_json_lines(folder / "transcripts.jsonl", remedy, appended=False)
    parts = {"checkpoints": dict, "differences": list, "baselines": dict, "config": dict}
    whole = all(isinstance(results.get(part), kind) for part, kind in parts.items()) and results["checkpoints"]
    torn = not transcripts and (folder / "transcripts.jsonl").stat().st_size > 0
    if torn or not whole:
        raise UserError(_damaged(folder))
    return results, transcripts


def _damaged(folder: Path) -> str:
    return (
        f"The files in {folder} are damaged or not what evaluate_model.py writes. Measure again: "
        f"python evaluate_model.py output_dir={folder} --overwrite"
    )


def commands(results: Results, folder: Path) -> str:
    """What a reader would type next, ready to copy."""
    places = [results["config"]["checkpoints"][name] for name in results["checkpoints"]]
    local = [place for place in places if isinstance(place, str)]  # the others are endpoints
    chat = command("inference_with_improved_settings")
    if results["config"].get("goals"):  # those of the quickstart, whose models want other presets
        chat += " --config configs/quickstart/chat.yaml"
    chat += f" {shlex.quote(f'model.name_or_path={local[-1]}' if local else 'model.name_or_path=MODEL')}"
    beside = f" --beside {shlex.quote(local[-2])}" if len(local) > 1 else ""
    lines = [("Talk to the result", chat)]
    lines += [("In the browser" + (", beside its predecessor" if beside else ""), f"{chat} --web{beside}")]
    lines += [("The same question under each preset", f'{chat} --compare --prompt "Tell me about the old garden."')]
    lines += [(f"Watch it play {name.replace('_', ' ')}", f"{chat} --play {name}") for name in results["baselines"]]
    lines += [("All answers and episodes, with filters", f"posttrain report {folder / 'transcripts.jsonl'}")]
    lines += [("Beside another run, with a verdict", f"posttrain report {folder} ANOTHER_RUN")]
    lines += [("Make this page again", f"posttrain report {folder}")]
    lines += [("The reference run, on a GPU with a real model", command("train_phase1_sft"))]
    items = "".join(f"<li><span>{text(why)}</span><code>{text(command)}</code></li>" for why, command in lines)
    return f'<ul class="commands">{items}</ul>'


def provenance(results: Results) -> str:
    config = results["config"]
    knobs = ("temperature", "top_k", "top_p", "repetition_penalty")
    facts = {
        "Settings": "; ".join(
            f"{setting['name']}: " + ", ".join(f"{knob.replace('_', ' ')} {setting[knob]:g}" for knob in knobs)
            for setting in config["settings"]
        ),
        "Intervals": "95 %: Wilson for shares, bootstrap over items for repetition; those of paired differences hold "
        "zero where an exact test (McNemar's, sign flips) does not reject it, and those of the headline's changes hold "
        "together (Bonferroni)",
        "Repetition": "seq-rep-4 on token ids without the stop token: 1 - distinct 4-grams / all 4-grams",
        "Commit": results["commit"] or "not a git checkout",
        "Seed": config["seed"],
        "Hardware": config["hardware"] or "not stated",
        "Versions": ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
    }
    rows = "".join(f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in facts.items())
    return f'<table class="facts">{rows}</table>'
