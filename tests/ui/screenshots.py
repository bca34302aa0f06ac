"""Pictures of the live page for the documentation: `python -m tests.ui.screenshots docs/images`.

A real router and real workers on the SmolLM2 checkpoint, among them one that fits nobody and one that has died, answer
a minute's traffic meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Locator, Page, ViewportSize, expect

from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.engine.load import load_model, model_path
from pdserve.engine.plan import EngineConfig
from pdserve.errors import PdserveError
from pdserve.registry.records import PREFILL
from pdserve.registry.settings import RegistrySettings
from pdserve.request import SamplingParams
from pdserve.tokenizer import load_bundle
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from router.app import Router
from router.request import Ask, TextPrompt
from tests.e2e.stack import pause
from tests.router.support import House, router_settings
from tests.ui.browser import PHONE, chromium, opened

MODEL = "smollm2"
WARM_S, AT_ONCE = 60.0, 2
MAX_BYTES = 150_000
SIZE: ViewportSize = {"width": 1180, "height": 800}
SUBJECTS = ("tides", "lighthouses", "rye bread", "the abacus", "glaciers", "letterpress", "bees", "canals")
REGISTRY = RegistrySettings(lease_s=60.0, heartbeat_s=0.5, timeout_s=2.0)


@asynccontextmanager
async def deployment() -> AsyncIterator[House]:
    path = model_path(MODEL)
    bundle, weights = load_bundle(path), load_model(path, "bf16")
    router = Router(router_settings(registry=REGISTRY))
    made = House(router)
    await router.start()
    try:
        for name, dtype in (("prefill-a", "bf16"), ("prefill-b", "bf16"), ("prefill-old", "fp32")):
            given = PrefillSettings(**common(name, dtype), chunk_tokens=128)
            model = weights if dtype == "bf16" else load_model(path, dtype)
            made.prefills.append(PrefillWorker(model, bundle, given, router.registry))
        for name in ("decode-a", "decode-b"):
            made.decodes.append(DecodeWorker(weights, bundle, DecodeSettings(**common(name, "bf16")), router.registry))
        for worker in made.workers:
            await worker.start()
        await router.pool.refresh()
        yield made
    finally:
        for worker in made.workers:
            await worker.stop()
        await router.stop()


def common(name: str, dtype: str) -> dict[str, Any]:
    engine = EngineConfig(dtype=dtype, pages=256, threads=1)
    return {"worker_id": name, "name": MODEL, "engine": engine, "registry": REGISTRY}


async def traffic(made: House, rng: random.Random) -> None:
    """Requests of one caller, one after the other, for ever."""
    while True:
        about = ", ".join(rng.sample(SUBJECTS, rng.randrange(1, 6)))
        prompt = TextPrompt(f"A long and careful essay about {about}. " * rng.randrange(1, 14))
        params = SamplingParams(temperature=0.7, max_tokens=rng.randrange(8, 72))
        try:
            request = await made.router.intake.take(Ask(prompt, params, label=rng.choice(SUBJECTS)))
            async with aclosing(made.router.orchestrator.generate(request)) as events:
                left = 6 if rng.random() < 0.06 else 1 << 30  # a client that goes away
                async for _ in events:
                    if not (left := left - 1):
                        break
        except PdserveError as error:
            print(error)  # noqa: T201
            await pause(1.0)


async def lose_one(made: House) -> None:
    """The next request goes to a prefill worker that has died, and from there to another one."""
    await made.add_ghost("prefill-c", PREFILL, model=MODEL)
    busy = [made.make_look_busy(name) for name in ("prefill-a", "prefill-b")]
    async with asyncio.timeout(60):
        while made.router.pool.is_ready(made.member("prefill-c")):
            await pause(0.1)
    for job in busy:
        made.router.pool.end(job)


async def take(what: Page | Locator, folder: Path, name: str) -> None:
    await what.screenshot(path=folder / f"{name}.png")
    size = (folder / f"{name}.png").stat().st_size
    print(f"{name}.png {size:,} bytes")  # noqa: T201
    assert size < MAX_BYTES


async def main(folder: Path) -> None:
    async with deployment() as made, chromium() as browser:
        callers = [asyncio.create_task(traffic(made, random.Random(number))) for number in range(AT_ONCE)]
        try:
            async with opened(browser, made.router.http_address, viewport=SIZE, color_scheme="light") as page:
                await asyncio.wait(callers, timeout=WARM_S / 2)
                await lose_one(made)
                with contextlib.suppress(PdserveError):
                    await made.router.intake.take(Ask(TextPrompt("hello"), SamplingParams(), model="smollm3"))
                await asyncio.wait(callers, timeout=WARM_S / 2)
                await take(page, folder, "ui-light")
                row = page.locator("#list tbody tr").filter(has_text="attempts").first
                await row.get_by_role("button").click()
                await expect(page.get_by_role("dialog")).to_contain_text("What it took")
                await take(page.get_by_role("dialog"), folder, "ui-decision")
                await page.keyboard.press("Escape")
                await page.emulate_media(color_scheme="dark")
                await page.mouse.move(0, 0)
                await page.set_viewport_size({"width": 1180, "height": 600})
                await page.evaluate(
                    "document.activeElement.blur(), document.getElementById('requests').scrollIntoView()"
                )
                await take(page, folder, "ui-dark")
                await page.set_viewport_size(PHONE)
                await page.evaluate("scrollTo(0, 0)")
                await take(page, folder, "ui-phone")
        finally:
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    asyncio.run(main(Path(sys.argv[1])))
