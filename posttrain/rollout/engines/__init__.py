"""How does a model write turns?  Engines with one interface: a kept KV cache, replay, vLLM here or on servers."""
