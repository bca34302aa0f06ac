"""`pdserve config`: every key of the configuration file with its default and meaning.

Made from the settings dataclasses themselves, so it cannot drift from what is accepted.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from dataclasses import fields, is_dataclass
from typing import Any

from decode_worker.settings import DecodeSettings
from pdserve.config import ModelSettings, PoolSettings
from pdserve.engine.plan import EngineConfig
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.settings import RpcSettings, TlsSettings
from pdserve.scaling.settings import ScalingSettings
from pdserve.telemetry.settings import TelemetrySettings
from prefill_worker.settings import PrefillSettings
from router.settings import RouterSettings

# Set in other sections: [model], [engine], [rpc], [registry], [telemetry].
SHARED = ("model", "name", "adapters", "adapter_root", "engine", "rpc", "registry", "telemetry")
SECTIONS: tuple[tuple[str, type, str], ...] = (
    ("model", ModelSettings, "The model that both pools serve."),
    ("engine", EngineConfig, "How workers compute; [prefill.engine] and [decode.engine] override single keys."),
    ("pools", PoolSettings, "How many workers Ray runs."),
    ("scaling", ScalingSettings, "How the pools follow their load."),
    ("router", RouterSettings, "The gateway."),
    ("prefill", PrefillSettings, "Each prefill worker."),
    ("decode", DecodeSettings, "Each decode worker."),
    ("registry", RegistrySettings, "Where workers announce themselves."),
    ("telemetry", TelemetrySettings, "Traces and logs of every part, see docs/observability.md."),
    ("rpc", RpcSettings, "Every connection."),
    ("rpc.tls", TlsSettings, "Certificates, see docs/security.md; each part has its own. Empty: no encryption."),
)


def config() -> None:
    """Print a configuration file with every key, its default and its meaning."""
    print(template(), end="")


def template() -> str:
    """A TOML file that means the same as none at all."""
    return "\n".join(_section(name, cls, about) for name, cls, about in SECTIONS)


def _section(name: str, cls: type, about: str) -> str:
    lines = [f"# {about}", f"[{name}]"]
    docs, defaults = field_docs(cls), cls()
    for f in fields(cls):
        value = getattr(defaults, f.name)
        if is_dataclass(value) or (name in ("prefill", "decode", "router") and f.name in SHARED):
            continue
        lines += [f"# {line}" for line in textwrap.wrap(docs[f.name], 100)]
        lines.append(f"{f.name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string literal that follows it in the body of its class."""
    docs = field_docs(cls.__base__) if cls.__base__ not in (None, object) else {}
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    if isinstance(body, ast.ClassDef):
        for before, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                text = (
                    after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
                )
                docs[before.target.id] = inspect.cleandoc(str(text)).replace("\n", " ")
    return docs


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(value) if isinstance(value, str) else repr(value)
