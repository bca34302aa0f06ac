"""The handoff of a KV cache between two workers. Imports nothing, so the router stays light."""
