"""Measurements, each as a ratio to a peer taken in the same run: `python -m benchmarks.NAME`."""
