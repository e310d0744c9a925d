"""A headless Chromium for tests of pages; test files that import this are skipped without one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="no selenium; pip install selenium")
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("no Chromium; apt-get install chromium-driver", allow_module_level=True)

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

__all__ = ["By", "Keys", "WebDriverWait", "chromium", "webdriver"]


@contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """A browser that reaches no host but this one. `profile`: an empty folder for its files."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with webdriver.Chrome(options, service) as driver:
        yield driver
