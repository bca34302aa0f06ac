"""Writes dashboard.json, the Grafana dashboard, from panels.yaml: python infra/observability/dashboard.py

tests/infra/test_observability.py compares the file with what this gives, and every query with what a running system
exports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
FILE = HERE / "dashboard.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
ACROSS, WIDTH, HEIGHT = 3, 8, 7  # Grafana's grid has 24 columns


def queries(given: dict[str, Any]) -> dict[str, str]:
    """PromQL by legend."""
    if "quantiles" not in given:
        return dict(given["queries"])
    metric, _, by = given["quantiles"].partition(" by ")
    labels, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    buckets = f"sum by ({labels}) (rate({metric}_bucket[$__rate_interval]))"
    return {f"p{q}{legend}": f"histogram_quantile({q / 100:g}, {buckets})" for q in (50, 95, 99)}


def panel(number: int, given: dict[str, Any], x: int, y: int) -> dict[str, Any]:
    stacked, kind = given.get("stacked", False), given.get("kind", "timeseries")
    defaults: dict[str, Any] = {"unit": given["unit"], "min": 0}
    if kind == "timeseries":
        stacking = {"mode": "normal" if stacked else "none"}
        defaults["custom"] = {"fillOpacity": 20 if stacked else 0, "stacking": stacking}
    return {
        "id": number,
        "type": kind,
        "title": given["title"],
        "description": given.get("text", ""),
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(queries(given).items())
        ],
    }


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in yaml.safe_load((HERE / "panels.yaml").read_text()):
        place = {"x": 0, "y": y, "w": ACROSS * WIDTH, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row["row"], "gridPos": place, "panels": []})
        y += 1
        for index, each in enumerate(row["panels"]):
            below, beside = divmod(index, ACROSS)
            panels.append(panel(len(panels) + 1, each, beside * WIDTH, y + below * HEIGHT))
        y += -(-len(row["panels"]) // ACROSS) * HEIGHT
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "title": "pdserve",
        "uid": "pdserve",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
