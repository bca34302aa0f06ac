"""Coverage-guided fuzzing of everything that reads a peer's bytes, for as long as you like.

    python -m tests.fuzz [--minutes 10] [--target header|push|receive] [--keep DIR]

Prints the inputs tried and the crashes of each target; exits with 1 when there is one, and leaves
its input in DIR. Needs atheris (`pip install -e '.[fuzz]'`). Not part of CI, which replays tests/fuzz/corpus.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.seeds import CORPUS
from tests.fuzz.targets import TARGETS

# Most of the code is behind `receive`, whose inputs also take longest.
SHARES = {"header": 0.1, "push": 0.1, "receive": 0.8}
MAX_BYTES = {"header": 300, "push": 2048, "receive": 4096}
RSS_LIMIT_MB = 512
INPUT_TIMEOUT_S = 10


@dataclass(frozen=True)
class Result:
    target: str
    inputs: int
    crashes: list[Path]
    report: str

    def __str__(self) -> str:
        return f"{self.target:10} {self.inputs:>12,} inputs, {len(self.crashes)} crashes"


def fuzz(target: str, seconds: int, keep: Path) -> Result:
    """Runs one target; new inputs that reach new code stay in `keep`/TARGET, crashes in `keep`/crashes."""
    found, crashes = keep / target, keep / "crashes"
    for folder in (found, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={MAX_BYTES[target]}",
        f"-rss_limit_mb={RSS_LIMIT_MB}",
        f"-timeout={INPUT_TIMEOUT_S}",
        f"-artifact_prefix={crashes / target}-",
        str(found),
        str(CORPUS / target),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.child", target, *options], capture_output=True, text=True, check=False
    )
    numbers = [
        int(number) for number in re.findall(r"^#(\d+)|^Done (\d+)", done.stderr, re.M) for number in number if number
    ]
    left = sorted(crashes.glob(f"{target}-*"))
    if done.returncode and not left:
        raise SystemExit(f"{target} did not run:\n{done.stderr[-2000:]}")
    return Result(target, max(numbers, default=0), left, done.stdout[-2000:] + done.stderr[-2000:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--target", choices=list(TARGETS))
    parser.add_argument("--keep", type=Path, help="folder for what is found; default: a new one")
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        raise SystemExit("atheris is not installed: pip install -e '.[fuzz]'")
    keep = options.keep or Path(tempfile.mkdtemp(prefix="pdserve-fuzz-"))
    targets = [options.target] if options.target else list(TARGETS)
    whole = sum(SHARES[target] for target in targets)
    results = []
    for target in targets:
        results.append(fuzz(target, max(1, round(60 * options.minutes * SHARES[target] / whole)), keep))
        sys.stdout.write(f"{results[-1]}\n")
        sys.stdout.flush()
    bad = [result for result in results if result.crashes]
    for result in bad:
        sys.stdout.write(f"\n{result.target}: {', '.join(map(str, result.crashes))}\n{result.report}\n")
    total = sum(result.inputs for result in results)
    sys.stdout.write(
        f"{'all':10} {total:>12,} inputs, {sum(len(r.crashes) for r in results)} crashes, kept in {keep}\n"
    )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
