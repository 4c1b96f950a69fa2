"""Messages that wait for a time of their own, in a real browser: shown, searched, recalled."""

# ruff: noqa: E501  # JavaScript, which nobody wraps here

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from rocketstore.client import Message
from tests.browser.chromium import Page
from tests.browser.test_changes import console_of, flaws, until_says
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.console.group_pages import Broker, plain_broker

HOUR_MS = 3_600_000
COUNT = 30
ROWS = "return [...document.querySelectorAll('#timed-list tbody tr')].map((row) => [...row.cells].map((one) => one.textContent))"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """In this process; a message waits in each of so many hours, and one of another topic."""
    with plain_broker(tmp_path_factory.mktemp("broker")) as made:
        made.add_topic("orders", 4)
        made.add_topic("invoices", 1)
        begin_ms = int(time.time() * 1000) + HOUR_MS // 2
        for number in range(COUNT):
            due_ms = begin_ms + number * HOUR_MS
            made.producer.send(
                Message("orders", b"x" * number, tags="remind", keys=f"order-{number}", deliver_at=due_ms)
            )
        made.producer.send(Message("invoices", b"", keys="invoice-1", deliver_at=begin_ms + 20 * 24 * HOUR_MS))
        made.producer.send(Message("orders", b"tea", delay_level=17))
        wait_until(lambda: made.server.store.wait_dispatched(60), "all are listed")
        yield made


def keys(page: Page) -> list[str]:
    return [row[5] for row in page.js(ROWS)]


def wait_keys(page: Page, expected: list[str]) -> None:
    page.wait(lambda: keys(page) == expected, f"rows {expected[:3]}…")


def fill(page: Page, element_id: str, text: str) -> None:
    page.js(
        "const one = document.getElementById(arguments[0]); one.value = arguments[1]; one.focus()", element_id, text
    )


def keep(page: Page, name: str) -> None:
    """A picture, for those who want to look: ``BROWSER_PICTURES=DIRECTORY``."""
    into = os.environ.get("BROWSER_PICTURES")
    if into:
        page.save(Path(into) / f"{name}.png")


@pytest.mark.parametrize(("width", "theme"), [(1360, "light"), (375, "dark")])
def test_waiting_messages_are_shown_and_searched(page: Page, broker: Broker, width: int, theme: str) -> None:
    """The next first, page by page; by topic, key and time; nothing is cut off, pale or nameless."""
    with console_of(broker) as console:
        page.open(console.url, width=width, theme=theme)
        page.click("#tab-delayed")
        until_says(page, "31 messages wait for their time")
        wait_keys(page, [f"order-{number}" for number in range(20)])
        first = page.js(ROWS)[0]
        assert first[2] == "orders"
        assert first[0].endswith("(in 30 min)") or "(in 2" in first[0]
        assert [first[1], first[4]] == ["Recall…", "remind"]
        assert flaws(page) == []
        keep(page, f"timed-{theme}")
        page.click("[data-key=timed-later]")
        wait_keys(page, [*(f"order-{number}" for number in range(20, COUNT)), "invoice-1"])
        assert page.js("return document.activeElement.dataset.key") == "timed-later"
        page.click("[data-key=timed-earlier]")
        wait_keys(page, [f"order-{number}" for number in range(20)])

        fill(page, "timed-topic", "invoices")
        page.press(Keys.ENTER)
        wait_keys(page, ["invoice-1"])
        fill(page, "timed-topic", "")
        fill(page, "timed-key", "order-7")
        page.press(Keys.ENTER)
        wait_keys(page, ["order-7"])
        fill(page, "timed-key", "order-77")
        page.press(Keys.ENTER)
        until_says(page, "No waiting message is like that.")
        fill(page, "timed-key", "")
        moment = "const at = new Date(Date.now() + arguments[0]); at.setMinutes(at.getMinutes() - at.getTimezoneOffset()); return at.toISOString().slice(0, 19)"
        fill(page, "timed-from", page.js(moment, 28 * HOUR_MS))
        page.press(Keys.ENTER)
        wait_keys(page, [f"order-{number}" for number in range(28, COUNT)] + ["invoice-1"])
        assert flaws(page) == []
        page.leave()


def test_a_message_is_recalled_after_a_question(page: Page, broker: Broker) -> None:
    """No loses nothing and gives the focus back; yes, and the row goes."""
    with console_of(broker) as console:
        page.open(console.url)
        page.click("#tab-delayed")
        wait_keys(page, [f"order-{number}" for number in range(20)])
        fill(page, "timed-key", "order-3")
        page.press(Keys.ENTER)
        wait_keys(page, ["order-3"])
        page.click("#timed-list tbody button")
        until_says(page, "will never be delivered")
        assert flaws(page) == []
        keep(page, "timed-question")
        page.press(Keys.ESCAPE)
        page.wait(lambda: page.js("return document.activeElement.textContent") == "Recall…", "the focus is back")
        assert keys(page) == ["order-3"]
        page.click("#timed-list tbody button")
        until_says(page, "will never be delivered")
        page.click("#confirm-yes")
        until_says(page, "for orders: it will not be delivered")
        until_says(page, "No waiting message is like that.")
        page.leave()
    assert broker.admin.timed(key="order-3").messages == []


def test_a_read_only_console_recalls_nothing(page: Page, broker: Broker) -> None:
    """It shows what waits, without the button."""
    with console_of(broker, read_only=True) as console:
        page.open(console.url)
        page.click("#tab-delayed")
        page.wait(lambda: len(page.js(ROWS)) == 20, "rows")
        assert {len(row) for row in page.js(ROWS)} == {7}
        page.leave()
