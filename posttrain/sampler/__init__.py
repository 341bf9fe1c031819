"""How do conversations become tokens?  One interface: the KV cache kept, the history replayed, or vLLM asked."""

from posttrain.sampler.base import Sampler, TurnRequest
from posttrain.sampler.replay import ReplaySampler
from posttrain.sampler.slots import SlotSampler
from posttrain.sampler.vllm import VLLMSampler

__all__ = ["ReplaySampler", "Sampler", "SlotSampler", "TurnRequest", "VLLMSampler"]
