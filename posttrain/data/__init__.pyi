from . import embedded as embedded, prepared_rows as prepared_rows, reading as reading
from .embedded.base_model import SHAPE as SHAPE, VOCABULARY as VOCABULARY
from .gsm8k import GSM8K_HELD_OUT as GSM8K_HELD_OUT, final as final, is_held_out as is_held_out
from .loading import (
    PromptQuestion as PromptQuestion,
    TokenData as TokenData,
    load_preferences as load_preferences,
    load_prompts as load_prompts,
    load_questions as load_questions,
    load_sft as load_sft,
)
from .prepared_rows import SOURCES as SOURCES, length_pools as length_pools, row_lengths as row_lengths
from .reading import (
    HELD_OUT as HELD_OUT,
    evaluation_rows as evaluation_rows,
    instruction_row as instruction_row,
)
