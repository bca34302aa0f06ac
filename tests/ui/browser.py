"""Debian's Chromium without a window, and a page in it that remembers what it should not have done."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, Page, ViewportSize, async_playwright

WAIT_MS = 10_000
DESK: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 360, "height": 740}


def chromium_path() -> str:
    found = shutil.which("chromium")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("CI needs Chromium: apt-get install chromium")
        pytest.skip("no Chromium here: apt-get install chromium")
    return found


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    path = chromium_path()
    async with async_playwright() as playwright:
        # Root may not use Chromium's sandbox; it only ever opens our own page here.
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-lcd-text"])
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Seen:
    """What a page did while it was open."""

    complaints: list[str] = field(default_factory=list)  # console errors and warnings, exceptions, dialogs
    origins: set[str] = field(default_factory=set)


@asynccontextmanager
async def opened(
    browser: Browser, address: str, *, path: str = "/ui", expected: tuple[str, ...] = (), **options: Any
) -> AsyncIterator[Page]:
    """The page of a router. At its end: nothing was complained of but what is `expected`, no other origin was asked."""
    seen = Seen()
    given = {"viewport": DESK, "reduced_motion": "reduce", "locale": "en-GB", **options}
    context = await browser.new_context(**given)
    context.set_default_timeout(WAIT_MS)
    page = await context.new_page()
    page.on("console", lambda m: seen.complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("request", lambda request: seen.origins.add("{0.scheme}://{0.netloc}".format(urlsplit(request.url))))
    try:
        await page.goto(f"http://{address}{path}")
        yield page
        unexpected = [text for text in seen.complaints if not any(known in text for known in expected)]
        assert not unexpected
        assert seen.origins == {f"http://{address}"}
    finally:
        await context.close()
