"""What are the phases trained on?  Rows are read, filtered, split by question, and become token ids.

    sft = load_sft(cfg.data, chat)              # sft.train, sft.eval: columns input_ids, assistant_masks
    pairs = load_preferences(cfg.data, chat)    # pairs.train, pairs.eval: columns prompt_ids, chosen_ids, rejected_ids
    prompts = load_prompts(data, chat)          # prompts.train, prompts.eval: column prompt_ids
    questions, table = load_questions(data, chat)   # messages, their ids, and what the answer comes to

`reading` opens sources (Hub, local file, embedded), `filters` judges one row at a time, `contamination` knows the
evaluation sets, `loading` puts them together, `table` shows what each filter took.
"""

from posttrain.data.loading import (
    PreferenceData,
    PromptData,
    Question,
    SFTData,
    load_preferences,
    load_prompts,
    load_questions,
    load_sft,
)
from posttrain.data.table import FilterTable, SourceReport

__all__ = [
    "FilterTable",
    "PreferenceData",
    "PromptData",
    "Question",
    "SFTData",
    "SourceReport",
    "load_preferences",
    "load_prompts",
    "load_questions",
    "load_sft",
]
