"""Which engine writes the turns of this model?  The one asked for, or the fastest that its self-test allows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from posttrain import launcher, parallel
from posttrain.sampler import CompiledSampler, RemoteSampler, ReplaySampler, Sampler, SlotSampler, VLLMSampler
from posttrain.sampler.remote import Policy
from posttrain.sampler.slot_server import SlotServer, SlotServers
from posttrain.sampler.vllm_server import VLLMServer, VLLMServers
from posttrain.selftest import why_unfit
from posttrain.types import UserError


def open_engine(
    model: PreTrainedModel,
    stop_ids: Sequence[int],
    pad_id: int,
    engine: str = "auto",
    longest: int | None = None,
    vllm_memory: float = 0.3,
    compiled: bool = False,
) -> Sampler:
    """The engine asked for; `auto` takes the slot engine where a self-test on this very model proves it right, else
    the one that replays, which must pass the same test.

    longest: the tokens that no conversation exceeds, where that is known. vllm_memory: vLLM's share of the device.
    compiled: decode with the compiled step of the slot engine, and with nothing else.
    """
    if engine == "vllm":
        return VLLMSampler(model, stop_ids, longest, vllm_memory)
    name = type(model).__name__
    slots = CompiledSampler if compiled else SlotSampler
    cause = None if engine == "replay" else why_unfit(model, stop_ids, pad_id, slots)
    if cause is None and engine != "replay":
        return slots(model, stop_ids, pad_id, longest)
    if compiled:
        raise UserError(
            f"rollout.compile=true decodes with a kept KV cache, which {name} does not allow: {cause}. Leave"
            " rollout.compile out."
        )
    if engine == "slots":
        raise UserError(
            f"engine=slots keeps the KV cache across turns, which {name} does not allow: {cause}. Write engine=replay,"
            " or engine=auto to let the self-test choose."
        )
    if (wrong := why_unfit(model, stop_ids, pad_id, ReplaySampler)) is not None:
        also = "" if cause is None else f" Nor is there another way: {cause}."
        raise UserError(
            f"{name} cannot be sampled by replaying its history: {wrong}.{also} Take a model of another architecture."
        )
    if cause is not None:
        warnings.warn(
            f"{name} replays its history in every turn (slower), without a kept KV cache: {cause}", stacklevel=2
        )
    return ReplaySampler(model, stop_ids, pad_id)


def open_servers(policy: Policy, kind: str, urls: Sequence[str], folder: Path) -> RemoteSampler:
    """Servers that play for this process: its share of them. kind: server for ours, vllm_server for vLLM's.

    folder: where weights may lie until vLLM has read them. A UserError where one is not there, or does not fit.
    """
    if few := launcher.servers_for(parallel.size(), list(urls)):
        raise UserError(few)
    mine = urls[parallel.rank() :: parallel.size()]
    if kind == "server":
        servers = SlotServers([SlotServer(url) for url in mine], policy)
    else:
        servers = VLLMServers([VLLMServer(url) for url in mine], policy, folder / f"weights-{parallel.rank()}")
    servers.init_weight_transfer()
    return RemoteSampler(servers)
