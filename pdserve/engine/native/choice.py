"""Which path computes a step: native kernels where they can run and are built, plain torch otherwise.

    plain      the configuration or the model asks for it (`why` says what); if only the model does, its products are
               the kernels' all the same
    building   plain torch serves; a thread waits for the compiler, or the weights are being laid out
    native     the kernels serve; the change falls between two steps, once
    failed     plain torch serves, because the kernels could not be built, or the weights not be laid out (`why`)

The weights are laid out at once before an engine serves. Where the kernels come later, some are before each step, and
plain torch computes with those that are and those that are not, so that no step looks like one that hangs.

Under kernels = native an engine is never in another state than native: it waits, or refuses to start.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from pdserve.engine.native import library
from pdserve.engine.native.build import Built, Recipe, build, find_recipe, kept
from pdserve.engine.native.path import NativePath, layer_packer, why_not
from pdserve.engine.native.products import Products, why_none
from pdserve.engine.plain import PlainPath
from pdserve.engine.plan import EngineConfig
from pdserve.errors import ConfigError

CHOICES = ("auto", "plain", "native")
BYTES_A_STEP = 256 * 1024**2
"""Of weights that are laid out before a step of an engine that serves, and the layer that passes it: under a second."""

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
        self._native: NativePath | None = None  # of the library, once all weights are packed
        self._products: Products | None = (
            None  # packs the weights; all there is where the kernels do not know the model
        )
        self._packing: Iterator[None] | None = None  # the rest of it
        self._bytes_a_step = math.inf
        self._insisting = config.kernels == "native"
        self._refusal: ConfigError | None = None  # why there is nothing that may compute
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
        """What computes now; adopts a library that has been built meanwhile, and packs some of the weights.

        They are packed here and not when the engine is made: whoever made it holds its model until then, and every
        weight would be there twice. Raises ConfigError under native, when there is no memory for it.
        """
        if self._wanted is not None and self._wanted.done():
            self._finish(self._wanted, BYTES_A_STEP)
        self._pack(self._bytes_a_step)
        return self._native or self._plain

    def prepare(self) -> None:
        """As `current`, with all weights packed if there is a library now: for an engine that does not serve yet."""
        if self._wanted is not None and self._wanted.done():
            self._finish(self._wanted, math.inf)
        self._pack(math.inf)

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

    def _finish(self, wanted: Future[Built], bytes_a_step: float) -> None:
        self._wanted, self._bytes_a_step = None, bytes_a_step
        try:
            self._adopt(wanted.result())
        except ConfigError as error:
            self._fail(error)
            return
        if not self._declined:
            self._state, self._why = "building", "until the weights are laid out for the native kernels"

    def _pack(self, most: float) -> None:
        """So many bytes of the weights, and what is left of a layer. After an error the decoder stays as it is then."""
        if self._refusal is not None:
            raise self._refusal
        if self._packing is None or self._products is None:
            return
        before, plain = self._products.packed_bytes, self._plain
        try:
            for _ in self._packing:
                if self._products.packed_bytes - before >= most:
                    return
            self._packing = None
            if not self._declined and self._library is not None:
                self._native = NativePath(self._library, plain.decoder, plain.cache, plain.rotary)
        except (MemoryError, RuntimeError) as error:  # the latter from torch, of memory or of anything else
            self._give_up(error)
            return
        if not self._declined:
            self._state, self._why = "native", ""

    def _give_up(self, error: Exception) -> None:
        """A weight could not be laid out, mostly for want of memory. Under native every later attempt says so again."""
        lacks_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)  # torch says it in words only
        why = str(error).partition("\n")[0] or type(error).__name__  # without the stack that torch may add
        reason = ConfigError(
            f"no memory to lay the weights out for the native kernels: {why}"
            if lacks_memory
            else f"the weights could not be laid out for the native kernels: {why}",
            field="kernels",
            remedy="give it more memory, or use plain" if lacks_memory else "use plain, and report it",
        )
        if self._insisting:
            self._refusal = reason
            raise reason from error
        self._packing = self._library = None
        self._fail(reason)

    def _adopt(self, built: Built) -> None:
        self._library = library.load(built.path)
        self._compilations += built.compiled
        self._products = products = Products(self._library, self._plain.decoder)
        decoder = self._plain.decoder
        self._packing = products.pack(decoder, *([] if self._declined else [layer_packer(products, decoder.spec)]))
        if not self._declined:
            self._state, self._why = "native", ""
        log.info("kernels: %s", self.describe())

    def _fail(self, error: Exception) -> None:
        if self._declined:
            self._why = f"{self._declined}; its products, too: {error}"
        else:
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
