"""A real headless browser: Debian's chromium, through its own driver. Nothing is downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException, TimeoutException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.lacking import lacks
from tests.support.waiting import PATIENCE_S

CHROMIUM = "/usr/bin/chromium"
DRIVER = "/usr/bin/chromedriver"
INSTALL = "apt-get install chromium chromium-driver"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--force-device-scale-factor=1", "--lang=en-US", "--no-proxy-server"),
)
_T = TypeVar("_T")


def is_installed() -> bool:
    """Whether there is a browser with its driver."""
    return all(shutil.which(path) is not None for path in (CHROMIUM, DRIVER))


def need_chromium() -> None:
    """Skip the test where there is no browser."""
    if not is_installed():
        lacks("Chromium", INSTALL)


class Page:
    """One window of the browser."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.found: list[str] = []

    def open(self, url: str, *, width: int = 1360, height: int = 1440, theme: str = "light") -> None:
        """Go there, in a window of this size and with this colour scheme, and wait until the page is live."""
        self.resize(width, height)
        self.prefer(theme)
        self.driver.get(url)
        self.wait(lambda: self.text("live-text") == "live", "the page is live")

    def resize(self, width: int, height: int) -> None:
        """The size of the view, not of the window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, theme: str, *, motion: str = "no-preference") -> None:
        """What the system of the person in front of it is set to."""
        features = [
            {"name": "prefers-color-scheme", "value": theme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def js(self, script: str, *arguments: object) -> Any:  # noqa: ANN401  # JSON
        """Run a function body in the page."""
        return self.driver.execute_script(script, *arguments)

    def text(self, element_id: str) -> str:
        """An element's text."""
        return str(self.js("return document.getElementById(arguments[0])?.textContent.trim() ?? ''", element_id))

    def click(self, selector: str) -> None:
        """As a mouse does it: the browser refuses if something lies over the element."""

        def try_once() -> bool:
            try:
                self.driver.find_element("css selector", selector).click()
            except StaleElementReferenceException:  # it was drawn anew meanwhile
                return False
            return True

        self.wait(try_once, f"{selector} can be clicked")

    def press(self, *keys: str) -> None:
        """Keys, for whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def leader(self) -> str:
        """Who leads, as the lanes show it; empty if none or several do."""
        found = self.js(
            "return [...document.querySelectorAll('.lane[data-state=leader]')].map((one) => one.dataset.node)"
        )
        return found[0] if len(found) == 1 else ""

    def state(self, node: str) -> str:
        """A lane's state."""
        return str(self.js("return document.querySelector(`[data-node='${arguments[0]}']`)?.dataset.state ?? ''", node))

    def wait(self, condition: Callable[[], _T], what: str, timeout_s: float = PATIENCE_S) -> _T:
        """Until the condition holds; gives what it gave. If it does not, the error has the page's text."""
        waiting = WebDriverWait(self.driver, timeout_s, poll_frequency=0.05)
        try:
            return waiting.until(lambda _driver: condition())
        except TimeoutException as error:
            text = self.js("return document.body.innerText")[:4000]
            raise AssertionError(f"not within {timeout_s} s: {what}; the page says:\n{text}") from error

    def complaints(self) -> list[str]:
        """What the browser's console says, since it was last asked; not of pages of its own, as a new tab's."""
        entries = self.driver.get_log("browser")  # type: ignore[no-untyped-call]  # selenium leaves it untyped
        return [f"{one['level']}: {one['message']}" for one in entries if not one["message"].startswith("chrome://")]

    def leave(self) -> None:
        """Close the page, and keep in ``found`` what the browser had to complain of."""
        self.found += self.complaints()
        self.driver.get("about:blank")

    def save(self, file: Path) -> None:
        """A picture of the view."""
        self.driver.save_screenshot(str(file))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile, for as long as the block runs."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield Page(driver)
    finally:
        driver.quit()
