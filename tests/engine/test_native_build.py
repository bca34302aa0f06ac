"""How the native kernels are built, kept and chosen."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.engine.checks import TOLERANCES, relative_error
from pdserve.engine.native import build, choice
from pdserve.engine.native.build import Built, Recipe
from pdserve.engine.plan import Chunk
from pdserve.errors import ConfigError
from tests.engine.tiny import prompt, run, tiny_engine


def test_without_a_compiler_auto_serves_plain_and_native_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    build.find_recipe.cache_clear()
    try:
        engine = tiny_engine(kernels="auto")
        assert engine.kernels.state == "failed" and "g++" in engine.kernels.why
        run(engine, Chunk("r", prompt(6), 0, (0, 1)))
        assert engine.kernels.plain_steps == 1
        with pytest.raises(ConfigError) as error:
            tiny_engine(kernels="native")
        assert error.value.reason == "NO_COMPILER" and error.value.field == "kernels"
    finally:
        build.find_recipe.cache_clear()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recipe:
    """A recipe whose library says nothing but its version, in a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = build.find_recipe()
    return replace(recipe, flags=("-shared", "-fPIC", "-O0", "-fsyntax-only"), digest="0" * 64)


def compile_nothing(recipe: Recipe, target: Path) -> None:
    source = target.with_suffix(".c")
    source.write_text("int pdserve_abi(void) { return 1; }")
    subprocess.run([recipe.compiler, "-shared", "-fPIC", source, "-o", target], check=True)


def test_a_library_is_compiled_once_and_kept(quick: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_compile", compile_nothing)
    assert build.kept(quick) is None
    first, second = build.build(quick), build.build(quick)
    assert (first.compiled, second.compiled) == (True, False) and first.path == second.path
    assert build.kept(quick) == first.path


def test_what_a_killed_process_was_building_in_is_removed_and_what_lives_is_not(
    quick: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, go_on = threading.Event(), threading.Event()

    def held(recipe: Recipe, target: Path) -> None:
        compiling.set()
        assert go_on.wait(60)
        assert target.parent.is_dir(), "others waited"
        compile_nothing(recipe, target)

    build.kernels_folder().mkdir(mode=0o700, parents=True)
    killed = build.kernels_folder() / ".building-killed"
    killed.mkdir()
    (killed / "half a library").write_bytes(b"x")
    monkeypatch.setattr(build, "_compile", held)
    made: list[Built] = []
    recipes = (quick, replace(quick, digest="1" * 64))
    builders = [threading.Thread(target=lambda of=of: made.append(build.build(of))) for of in recipes]
    for builder in builders:
        builder.start()
    assert compiling.wait(60) and not killed.exists()
    go_on.set()
    for builder in builders:
        builder.join(60)
    assert [each.compiled for each in made] == [True, True]
    assert sorted(path.name for path in build.kernels_folder().iterdir()) == ["0" * 64, "1" * 64, "lock"]


def test_libraries_of_other_recipes_go_once_nobody_has_found_them_for_a_month(
    quick: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_compile", compile_nothing)
    found = build.build(quick).path.parent
    month_ago = time.time() - 31 * 24 * 3600
    for name, age in (("old", month_ago), ("young", month_ago + 2 * 24 * 3600)):
        shutil.copytree(found, found.with_name(name))
        os.utime(found.with_name(name), (age, age))
    found.with_name("not a library").mkdir()
    os.utime(found.with_name("not a library"), (month_ago, month_ago))
    os.utime(found, (month_ago, month_ago))  # this process has had it for longer, and still does
    build.build(replace(quick, digest="1" * 64))
    left = sorted(path.name for path in build.kernels_folder().iterdir())
    assert left == ["0" * 64, "1" * 64, "lock", "not a library", "young"]
    assert build.kept(quick) and found.stat().st_mtime > month_ago + 24 * 3600, "finding it is using it"


def test_a_library_that_is_being_removed_is_not_found(quick: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_compile", compile_nothing)
    folder = build.build(quick).path.parent
    os.close(build._held.pop(folder))  # as if another process had built it
    found: list[Path | None] = []
    with (folder / "kernels.sha256").open() as digest:
        fcntl.flock(digest, fcntl.LOCK_EX)
        finder = threading.Thread(target=lambda: found.append(build.kept(quick)))
        finder.start()
        shutil.rmtree(folder)
    finder.join(60)
    assert found == [None]


@pytest.mark.parametrize("harm", ["content", "digest", "writable", "folder"])
def test_a_damaged_or_foreign_library_is_never_loaded(
    quick: Recipe, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    monkeypatch.setattr(build, "_compile", compile_nothing)
    path = build.build(quick).path
    if harm == "content":
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    elif harm == "digest":
        path.with_suffix(".sha256").write_text("0" * 64)
    elif harm == "writable":
        path.chmod(0o777)
    else:
        build.kernels_folder().chmod(0o777)
    assert build.kept(quick) is None
    if harm == "folder":
        with pytest.raises(ConfigError, match="others"):
            build.build(quick)
    else:
        assert build.build(quick).compiled


def test_a_compiler_that_fails_is_quoted(quick: Recipe) -> None:
    with pytest.raises(ConfigError, match="unrecognized"):
        build.build(replace(quick, flags=("--no-such-flag",)))
    assert not [path for path in build.kernels_folder().iterdir() if path.name != "lock"]


def test_auto_serves_plain_while_compiling_and_changes_between_two_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = build.build(build.find_recipe()).path  # kept for this user, or made now
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choice, "_builds", {})

    def held(recipe: Recipe, target: Path) -> None:
        assert steps.wait(60)
        target.write_bytes(real.read_bytes())

    steps = threading.Event()
    monkeypatch.setattr(build, "_compile", held)
    engine, other = (tiny_engine(kernels="auto") for _ in range(2))
    before = run(engine, Chunk("r", prompt(6), 0, (0, 1))).logits["r"]
    assert engine.kernels.state == "building" and engine.kernels.plain_steps == 1
    steps.set()
    for wanted in choice._builds.values():
        wanted.result(60)
    after = run(engine, Chunk("r", prompt(6), 0, (0, 1))).logits["r"]
    for length in range(2, 30):  # no shape asks for another compilation
        run(engine, Chunk("r", prompt(length), 0, tuple(range(8))))
    assert relative_error(after, before) < TOLERANCES["fp32"]
    counters = engine.kernels
    assert (counters.state, counters.plain_steps, counters.native_steps) == ("native", 1, 29)
    run(other, Chunk("r", prompt(6), 0, (0, 1)))
    assert other.kernels.state == "native" and len(choice._builds) == 1
    assert tiny_engine(kernels="auto").kernels.state == "native"  # kept: the next start does not compile


def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    tiny_engine(kernels="native")
    maps = {path for path in Path("/proc/self/maps").read_text().split() if ".libs/" not in path}  # vendored by others
    assert len({path for path in maps if "gomp" in path or "libomp" in path or "libiomp" in path}) == 1
