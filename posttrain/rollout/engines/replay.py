"""What if a model has no standard KV cache?  `model.generate` reads the whole conversation again for each turn.

Slower than the slot engine by a factor that grows with the turns, but it works for every model with `generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from posttrain.rollout.engines.base import Histories, Then, TurnRequest
from posttrain.rollout.engines.sampling import sample_tokens, uniforms
from posttrain.runtime import floats, integers
from posttrain.types import Completion, SamplingParams


class _OurDraw(LogitsProcessor):
    """Draws each token with `sample_tokens` and masks all others, so that greedy `generate` takes it."""

    def __init__(self, params: SamplingParams, seeds_B: torch.Tensor, padding: list[int]) -> None:
        self.params, self.seeds_B, self.padding = params, seeds_B, padding
        self.tokens: list[torch.Tensor] = []
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        seen_BV = None
        if self.params.repetition_penalty != 1.0:
            seen_BV = torch.zeros_like(scores, dtype=torch.bool)
            for row, padding in enumerate(self.padding):
                seen_BV[row, input_ids[row, padding:]] = True
        uniform_B = uniforms(self.seeds_B, len(self.tokens))
        tokens_B, logprobs_B = sample_tokens(scores, self.params, uniform_B, seen_BV)
        self.tokens.append(tokens_B)
        self.logprobs.append(logprobs_B)
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter_(-1, tokens_B[:, None], 0.0)


class ReplaySampler(Histories):
    """Keeps token ids only; each turn prefills the whole history, padded on the left, into a new cache."""

    def __init__(self, model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int) -> None:
        super().__init__()
        self.model, self.stop_ids, self.pad_id = model, list(stop_ids), pad_id

    def converse(self, turns: Sequence[TurnRequest], params: SamplingParams, then: Then) -> None:
        while turns:
            handles, seeds = [handle for handle, _ in turns], [seed for _, seed in turns]
            turns = then(list(zip(handles, self.sample(handles, params, seeds), strict=True)))

    @torch.no_grad()
    def sample(self, handles: Sequence[int], params: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        if not handles:
            return []
        device = self.model.device
        rows = [self._ids[handle] for handle in handles]
        width = max(map(len, rows))
        ids_BT = torch.full((len(rows), width), self.pad_id)
        mask_BT = torch.zeros((len(rows), width), dtype=torch.long)
        for i, row in enumerate(rows):
            ids_BT[i, width - len(row) :] = torch.tensor(row)
            mask_BT[i, width - len(row) :] = 1
        chooser = _OurDraw(params, torch.tensor(seeds, device=device), [width - len(row) for row in rows])
        was_training = self.model.training
        self.model.eval()
        generate = cast(Callable[..., object], self.model.generate)
        generate(
            ids_BT.to(device),
            attention_mask=mask_BT.to(device),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=params.max_new_tokens,
                eos_token_id=self.stop_ids,
                pad_token_id=self.pad_id,
                use_cache=True,
            ),
            logits_processor=LogitsProcessorList([chooser]),
        )
        self.model.train(was_training)
        tokens_BN, logprobs_BN = torch.stack(chooser.tokens, 1).cpu(), torch.stack(chooser.logprobs, 1).cpu()
        completions: list[Completion] = []
        for handle, tokens_N, logprobs_N in zip(handles, tokens_BN, logprobs_BN, strict=True):
            tokens, logprobs = integers(tokens_N), floats(logprobs_N)
            stops = [n for n, token in enumerate(tokens) if token in self.stop_ids]
            length = stops[0] + 1 if stops else len(tokens)
            completions.append(Completion(tokens[:length], logprobs[:length], bool(stops)))
            self._ids[handle].extend(tokens[:length])
        return completions
