from . import animation as animation, tables as tables
from .episodes import (
    Pictures as Pictures,
    browser_row as browser_row,
    describe_end as describe_end,
    frames_of as frames_of,
    gif as gif,
    list_moments as list_moments,
)
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
