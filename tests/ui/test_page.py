"""The live page in Chromium, in front of real routers and workers."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from pdserve.client import AsyncClient
from pdserve.errors import PdserveError
from pdserve.registry.records import DECODE
from router.app import Router
from router.tenants import Tenant
from tests.engine.tiny import prompt
from tests.router.support import ENGINE, VOCAB, House, contract, house, record_of, router_settings
from tests.ui.browser import PHONE, chromium, opened

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
HOSTILE = '"><img src=x onerror="document.title=1"><b>'
STRANGER = "stranger"
OPERATOR, OTHER = "sk-operator-0123456789", "sk-somebody-0123456789"
TENANTS = (Tenant.of(HOSTILE, OPERATOR), Tenant.of("other", OTHER))
IDS = prompt(40, seed=5, vocab=VOCAB)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made() -> AsyncIterator[House]:
    """Two real workers that fit, and the record of a decode worker that does not."""
    async with house() as it:
        await it.add_ghost(STRANGER, DECODE, contract=contract(model_digest=b"x" * 32, vocab_size=VOCAB))
        yield it


async def test_the_pools_and_the_reason_of_a_refused_pair_are_shown(browser: Browser, made: House) -> None:
    async with opened(browser, made.router.http_address) as page:
        await expect(page.get_by_role("status")).to_have_text("live")
        for pool, names in (("prefill", ["p0"]), ("decode", ["d0", STRANGER])):
            rows = page.locator(f"#{pool}").get_by_role("row")
            await expect(rows).to_have_count(1 + len(names))
            for row, name in zip((await rows.all())[1:], names, strict=True):
                await expect(row.get_by_role("rowheader")).to_have_text(name)
                await expect(row.get_by_role("cell").first).to_have_text("ready")
        row = page.locator("#prefill").get_by_role("row").nth(1)
        await expect(row).to_contain_text(f"0 / {ENGINE.pages}")
        await expect(page.locator("#prefill-facts")).to_contain_text("tiny")

        cells = page.locator("#matrix").get_by_role("cell")
        await expect(cells.filter(has_text="fits")).to_have_count(1)
        await cells.get_by_role("link", name="refused").click()
        reason = page.locator("#reasons article:target")
        await expect(reason).to_contain_text(f"p0 → {STRANGER} refused")
        for difference in made.router.pool.gate.differences(made.member("p0"), made.member(STRANGER)):
            line = reason.get_by_role("row").filter(has_text=difference.code)
            await expect(line).to_contain_text(difference.left)
            await expect(line).to_contain_text(difference.right)


async def test_a_request_appears_by_itself_and_opens_as_its_record(browser: Browser, made: House) -> None:
    async with opened(browser, made.router.http_address) as page:
        await expect(page.get_by_role("status")).to_have_text("live")
        before = await page.evaluate("performance.timeOrigin")
        record = record_of(await made.generate(IDS, max_tokens=6, ignore_eos=True))
        row = page.locator("#list").get_by_role("row").filter(has=page.get_by_label(record.request_id))
        await expect(row).to_contain_text(f"{record.prompt_tokens} → 6")
        await expect(row).to_contain_text("p0 → d0")
        track = row.get_by_role("img")
        # The transfer's last word may come after the first token, and leave that no time of its own.
        for stage in ("queued", "prefill", "transfer", "decode"):
            await expect(track).to_have_accessible_name(re.compile(rf"\b{stage} [\d.]+ ms"))

        await row.get_by_role("button").focus()
        await page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name=record.request_id)
        await expect(dialog).to_contain_text("p0 handed over to d0: the router's mode leaves no choice")
        await expect(dialog).to_contain_text(f"{record.computed_tokens} computed, {record.sent_tokens} sent")
        await expect(dialog).to_contain_text("MODEL_DIGEST")
        assert f"{record.bytes_sent} " not in await dialog.inner_text()  # a figure for people
        await dialog.get_by_text("The whole record").click()
        await expect(dialog.locator("pre")).to_contain_text(f'"bytes_sent": {record.bytes_sent}')
        await page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()
        await expect(row.get_by_role("button")).to_be_focused()
        assert await page.evaluate("performance.timeOrigin") == before  # never loaded anew


async def test_a_name_with_a_line_separator_does_not_lose_what_came_with_it(browser: Browser, made: House) -> None:
    """U+2028 stands unescaped in JSON, and is the end of a line in JavaScript's expressions."""
    async with AsyncClient(made.router.address) as client, opened(browser, made.router.http_address) as page:
        with pytest.raises(PdserveError):
            await client.complete("x", model="odd\u2028name")
        await expect(page.locator("#list")).to_contain_text("UNKNOWN_MODEL")


async def test_names_are_never_markup(browser: Browser, made: House) -> None:
    strange = replace(contract(vocab_size=VOCAB), device=HOSTILE[:30], info={"kernels": HOSTILE})
    await made.add_ghost(HOSTILE, DECODE, contract=strange, model=HOSTILE)
    try:
        async with opened(browser, made.router.http_address) as page:
            await expect(page.locator("#decode")).to_contain_text(HOSTILE)
            await expect(page.locator("#matrix")).to_contain_text(HOSTILE)
            await expect(page.locator("#reasons")).to_contain_text(HOSTILE)
            assert await page.locator("img, b, main script").count() == 0 and await page.title() == "pdserve"
    finally:
        await made.remove_ghost(HOSTILE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_phone_needs_no_sideways_scrolling_and_every_text_has_contrast(
    browser: Browser, made: House, scheme: str
) -> None:
    await made.generate(IDS, max_tokens=3, ignore_eos=True)
    async with opened(browser, made.router.http_address, viewport=PHONE, color_scheme=scheme) as page:
        await expect(page.locator("#list tbody tr")).not_to_have_count(0)
        assert await fits(page)
        await check_contrast(page)
        background = await page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        darkness = sum(map(int, re.findall(r"\d+", background)[:3]))
        assert darkness < 150 if scheme == "dark" else darkness > 600
        await page.locator("#list .open").first.click()
        await expect(page.get_by_role("dialog")).to_contain_text("What it took")
        assert await fits(page)
        await check_contrast(page)


async def test_a_lost_router_is_told_of_and_found_again(browser: Browser) -> None:
    router = Router(router_settings())
    await router.start()
    port = int(router.http_address.rpartition(":")[2])
    async with opened(browser, router.http_address, expected=("Failed to load resource",)) as page:
        await expect(page.locator("#prefill")).to_have_text(re.compile("No workers yet. pdserve up"))
        await expect(page.locator("#list")).to_contain_text("No request yet.")
        await router.stop()
        assert router.ui.viewers == 0
        await expect(page.get_by_role("status")).to_contain_text("connection lost")
        again = Router(router_settings(http_port=port))
        await again.start()
        try:
            await expect(page.get_by_role("status")).to_have_text("live")
        finally:
            await again.stop()


async def test_with_tenants_only_an_operators_key_opens_the_page(browser: Browser) -> None:
    router = Router(router_settings(tenants=TENANTS, operators=(HOSTILE,)))
    await router.start()
    try:
        async with opened(browser, router.http_address, expected=("401 (Unauthorized)", "403 (Forbidden)")) as page:
            form = page.locator("#sign-in")
            field = form.get_by_label("API key of an operator")
            await expect(field).to_be_focused()
            await expect(page.get_by_role("main")).to_be_hidden()
            for key, answer in (("sk-nobody-0123456789", "not known here"), (OTHER, "may not see this router's pages")):
                await field.fill(key)
                await form.get_by_role("button").click()
                await expect(form.get_by_role("alert")).to_contain_text(answer)
            await field.fill(OPERATOR)
            await page.keyboard.press("Enter")
            await expect(page.get_by_role("main")).to_be_visible()
            assert OPERATOR not in page.url
            assert await page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
            await page.reload()
            await expect(page.get_by_role("status")).to_have_text("live")
            await page.get_by_role("button", name="Sign out").click()
            await expect(field).to_be_visible()
            assert await page.evaluate("sessionStorage.length") == 0
    finally:
        await router.stop()


async def fits(page: Page) -> bool:
    wide: int = await page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return wide <= 0


async def check_contrast(page: Page) -> None:
    told = await page.evaluate(CONTRAST)
    assert told["texts"] > 40 and not told["found"]
