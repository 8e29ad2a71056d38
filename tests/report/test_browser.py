"""The page in a real headless Chromium: it loads alone, draws all, fits, switches, prints."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic_study import MECHANISMS, Plan, make

from farfield import report

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PATIENCE = 120  # seconds
REQUIRED = os.environ.get("FARFIELD_REQUIRE_BROWSER") == "1"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None and not REQUIRED, reason="no chromium here and none required"
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "FARFIELD_REQUIRE_BROWSER=1, but there is no chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(make(tmp_path_factory.mktemp("whole") / "study", Plan(seeds=(0, 1))))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run finished, one failed with markup in its error, the rest to come."""
    states: dict[tuple[str, int], dict[str, Any]] = {
        (name, 0): {"status": "pending"} for name in MECHANISMS if name != "rope"
    }
    states["alibi", 0] = {"status": "failed", "error": "<script>document.title='bad'</script>"}
    folder = tmp_path_factory.mktemp("begun") / "study"
    return report.write(make(folder, Plan(seeds=(0,)), states=states))


class Visit:
    """A page opened from its file, with all it complained of and all it asked the network for."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.context = browser.new_context(**context)
        # No test of speed: a starved machine takes a minute for four seconds of work.
        self.context.set_default_timeout(1000 * PATIENCE)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.until("document.documentElement.dataset.drawn")

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def ask(self, script: str) -> Any:
        return self.page.evaluate(script)

    def until(self, script: str, seconds: float = PATIENCE) -> None:
        """Wait for a condition; the page's policy forbids playwright's own wait, which evals."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.ask(script):
                return
            self.page.wait_for_timeout(50)
        pytest.fail(f"not within {seconds} s: {script}")


@pytest.fixture(scope="module")
def desk(browser: Any, whole: Path) -> Iterator[Visit]:
    """One visit on a desktop's screen, which its tests leave as they found it."""
    with Visit(browser, whole, viewport={"width": 1280, "height": 900}) as visit:
        yield visit


def test_it_loads_alone_and_draws_everything(desk: Visit, whole: Path) -> None:
    assert desk.complaints == []
    assert [url for url in desk.requests if not url.startswith("data:")] == [whole.as_uri()]
    roles = desk.ask("document.getElementById('ratio').data.map((t) => t.meta.role)")
    assert [roles.count(role) for role in ("pooled", "band", "seed", "rule")] == [8, 8, 16, 2]
    assert desk.page.locator("#ratio .scatterlayer .trace").count() == 34
    labels = desk.page.locator("#ratio .annotation").all_text_contents()
    assert sorted(label.strip() for label in labels) == sorted(MECHANISMS)
    assert desk.page.locator(".card").count() == 6
    assert desk.page.locator("#table tbody tr").count() == 8
    assert desk.page.locator("#cost tbody tr").count() == 8
    assert desk.page.locator("#positions .main-svg").count() >= 8
    assert desk.page.locator("#training .scatterlayer").count() == 2
    assert desk.page.locator("#recipe").inner_text().startswith('name = "three seeds"')


def test_labels_do_not_overlap(desk: Visit) -> None:
    boxes = desk.ask(
        "[...document.querySelectorAll('#ratio .annotation-text-g')]"
        ".map((g) => g.getBoundingClientRect()).map((b) => [b.top, b.bottom, b.right])"
    )
    edge = desk.ask("document.getElementById('ratio').getBoundingClientRect().right")
    boxes.sort()
    assert len(boxes) == 8
    assert all(right <= edge for _, _, right in boxes)
    for above, below in itertools.pairwise(boxes):
        assert below[0] - above[0] >= 12


def test_protocols_and_mechanisms_switch(desk: Visit) -> None:
    last = "document.getElementById('ratio').data.find((t) => t.name === 'rope').y.at(-1)"
    before = desk.ask(last)
    desk.page.get_by_role("button", name="clipped").click()
    assert before > 5 > 1 > desk.ask(last)
    assert desk.page.locator("[data-about=clipped]").is_visible()
    assert not desk.page.locator("[data-about=windows]").is_visible()
    desk.page.get_by_role("button", name="windows").click()
    desk.page.locator("[data-mechanism='rope']").click()
    assert desk.page.locator("#ratio .scatterlayer .trace").count() == 30
    assert not desk.page.locator("[data-panel='rope']").is_visible()
    desk.page.locator("[data-mechanism='rope']").click()
    assert desk.page.locator("#ratio .scatterlayer .trace").count() == 34
    assert desk.complaints == []


def test_a_point_tells_its_numbers(desk: Visit) -> None:
    desk.page.locator("#ratio").scroll_into_view_if_needed()
    point = desk.page.locator("#ratio .scatterlayer .trace .point").last
    box = point.bounding_box()
    assert box is not None
    desk.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    desk.page.wait_for_selector("#ratio .hovertext")
    said = desk.page.locator("#ratio .hovertext").text_content() or ""
    for words in (
        "learned+v+alibi",
        "128 L₀ = 16,384 tokens",
        "ratio 0.9",
        "perplexity",
        "2 seeds",
    ):
        assert words in said


def test_a_phone_never_scrolls_sideways(browser: Any, whole: Path) -> None:
    phone = {"width": 390, "height": 844}
    with Visit(browser, whole, viewport=phone, is_mobile=True, has_touch=True) as visit:
        for width in (390, 320):
            visit.page.set_viewport_size({"width": width, "height": 844})
            visit.until(
                "document.querySelector('#ratio .main-svg').getBoundingClientRect().width"
                f" <= {width - 32}"
            )
            assert visit.ask("document.documentElement.scrollWidth") <= width
            box = "document.querySelector('#table .scroll')"
            assert visit.ask(f"{box}.scrollWidth > {box}.clientWidth")
        assert visit.complaints == []


def test_dark_follows_the_system_and_the_button_and_paper_is_light(
    browser: Any, whole: Path
) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    line = "document.getElementById('ratio').data.find((t) => t.name === 'rope').line.color"
    screen = {"width": 1280, "height": 900}
    with Visit(browser, whole, color_scheme="light", viewport=screen) as visit:
        assert visit.ask(paper) == "rgb(255, 255, 255)"
        assert visit.ask(line) == "#16191d"
        visit.page.emulate_media(color_scheme="dark")
        visit.until(f"{line} === '#f2f2f0'")
        assert visit.ask(paper) == "rgb(20, 23, 26)"
        visit.page.emulate_media(media="print", color_scheme="dark")
        visit.until(f"{line} === '#16191d'")
        assert visit.ask(paper) == "rgb(255, 255, 255)"
        assert not visit.page.locator("#theme").is_visible()
        assert visit.ask("document.querySelector('#ratio .main-svg').clientWidth") == 676
        assert visit.page.locator("#ratio .scatterlayer .trace").count() == 34
        visit.page.emulate_media(media="screen", color_scheme="dark")
        visit.until(f"{line} === '#f2f2f0'")
        visit.page.locator("#theme").click()
        visit.until(f"{line} === '#16191d'")
        assert visit.ask(paper) == "rgb(255, 255, 255)"
        assert visit.page.pdf(format="A4").startswith(b"%PDF")
        assert visit.complaints == []


def test_a_study_that_has_just_begun_has_no_empty_figure(browser: Any, begun: Path) -> None:
    with Visit(browser, begun, viewport={"width": 390, "height": 844}) as visit:
        assert visit.complaints == []
        assert visit.page.title() == "three seeds · farfield"
        assert "<script>document.title" in visit.page.locator(".trouble").inner_text()
        drawn = visit.ask("[...document.querySelectorAll('.plot')].map((p) => p.data.length)")
        assert drawn
        assert min(drawn) >= 1
        assert visit.ask("document.documentElement.scrollWidth") <= 390
