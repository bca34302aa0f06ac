"""Content digests kept beside a checkpoint: right or not used, whatever happens to the files."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache_transfer.contract import LOSSY, MUST_EQUAL, diff
from pdserve.engine.checkpoint import save_spec_checkpoint
from pdserve.engine.checkpoint_files import SETTLED_S, CheckpointFiles, kept_path
from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model
from pdserve.engine.plan import EngineConfig
from pdserve.errors import CheckpointError
from tests.engine.loading import peers
from tests.engine.loading.directories import directory, edit_json
from tests.engine.loading.gguf_writing import write_gguf
from tests.engine.loading.kept import flip, fresh, load, names, next_tick
from tests.engine.tiny import TINY, tiny_model
from tests.tokenizer.conftest import llama2_like, write_directory

MAKERS: dict[str, Callable[[Path], Path]] = {
    "directory": directory,
    "shards": lambda folder: directory(folder, max_shard_size="30KB"),
    "gguf": lambda folder: write_gguf(peers.make_peer("llama"), folder / "tiny.gguf"),
    "spec": lambda folder: _spec_checkpoint(folder / "tiny.pdmodel"),
}


def _spec_checkpoint(path: Path) -> Path:
    save_spec_checkpoint(path, TINY, tiny_model().tensors)
    return path


def weights(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_second_load_hashes_nothing_and_any_changed_byte_hashes_its_file(kind: str, tmp_path: Path) -> None:
    path = MAKERS[kind](tmp_path)
    next_tick(tmp_path)
    expected = fresh(path)
    first, hashed = load(path)
    assert first == expected and hashed > 0
    assert load(path) == (expected, 0)
    for file in weights(path):
        assert kept_path(file).exists()
        flip(file)
        changed, part = load(path)
        assert changed == fresh(path) != expected
        assert 0 < part <= hashed and (part < hashed or len(weights(path)) == 1)
        next_tick(tmp_path)
        flip(file)
        assert load(path)[0] == expected


def test_the_configuration_is_never_kept(tmp_path: Path) -> None:
    path = directory(tmp_path)
    next_tick(tmp_path)
    before, _ = load(path)
    edit_json(path, {"rms_norm_eps": 3e-5})
    assert load(path) == (fresh(path), 0)
    assert fresh(path) != before


def test_copies_hard_links_and_links_find_the_same_digest(checkpoint: Path, tmp_path: Path) -> None:
    expected, count = load(checkpoint)
    copy = Path(shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-copy"))) / checkpoint.name  # keeps times
    assert kept_path(copy).exists()
    assert load(copy) == (expected, count)  # another inode: hashed anew
    link = tmp_path / "elsewhere" / "other.pdmodel"
    link.parent.mkdir()
    link.symlink_to(checkpoint)
    assert load(link) == (expected, 0)
    assert names(link.parent) == {"other.pdmodel"}


def test_another_file_renamed_over_it_is_another_model(checkpoint: Path, tmp_path: Path) -> None:
    before, _ = load(checkpoint)
    seen = checkpoint.stat()
    other = tmp_path / "other.pdmodel"
    save_spec_checkpoint(other, TINY, tiny_model(seed=5).tensors)
    os.utime(other, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert other.stat().st_size == seen.st_size
    os.replace(other, checkpoint)
    assert load(checkpoint)[0] == fresh(checkpoint) != before


def _json(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(kept: Path) -> None:
        value = json.loads(kept.read_text())
        change(value)
        kept.write_text(json.dumps(value))

    return apply


def _other_digest(value: dict[str, Any]) -> None:
    name = next(iter(value["tensors"]))
    value["tensors"][name] = "00" * 32


def _exchanged(value: dict[str, Any]) -> None:
    a, b = list(value["tensors"])[:2]
    value["tensors"][a], value["tensors"][b] = value["tensors"][b], value["tensors"][a]


def _swap_for(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def apply(kept: Path) -> None:
        kept.unlink()
        make(kept)

    return apply


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda kept: kept.write_bytes(b""),
    "cut": lambda kept: kept.write_bytes(kept.read_bytes()[:-20]),
    "no json": lambda kept: kept.write_bytes(b"\x80\x04."),
    "no object": lambda kept: kept.write_text("[]"),
    "nested": lambda kept: kept.write_text("[" * 100_000),
    "another format": _json(lambda v: v.update(format=2)),
    "no format": _json(lambda v: v.pop("format")),
    "another file's": _json(lambda v: v["file"].__setitem__(1, 7)),
    "another digest": _json(_other_digest),
    "exchanged digests": _json(_exchanged),
    "no digest": _json(lambda v: v["tensors"].update(dict.fromkeys(v["tensors"], ""))),
    "numbers": _json(lambda v: v["tensors"].update(dict.fromkeys(v["tensors"], 7))),
    "a tensor less": _json(lambda v: v["tensors"].popitem()),
    "names alone": _json(lambda v: v.update(tensors=list(v["tensors"]))),
    "no check": _json(lambda v: v.update(check="")),
    "writable by all": lambda kept: kept.chmod(0o666),
    "a link": _swap_for(lambda kept: kept.symlink_to(kept.with_name("tiny.pdmodel"))),
    "a pipe": _swap_for(os.mkfifo),
    "a directory": _swap_for(Path.mkdir),
}
if os.geteuid() == 0:  # nobody else may give a file away
    DAMAGE["someone else's"] = lambda kept: os.chown(kept, 12345, 12345)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_what_is_odd_about_the_kept_file_means_hashing_again(
    damage: Callable[[Path], object], checkpoint: Path, tmp_path: Path
) -> None:
    expected, count = load(checkpoint)
    damage(kept_path(checkpoint))
    assert load(checkpoint) == (expected, count)
    if not kept_path(checkpoint).is_dir():  # which nobody replaces by a file
        assert load(checkpoint) == (expected, 0), "the odd one was replaced"
    assert not [name for name in names(tmp_path) if name.startswith(f"{kept_path(checkpoint).name}-")]


def test_a_file_just_written_is_not_kept(tmp_path: Path) -> None:
    """A second change within one tick of the clock would leave no trace."""
    path = directory(tmp_path)
    before = names(path)
    first = load_model(path, "fp32").digest
    assert SETTLED_S > 0 and names(path) == before
    assert load(path, settled_s=0.0)[0] == first


class Changing(CheckpointFiles):
    """Somebody writes to the checkpoint while its tensors are hashed."""

    def _hash(self, tensors: Any) -> dict[str, bytes]:
        made = super()._hash(tensors)
        for path in self._stamps:
            next_tick(path.parent)
            flip(path)
        return made


class Meanwhile(CheckpointFiles):
    """Another load of the same checkpoint begins and ends while its tensors are hashed."""

    def _hash(self, tensors: Any) -> dict[str, bytes]:
        for path in self._stamps:
            before = names(path.parent)
            load(path)
            assert before - names(path.parent) == set(), "what lives is left alone"
        return super()._hash(tensors)


def test_what_a_killed_process_left_goes_with_the_next_load_and_what_lives_is_left_alone(checkpoint: Path) -> None:
    kept = kept_path(checkpoint)
    killed = [kept.with_name(f"{kept.name}-{name}") for name in ("killed", "killed_too")]
    for left in killed:
        left.touch(0o600)
    other = kept.with_name(f"{kept.name}.of-somebody")
    other.touch()
    load_model(checkpoint, "fp32", files=Meanwhile(settled_s=0.0))
    assert names(checkpoint.parent) == {checkpoint.name, kept.name, other.name}


def test_a_file_that_changes_while_it_is_loaded_is_refused_and_not_kept(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="changed") as caught:
        load_model(checkpoint, "fp32", files=Changing(settled_s=0.0))
    assert (caught.value.reason, caught.value.field) == ("CHANGED", checkpoint.name)
    assert not kept_path(checkpoint).exists()


def test_a_file_that_vanishes_while_it_is_loaded_is_refused(checkpoint: Path) -> None:
    files = CheckpointFiles()
    files.stamp(checkpoint)
    checkpoint.unlink()
    with pytest.raises(CheckpointError, match="changed"):
        files.check_unchanged()


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    """The name of what would be kept is too long for a file system, which refuses root too."""
    path = tmp_path / f"{'n' * 240}.pdmodel"
    save_spec_checkpoint(path, TINY, tiny_model().tensors)
    next_tick(tmp_path)
    first, count = load(path)
    assert load(path) == (first, count)
    assert names(tmp_path) == {path.name}


def test_it_can_be_turned_off(checkpoint: Path, tmp_path: Path) -> None:
    before = names(tmp_path)
    files = CheckpointFiles(keep=False, settled_s=0.0)
    load_model(checkpoint, "fp32", files=files)
    assert names(tmp_path) == before


ONE_LOAD = """
import sys
from pathlib import Path
from pdserve.engine.checkpoint_files import CheckpointFiles
from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model
from pdserve.engine.plan import EngineConfig
from pdserve.tokenizer import load_bundle
from cache_transfer.contract import HandoffIdentity, cache_identity

path, dtype, tokenizer = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
bundle = load_bundle(tokenizer)
model = load_model(path, dtype, files=CheckpointFiles(settled_s=0.0))
contract = Engine(model, EngineConfig(dtype=dtype, pages=4, page_size=4)).contract(bundle.digest())
identity = HandoffIdentity(contract.digest(), None, "tenant", b"p" * 32, 0, 7)
digests = (model.digest, bundle.digest(), contract.digest(), identity.digest(), cache_identity(contract, None, "t"))
print(*(digest.hex() for digest in digests))
"""


async def test_processes_with_other_hash_seeds_and_precisions_agree(tmp_path: Path) -> None:
    """Both load at once, and so both may write what is kept; each has paths and a layout of its own."""
    one, two = tmp_path / "one", tmp_path / "two"
    paths = [directory(one), directory(two, max_shard_size="30KB")]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizers = [
        write_directory(one / "tokenizer", llama2_like(), special),
        write_directory(two / "words", llama2_like(), dict(reversed(special.items()))),
    ]
    next_tick(tmp_path)

    async def process(number: int, dtype: str) -> list[str]:
        made = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ONE_LOAD, str(paths[number % 2]), dtype, str(tokenizers[number % 2])),
            env={**os.environ, "PYTHONHASHSEED": str(number), "OMP_NUM_THREADS": "1"},
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(120.0):
            out, _ = await made.communicate()
        assert made.returncode == 0
        return out.decode().split()

    printed = await asyncio.gather(process(0, "fp32"), process(1, "bf16"), process(2, "fp32"))
    assert len(printed[0]) == 5 and printed[0] == printed[2]
    assert printed[0][:4] == printed[1][:4]
    assert printed[0][4] != printed[1][4], "a page of another precision is never found"
    assert all(kept_path(file).exists() for path in paths for file in weights(path))
    assert load(paths[0]) == (bytes.fromhex(printed[0][0]), 0)
    assert load(paths[1]) == (bytes.fromhex(printed[0][0]), 0)


def test_two_precisions_of_one_checkpoint_share_the_model_and_differ_in_numerics(checkpoint: Path) -> None:
    a, b = (
        Engine(load_model(checkpoint, dtype), EngineConfig(dtype=dtype, pages=4, page_size=4)).contract()
        for dtype in ("fp32", "bf16")
    )
    assert a.model_digest == b.model_digest and a.digest() == b.digest()
    found = diff(a, b)
    assert {d.code for d in found if d.kind == LOSSY} == {"KV_DTYPE", "WEIGHT_DTYPE", "ACTIVATION_DTYPE"}
    assert not [d for d in found if d.kind == MUST_EQUAL]
