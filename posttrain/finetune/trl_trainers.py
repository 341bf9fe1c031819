"""How do phases 1 and 2 differ from TRL's trainers?  In the rows they read, the order of rows, and two means.

As runtime/compat.py does, it overrides private parts of another library: each has its reason, and test_compat.py
fails when the library changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from operator import mul
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from transformers import Trainer
from trl.trainer import dpo_trainer, sft_trainer
from trl.trainer.dpo_config import DPOConfig as DPOConfig
from trl.trainer.sft_config import SFTConfig as SFTConfig

from posttrain.data import length_pools, row_lengths
from posttrain.models import pads_on_the_right


class GroupingTrainer(Trainer):
    """A trainer of TRL whose `group_by_length` draws new batches of similar length in each epoch.

    transformers' own grouping sorts 50 batches at a time, and batches that are all of one kind of row taught a small
    model less. The rows are kept in the order of the first epoch (`prepared_rows.prepare`). Until transformers groups
    a few batches at a time.
    """

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        return PooledRows(self)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Return the held-out rows in their own order; transformers would read `input_ids`, which pairs lack."""
        grouped = self.args.train_sampling_strategy == "group_by_length"
        return SequentialSampler(eval_dataset) if grouped else super()._get_eval_sampler(eval_dataset)


class WeighingTrainer(Trainer):
    """A trainer of TRL whose `eval_*` depend neither on batches nor on the number of processes.

    transformers takes means over batches: the only row of a last batch would count as much as all of another one, and
    several processes would read some rows twice. Here every process reads all rows (1,000 in the reference
    configs), and a batch counts as much as its pairs or, in SFT, its tokens that have a label. Until transformers does.
    """

    _metrics: dict[str, Any]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        shared = super().get_eval_dataloader(eval_dataset)
        return DataLoader(shared.dataset, self.args.eval_batch_size, collate_fn=shared.collate_fn)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        outputs: Any = super().prediction_step(model, inputs, *args, **kwargs)
        labels = inputs.get("labels")
        # a pair is two rows; nothing predicts the first token of a row
        weight = len(inputs["input_ids"]) // 2 if labels is None else int((labels[:, 1:] != -100).sum())
        self.weights_and_losses.append((weight, float(outputs[0])))
        return outputs

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        self.weights_and_losses: list[tuple[int, float]] = []
        output: Any = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        weights, losses = zip(*self.weights_and_losses, strict=True)

        def mean(of_batches: Iterable[float]) -> float:
            return sum(map(mul, weights, of_batches)) / sum(weights)

        output.metrics[f"{metric_key_prefix}_loss"] = mean(losses)
        for name, of_batches in self._metrics["eval"].items():
            if len(of_batches) == len(weights):  # `num_tokens` is one number, of training
                self._metrics["eval"][name] = [mean(of_batches)]
        return output


class _NumbersLater(TorchFunctionMode):
    """Leaves tensors what TRL turns into numbers: `item()`, whether a count is above 0, and a sum over a mask."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item:
            return args[0].detach()
        if func is torch.Tensor.__bool__:
            return True  # every micro-batch has tokens with a label
        if func is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool:
            return torch.where(args[1], args[0], 0)  # where a mask chooses, the number of elements is waited for
        return func(*args, **(kwargs or {}))


def _padded_on_the_right(collator: Callable[..., Any], rows: list[Any]) -> Any:
    batch = collator(rows)
    mask = batch.get("attention_mask")
    assert mask is None or pads_on_the_right(mask, mask.shape[1]), "training.read_without_padding_masks needs it"
    return batch


class AheadTrainer(Trainer):
    """A trainer of TRL that waits for the GPU when figures are logged, and not ten times in each micro-batch.

    Python runs ahead of a GPU, which computes what was launched; each number that is read of a result ends the lead.
    What follows the forward pass in TRL's loss is only its scalar and its figures. Until TRL reads them when it logs.
    """

    _metrics: dict[str, Any]

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return TRL's batches, of which each is seen to be padded on the right while it is on the CPU."""
        collator = self.data_collator
        self.data_collator = partial(_padded_on_the_right, collator)  # worker processes need one that can be pickled
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = collator

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        with ExitStack() as stack:
            later = [_NumbersLater()]

            def begin(*_: Any) -> None:
                if later:
                    stack.enter_context(later.pop())

            stack.callback(model.register_forward_hook(begin).remove)
            return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        for figures in self._metrics.values():
            figures.update({name: [*map(float, values)] for name, values in figures.items()})
        super().log(logs, *args, **kwargs)


class TokenTrainer(dpo_trainer.DPOTrainer):
    """TRL's DPOTrainer for rows that are token ids already, in the columns that its collator reads.

    TRL would render and tokenise text here, and text of a data set could become a control token. Until DPOTrainer
    leaves such rows alone, as SFTTrainer does.
    """

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        assert {"prompt_ids", "chosen_ids", "rejected_ids"} <= set(dataset.column_names)
        return dataset


class PairTrainer(TokenTrainer):
    """TRL's DPOTrainer, whose loss `sft` does not depend on micro-batches: like the other losses, a mean over pairs.

    For each pair it is the mean over the tokens of the chosen answer, as in RPO (arXiv 2404.19733, eq. 2) and MPO
    (2411.10442). TRL's is a mean over the tokens of a micro-batch, so that accumulation changes what a token counts.
    Until TRL's does not.
    """

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        losses = list(zip(self.loss_types, self.loss_weights, strict=True))
        sft_weight = sum(weight for name, weight in losses if name == "sft")
        if sft_weight == 0:
            return super()._compute_loss(model, inputs, return_outputs)
        others, outputs = [(name, weight) for name, weight in losses if name != "sft"], []
        self.loss_types, self.loss_weights = [name for name, _ in others], [weight for _, weight in others]
        hook = model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        try:
            result = super()._compute_loss(model, inputs, return_outputs)
        finally:
            hook.remove()
            self.loss_types, self.loss_weights = [name for name, _ in losses], [weight for _, weight in losses]
        mask_BT = inputs["completion_mask"][:, 1:]
        answers, width = len(mask_BT) // 2, mask_BT.shape[1]  # the chosen ones come first
        mean_B = -_mean_of_tokens(outputs[0].log_probs[:, -width:], mask_BT)
        if self.use_weighting:  # as TRL weighs the other losses
            aligned_BT = outputs[0].log_probs[:, -width:] - outputs[0].log_sum_sq_probs[:, -width:]
            by_chosen_B, by_rejected_B = _mean_of_tokens(aligned_BT, mask_BT).detach().exp().chunk(2)
            mean_B = mean_B[:answers] * by_chosen_B * by_rejected_B
        loss = sft_weight * mean_B[:answers].mean()
        return (result[0] + loss, result[1]) if return_outputs else result + loss


def _mean_of_tokens(of_tokens_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return (of_tokens_BT * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)


class PooledRows(Sampler[int]):
    """The indices of a trainer's rows in the order of the current epoch.

    The epoch is that of the trainer's state, which a checkpoint holds: after a resumed run skips batches, `set_epoch`
    does not reach a sampler that several processes share.
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
    """Return `order` with batches of similar length side by side within each optimizer step.

    Processes that share the batches of a step read neighbours at the same time. Each step keeps its rows.
    """
    size, in_a_step = args.per_device_train_batch_size, args.gradient_accumulation_steps * args.world_size
    if args.world_size == 1:
        return list(order)
    full = [order[at : at + size] for at in range(0, len(order) - size + 1, size)]
    steps = [full[at : at + in_a_step] for at in range(0, len(full), in_a_step)]
    batches = [batch for step in steps for batch in sorted(step, key=lambda batch: lengths[batch[-1]])]
    return [row for batch in batches for row in batch] + list(order[len(full) * size :])


class SFTTrainer(GroupingTrainer, WeighingTrainer, AheadTrainer, sft_trainer.SFTTrainer):
    """The trainer of phase 1. Arguments are those of TRL's SFTTrainer."""


class DPOTrainer(GroupingTrainer, WeighingTrainer, AheadTrainer, PairTrainer):
    """The trainer of phase 2. Arguments are those of TRL's DPOTrainer; rows hold token ids."""
