"""Which pages does a run get?  report.html, transcripts.html and results.md, from the files of a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from posttrain import files
from posttrain.report import answers, sections, tables, training_log, verdict
from posttrain.report.episodes import Pictures
from posttrain.report.rendering import DAMAGED, TEMPLATES, render_page
from posttrain.report.tables import NOT_ASKED, Results, percent, readable, span
from posttrain.types import Record, UserError, Words, one_line


class PageSection(NamedTuple):
    """A section of a page; `kind` is its macro in sections.html.j2. The page leaves out a section without content."""

    title: str
    short: str  # its name in the navigation
    kind: str
    found: Any  # what the macro shows
    hint: str = ""  # what is in it, in a few words, beside the title
    unfolded: bool = False


def build(folder: Path) -> Path:
    """Write report.html beside results.json and return its path."""
    folder = Path(folder)
    results, transcripts = read_run(folder)
    name, pictures = folder.resolve().name, Pictures()
    try:
        merged = training_log.merged_of(results, folder)
        top = sections.first_levels(results, transcripts, pictures)
        answered = sections.evaluated_answers(results, transcripts)
        examples = answers.good_and_bad(answered)
        steps = verdict.steps(folder, results, transcripts, merged)
        shown, episodes = _sections(results, transcripts, answered, examples, steps, folder, pictures)
        words = tables.task_words(results)
        trained = " → ".join(name for name in results["checkpoints"] if name not in merged)
        names = ", ".join(filter(None, (trained, *merged)))
        lead = f"{names}, on held-out questions and {words.levels}, the same for every"
        html = render_report(
            {"top": top, **episodes, "pictures": pictures.coded},
            shown,
            name=name,
            heading="What training and merging changed" if merged else "What each phase changed",
            lead=f"{lead} checkpoint. Intervals are at 95 %.",
            examples=examples,
            words=words,
            pictured=top is not None,
            colour=partial(tables.colour, results),
        )
    except DAMAGED as error:
        raise UserError(f"{_damaged(folder)} (found {one_line(error)})") from error
    path = folder / "report.html"
    path.write_text(html, encoding="utf-8")
    return path


def recorded_section(recorded: Sequence[Record], words: Words) -> PageSection:
    """Return the section of the episodes that a run recorded."""
    title, hint = f"{words.episodes.capitalize()} recorded while training", f"{len(recorded):,} {words.episodes}"
    return PageSection(title, "Recorded", "recorded", bool(recorded), hint)


def render_report(data: Record, shown: Sequence[PageSection], name: str, heading: str, **values: Any) -> str:
    """Return the page of a run. data: for page.js. values: for report.html.j2."""
    return render_page(
        "report.html.j2",
        f"{name}: {heading[:1].lower()}{heading[1:]}",
        data,
        *("player.js", "viewer.js", "charts.js", "page.js"),
        name=name,
        heading=heading,
        sections=[(f"s{number}", each) for number, each in enumerate(shown) if each.found],
        SAMPLES=sections.SAMPLES,
        MOST_ANSWERS=sections.MOST_ANSWERS,
        **values,
    )


def build_transcripts(file: Path) -> Path:
    """Write transcripts.html beside a transcripts.jsonl, with its name, and return its path.

    Episodes are played again if a run_config.yaml or results.json is beside the file.
    """
    if not file.is_file():
        raise UserError(f"There is no file {file}. Name a transcripts.jsonl of phase 3 or of evaluate_model.py.")
    pictures = Pictures()
    rows = training_log.recorded(file, pictures)
    if not rows:
        raise UserError(
            f"{file} does not hold a complete row. A run of phase 3 writes the episodes of every `transcripts.every`-th"
            " step (10), and of none before: transcripts.every=1 writes all."
        )
    folder = file.resolve().parent.name
    data = {"rows": rows, "pictures": pictures.coded}
    scripts = ("player.js", "viewer.js", "transcripts.js")
    page = {"folder": folder, "file": file.name, "count": len(rows)}
    path = file.with_suffix(".html")
    path.write_text(
        render_page("transcripts.html.j2", f"{folder}: transcripts", data, *scripts, **page), encoding="utf-8"
    )
    return path


def markdown(results: Results) -> str:
    """Return results.md: the headline table, what changed from phase to phase, players, all settings, goals."""
    columns = tables.columns(results)
    rows = []
    for name, entry in results["checkpoints"].items():
        figures = (column.get(entry) for column in columns)
        rows.append([name, *(f"{percent(each.value)} ({span(each)})" if each else NOT_ASKED for each in figures)])
    differences = (
        [
            *(each["from"], each["to"], tables.what(each), each["setting"]),
            *(f"{each['before']:.3f}", f"{each['after']:.3f}", f"{each['value']:+.3f}"),
            *(f"{each['low']:+.3f} to {each['high']:+.3f}", each["n"]),
        ]
        for each in results["differences"]
    )
    settings = tables.every_setting(results)
    players = {
        readable(env): [_player(*each) for each in by_player.items()]
        for env, by_player in results["baselines"].items()
        if by_player  # nobody plays `prompts` by a rule
    }
    goals = results.get("goals") or ()
    text = TEMPLATES.get_template("results.md.j2").render(
        headline=(["checkpoint", *(f"{column.title} ({column.note})" for column in columns)], rows),
        failed=results.get("failed", {}).items(),
        differences=differences,
        baselines=players.items(),
        settings=[(*where, percent(figure.value), span(figure), n) for *where, figure, n in settings],
        benchmarks=list(tables.benchmark_rows(results)),
        goals=[(each["phase"], each["goal"], each["measured"], "yes" if each["reached"] else "no") for each in goals],
    )
    return text.strip()


def _player(name: str, figures: Record) -> list[str]:
    success = percent(figures["success"])
    if "low" in figures:
        success += f" ({span(tables.figure_of(figures, 'success'))})"
    counts = ", ".join(f"{word} {count}" for word, count in figures.get("failures", {}).items())
    return [name, success, f"{figures['return']:.2f}" if "return" in figures else "", counts]


def _sections(
    results: Results,
    transcripts: list[Record],
    answered: list[Record],
    examples: list[answers.ShownAnswer],
    steps: sections.Steps,
    folder: Path,
    pictures: Pictures,
) -> tuple[list[PageSection], Record]:
    """Return the sections, and the episodes for page.js."""
    folders = training_log.phase_folders(results, folder)
    same_level, pairs = sections.level_pairs(results, transcripts, [None, *steps][-1], pictures)
    recorded, words = training_log.recorded_episodes(folders, pictures), tables.task_words(results)
    environments = "environments, beside other players" if any(results["baselines"].values()) else words.levels
    own = [row for row in answered if row["suite"] == "envs"] if sections.has_answers(results) else []
    listed = sections.first_answers(own)
    headline = sections.headline_table(results, steps, training_log.kept_steps(results, folders))
    goals, cost = results.get("goals") or (), training_log.cost(results, folders)
    curves, settings = training_log.curves(folders), list(tables.every_setting(results))
    differences, benchmarks = sections.differences(results), list(tables.benchmark_rows(results))
    reached = f"{sum(goal['reached'] for goal in goals)} of {len(goals)} reached"
    count = sum(len(rows) for *_, rows in differences["steps"]) if differences else 0
    shown = [
        PageSection("In one sentence each", "Summary", "phases", sections.phases(steps), unfolded=True),
        PageSection("Results", "Results", "results", headline, unfolded=True),
        PageSection("Answers by reward", "Answers", "by_reward", answers.by_reward(own, examples), unfolded=True),
        PageSection(
            "Calls and results",
            "Calls",
            "calls",
            answers.calls_table(own, sections.has_programs(results)),
            unfolded=True,
        ),
        PageSection(
            "Every answer, with filters", "List", "answered", len(listed) and len(own), f"{len(listed):,} answers"
        ),
        PageSection("Goals", "Goals", "goals", goals, reached),
        PageSection(f"The {environments}", "Tasks", "environments", sections.environments(results)),
        PageSection(f"The same {words.level}, before and after", words.levels.capitalize(), "levels", same_level),
        recorded_section(recorded, words),
        PageSection("Learning curves", "Curves", "curves", curves, training_log.count_of(curves)),
        PageSection("Samples", "Samples", "answers", sections.answers(results, transcripts)),
        PageSection("The data of phases 1 and 2", "Data", "data", training_log.data(folders)),
        PageSection("What it cost", "Cost", "cost", cost, f"{cost['total']} of training" if cost else ""),
        PageSection("Every paired difference", "Differences", "differences", differences, f"{count} figures"),
        PageSection("Every sampling setting", "Settings", "settings", settings, f"{len(settings)} figures"),
        PageSection("Standard benchmarks", "Benchmarks", "benchmarks", benchmarks, f"{len(benchmarks)} figures"),
        PageSection("What to type next", "Commands", "commands", sections.commands(results, folder)),
        PageSection("How this was measured", "Method", "provenance", sections.provenance(results)),
    ]
    return shown, {"pairs": pairs, "recorded": recorded, "answered": listed}


def read_run(folder: Path) -> tuple[Results, list[Record]]:
    """Return results.json and transcripts.jsonl; UserError if they are not files of the evaluator."""
    for file in (folder / "results.json", folder / "transcripts.jsonl"):
        if file.is_file():
            continue
        if (folder / "metrics.jsonl").is_file():  # of a training run
            raise UserError(
                f"{folder} is a training run, and this needs an evaluation: `posttrain eval` with its checkpoints"
                f" (docs/own.md). A page of the training itself: posttrain report {folder}"
            )
        raise UserError(f"{file} does not exist. `python evaluate_model.py output_dir={folder}` writes it.")
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
