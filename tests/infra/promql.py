"""What a PromQL query names, read off the tree that promql-parser makes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import promql_parser as promql

Labels = Mapping[str, set[str]]  # label -> values that are exported
RANGE = "$__rate_interval"  # Grafana's


def parsed(query: str) -> Any:
    """Raises ValueError for what is no PromQL."""
    return promql.parse(query.replace(RANGE, "1m"))


def nodes(expression: Any) -> Iterator[Any]:
    yield expression
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        child = getattr(expression, name, None)
        if child is not None:
            yield from nodes(child)
    for argument in getattr(expression, "args", ()):
        yield from nodes(argument)


def check(query: str, exported: Mapping[str, Labels], added: set[str]) -> set[str]:
    """Returns the names that the query reads.

    Args:
        exported: sample name -> its labels and their values.
        added: labels that Prometheus itself gives every sample.

    Raises AssertionError for a name, a label or a label's value that nobody exports.
    """
    tree = list(nodes(parsed(query)))
    selectors = [node for node in tree if isinstance(node, promql.VectorSelector)]
    assert selectors, query
    for selector in selectors:
        name = str(selector.name)
        assert name in exported, f"nobody exports {name}: {query}"
        for matcher in selector.matchers.matchers:
            check_matcher(matcher, exported[name], added, query)
    for node in tree:
        if isinstance(node, promql.AggregateExpr):
            has, wanted = labels_of(node.expr, exported, added), set(node.modifier.labels if node.modifier else ())
            assert wanted <= has, f"{wanted - has} is not there to sum by: {query}"
        elif isinstance(node, promql.BinaryExpr) and node.modifier and node.modifier.matching:
            for side in (node.lhs, node.rhs):
                assert set(node.modifier.matching.labels) <= labels_of(side, exported, added), query
    return {str(selector.name) for selector in selectors}


def check_matcher(matcher: Any, labels: Labels, added: set[str], query: str) -> None:
    if matcher.name in added and matcher.name not in labels:
        return
    assert matcher.name in labels, f"there is no label {matcher.name}: {query}"
    exact = matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual)
    pattern = re.escape(matcher.value) if exact else matcher.value
    assert any(re.fullmatch(pattern, value) for value in labels[matcher.name]), f"{matcher}: {query}"


def labels_of(expression: Any, exported: Mapping[str, Labels], added: set[str]) -> set[str]:
    """Labels of what a query gives."""

    def of(node: Any) -> set[str]:
        if isinstance(node, promql.VectorSelector):
            return set(exported[str(node.name)]) | added
        if isinstance(node, promql.MatrixSelector):
            return of(node.vector_selector)
        if isinstance(node, promql.AggregateExpr):
            return set(node.modifier.labels) if node.modifier else set()
        if isinstance(node, promql.ParenExpr):
            return of(node.expr)
        if isinstance(node, promql.Call):
            found = set().union(*map(of, node.args))
            return found - {"le"} if node.func.name == "histogram_quantile" else found
        if isinstance(node, promql.BinaryExpr):
            return of(node.lhs) or of(node.rhs)
        return set()

    return of(expression)
