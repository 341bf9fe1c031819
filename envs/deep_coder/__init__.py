"""deep_coder: programs judged by tests, in a sandbox."""

from envs.deep_coder.environment import DeepCoder

__all__ = ["DeepCoder"]
