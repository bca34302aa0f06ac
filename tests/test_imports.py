"""Who may import whom: the arrows of docs/architecture.md, checked on the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pdserve", "cache_transfer", "prefill_worker", "decode_worker", "router")

ANYONE = ("pdserve", "pdserve.errors", "pdserve.gguf_pairs", "pdserve.request")
EVERYTHING = PACKAGES
WORKER = (
    "pdserve.worker",
    "pdserve.worker_main",
    "pdserve.engine",
    "pdserve.tokenizer",
    "pdserve.registry",
    "pdserve.rpc",
    "pdserve.v1",
    "pdserve.config",
    "pdserve.telemetry",
    "cache_transfer",
)
SETTINGS = (
    "prefill_worker.settings",
    "decode_worker.settings",
    "router.settings",
    "router.tenants",
    "pdserve.registry.settings",
    "pdserve.registry.records",
    "pdserve.scaling",
    "pdserve.telemetry.settings",
)

# package or module -> what it may import besides itself and ANYONE; the longest name decides.
ARROWS: dict[str, tuple[str, ...]] = {
    "pdserve.cli": EVERYTHING,
    "pdserve.verify": EVERYTHING,
    "pdserve.ray_app": EVERYTHING,
    "pdserve.cluster": ("pdserve.registry", "pdserve.rpc", "pdserve.scaling"),
    "pdserve.scaling": ("pdserve.registry.records",),
    "pdserve.local": EVERYTHING,
    "pdserve.drain": (),
    "pdserve.worker_main": (
        "pdserve.engine",
        "pdserve.tokenizer",
        "pdserve.registry",
        "pdserve.rpc",
        "pdserve.telemetry",
    ),
    "router": (
        "cache_transfer.contract",
        "cache_transfer.encoding",
        "cache_transfer.wire",
        "pdserve.tokenizer",
        "pdserve.registry",
        "pdserve.rpc",
        "pdserve.v1",
        "pdserve.config",
        "pdserve.telemetry",
    ),
    "prefill_worker": WORKER,
    "decode_worker": WORKER,
    "pdserve.engine": ("cache_transfer.contract", "cache_transfer.encoding"),
    "pdserve.tokenizer": (),
    "cache_transfer": ("pdserve.rpc", "pdserve.telemetry", "pdserve.v1"),
    "cache_transfer.contract": ("cache_transfer.encoding",),
    "cache_transfer.encoding": (),
    "cache_transfer.pages": (),
    "pdserve.rpc": ("pdserve.telemetry", "pdserve.v1"),
    "pdserve.registry": (
        "cache_transfer.contract",
        "cache_transfer.wire",
        "pdserve.rpc",
        "pdserve.telemetry",
        "pdserve.v1",
    ),
    "pdserve.worker": (
        "cache_transfer.contract",
        "pdserve.registry",
        "pdserve.rpc",
        "pdserve.telemetry",
        "pdserve.v1",
    ),
    "pdserve.telemetry": (),
    "pdserve.client": ("pdserve.rpc", "pdserve.v1"),
    "pdserve.conformance": ("cache_transfer", "pdserve.rpc", "pdserve.v1"),
    "pdserve.doctor": ("pdserve.client", "pdserve.rpc", "pdserve.v1"),
    "pdserve.config": (*SETTINGS, "pdserve.engine.plan", "pdserve.rpc.settings"),
    "pdserve.v1": (),
    "pdserve": (),
}
NEVER = {
    "router": ("torch", "ray", "numpy", "transformers", "gguf"),
    "cache_transfer": ("torch",),
    "pdserve.tokenizer": ("torch", "transformers"),
    "pdserve.rpc": ("torch",),
    "pdserve.registry": ("torch",),
    "pdserve.worker": ("torch",),
    "pdserve.telemetry": ("torch",),
    "pdserve.client": ("torch",),
    "pdserve.cluster": ("torch",),
    "pdserve.scaling": ("torch", "ray"),
    "pdserve.conformance": ("torch",),
    "pdserve.doctor": ("torch",),
}
# protobuf stays at the edges.
PROTOBUF_ALLOWED = (
    "pdserve.v1",
    "pdserve.rpc",
    "pdserve.registry",
    "pdserve.worker.adapter_service",
    "pdserve.worker.trace",
    "pdserve.client",
    "pdserve.conformance",
    "pdserve.cli",
    "pdserve.verify.remote",
    "pdserve.doctor.ask",
    "cache_transfer.wire",
    "cache_transfer.transport",
    "cache_transfer.push",
    "router.wire",
    "router.adapter_service",
    "router.operator_service",
    "router.gateway_ask",
    "router.gateway_answer",
)


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found.append((name.removesuffix(".__init__"), path))
    return found


def imports(name: str, path: Path) -> set[str]:
    """Full names that a module imports, wherever in the file the import stands."""
    names: set[str] = set()
    known = {module for module, _ in modules()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} uses a relative import"
            base = node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                names.add(full if full in known else base)
    return names


def inside(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def rule(name: str) -> str:
    return max((key for key in ARROWS if inside(name, (key,))), key=len)


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_a_module_imports_only_what_its_arrows_allow(name: str, path: Path) -> None:
    key = rule(name)
    owner = max((k for k in ARROWS if inside(name, (k,)) and "." not in k.removeprefix("pdserve.")), key=len)
    for imported in imports(name, path):
        forbidden = next(
            (key for key, names in NEVER.items() if inside(name, (key,)) and inside(imported, names)), None
        )
        assert forbidden is None, f"{name} imports {imported}, which {forbidden} never may"
        if not inside(imported, PACKAGES):
            continue
        allowed = (
            imported in ANYONE or inside(imported, ARROWS[key]) or (owner != "pdserve" and inside(imported, (owner,)))
        )
        assert allowed, f"{name} imports {imported}; {key} may import only {ARROWS[key] or 'itself'}"


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_protobuf_stays_at_the_edges(name: str, path: Path) -> None:
    if inside(name, PROTOBUF_ALLOWED) or name.endswith(".service"):
        return
    generated = {i for i in imports(name, path) if inside(i, ("pdserve.v1", "google.protobuf"))}
    assert not generated, f"{name} imports {sorted(generated)}; only service modules and the wire do"


def test_the_checks_see_a_planted_import(tmp_path: Path) -> None:
    planted = tmp_path / "gate.py"
    planted.write_text("def late() -> None:\n    from pdserve.engine import model\n    import torch.nn\n")
    assert imports("router.gate", planted) & {"pdserve.engine", "pdserve.engine.model"}
    assert "torch.nn" in imports("router.gate", planted)
    assert not inside("pdserve.engine.model", ARROWS["router"])
