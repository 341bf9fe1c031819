"""What did the run come to, on one page?  Pages, a Markdown table and plots from the files of runs, no model needed.

    python -m posttrain.report runs/quickstart                 report.html
    python -m posttrain.report runs/quickstart runs/seed1      comparison.html

They read results.json and transcripts.jsonl of the evaluator, and what each phase leaves beside its checkpoint. A page
holds everything it shows: it can be mailed, and opens without a network.

page.py, comparison.py, transcripts_page.py     the three pages
tables.py, figures.py, charts.py, markup.py     figures, as Markdown, HTML and SVG
levels.py, samples.py, training_log.py          sections of the report: levels before and after, answers, training
verdict.py                                      better, worse or cannot tell
rows.py, episodes.py, animation.py              episodes, played again
page.css, player.css; player.js, viewer.js, charts.js, page.js, transcripts.js   what runs in the browser: no library
"""

from posttrain.report.page import build
from posttrain.report.tables import markdown, plots, show

__all__ = ["build", "markdown", "plots", "show"]
