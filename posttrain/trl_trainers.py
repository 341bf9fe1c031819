"""TRL's trainers as phases 1 and 2 use them: what they read, and what they say of held-out rows.

As in posttrain/compat.py: private parts of another library, which tests/test_compat.py watches, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import mul
from typing import Any

from torch.utils.data import DataLoader


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
