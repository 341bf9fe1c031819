from .episodes import (
    Place as Place,
    Plan as Plan,
    choose as choose,
    make_plan as make_plan,
    rows_at_once as rows_at_once,
)
from .parts import Numbers as Numbers, gib as gib, peak_bytes as peak_bytes
from .preflight import check_hub as check_hub, check_run as check_run, try_output_layer as try_output_layer
from .report import print_plan as print_plan
from .rows import BY_MEMORY as BY_MEMORY, RowSettings as RowSettings, choose_rows as choose_rows, warning as warning
from .selftest import (
    can_be_deterministic as can_be_deterministic,
    can_share_prefixes as can_share_prefixes,
    head_agrees as head_agrees,
    without_noise as without_noise,
)
from .shape import Shape as Shape
