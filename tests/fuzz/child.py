"""One target under atheris, in a process of its own: libFuzzer ends the process when it is done.

python -m tests.fuzz.child TARGET [libFuzzer's options and corpus folders]
"""

from __future__ import annotations

import logging
import sys

import atheris

with atheris.instrument_imports(include=["cache_transfer"]):
    from tests.fuzz.targets import TARGETS

from tests.fuzz.mutations import restructured


def main() -> None:
    logging.disable()  # every refusal is logged: that is most of the inputs
    target = TARGETS[sys.argv[1]]
    options = {"custom_mutator": mutated} if sys.argv[1] == "receive" else {}
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target, **options)
    atheris.Fuzz()


def mutated(data: bytes, max_size: int, seed: int) -> bytes:
    """Half of the changes are libFuzzer's own, in single bytes."""
    if seed % 2 and (changed := restructured(data, seed)) != data and len(changed) <= max_size:
        return changed
    return bytes(atheris.Mutate(data, max_size))


if __name__ == "__main__":
    main()
