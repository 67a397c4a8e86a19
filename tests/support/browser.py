"""A headless Chromium for tests that look at pages: the system's, which `make unit` installs.

Tests that need it are skipped if it is not installed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync",
    "disable-background-networking", "disable-component-update", "disable-dev-shm-usage",
)  # fmt: skip


@contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """Run a browser inside the `with` block, with a new folder as its profile."""
    binary, server = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or server is None:
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options, Service(server)) as driver:
        yield driver


def resize(driver: webdriver.Chrome, width: int, height: int = 1100) -> None:
    """Set the size of the window as pages see it."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
