"""What an operator may set about the sizes of the pools at run time."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import not_allowed

FIXED = "fixed"
RATIO = "ratio"
AUTO = "auto"
MODES = (FIXED, RATIO, AUTO)


@dataclass(frozen=True)
class ScalingSettings:
    """How the pools follow their load. A pool's *pressure* is its load over the loads set here: 1 is as intended."""

    mode: str = FIXED
    """fixed: as [pools] or `pdserve scale` says. ratio: all of the budget is used, and workers move to the pool that
    needs them. auto: each pool grows and shrinks with its own load, within the budget."""

    prefill_min: int = 1
    """Fewest prefill workers."""

    prefill_max: int = 0
    """Most prefill workers; 0: as many as the budget holds."""

    decode_min: int = 1
    """Fewest decode workers."""

    decode_max: int = 0
    """Most decode workers; 0: as many as the budget holds."""

    budget_cpus: float = 0.0
    """Ray CPUs that both pools may take together; 0: what the replicas in [pools] take."""

    budget_gpus: float = 0.0
    """GPUs that both pools may take together; 0: what the replicas in [pools] take."""

    queued_tokens: int = 4096
    """Prompt tokens that wait per prefill worker at pressure 1."""

    wait_s: float = 1.0
    """Predicted seconds until a prefill worker has computed what waits, at pressure 1."""

    page_use: float = 0.7
    """Share of a decode worker's pages that is held at pressure 1."""

    running: int = 16
    """Sequences that run per decode worker at pressure 1."""

    high: float = 1.2
    """A pool with more pressure than this wants another worker."""

    low: float = 0.6
    """A pool gives up a worker if those left would have less pressure than this."""

    window_s: float = 5.0
    """Time constant by which pressure is smoothed."""

    up_s: float = 5.0
    """Pressure must be high for so long without a break before a pool grows."""

    down_s: float = 60.0
    """Pressure must be low for so long without a break before a pool shrinks."""

    cooldown_s: float = 15.0
    """After a change a pool keeps its size for so long."""

    step: int = 1
    """Most workers by which a pool changes at a time."""

    def check(self) -> None:
        """Raises ConfigError naming the first setting that cannot work."""
        if self.mode not in MODES:
            raise not_allowed("scaling", "mode", self.mode, f"one of {', '.join(MODES)}")
        for name in ("prefill_min", "decode_min", "queued_tokens", "running", "step"):
            if getattr(self, name) < 1:
                raise not_allowed("scaling", name, getattr(self, name), "at least 1")
        for pool in ("prefill", "decode"):
            most, least = getattr(self, f"{pool}_max"), getattr(self, f"{pool}_min")
            if most and most < least:
                raise not_allowed("scaling", f"{pool}_max", most, f"0, or at least {pool}_min ({least})")
        for name in ("budget_cpus", "budget_gpus", "up_s", "down_s", "cooldown_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise not_allowed("scaling", name, getattr(self, name), "0 or more")
        for name in ("wait_s", "window_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise not_allowed("scaling", name, getattr(self, name), "more than 0 seconds")
        if not 0 < self.page_use <= 1:
            raise not_allowed("scaling", "page_use", self.page_use, "a share above 0 and at most 1")
        if not 0 <= self.low < 1 <= self.high < float("inf"):
            raise not_allowed("scaling", "low", self.low, f"below 1, with high ({self.high}) at least 1")
