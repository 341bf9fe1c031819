from .agents.game import PROGRAM_CRASHED as PROGRAM_CRASHED
from .engine import why_unfit as why_unfit
from .engines.base import Histories as Histories, Sampler as Sampler, Then as Then, TurnRequest as TurnRequest
from .engines.graphs import whole_rows as whole_rows
from .engines.remote import LOOK as LOOK, RemoteSampler as RemoteSampler
from .engines.replay import ReplaySampler as ReplaySampler
from .engines.sampling import sample_tokens as sample_tokens, uniforms as uniforms
from .engines.slots import PREFILL_TOKENS as PREFILL_TOKENS, whole_blocks as whole_blocks
from .episodes import (
    complete as complete,
    has_agent as has_agent,
    most_turns as most_turns,
    new_episode as new_episode,
    open_env as open_env,
    open_sampler as open_sampler,
    play as play,
    sampler_of as sampler_of,
    set_up as set_up,
)
from .game import RAISED as RAISED, Context as Context, Game as Game
from .late_rewards import score_late as score_late
from .thoughts import thoughts as thoughts
