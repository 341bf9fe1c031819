"""How do conversations become tokens?  One interface: the KV cache kept, the history replayed, vLLM, or servers."""

from posttrain.rollout.engines.base import Sampler, TurnRequest
from posttrain.rollout.engines.compiled import CompiledSampler
from posttrain.rollout.engines.remote import RemoteSampler
from posttrain.rollout.engines.replay import ReplaySampler
from posttrain.rollout.engines.slots import SlotSampler
from posttrain.rollout.engines.vllm import VLLMSampler

__all__ = ["CompiledSampler", "RemoteSampler", "ReplaySampler", "Sampler", "SlotSampler", "TurnRequest", "VLLMSampler"]
