"""A real Chromium and a real ``ttp web`` for tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --hide-scrollbars --force-device-scale-factor=1"""
ROOT = Path(__file__).parents[2]
PICTURES = os.environ.get("WEB_TEST_PICTURES", "")
"""Where pictures of the pages go: docs/images for those of the documentation."""


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Any]:
    """Start Chromium with an empty profile; skips if something is missing."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium: nox -s web does")
    from selenium.webdriver.chrome.service import Service

    if not (Path(CHROMIUM).exists() and Path(DRIVER).exists()):
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS.split(), f"--user-data-dir={profile}", "--window-size=1280,900"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@contextlib.contextmanager
def served(*arguments: str, env: dict[str, str]) -> Iterator[str]:
    """Run ``ttp web`` and yield the address that it prints."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TTP_")}
    command = [sys.executable, "-m", "ttp", "web", "--listen", "127.0.0.1:0", *arguments]
    server = subprocess.Popen(command, cwd=ROOT, env=clean | env, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        server.wait(30)  # an open page does not hold it
        server.stdout.close()


def text(page: Any, name: str) -> str:
    """Return the text of an element of the page."""
    said = page.execute_script("return document.getElementById(arguments[0]).textContent", name)
    return str(said)


def assert_well(page: Any, *, axe: bool = True) -> None:
    """Check that there are no complaints, no requests to other hosts, and no serious finding of axe-core."""
    complaints = [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
    assert not complaints, complaints
    hosts = page.execute_script("return performance.getEntriesByType('resource').map(e => new URL(e.name).host)")
    assert set(hosts) <= {page.execute_script("return location.host")}
    script = os.environ.get("WEB_TEST_AXE", "")
    if not (script and axe):
        return
    page.execute_cdp_cmd(
        "Runtime.evaluate", {"expression": Path(script).read_text()}
    )  # the page's policy forbids scripts
    for scheme in ("light", "dark"):
        dress(page, scheme)
        found = page.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
        problems = [f"{v['id']}: {v['help']}: {n['html']}" for v in found["violations"] for n in v["nodes"][:2]]
        assert not problems, "\n".join([scheme, *problems])


def dress(page: Any, scheme: str) -> None:
    """Show the page as to a user who prefers ``light`` or ``dark``."""
    features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", features)


def picture(page: Any, name: str, folder: Path) -> None:
    """Save a picture of the page with few colours, so that it is small."""
    file = Path(PICTURES or folder) / f"{name}.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    page.save_screenshot(str(file))
    if shutil.which("pngquant"):
        subprocess.run(["pngquant", "--force", "--ext", ".png", "64", str(file)], check=True)
