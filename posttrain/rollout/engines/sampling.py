"""Which token comes next?  One token per row, from logits and the row's own seed, without a global generator."""

from __future__ import annotations

import torch

from posttrain.types import SamplingParams

BLOCK = 256  # tokens of the vocabulary whose probabilities are summed together


def uniforms(seeds_B: torch.Tensor, step: int | torch.Tensor) -> torch.Tensor:
    """Return a uniform number in [0, 1) for each row, float64, (B,): splitmix64 of its seed and position.

    It depends on nothing else, so a row draws the same in any batch (Steele et al. 2014, "Fast splittable pseudorandom
    number generators").

    Args:
        seeds_B: (B,) or, for the numbers (B, N) of N positions, (B, 1); int64.
        step: the position in the turn: an int, (B,), or (N,).
    """
    if seeds_B.device.type == "mps":  # which has no double precision: the same numbers, rounded
        return uniforms(seeds_B.cpu(), torch.as_tensor(step).cpu()).float().to(seeds_B.device)

    def signed(word: int) -> int:  # torch has no unsigned 64-bit arithmetic; two's complement gives the same bits
        return (word + (1 << 63)) % (1 << 64) - (1 << 63)

    def shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
        return (z >> bits) & ((1 << (64 - bits)) - 1)  # a logical shift; that of int64 is arithmetic

    z = seeds_B + (torch.as_tensor(step, device=seeds_B.device) + 1) * signed(0x9E3779B97F4A7C15)
    z = (z ^ shifted(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ shifted(z, 27)) * signed(0x94D049BB133111EB)
    z = z ^ shifted(z, 31)
    return shifted(z, 11).double() * 2.0**-53


def sample_tokens(
    logits_BV: torch.Tensor,
    params: SamplingParams,
    uniform_B: torch.Tensor,
    seen_BV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row by inverting the CDF; return tokens and log-probs, both (B,).

    Log-probs are those of softmax(logits / temperature), before penalty, top-k and top-p.

    Args:
        uniform_B: of `uniforms`.
        seen_BV: True where a token already occurs in the row (CTRL's repetition penalty, Keskar et al. 2019, eq. 5).
    """
    if (device := logits_BV.device).type == "mps":  # the CPU draws, in double precision
        seen_BV = None if seen_BV is None else seen_BV.cpu()
        tokens_B, logprobs_B = sample_tokens(logits_BV.cpu(), params, uniform_B.cpu().double(), seen_BV)
        return tokens_B.to(device), logprobs_B.to(device)
    logits_BV = logits_BV.float()
    divides = params.temperature not in (0, 1)
    scaled_BV = logits_BV / params.temperature if divides else logits_BV
    logprobs_BV = scaled_BV.log_softmax(-1)
    if params.repetition_penalty != 1.0:
        assert seen_BV is not None
        rate = params.repetition_penalty
        punished_BV = torch.where(logits_BV > 0, logits_BV / rate, logits_BV * rate)
        logits_BV = torch.where(seen_BV, punished_BV, logits_BV)
        scaled_BV = logits_BV / params.temperature if divides else logits_BV
    if params.temperature == 0:
        tokens_B = scaled_BV.argmax(-1)
    elif params.top_k > 0 or params.top_p < 1.0:
        tokens_B = _draw_filtered(scaled_BV, params, uniform_B)
    else:
        tokens_B = _draw_in_blocks(scaled_BV.softmax(-1), uniform_B)
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None]).squeeze(-1)


def _draw_in_blocks(probs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Draw a block of the vocabulary, then a token in it: only a few hundred sums are in double precision."""
    padded_BV = torch.nn.functional.pad(probs_BV, (0, -probs_BV.shape[-1] % BLOCK))
    blocks_BNK = torch.unflatten(padded_BV, -1, (-1, BLOCK))
    cdf_BN = blocks_BNK.sum(-1).double().cumsum(-1)
    block_B1 = _invert(cdf_BN, uniform_B)[:, None]
    upper_B1 = cdf_BN.gather(-1, block_B1)
    lower_B1 = torch.where(block_B1 > 0, cdf_BN.gather(-1, (block_B1 - 1).clamp_(min=0)), 0.0)
    target_B1 = uniform_B[:, None] * cdf_BN[:, -1:]
    rest_B1 = (target_B1 - lower_B1) / (upper_B1 - lower_B1)  # uniform again, inside the block
    inside_BK = blocks_BNK.gather(1, block_B1[:, :, None].expand(-1, 1, BLOCK)).squeeze(1)
    tokens_B = block_B1.squeeze(-1) * BLOCK + _invert(inside_BK.double().cumsum(-1), rest_B1.squeeze(-1))
    return tokens_B.clamp_(max=probs_BV.shape[-1] - 1)  # if logits are NaN: the last token, not a crash


def _draw_filtered(scaled_BV: torch.Tensor, params: SamplingParams, uniform_B: torch.Tensor) -> torch.Tensor:
    """Draw from top-k, then nucleus (Holtzman et al. 2020); tokens are sorted, so both filters keep a prefix."""
    k = min(params.top_k or scaled_BV.shape[-1], scaled_BV.shape[-1])
    top_BK, index_BK = scaled_BV.topk(k, sorted=True)
    probs_BK = top_BK.double().softmax(-1)
    before_BK = probs_BK.cumsum(-1) - probs_BK
    probs_BK = torch.where(before_BK < params.top_p, probs_BK, 0.0)
    rank_B = _invert(probs_BK.cumsum(-1), uniform_B)
    return index_BK.gather(-1, rank_B[:, None]).squeeze(-1)


def _invert(cdf_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Return the first index whose cumulative probability exceeds u; it never has probability zero."""
    total_B1 = cdf_BV[:, -1:]
    target_B1 = torch.minimum(uniform_B[:, None] * total_B1, total_B1.nextafter(torch.zeros_like(total_B1)))
    index_B = torch.searchsorted(cdf_BV, target_B1, right=True).squeeze(-1)
    return index_B.clamp_(max=cdf_BV.shape[-1] - 1)
