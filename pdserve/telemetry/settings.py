"""What an operator may set on traces and logs, for every part of a deployment alike."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from pdserve.errors import ConfigError, not_allowed

LOG_LEVELS = ("debug", "info", "warning", "error")
TEXT, JSON = LOG_FORMATS = ("text", "json")


@dataclass(frozen=True)
class TelemetrySettings:
    """Section [telemetry]; docs/observability.md."""

    otlp_endpoint: str = ""
    """Collector that takes spans as OTLP over gRPC, such as "http://collector:4317" ("https://...": TLS). Empty: what
    OTEL_EXPORTER_OTLP_ENDPOINT says; without that nothing is traced. All other OTEL_ variables hold as usual."""

    sample_ratio: float = 1.0
    """Share of requests that are traced where the caller's own trace does not say; 1: what OTEL_TRACES_SAMPLER says,
    or all."""

    log_format: str = TEXT
    """text: lines for people. json: one JSON object per line."""

    log_level: str = "warning"
    """debug, info, warning or error. At info each request has one line, its handoff record."""

    def check(self) -> None:
        """Raises ConfigError naming the first setting that cannot work."""
        if self.log_format not in LOG_FORMATS:
            raise not_allowed("telemetry", "log_format", self.log_format, "text or json")
        if self.log_level not in LOG_LEVELS:
            raise not_allowed("telemetry", "log_level", self.log_level, f"one of {', '.join(LOG_LEVELS)}")
        if not 0 <= self.sample_ratio <= 1:
            raise not_allowed("telemetry", "sample_ratio", self.sample_ratio, "0 to 1")
        if self.otlp_endpoint and not _is_url(self.otlp_endpoint):
            raise ConfigError(
                f"{self.otlp_endpoint!r} is no collector's address",
                field="telemetry.otlp_endpoint",
                remedy='write "http://HOST:4317", or "https://HOST:4317"',
            )


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        return False
