"""Which path computes a step: native kernels where they can run and are built, plain torch otherwise.

    plain      the configuration or the model asks for it (`why` says what); if only the model does, its products are
               the kernels' all the same
    building   plain torch serves; a thread waits for the compiler
    native     the kernels serve; the change falls between two steps, once
    failed     plain torch serves, because the kernels could not be built (`why`)

Under kernels = native an engine is never in another state than native: it waits, or refuses to start.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass

from pdserve.engine.native import library
from pdserve.engine.native.build import Built, Recipe, build, find_recipe, kept
from pdserve.engine.native.path import NativePath, why_not
from pdserve.engine.native.products import Products, why_none
from pdserve.engine.plain import PlainPath
from pdserve.engine.plan import EngineConfig
from pdserve.errors import ConfigError

CHOICES = ("auto", "plain", "native")

log = logging.getLogger(__name__)
_builds: dict[Recipe, Future[Built]] = {}  # of this process: engines of one recipe share one
_builds_lock = threading.Lock()


@dataclass(frozen=True)
class KernelCounters:
    """What an engine computed with. Without shapes in the library, `compilations` of a process is 0 or 1."""

    state: str  # plain | building | native | failed
    why: str  # why it is not native; empty: it is
    compilations: int
    native_steps: int
    plain_steps: int


class Kernels:
    """One engine's choice. `current` is asked before each step, in the engine's thread.

    Raises ConfigError for an unknown choice, and under native where the kernels cannot serve.
    """

    def __init__(self, plain: PlainPath, config: EngineConfig) -> None:
        if config.kernels not in CHOICES:
            raise ConfigError(f"unknown choice {config.kernels!r}", field="kernels", remedy=f"use {', '.join(CHOICES)}")
        self._plain = plain
        self._library: ctypes.CDLL | None = None
        self._native: NativePath | None = None  # of the library; made when a step first needs it
        self._products: Products | None = None  # in its place, where the kernels do not know the model as a whole
        self._wanted: Future[Built] | None = None
        self._compilations = self._native_steps = self._plain_steps = 0
        self._state, self._why = "plain", "kernels = plain"
        self._declined = ""  # why the kernels do not compute whole steps
        if config.kernels == "plain":
            return
        self._why = self._declined = why_not(plain.decoder.spec, config)
        if config.kernels == "native":
            self._insist()
        elif not why_none(config):
            self._start()

    @property
    def counters(self) -> KernelCounters:
        return KernelCounters(self._state, self._why, self._compilations, self._native_steps, self._plain_steps)

    def describe(self) -> str:
        """For the contract's information: native and its instructions, or plain and why."""
        if self._library is None:
            return f"plain ({self._why})"
        level = library.level(self._library)
        return f"plain ({self._declined}), products native {level}" if self._declined else f"native {level}"

    def current(self) -> PlainPath | NativePath:
        """What computes now; adopts a library that has been built meanwhile.

        The weights are packed here and not when the engine is made: whoever made it holds its model until then, and
        every weight would be there twice.
        """
        if self._wanted is not None and self._wanted.done():
            self._finish(self._wanted)
        if self._library is not None and self._native is None and self._products is None:
            plain = self._plain
            if self._declined:
                self._products = Products(self._library, plain.decoder)
                self._products.pack(plain.decoder)
            else:
                self._native = NativePath(self._library, plain.decoder, plain.cache, plain.rotary)
        return self._native or self._plain

    def count(self, path: PlainPath | NativePath) -> None:
        """Counts a step on the path that ran it."""
        if path is self._plain:
            self._plain_steps += 1
        else:
            self._native_steps += 1

    def _insist(self) -> None:
        if self._declined:
            raise ConfigError(
                f"the native kernels do not run {self._declined}", field="kernels", remedy="use auto or plain"
            )
        recipe = find_recipe()
        path = kept(recipe)
        self._adopt(Built(path, compiled=False) if path is not None else build(recipe))

    def _start(self) -> None:
        try:
            recipe = find_recipe()
        except ConfigError as error:
            self._fail(error)
            return
        path = kept(recipe)
        if path is not None:
            self._adopt(Built(path, compiled=False))
            return
        if not self._declined:
            self._state, self._why = "building", "until the native kernels are compiled"
        self._wanted = _in_background(recipe)

    def _finish(self, wanted: Future[Built]) -> None:
        self._wanted = None
        try:
            self._adopt(wanted.result())
        except ConfigError as error:
            self._fail(error)

    def _adopt(self, built: Built) -> None:
        self._library = library.load(built.path)
        self._compilations += built.compiled
        if not self._declined:
            self._state, self._why = "native", ""
        log.info("kernels: %s", self.describe())

    def _fail(self, error: Exception) -> None:
        if not self._declined:
            self._state, self._why = "failed", str(error)
        log.warning("plain torch serves: %s", error)


def _in_background(recipe: Recipe) -> Future[Built]:
    with _builds_lock:
        if recipe not in _builds:
            made: Future[Built] = Future()
            _builds[recipe] = made
            threading.Thread(target=_build_into, args=(made, recipe), name="build-kernels", daemon=True).start()
        return _builds[recipe]


def _build_into(made: Future[Built], recipe: Recipe) -> None:
    try:
        made.set_result(build(recipe))
    except Exception as error:  # noqa: BLE001 - whoever asks for the library gets it
        made.set_exception(error)
