"""What if vLLM is installed?  It writes the turns in this process, with the policy's weights.

vLLM batches the rows, and its prefix cache holds what it has read of a conversation. Its log-probs are the trainer's
except for rounding. One process, one GPU.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from posttrain.rollout.engines.base import Histories, Then, TurnRequest
from posttrain.runtime import launcher, merged_weights, parallel
from posttrain.types import Completion, SamplingParams, UserError


class VLLMSampler(Histories):
    """vLLM's `LLM` with a copy of the policy, which is updated at the beginning of each `converse`.

    Without top_k, top_p and repetition penalty. longest: tokens of the longest conversation, if known. memory: the
    share of the GPU that vLLM takes for weights and KV cache. A UserError if vLLM is not installed or does not know the
    architecture, or if there are several processes.
    """

    def __init__(
        self, model: PreTrainedModel, stop_ids: Sequence[int], longest: int | None = None, memory: float = 0.3
    ) -> None:
        super().__init__()
        if parallel.size() > 1:
            raise UserError(launcher.ONE_PROCESS)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        try:
            self.vllm = importlib.import_module("vllm")
        except ImportError as error:
            raise UserError(
                f"rollout.engine=vllm needs vLLM, which cannot be imported ({error}). Run `pip install"
                " vllm==0.32.0` and then `pip install .` again in this project's folder, or write rollout.engine=auto."
            ) from error
        name = type(model).__name__
        if name not in self.vllm.ModelRegistry.get_supported_archs():
            raise UserError(f"vLLM does not know {name}: write rollout.engine=auto.")
        self.model, self.stop_ids, self.longest, self.memory = model, sorted(stop_ids), longest, memory
        self._llm: Any = None

    def converse(self, turns: Sequence[TurnRequest], params: SamplingParams, then: Then) -> None:
        if not turns:
            return
        self._llm = self._llm or self._start()
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": merged_weights(self.model)})
        self._llm.reset_prefix_cache()
        engine = self._llm.llm_engine
        while turns or engine.has_unfinished_requests():
            for handle, seed in turns:
                prompt = {"prompt_token_ids": self._ids[handle]}
                engine.add_request(str(handle), prompt, self._distribution(params, seed))
            written = [self._written(output) for output in engine.step() if output.finished]
            turns = then(written) if written else []

    def _start(self) -> Any:
        """Start vLLM with random weights, in the precision that the policy computes in."""
        kind = self.model.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else self.model.dtype
        config = self.model.config
        config.architectures = [type(self.model).__name__]
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)  # pyright: ignore[reportUnknownMemberType]
            return self.vllm.LLM(
                folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                generation_config="vllm",
                logprobs_mode="processed_logprobs",  # log-probs at the temperature of the draw
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=self.longest,
                gpu_memory_utilization=self.memory,
                enable_prefix_caching=True,
                enforce_eager=kind == "cpu",  # compilation takes longer there than it saves
            )

    def _distribution(self, params: SamplingParams, seed: int) -> object:
        plain = params.top_k == 0 and params.top_p == 1 and params.repetition_penalty == 1
        assert plain, "its log-probs would be those after the cut"
        return self.vllm.SamplingParams(
            temperature=params.temperature,
            seed=seed,
            max_tokens=params.max_new_tokens,
            stop_token_ids=self.stop_ids,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=self.vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def _written(self, output: Any) -> tuple[int, Completion]:
        handle, (answer,) = int(output.request_id), output.outputs
        ids = list(answer.token_ids)
        logprobs = [place[token].logprob for token, place in zip(ids, answer.logprobs, strict=True)]
        self._ids[handle].extend(ids)
        return handle, Completion(ids, logprobs, ids[-1] in self.stop_ids)
