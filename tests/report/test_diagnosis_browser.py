"""The page of a diagnosis in a real headless Chromium: it loads, draws all, fits, repaints."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic_diagnosis import make

from farfield.report import diagnosis

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
REQUIRED = os.environ.get("FARFIELD_REQUIRE_BROWSER") == "1"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None and not REQUIRED, reason="no chromium here and none required"
    ),
]
PATIENCE = 120  # seconds


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "FARFIELD_REQUIRE_BROWSER=1, but there is no chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_it_draws_all_and_fits(browser: Any, width: int, tmp_path: Path) -> None:
    page_file = diagnosis.write(make(tmp_path / "d", slope=0.05, rho=0.98))
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="light")
    context.set_default_timeout(1000 * PATIENCE)
    page = context.new_page()
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(page_file.as_uri())
    end = time.monotonic() + PATIENCE
    while not page.evaluate("document.documentElement.dataset.diagnosed"):
        assert time.monotonic() < end
        page.wait_for_timeout(50)
    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == [page_file.as_uri()]
    assert page.evaluate("document.querySelectorAll('[data-figure] .main-svg').length") >= 7
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    colour = "document.querySelector('[data-figure=lags]')._fullData.slice(-1)[0].line.color"
    before = page.evaluate(colour)
    page.locator("#theme").click()
    end = time.monotonic() + PATIENCE
    while page.evaluate(colour) == before:
        assert time.monotonic() < end, "the theme was switched and nothing was painted again"
        page.wait_for_timeout(50)
    context.close()
