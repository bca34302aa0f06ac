"""The peers that benchmarks compare with: their environments, and the processes that run them. Imports nothing."""
