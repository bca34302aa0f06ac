"""A comparison as plain data: what `--json` writes and the table shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from cache_transfer.contract import INFORMATIONAL, diff
from pdserve.verify.compare import WORST, Comparison, Finding
from pdserve.verify.diagnose import diagnose
from pdserve.verify.observing import Prompts, Run, here

SCHEMA = 1


def to_json(comparisons: Sequence[Comparison], prompts: Prompts, tokens: int) -> dict[str, object]:
    """One object for all comparisons with one baseline; numbers that JSON cannot hold are null."""
    return {
        "schema": SCHEMA,
        "equal": all(comparison.equal for comparison in comparisons),
        "environment": here(),
        "inputs": {
            "prompts": [
                {"token_ids": list(ids), "attention_mask": [1] * len(ids), "positions": list(range(len(ids)))}
                for ids in prompts
            ],
            "greedy_tokens": tokens,
        },
        "baseline": _side(comparisons[0].left) if comparisons else None,
        "comparisons": [_comparison(comparison) for comparison in comparisons],
    }


def by_layer(comparison: Comparison) -> list[Finding]:
    """For each layer the finding to look at: the first out of tolerance, else the one nearest to it."""
    found: dict[int, Finding] = {}
    for finding in comparison.findings:
        best = found.get(finding.layer)
        if best is None or (best.ok and (not finding.ok or closeness(finding) > closeness(best))):
            found[finding.layer] = finding
    return [found[layer] for layer in sorted(found)]


def worst(comparison: Comparison, count: int = 3) -> list[Finding]:
    """The first finding out of tolerance and those of other layers that use up most of theirs; none with equal bits."""
    used = [finding for finding in by_layer(comparison) if closeness(finding) > 0]
    chosen = sorted(used, key=closeness, reverse=True)[:count]
    first = comparison.first
    if first is not None and first not in chosen:
        chosen = [first, *chosen[: count - 1]]
    return sorted(chosen, key=lambda finding: finding.place)


def closeness(finding: Finding) -> float:
    """How much of its tolerance a finding uses up; over 1: out of it. 0 for what is compared exactly and is equal."""
    if not finding.tolerance:
        return 0.0 if finding.ok else math.inf
    return max(finding.mean / finding.tolerance, finding.error / (WORST * finding.tolerance))


def place(finding: Finding, comparison: Comparison) -> str:
    """Where a finding is, for people."""
    layers = comparison.left.shape.layers
    layer = "before the layers" if finding.layer < 0 else "at the end" if finding.layer == layers else None
    where = f"{layer or f'layer {finding.layer}'}, {finding.tensor}"
    if finding.tensor == "run":
        return "the run itself"
    where += f", prompt {finding.prompt + 1}"
    if finding.token >= 0 and comparison.left.observed:
        prompt = comparison.left.observed[finding.prompt].prompt_tokens
        inside = finding.token < prompt
        where += f", token {finding.token}" if inside else f", output token {finding.token - prompt}"
    return where


def _comparison(comparison: Comparison) -> dict[str, object]:
    first = comparison.first
    return {
        "side": _side(comparison.right),
        "equal": comparison.equal,
        "bits_equal": all(finding.bits_equal for finding in comparison.findings),
        "tolerance": {"mean": comparison.tolerance, "worst_row": WORST * comparison.tolerance},
        "contract_differences": _differences(comparison.left, comparison.right),
        "first_divergence": None if first is None else {**_finding(first), "place": place(first, comparison)},
        "hints": list(diagnose(comparison)),
        "findings": [_finding(finding) for finding in comparison.findings],
    }


def _side(run: Run) -> dict[str, object]:
    return {
        **run.record,
        "reused_tokens": list(run.reused),
        "outputs": [list(observed.outputs) for observed in run.observed],
        "broken_rules": [asdict(broken) for broken in run.broken],
        "error": None if run.error is None else str(run.error),
    }


def _finding(finding: Finding) -> dict[str, object]:
    found = asdict(finding)
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in found.items()}


def _differences(left: Run, right: Run) -> list[dict[str, str]]:
    if left.contract is None or right.contract is None:
        return []
    return [asdict(d) for d in diff(left.contract, right.contract) if d.kind != INFORMATIONAL]
