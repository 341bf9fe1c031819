"""What does the quickstart start from?  A tokenizer fitted to the generated text, and random weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from posttrain.data.embedded.arithmetic import openmathinstruct
from posttrain.data.embedded.conversations import capybara
from posttrain.data.embedded.environments import TOY, TOY_STYLE, demonstrations
from posttrain.types import derive_seed

VOCABULARY = 1024
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# A role name keeps its line break and a word its leading space, also its trailing one before a number: so a number is
# the same token in "has 12", "12+5" and "{12}", and sums need to be learnt once. Numbers above 99 are split into
# digits: two of them in a row say that a number is too large, also one that no row has.
PIECES = r"(?:system|user|assistant)\n| ?\p{L}+ (?=\d)| ?\p{L}+|(?<!\d)\d\d?(?!\d)|\d| ?[^\s\p{L}\d]+|\s"
WHOLE_NUMBERS = 100  # below this a number is one token

SHAPE: dict[str, Any] = dict(
    hidden_size=256,  # a 16 x 16 square, pooled to a decoder of width 64
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=192,
    max_position_embeddings=1024,
    initializer_range=0.06,  # 0.02 is small at this width: learning then starts late
    rope_theta=1000.0,  # with 100 it confuses what was told a few messages before
    tie_word_embeddings=False,  # tied embeddings need scale_up, which would be most of the parameters
)


def _texts(seed: int) -> Iterator[str]:
    """Yield the tokenizer's training texts: a sample of all generated data, and the numbers that are one token."""
    import envs

    for row in openmathinstruct(2000, seed):
        yield from (row["question"], row["generated_solution"])
    conversations = [capybara(3000, seed), demonstrations(TOY, 600, seed, style=TOY_STYLE)]
    for row in itertools.chain.from_iterable(conversations):
        yield from (f"{message['role']}\n{message['content']}" for message in row["messages"])
    for name, _ in TOY:  # not all there are: an environment that is added makes no other tokenizer
        actions = envs.make(name).actions or ()
        yield from actions * 2000  # an action begins an answer there and follows a word elsewhere
    yield from [str(number) for number in range(WHOLE_NUMBERS)] * 400


def build_base(folder: str | Path, seed: int = 0) -> Path:
    """Write the model that the quickstart starts from: a tokenizer fitted to the generated text, and random weights."""
    return new_base(folder, _texts(seed), seed)


def new_base(
    folder: str | Path,
    texts: Iterable[str],
    seed: int,
    *,
    vocabulary: int = VOCABULARY,
    pieces: str = PIECES,
    tags: Sequence[str] = TAGS,
    **shape: Any,
) -> Path:
    """Return a ConvGPT of random weights with a tokenizer fitted to `texts`, at most `vocabulary` tokens.

    pieces: what no token crosses the borders of. tags: texts that are one token each. shape: keys of ConvGPTConfig,
    where they are not the quickstart's.
    """
    import torch
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from posttrain.models import Chat, ConvGPTConfig, ConvGPTForCausalLM
    from posttrain.runtime import checkpoint

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(tags),
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    chat = Chat.load(tokenizer, None)

    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(seed, "base"))
        net = ConvGPTForCausalLM(
            ConvGPTConfig(
                vocab_size=len(tokenizer),
                pad_token_id=chat.pad_id,
                bos_token_id=None,
                eos_token_id=chat.stop_id,
                **{**SHAPE, **shape},
            )
        )

    def write(out: Path) -> None:
        net.save_pretrained(out)
        chat.save(out)

    return checkpoint.save(Path(folder), write, chat_template_sha256=chat.hash, phase="base", seed=seed)
