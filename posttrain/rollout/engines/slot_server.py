"""How does a run talk to `python -m posttrain.rollout_server`?  JSON for conversations, safetensors for weights.

The requests for weights have the names and the order that vLLM gives them; the tensors come in their bodies.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import save
from transformers import PreTrainedModel

from envs.web import FAILURES, BadStatus, ask
from posttrain.rollout.engines.remote import BRIEF, Lost, Policy, Servers, Weights, Work, check_logprobs, chunks
from posttrain.runtime import runlog
from posttrain.types import Completion, SamplingParams, UserError, one_line

PROTOCOL = 2  # changes with what is said between a run and its servers
TOKEN = "ROLLOUT_SERVER_TOKEN"  # the environment variable with the password of the servers
SESSION, CHECKSUM = "X-Session", "X-Checksum"
LEASE = 120.0  # seconds after which a server forgets a run that says nothing; longer than one request may take
LONG_POLL = 10.0  # seconds after which it answers that nothing is written yet
PATIENCE = 60.0  # seconds for an answer, and for weights:
WEIGHTS_PATIENCE = 1800.0
FAREWELL = 5.0  # seconds that the end of a run may take
MOST_REPLY = 256 << 20  # bytes


# keys of a config.json that are the same thing under other names, or are compared by themselves
NOT_COMPARED = {
    "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config",
    "transformers_version", "use_cache",
}  # fmt: skip


def vocabulary_of(tokenizer: Any) -> str:
    """A digest of which number each token has."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def architecture(model: PreTrainedModel) -> dict[str, Any]:
    """What its config says of how it computes: two models with weights of the same shapes may differ in it."""
    said = {key: value for key, value in model.config.to_dict().items() if key not in NOT_COMPARED and key[0] != "_"}
    return json.loads(json.dumps(said, default=str))


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def precision(model: PreTrainedModel) -> list[str]:
    """Two processes that say the same compute the same, as far as one can know."""
    return [str(model.dtype), model.device.type, torch.__version__]


class SlotServer:
    """One rollout server; `session` is what it knows this run by."""

    keeps, exact = True, False

    def __init__(self, url: str) -> None:
        self.url, self.session = url.rstrip("/"), ""

    def connect(self, policy: Policy) -> None:
        why = ""
        try:
            about = self._ask("/server_info", None)
        except Lost as error:
            if not isinstance(error.__cause__, ValueError):  # it has answered, with another status or no JSON
                raise
            about, why = None, f" ({error})"
        if not isinstance(about, dict) or about.get("program") != "posttrain.rollout_server":
            raise UserError(
                f"{self.url} is no rollout server of this project{why}. Name the address that python -m"
                " posttrain.rollout_server printed; for vLLM's servers write rollout.engine=vllm_server."
            )
        if about.get("protocol") != PROTOCOL:
            raise UserError(
                f"The rollout server at {self.url} is of another version of this program (it speaks protocol"
                f" {about.get('protocol')}, this run {PROTOCOL}): start both from the same commit."
            )
        if about.get("vocabulary") != vocabulary_of(policy.tokenizer):
            raise UserError(
                f"The rollout server at {self.url} has another vocabulary: it serves {about.get('model')}. Start it"
                " with --model and the folder that this run starts from (model.name_or_path)."
            )
        exact = about.get("precision") == precision(policy.model)
        if self.session and exact != self.exact:
            raise UserError(f"The rollout server at {self.url} was restarted with another device, precision or torch.")
        self.exact = exact
        wanted = {
            "architecture": architecture(policy.model), "shapes": policy.shapes(), "stop_ids": policy.stop_ids,
            "pad_id": policy.pad_id, "longest": policy.longest,
        }  # fmt: skip
        # a run that was killed a moment ago still has it; a server that this run had is its own, or not waited for
        until, told = time.monotonic() + (0 if self.session else LEASE + 5), False
        while True:
            try:
                self.session = self._ask("/init_weight_transfer_engine", {"init_info": wanted})["session"]
                return
            except Lost as error:
                refused = getattr(error.__cause__, "status", 0)
                if refused == 409 and time.monotonic() < until:
                    if not told:
                        runlog.say(f"Waiting for the rollout server at {self.url}, at most {LEASE:.0f} s: {error}.")
                    told = True
                    time.sleep(1.0)
                elif 400 <= refused < 500:
                    raise UserError(f"The rollout server at {self.url} cannot play for this run: {error}.") from error
                else:
                    raise

    def disconnect(self) -> None:
        self._ask("/shutdown_weight_transfer_engine", {}, FAREWELL)

    def still_here(self) -> None:
        self._ask("/renew", {}, BRIEF)

    def pause(self) -> None:
        self._ask("/pause?mode=wait", {}, WEIGHTS_PATIENCE)

    def resume(self) -> None:
        self._ask("/resume", {})

    def start_weight_update(self) -> None:
        self._ask("/start_weight_update", {})

    def update_weights(self, body: bytes) -> None:
        self._ask("/update_weights", body, WEIGHTS_PATIENCE)

    def finish_weight_update(self, version: int) -> None:
        """The server goes on with these weights when the turns that are being written have ended."""
        self._ask("/finish_weight_update", {"weight_version": str(version)}, WEIGHTS_PATIENCE)

    def ask(self, work: Work, params: SamplingParams | None, in_step: bool) -> list[tuple[int, Completion]]:
        told = {
            "close": work.close,
            "open": list(work.open.items()),
            "append": list(work.append.items()),
            "turns": [(turn.handle, turn.seed) for turn in work.turns],
            "params": None if params is None else vars(params),
            "in_step": in_step,
        }
        reply = self._ask("/converse", told)
        try:
            written = [
                (int(handle), Completion(list(map(int, ids)), list(map(float, logprobs)), bool(finished), int(version)))
                for handle, ids, logprobs, finished, version in reply["written"]
            ]
        except (TypeError, ValueError, KeyError) as error:
            raise Lost(f"its answer is none: {one_line(error)}") from error
        for _, said in written:
            check_logprobs(said)
        return written

    def _ask(self, path: str, content: Any, timeout: float = PATIENCE) -> Any:
        headers = {SESSION: self.session}
        if token := os.environ.get(TOKEN):
            headers["Authorization"] = f"Bearer {token}"
        body = content
        if isinstance(content, bytes):
            headers |= {"Content-Type": "application/octet-stream", CHECKSUM: digest(content)}
        elif content is not None:
            headers["Content-Type"] = "application/json"
            body = json.dumps(content).encode()
        try:
            return json.loads(ask(self.url + path, body, timeout, headers, MOST_REPLY))
        except BadStatus as error:
            if error.status == 401 and not self.session:  # later it is a server that was restarted with another token
                raise UserError(
                    f"The rollout server at {self.url} asks for its token: set the environment variable {TOKEN} here to"
                    " what it is set to there."
                ) from error
            raise Lost(_said(error), forgot=error.status == 409) from error
        except FAILURES as error:
            raise Lost(one_line(error)) from error


def _said(error: BadStatus) -> str:
    """What a server says about a request that it refuses."""
    try:
        return str(json.loads(error.reply)["error"])[:500]
    except (ValueError, TypeError, KeyError):
        return str(error)


class SlotServers(Servers[SlotServer]):
    """Rollout servers of this project: each gets the tensors themselves."""

    def _send(self, weights: Weights, servers: Sequence[SlotServer]) -> None:
        self._all(lambda server: server.start_weight_update(), servers)
        for chunk in chunks(weights):
            body = save(chunk)
            self._all(lambda server, body=body: server.update_weights(body), servers)
        self._all(lambda server: server.finish_weight_update(self.version), servers)
