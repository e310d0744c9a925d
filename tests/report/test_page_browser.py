"""The page in a real Chromium: figures are drawn, quickly, without errors, and react to keys."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import By, Keys, WebDriverWait, chromium, webdriver
from tests.support.finished_run import make_results
from tokamake.report.report import report

RUNS = 20
DRAWN = "return document.documentElement.dataset.drawn"
PAINT = (
    "return performance.getEntriesByName('first-contentful-paint').map(each => each.startTime)[0]"
)
START = "return plots.get('figure-3').x_range.start"
OVERFLOWS = "return document.documentElement.scrollWidth > innerWidth"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about 20 runs of 5,000 logged steps."""
    folder = tmp_path_factory.mktemp("many")
    results = make_results(folder / "results", [f"run{n}" for n in range(RUNS)], num_steps=5000)
    report(results)
    return results / "report.html"


def opened(browser: webdriver.Chrome, page: Path, *, width: int, scheme: str) -> None:
    """Show a page, and wait until its figures are drawn."""
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    size: dict[str, Any] = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    WebDriverWait(browser, 60).until(lambda _: browser.execute_script(DRAWN))


def background(browser: webdriver.Chrome) -> str:
    return browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")


def test_twenty_runs_are_small_and_drawn_without_errors(
    browser: webdriver.Chrome, page: Path
) -> None:
    assert page.stat().st_size <= 5_000_000
    opened(browser, page, width=1280, scheme="light")
    log = browser.get_log("browser")
    assert [entry for entry in log if entry["level"] in ("WARNING", "SEVERE")] == []
    figures = browser.find_elements(By.CSS_SELECTOR, "figure.plot .canvas")
    assert len(figures) >= 6
    assert all(figure.get_attribute("data-drawn") for figure in figures)
    assert all(figure.rect["height"] > 200 for figure in figures)
    assert browser.execute_script(PAINT) <= 2000
    assert not browser.execute_script(OVERFLOWS)
    assert background(browser) == "rgba(255, 255, 255, 1)"


def test_a_narrow_dark_screen_shows_all(browser: webdriver.Chrome, page: Path) -> None:
    opened(browser, page, width=400, scheme="dark")
    assert not browser.execute_script(OVERFLOWS)
    assert background(browser) == "rgba(20, 23, 27, 1)"


def test_keys_zoom_and_names_hide_curves(browser: webdriver.Chrome, page: Path) -> None:
    opened(browser, page, width=1280, scheme="light")
    figure = browser.find_element(By.ID, "figure-3")
    before = browser.execute_script(START)
    figure.send_keys("+")
    assert browser.execute_script(START) > before
    figure.send_keys("0")
    WebDriverWait(browser, 10).until(lambda _: browser.execute_script(START) == before)
    figure.send_keys(Keys.ARROW_RIGHT)
    assert browser.execute_script(START) > before
    button = browser.find_element(By.CSS_SELECTOR, ".legend button[data-line=run1]")
    browser.execute_script("arguments[0].click()", button)
    assert button.get_attribute("aria-pressed") == "false"
    hidden = "return plots.get('figure-3').renderers.find(each => each.name === 'run1').visible"
    assert browser.execute_script(hidden) is False


@pytest.fixture(scope="module")
def spiked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about two runs with a spike at step 20 each."""
    results = make_results(tmp_path_factory.mktemp("spiked") / "results", ["trial", "wider"])
    event = {"step": 20, "case": "spike", "reason": "high", "documents": {"code-0000": [1, 2]}}
    for run in ("trial", "wider"):
        (results / run / "training/events.jsonl").write_text(json.dumps(event) + "\n")
    report(results)
    return results / "report.html"


def command(browser: webdriver.Chrome) -> str:
    text: str = browser.find_element(By.CSS_SELECTOR, ".trace output").text
    return text.replace(str(Path(browser.current_url).parent), "").replace("file:", "")


def test_a_click_on_a_curve_shows_the_documents_of_its_step(
    browser: webdriver.Chrome, spiked: Path
) -> None:
    opened(browser, spiked, width=1280, scheme="light")
    batch = browser.find_element(By.CSS_SELECTOR, "details.batch")
    assert batch.get_attribute("open") is None
    loss = "[...plots].find(([id]) => document.getElementById(id).ariaLabel.startsWith('Loss:'))"
    place = browser.execute_script(
        f"const [id, plot] = {loss}, view = Bokeh.index.find_one(plot),"
        "  canvas = document.getElementById(id);"
        "canvas.scrollIntoView({block: 'center'});"
        "const box = canvas.getBoundingClientRect(), sx = view.frame.x_scale.compute(20);"
        "return [sx - box.width / 2, view.frame.bbox.vcenter - box.height / 2, id]"
    )
    canvas = browser.find_element(By.ID, place[2])
    actions = webdriver.ActionChains(browser)
    actions.move_to_element_with_offset(canvas, int(place[0]), int(place[1])).click().perform()
    WebDriverWait(browser, 10).until(lambda _: batch.get_attribute("open"))
    assert " trial/run.yaml 20 0" in command(browser).replace("/trial", " trial")


def test_a_click_takes_no_hidden_curve_and_no_mark(browser: webdriver.Chrome, spiked: Path) -> None:
    opened(browser, spiked, width=1280, scheme="light")
    found = browser.execute_script(
        "const plot = [...plots.values()].find(({renderers}) => renderers.some("
        "  ({name}) => name === 'events')), click = {x: 20, y: 4}, seen = [nearest(plot, click)];"
        "for (const name of ['trial', 'wider']) {"
        "  plot.renderers.find((each) => each.name === name).visible = false;"
        "  seen.push(nearest(plot, click));"
        "}"
        "return seen;"
    )
    assert found == [["trial", 20], ["wider", 20], None]


def test_keys_name_a_step(browser: webdriver.Chrome, spiked: Path) -> None:
    opened(browser, spiked, width=400, scheme="dark")
    assert not browser.execute_script(OVERFLOWS)
    field = browser.find_element(By.CSS_SELECTOR, ".trace input")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("35")
    assert command(browser).endswith("/trial/run.yaml 35 0")
