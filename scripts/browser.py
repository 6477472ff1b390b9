"""A headless Chromium for the dashboard's test and its screenshot, driven through Selenium."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_ATTEMPTS = 3  # somebody else may take the driver's port between its choice and its use


def find_chromium() -> tuple[str, str] | None:
    """Paths of a browser and of its driver; None unless both are on the PATH."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    return None if browser is None or driver is None else (browser, driver)


@contextlib.contextmanager
def open_browser(
    width: int = 1440, height: int = 1000, scale: float = 1.0, dark: bool = False
) -> Iterator[webdriver.Chrome]:
    """A browser with a window of that many CSS pixels, which is closed at the end.

    Raises:
        RuntimeError: there is no Chromium; says how to get one.
    """
    found = find_chromium()
    if found is None:
        raise RuntimeError(
            "no Chromium: install it and its driver (Debian: apt-get install chromium chromium-driver)"
        )
    with tempfile.TemporaryDirectory(prefix="flashspark-browser-") as profile:
        options = Options()
        options.binary_location = found[0]
        for flag in (
            "headless=new",
            "no-sandbox",
            "disable-gpu",
            "disable-dev-shm-usage",
            "no-proxy-server",
            "hide-scrollbars",
        ):
            options.add_argument(f"--{flag}")
        options.add_argument(f"--user-data-dir={profile}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = _start(options, found[1])
        try:
            metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield driver
        finally:
            driver.quit()


def _start(options: Options, driver_path: str) -> webdriver.Chrome:
    # The driver listens on this machine: a proxy for everything else must not stand between.
    env = os.environ | {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
    with _environment(env):
        for attempt in range(START_ATTEMPTS):
            try:
                return webdriver.Chrome(options=options, service=Service(executable_path=driver_path))
            except WebDriverException:
                if attempt == START_ATTEMPTS - 1:
                    raise
    raise AssertionError("not reached")


@contextlib.contextmanager
def _environment(env: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
