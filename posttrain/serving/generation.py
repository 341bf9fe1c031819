"""What does the model answer?  One token at a time, sampled as in the rollouts, and as text."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.types import SamplingParams, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from posttrain.models import Chat


class DamagedModel(UserError):
    """The error of a model whose probabilities are NaN; another message would not help."""


def context_of(model: PreTrainedModel) -> int:
    """Return the model's context length in tokens."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


@dataclass(frozen=True)
class Generator:
    """A model that answers token by token."""

    model: PreTrainedModel
    chat: Chat

    @property
    def context(self) -> int:
        """Return the largest number of tokens that the model can read."""
        return context_of(self.model)

    def answer(self, ids: list[int], params: SamplingParams, seed: int) -> Answer:
        """Return the answer to a prompt, which is generated while it is read.

        Args:
            ids: token ids of the prompt.
            params: sampling and length.
            seed: of the sampling.
        """
        return Answer(self.chat, self.write(ids, params, seed))

    def write(self, ids: list[int], params: SamplingParams, seed: int) -> Iterator[int]:
        """Yield the tokens after `ids`, up to the stop token: the same ones that `rollout.complete` samples.

        Raises:
            DamagedModel: probabilities are nan.
        """
        import torch

        from posttrain.rollout import sample_tokens, uniforms

        unread, cache, seen_1V = ids, None, None
        seed_1 = torch.tensor([seed], device=self.model.device)
        for step in range(params.max_new_tokens):
            unread_1Q = torch.tensor([unread], device=self.model.device)
            with torch.no_grad():
                output = self.model(input_ids=unread_1Q, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits_1V = output.logits[:, -1]
            seen_1V = torch.zeros_like(logits_1V, dtype=torch.bool) if seen_1V is None else seen_1V
            seen_1V[0, unread_1Q[0]] = True
            token_1, logprob_1 = sample_tokens(logits_1V, params, uniforms(seed_1, step), seen_1V)
            if math.isnan(logprob_1.item()):
                raise DamagedModel(
                    "The model's probabilities are not numbers (NaN), so its weights are damaged, as after a"
                    " training that diverged. Name an earlier checkpoint (model.name_or_path=...)."
                )
            token = int(token_1)
            yield token
            if token == self.chat.stop_id:
                return
            unread, cache = [token], output.past_key_values


class Answer:
    """An answer while it is written: `for piece in answer` yields its text.

    ids       the tokens sampled so far, the stop token included
    finished  whether the stop token was sampled; False for an answer that the budget or the user cut short
    """

    def __init__(self, chat: Chat, tokens: Iterator[int]) -> None:
        self.chat, self.tokens = chat, tokens
        self.ids: list[int] = []
        self.finished = False

    def stop(self) -> None:
        """End the answer, and free the memory that further tokens would need."""
        self.tokens = iter(())

    @property
    def written(self) -> list[int]:
        """Return the ids without the stop token."""
        return self.ids[:-1] if self.finished else self.ids

    @property
    def text(self) -> str:
        return self.chat.decode(self.written).removeprefix(self.chat.lead)

    def __iter__(self) -> Iterator[str]:
        """Yield one piece for each token; it is empty until a character of several tokens is complete."""
        pieces = self._pieces()
        for piece in pieces:
            yield piece.removeprefix(self.chat.lead)
            if piece:
                break
        yield from pieces

    def _pieces(self) -> Iterator[str]:
        start = end = 0  # ids[start:end] has been yielded; the context for decoding what follows
        for token in self.tokens:
            self.ids.append(token)
            self.finished = token == self.chat.stop_id
            whole = self.chat.decode(self.written[start:])
            if whole.endswith("\ufffd") and not self.finished:
                yield ""
                continue
            yield whole[len(self.chat.decode(self.written[start:end])) :]
            start, end = end, len(self.ids)
        if not self.finished:
            yield self.chat.decode(self.ids[start:])[len(self.chat.decode(self.ids[start:end])) :]
