"""How do conversations become tokens?  One interface: the KV cache kept, the history replayed, vLLM, or servers."""

from posttrain.sampler.base import Sampler, TurnRequest
from posttrain.sampler.compiled import CompiledSampler
from posttrain.sampler.remote import RemoteSampler
from posttrain.sampler.replay import ReplaySampler
from posttrain.sampler.slots import SlotSampler
from posttrain.sampler.vllm import VLLMSampler

__all__ = ["CompiledSampler", "RemoteSampler", "ReplaySampler", "Sampler", "SlotSampler", "TurnRequest", "VLLMSampler"]
