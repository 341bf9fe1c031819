from . import animation as animation, tables as tables
from .episodes import frames_of as frames_of, gif as gif, png as png
from .page import build as build, markdown as markdown, read_run as read_run
from .tables import (
    Results as Results,
    benchmark_rows as benchmark_rows,
    figure_of as figure_of,
    percent as percent,
    plots as plots,
    points as points,
    points_span as points_span,
    readable as readable,
    show as show,
)
