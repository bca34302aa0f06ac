"""Disaggregated prefill/decode serving: what the pools share, and the user's face."""

__version__ = "0.1.0"
