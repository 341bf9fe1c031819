"""TRL's trainers as phases 1 and 2 use them: what they read, and what they say of held-out rows.

As in runtime/compat.py: private parts of another library, which test_compat.py watches, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import mul
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from trl.trainer import dpo_trainer, sft_trainer
from trl.trainer.dpo_config import DPOConfig as DPOConfig
from trl.trainer.sft_config import SFTConfig as SFTConfig

from posttrain.data import length_pools, row_lengths


def takes_token_ids(trainer: type) -> Any:
    """TRL's DPOTrainer for rows that are token ids already, in the columns that its collator reads.

    TRL would render and tokenise text here, and text of a data set could become a control token. Until DPOTrainer
    leaves such rows alone, as SFTTrainer does.
    """

    class TokenTrainer(trainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            assert {"prompt_ids", "chosen_ids", "rejected_ids"} <= set(dataset.column_names)
            return dataset

    TokenTrainer.__name__ = trainer.__name__
    return TokenTrainer


def counts_each_pair(trainer: type) -> Any:
    """TRL's DPOTrainer, whose loss `sft` does not depend on how a batch is cut: a mean over pairs, as of the others.

    Of each pair it is the chosen answer's mean over its tokens, as in RPO (arXiv 2404.19733, eq. 2) and MPO
    (2411.10442). TRL's is a mean over the tokens of a micro-batch, so that accumulation changes what a token counts.
    Until TRL's does not.
    """

    class PairTrainer(trainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
            whole = list(zip(self.loss_types, self.loss_weights, strict=True))
            weight = sum(each for name, each in whole if name == "sft")
            if weight == 0:
                return super()._compute_loss(model, inputs, return_outputs)
            rest, seen = [(name, each) for name, each in whole if name != "sft"], []
            self.loss_types, self.loss_weights = [name for name, _ in rest], [each for _, each in rest]
            hook = model.register_forward_hook(lambda _module, _given, out: seen.append(out))
            try:
                found = super()._compute_loss(model, inputs, return_outputs)
            finally:
                hook.remove()
                self.loss_types, self.loss_weights = [name for name, _ in whole], [each for _, each in whole]
            mask_BT = inputs["completion_mask"][:, 1:]
            answers, width = len(mask_BT) // 2, mask_BT.shape[1]  # the chosen ones come first
            mean_B = -_mean_of_tokens(seen[0].log_probs[:, -width:], mask_BT)
            if self.use_weighting:  # as TRL weighs the other losses
                aligned_BT = seen[0].log_probs[:, -width:] - seen[0].log_sum_sq_probs[:, -width:]
                by_chosen_B, by_rejected_B = _mean_of_tokens(aligned_BT, mask_BT).detach().exp().chunk(2)
                mean_B = mean_B[:answers] * by_chosen_B * by_rejected_B
            loss = weight * mean_B[:answers].mean()
            return (found[0] + loss, found[1]) if return_outputs else found + loss

    PairTrainer.__name__ = trainer.__name__
    return PairTrainer


def _mean_of_tokens(of_tokens_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return (of_tokens_BT * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)


def weighs_held_out_rows(trainer: type) -> Any:
    """TRL's SFTTrainer or DPOTrainer, whose `eval_*` depend neither on batches nor on the number of processes.

    transformers takes means over batches: the only row of a last batch would count as much as all of another one, and
    several processes would read some rows twice. Here every process reads all rows (1,000 in the reference
    configs), and a batch counts as much as its pairs or, in SFT, its tokens that have a label. Until transformers does.
    """

    class WeighingTrainer(trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
            shared = super().get_eval_dataloader(eval_dataset)
            return DataLoader(shared.dataset, self.args.eval_batch_size, collate_fn=shared.collate_fn)

        def prediction_step(self, model: Any, inputs: dict[str, Any], *more: Any, **named: Any) -> Any:
            found = super().prediction_step(model, inputs, *more, **named)
            labels = inputs.get("labels")
            # a pair is two rows; a row's first token is predicted by none
            weight = len(inputs["input_ids"]) // 2 if labels is None else int((labels[:, 1:] != -100).sum())
            self.weighed.append((weight, float(found[0])))
            return found

        def evaluation_loop(self, *given: Any, metric_key_prefix: str = "eval", **named: Any) -> Any:
            self.weighed: list[tuple[int, float]] = []
            found = super().evaluation_loop(*given, metric_key_prefix=metric_key_prefix, **named)
            weights, losses = zip(*self.weighed, strict=True)

            def mean(of_batches: Iterable[float]) -> float:
                return sum(map(mul, weights, of_batches)) / sum(weights)

            found.metrics[f"{metric_key_prefix}_loss"] = mean(losses)
            for name, of_batches in self._metrics["eval"].items():
                if len(of_batches) == len(weights):  # `num_tokens` is one number, of training
                    self._metrics["eval"][name] = [mean(of_batches)]
            return found

    WeighingTrainer.__name__ = trainer.__name__
    return WeighingTrainer


def groups_by_length(trainer: type) -> Any:
    """TRL's SFTTrainer or DPOTrainer, whose `group_by_length` draws batches of similar length anew in each epoch.

    transformers' own grouping sorts 50 batches at a time, and batches that are all of one kind of row taught a small
    model less. The rows are kept in the order of the first epoch (`prepared_rows.prepare`). Until transformers groups
    a few batches at a time.
    """

    class GroupingTrainer(trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            if self.args.train_sampling_strategy != "group_by_length":
                return super()._get_train_sampler(train_dataset)
            return PooledRows(self)

        def _get_eval_sampler(self, eval_dataset: Any) -> Any:
            """Held-out rows in their own order; transformers would look for `input_ids`, which pairs do not have."""
            grouped = self.args.train_sampling_strategy == "group_by_length"
            return SequentialSampler(eval_dataset) if grouped else super()._get_eval_sampler(eval_dataset)

    GroupingTrainer.__name__ = trainer.__name__
    return GroupingTrainer


class PooledRows(Sampler[int]):
    """The places of a trainer's rows in the order of the epoch that begins.

    The epoch is that of the trainer's state, which a checkpoint holds: after batches were skipped, `set_epoch` does not
    reach a sampler that several processes share.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.lengths = row_lengths(trainer.train_dataset)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        epoch = int(self.trainer.state.epoch or 0)
        order = length_pools(self.lengths, self.trainer.args, epoch) if epoch else list(range(len(self.lengths)))
        return iter(side_by_side(order, self.lengths, self.trainer.args))


def side_by_side(order: Sequence[int], lengths: Sequence[int], args: Any) -> list[int]:
    """The same rows in each optimizer step, where processes share its batches so that batches of similar length follow
    each other: these are read at the same time."""
    size, in_a_step = args.per_device_train_batch_size, args.gradient_accumulation_steps * args.world_size
    if args.world_size == 1:
        return list(order)
    full = [order[at : at + size] for at in range(0, len(order) - size + 1, size)]
    steps = [full[at : at + in_a_step] for at in range(0, len(full), in_a_step)]
    batches = [batch for step in steps for batch in sorted(step, key=lambda batch: lengths[batch[-1]])]
    return [row for batch in batches for row in batch] + list(order[len(full) * size :])


# What phases 1 and 2 train with.
SFTTrainer = groups_by_length(weighs_held_out_rows(sft_trainer.SFTTrainer))
DPOTrainer = groups_by_length(weighs_held_out_rows(counts_each_pair(takes_token_ids(dpo_trainer.DPOTrainer))))
