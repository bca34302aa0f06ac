"""Regenerates the gRPC stubs in a temporary folder and compares them with the committed ones."""

from __future__ import annotations

import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
COMMITTED = ROOT / "pdserve" / "v1"


def stale_stubs() -> list[str]:
    """Names of generated files that are missing, outdated, or left over."""
    protos = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", f"-I{ROOT / 'proto'}", *outputs, *protos]) != 0:
            return ["proto/ does not compile"]
        fresh = Path(folder) / "pdserve" / "v1"
        names = {path.name for path in fresh.iterdir()} | {path.name for path in COMMITTED.glob("*_pb2*")}
        _, differing, missing = filecmp.cmpfiles(fresh, COMMITTED, sorted(names), shallow=False)
        return sorted(differing + missing)


if __name__ == "__main__":
    stale = stale_stubs()
    if stale:
        sys.exit(f"stale stubs: {', '.join(stale)}; run `make stubs` and commit the result")
