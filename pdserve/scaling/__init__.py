"""How many workers each pool should have: pure decisions on what the workers report. Knows nothing of Ray."""
