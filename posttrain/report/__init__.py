"""What did the run come to, on one page?  report.html, a Markdown table and plots from a run's files, no model needed.

    python -m posttrain.report runs/quickstart

reads results.json and transcripts.jsonl there and the metrics.jsonl of each phase. The page holds everything it shows
(charts as SVG, replayed episodes as GIF): it can be mailed, and opens without a network.
"""

from posttrain.report.page import build
from posttrain.report.tables import markdown, plots, show

__all__ = ["build", "markdown", "plots", "show"]
