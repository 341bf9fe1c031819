"""What did the run come to, on one page?  Pages, a Markdown table and plots from the files of runs, no model needed.

    python -m posttrain.report runs/quickstart                 report.html
    python -m posttrain.report runs/quickstart runs/seed1      comparison.html

They read results.json and transcripts.jsonl of the evaluator, and what each phase leaves beside its checkpoint. A page
holds everything it shows: it can be mailed, and opens without a network.

page.py, comparison.py      report.html, transcripts.html, results.md and comparison.html
sections.py                 what the sections of report.html show
rendering.py, templates/    how pages and Markdown are written; into pages go page.css, player.css and *.js, no library
tables.py                   which figures stand where; terminal and plots
verdict.py                  better, worse or cannot tell
training_log.py, charts.py  what training left: curves, alarms, recorded episodes, data, cost
episodes.py, animation.py   episodes, played again
"""

from posttrain.report.page import build, markdown
from posttrain.report.tables import plots, show

__all__ = ["build", "markdown", "plots", "show"]
