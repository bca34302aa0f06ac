"""What prefill and decode workers have in common: the way from start to end, accounts, adapters, the Worker service."""
