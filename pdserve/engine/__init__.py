"""The decoder: one `step(plan)` over a paged KV cache."""
