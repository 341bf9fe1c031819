"""Which tokenizer do the tests use?  A byte-level BPE of 512 tokens, trained on a few sentences."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The agent stands on ice and must reach the goal G without falling into a hole O.",
    "<think>The goal is right of me, so I go right.</think><answer>Right</answer>",
    "<think>I push the box down.</think><answer>Down || Left</answer>",
    "Anna has 12 apples and buys 7 more. How many apples does she have? 12 + 7 = 19, so the answer is \\boxed{19}.",
    "system user assistant: hello, how are you? I am fine, thank you!\n\n",
    "Well, it depends on the weather: when it rains we stay inside, read books, cook soup and play cards together.",
    "Which way should the player move first? Between both holes lies one safe square; every other step ends the game.",
    "Tom buys three boxes with eight pencils each and gives five away. Solution: 3 * 8 = 24, then 24 - 5 = 19.",
    "_ P _ _\n_ O _ _\n_ _ _ O\nO _ _ G\n",
]


def byte_level_tokenizer(*, chatml: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 512 tokens, with or without the ChatML tokens among them; no template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        min_frequency=1,
        vocab_size=512,
        special_tokens=["<|endoftext|>", *(["<|im_start|>", "<|im_end|>"] if chatml else [])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    assert backend.get_vocab_size() == 512
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
