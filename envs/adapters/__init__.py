"""Environments of other libraries played here, and ours played there; docs/adapters.md shows each."""
