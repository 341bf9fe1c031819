"""How do `vllm serve` processes write turns for a run?  By a request for each turn, with the policy's weights.

Of a conversation only the tokens are kept here; what vLLM has read of it is in its prefix cache. Weights are sent by
NCCL if this process has a GPU and vLLM is installed here, otherwise as files in a folder that both sides see.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from envs.web import FAILURES, BadStatus, send_request
from posttrain.runtime import merged_weights
from posttrain.types import Completion, SamplingParams, UserError, one_line

KEY = "VLLM_API_KEY"  # environment variable from which vLLM's servers read their key
PATIENCE = 600.0  # seconds for a turn, which may wait for others, and for weights
MOST_REPLY = 64 << 20  # bytes
BRIEF = 5.0  # seconds for an answer that takes no computation
PROBE = "The quick brown <fox> jumps: 12 + 7 = 19.\n\n  \u00e9\u4e2d\U0001f600"  # both tokenizers must agree on it
HOW = (
    "Start it as docs/serving.md says: VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --generation-config vllm"
    " --logprobs-mode processed_logprobs --enable-prefix-caching"
)


class Lost(Exception):
    """Why a server cannot be used at present."""


class Policy(NamedTuple):
    """What a server needs to know, and must agree with, before it can write turns for a run."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_ids: list[int]
    longest: int  # tokens of the longest conversation


class WeightSender(Protocol):
    """What is used of vLLM's `NCCLTrainerWeightTransferEngine`."""

    def send_weights(self) -> object: ...


class VLLMServer:
    """One `vllm serve`, which several threads may use; `name` is the name of its model.

    Each method raises `Lost` if there is no answer, or a wrong one.
    """

    def __init__(self, url: str) -> None:
        self.url, self.name = url.rstrip("/"), ""
        self.nccl: WeightSender | None = None
        self.version = 0
        self.ready = threading.Event()  # set while the server has weights of this run
        self.stop_ids: list[int] = []

    def connect(self, policy: Policy) -> None:
        """Prepare the server for this run; a UserError if it does not fit."""
        self.ready = threading.Event()  # a server that was started again has other weights
        try:
            (model,) = self._ask("/v1/models", None)["data"]
            self.name = model["id"]
            config = self._ask("/server_info?config_format=json", None)["vllm_config"]
            settings, caches = config["model_config"], config["cache_config"]["enable_prefix_caching"]
            modes = settings["logprobs_mode"], settings["generation_config"]
        except (KeyError, TypeError, ValueError, Lost) as error:
            if isinstance(error, Lost) and not isinstance(error.__cause__, ValueError):  # no answer at all
                raise
            raise UserError(
                f"{self.url} is not a vLLM server in development mode ({one_line(error)}). {HOW}"
            ) from error
        if not caches or modes != ("processed_logprobs", "vllm"):
            raise UserError(f"The vLLM server at {self.url} runs with other options than a rollout needs. {HOW}")
        if settings["max_model_len"] < policy.longest:
            raise UserError(
                f"The vLLM server at {self.url} takes conversations of {settings['max_model_len']} tokens, and"
                f" rollout.max_context is {policy.longest}: lower it, or start the server with"
                f" --max-model-len {policy.longest}."
            )
        probe = {"model": self.name, "prompt": PROBE, "add_special_tokens": False}
        ids = policy.tokenizer(PROBE, add_special_tokens=False)["input_ids"]
        if self._ask("/tokenize", probe).get("tokens") != ids:
            raise UserError(
                f"The vLLM server at {self.url} has another vocabulary: it serves {settings.get('model')}. Start it"
                " with the folder that this run starts from (model.name_or_path)."
            )
        self.stop_ids = policy.stop_ids
        if policy.model.device.type == "cuda" and importlib.util.find_spec("vllm"):
            self.nccl = self._open_nccl(policy)

    def _open_nccl(self, policy: Policy) -> WeightSender:
        """Return vLLM's own sender of weights, from this process to the server's workers."""
        base = importlib.import_module("vllm.distributed.weight_transfer.base")
        nccl = importlib.import_module("vllm.distributed.weight_transfer.nccl_engine")
        clients = importlib.import_module("vllm.distributed.weight_transfer.clients")
        network = importlib.import_module("vllm.utils.network_utils")
        workers = self._ask("/get_world_size", None)["world_size"]
        place = {"master_address": network.get_ip(), "master_port": network.get_open_port()}

        class Source(base.WeightSource):
            """The policy's tensors, read again for each update."""

            def metadata(self) -> list[object]:
                return [base.ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return merged_weights(policy.model)

        return nccl.NCCLTrainerWeightTransferEngine.trainer_init(
            nccl.NCCLTrainerInitInfo(rank=0, world_size=1 + workers, **place),
            client=clients.HTTPVLLMWeightSyncClient(self.url, PATIENCE),
            source=Source(),
        )

    def disconnect(self) -> None:
        """Free the server for other runs."""
        if self.nccl is not None:
            self._ask("/shutdown_weight_transfer_engine", {})

    def ping(self) -> None:
        """Check that the server answers."""
        try:
            send_request(f"{self.url}/health", None, BRIEF)
        except FAILURES as error:
            raise Lost(one_line(error)) from error

    def update(self, folder: Path, version: int) -> None:
        """Load new weights between turns, from `folder` unless NCCL sends them, and empty the prefix cache."""
        self._ask("/pause?mode=wait", {})  # returns when no turn is being written
        if self.nccl is not None:
            try:
                self.nccl.send_weights()
            except Exception as error:  # requests' and NCCL's have no common type
                raise Lost(one_line(error)) from error
        else:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": PATIENCE}
            self._ask("/collective_rpc", call)
        self._ask("/update_weight_version", {"new_version": str(version)})
        self._ask("/reset_prefix_cache", {})
        self.version = version
        self._ask("/resume", {})
        self.ready.set()

    def ask(self, ids: Sequence[int], seed: int, params: SamplingParams) -> Completion:
        """Return the turn that the server writes after these ids."""
        plain = params.top_k == 0 and params.top_p == 1 and params.repetition_penalty == 1
        assert plain, "its log-probs would be those after the cut"
        request = {
            "model": self.name,
            "prompt": ids,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "seed": seed,
            "stop_token_ids": self.stop_ids,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        if not self.ready.wait(PATIENCE):
            raise Lost("it has not loaded the weights")
        version = self.version  # a turn that waits for a newer one counts as older than it is
        reply = self._ask("/v1/completions", request)
        try:
            (answer,) = reply["choices"]
            logprobs = list(map(float, answer["logprobs"]["token_logprobs"]))
            tokens = list(map(int, answer["token_ids"]))
        except (TypeError, ValueError, KeyError) as error:
            raise Lost(f"its answer is malformed: {one_line(error)}") from error
        if not tokens or len(tokens) != len(logprobs):
            raise Lost(f"its answer has {len(tokens)} tokens and {len(logprobs)} log-probs")
        if not all(-math.inf < logprob <= 1e-3 for logprob in logprobs):  # rounding may leave one above 0
            raise Lost("a log-prob in its answer is nan, infinite or above 0")  # the update would be nan
        return Completion(tokens, logprobs, tokens[-1] in self.stop_ids, version)

    def _ask(self, path: str, content: object) -> Any:
        """Return the JSON with which the server answers a POST of `content`, or a GET if it is None."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        body = None if content is None else json.dumps(content).encode()
        try:
            return json.loads(send_request(self.url + path, body, PATIENCE, headers, MOST_REPLY) or b"{}")
        except BadStatus as error:
            raise Lost(f"{error}{_reason(error.reply)}") from error
        except FAILURES as error:
            raise Lost(one_line(error)) from error


def _reason(reply: str) -> str:
    """Return why vLLM refuses a request; "" if the reply is not one of vLLM."""
    try:
        return f": {' '.join(str(json.loads(reply)['error']['message']).split())[:300]}"
    except (ValueError, TypeError, KeyError):
        return ""
