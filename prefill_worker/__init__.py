"""The prefill worker: a prompt in; its KV cache and first-step logits out, pushed to decode."""
