"""Does the model still think about the question it was asked?  RAGEN-2's diagnostics (arXiv 2604.06268), pure tensors.

Shapes: R reasonings, N distinct prompts, G groups. X is a prompt up to and including <think>, Z the tokens between the
tags. scores_RN[r, n] = log p(z_r | x_n), summed over the tokens of z_r; own_R[r] is the column z_r was sampled under.
"""

from __future__ import annotations

import torch

RETRIEVED = (1, 2, 4, 8)
EMA = 0.9  # RAGEN's decay of the z-score's scale


def matched_and_marginal(
    scores_RN: torch.Tensor, own_R: torch.Tensor, weight_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p(z | its own prompt) and log sum_n p(x_n) p(z | x_n), both (R,), p(x_n) proportional to weight_N.

    Their mean difference is the mutual information of prompt and reasoning within the batch (RAGEN-2, section 2.3).
    The weights are how often each distinct prompt was drawn: merging equal prompts then changes nothing.

    >>> scores = torch.tensor([[-1.0, -9.0], [-9.0, -1.0]])
    >>> matched, marginal = matched_and_marginal(scores, torch.tensor([0, 1]), torch.ones(2))
    >>> (matched - marginal).mean()  # nearly log 2: each reasoning names its prompt
    tensor(0.6928)
    """
    prior_N = weight_N.to(scores_RN).log() - weight_N.to(scores_RN).sum().log()
    return scores_RN.gather(1, own_R[:, None])[:, 0], (scores_RN + prior_N).logsumexp(1)


def z_score(
    matched_R: torch.Tensor, marginal_R: torch.Tensor, scale: float | None = None
) -> tuple[float, float, float]:
    """Return the information in units of the marginal's std: (z, z by the running scale, the new running scale).

    RAGEN's mean((matched - marginal) / (sigma + 0.001)) with sigma the marginal's population deviation in the batch,
    and the same with sigma averaged over the run (0.9 old + 0.1 new; None at the first measurement).
    """
    sigma = marginal_R.std(correction=0).item()
    scale = sigma if scale is None else EMA * scale + (1 - EMA) * sigma
    gained = (matched_R - marginal_R).mean().item()
    return gained / (sigma + 1e-3), gained / (scale + 1e-3), scale


def retrieval(scores_RN: torch.Tensor, own_R: torch.Tensor, k: int) -> float:
    """Return the share of reasonings with their own prompt among the k likeliest; chance is min(1, k / N).

    Equal scores share the places they stand on, so a model that ignores its prompt scores exactly chance.

    >>> retrieval(torch.zeros(3, 4), torch.tensor([0, 1, 2]), k=2)
    0.5
    """
    own_R1 = scores_RN.gather(1, own_R[:, None])
    better_R, equal_R = (scores_RN > own_R1).sum(1), (scores_RN == own_R1).sum(1)
    return ((k - better_R) / equal_R).clamp(0, 1).mean().item()


def information(
    scores_RN: torch.Tensor,
    own_R: torch.Tensor,
    lengths_R: torch.Tensor,
    weight_N: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[dict[str, float], float]:
    """Return all figures of one batch of cross scores, and the running scale of the z-score for the next batch.

    In nats. Per reasoning, where H(Z) = I(X;Z) + H(Z|X) holds exactly: `mi` (at most log N), `conditional_entropy`
    H(Z|X) = -mean(matched), `marginal_entropy` H(Z) = -mean(marginal). `..._token`: the same, each reasoning divided by
    its length, as the paper writes; `mi_token` is at most log(N) / length, so long reasonings make it small.
    `mi_tempered` takes the log-sum-exp of the mean log-prob of a token, as RAGEN's code does: no information any more
    (each likelihood is raised to 1 / length), but it does not saturate at log N as `mi` does for reasonings of more
    than a few tokens. So `mi` says whether a prompt can be told from a reasoning, `mi_tempered` how clearly; `mi_z` and
    `mi_z_ema` are its z-scores, the ones the paper finds to go with success. Also `retrieval_1` to `retrieval_8` and
    `retrieval_chance`, that of the first.
    Equal prompts must have been merged into one column, with their number in weight_N (None: each occurs once).
    """
    assert scores_RN.ndim == 2 and len(scores_RN) == len(own_R) == len(lengths_R) > 0 and bool((lengths_R > 0).all())
    scores_RN, lengths_R = scores_RN.double(), lengths_R.double()
    weight_N = torch.ones(scores_RN.shape[1]) if weight_N is None else weight_N
    matched_R, marginal_R = matched_and_marginal(scores_RN, own_R, weight_N)
    tempered = matched_and_marginal(scores_RN / lengths_R[:, None], own_R, weight_N)
    z, z_ema, scale = z_score(*tempered, scale)
    row = {
        "mi": (matched_R - marginal_R).mean().item(),
        "mi_token": ((matched_R - marginal_R) / lengths_R).mean().item(),
        "mi_tempered": (tempered[0] - tempered[1]).mean().item(),
        "mi_z": z,
        "mi_z_ema": z_ema,
        "conditional_entropy": -matched_R.mean().item(),
        "conditional_entropy_token": -(matched_R / lengths_R).mean().item(),
        "marginal_entropy": -marginal_R.mean().item(),
        "marginal_entropy_token": -(marginal_R / lengths_R).mean().item(),
        "retrieval_chance": 1 / scores_RN.shape[1],
    }
    return row | {f"retrieval_{k}": retrieval(scores_RN, own_R, k) for k in RETRIEVED}, scale


def regime(entropy: float, mi: float, start_entropy: float, start_mi: float, share: float = 0.5) -> str:
    """Return which of RAGEN-2's four regimes (figure 1) this is; high means at least `share` of the value at the start.

    Take H(Z|X) per token and `mi_tempered`. A start without information counts as 0.01: it can be gained, not lost.

    >>> regime(entropy=0.9, mi=0.1, start_entropy=1.0, start_mi=0.8)
    'template collapse'
    """
    varied, informed = entropy >= share * start_entropy, mi >= share * max(start_mi, 0.01)
    if varied:
        return "diverse" if informed else "template collapse"
    return "compressed" if informed else "low-entropy collapse"
