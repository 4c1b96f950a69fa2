"""Messages page by page, in a real browser: nothing is shown twice, nothing left out, nothing of another search."""

# ruff: noqa: E501  # JavaScript, which nobody wraps here

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from dledger.clock import Clock
from dledger_cli.console.server import ConsoleServer, ListenAddress
from dledger_cli.targets import BrokerTarget, GroupTarget
from rocketstore.client import Message
from rocketstore.server import BrokerServer
from tests.browser.chromium import Page
from tests.browser.test_crossing import HELD, HOLD
from tests.browser.test_page import find, press
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.console.group_pages import Broker
from tests.unit.rocketstore.test_server import plain

REMOVED, SENT, DEAD = 5, 70, 45
OFFSETS = "return [...document.querySelectorAll(`#${arguments[0]} td button.linklike`)].map((one) => Number(one.textContent.split(':').pop()))"
LATE = """
const direct = window.fetch;
window.fetch = async (...request) => {
  if (String(request[0]).includes('topic=slow')) await new Promise((resolve) => { window.answer = resolve; });
  return direct(...request);
};
"""


ANSWERED = """
const names = performance.getEntriesByType('resource').map((one) => one.name);
return names.filter((one) => one.includes('/api/dead-letters')).length > arguments[0];
"""
"""Whether more than so many requests for dead letters have been answered."""


class Seconds(Clock):
    """Wall time that is set by hand."""

    now_ms = 1_000

    def wall_ms(self) -> int:
        return self.now_ms


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A queue whose first messages were removed before a group had them, and the group's dead letters."""
    clock = Seconds()
    made = Broker(BrokerServer(plain(tmp_path_factory.mktemp("broker")), clock=clock).start())
    try:
        made.add_topic("orders", 1)
        fill(made, "orders", REMOVED)
        made.admin.delete_topic("orders")
        made.add_topic("orders", 1)
        fill(made, "orders", SENT - REMOVED)
        for offset in range(REMOVED, REMOVED + DEAD):
            made.bury("late", "orders", 0, offset)
        made.add_topic("slow", 1)
        fill(made, "slow", 1)
        made.add_topic("timed", 1)
        for number in range(SENT):
            clock.now_ms = 1_000_001 + 1000 * number
            fill(made, "timed", 1)
        made.commit("late", "orders", 0, 2)
        yield made
    finally:
        made.stop()


def fill(broker: Broker, topic: str, count: int) -> None:
    """Send messages, and wait until they are in their queue."""
    wanted = broker.server.store.max_offset(topic, 0) + count
    broker.producer.send_many([Message(topic, b"x")] * count, queue=0)
    wait_until(lambda: broker.server.store.max_offset(topic, 0) == wanted, "they are in their queue")


@pytest.fixture
def console(page: Page, brokers: Broker) -> Iterator[ConsoleServer]:
    """Their console, open."""
    target = GroupTarget(tuple(brokers.addresses), "", 20.0)
    with ConsoleServer(target, BrokerTarget(target.bootstrap, 20.0), place=ListenAddress(port=0)) as server:
        page.open(server.url)
        yield server
        page.leave()


def shows(page: Page, newest: int, oldest: int, panel: str = "panel-messages") -> None:
    """Wait until these messages are there, the newest first, and no other."""
    wanted = list(range(newest, oldest - 1, -1))
    page.wait(lambda: page.js(OFFSETS, panel) == wanted, f"{newest} to {oldest}")


def turn(page: Page, words: str) -> None:
    """A button of the line above the dead letters."""
    page.js(
        "[...document.querySelectorAll('#sheet .result-line button')].find((one) => one.textContent === arguments[0]).click()",
        words,
    )


def test_the_newest_messages_lead_to_all_older_ones_and_back(page: Page, console: ConsoleServer) -> None:
    """Newer is the page before, and not the first one."""
    page.click("#tab-messages")
    find(page, by="time", topic="orders", queue="")
    shows(page, 69, 50)
    for newest, oldest in ((49, 30), (29, 10), (9, 5)):
        press(page, "Older")
        shows(page, newest, oldest)
    for newest, oldest in ((29, 10), (49, 30)):
        press(page, "Newer")
        shows(page, newest, oldest)
    press(page, "Newest")
    shows(page, 69, 50)


def test_messages_of_a_time_come_in_the_order_that_is_chosen(page: Page, console: ConsoleServer) -> None:
    """Without pressing Find; the buttons that turn the pages are named after the order."""
    page.click("#tab-messages")
    moment = "const at = new Date(arguments[0]); return new Date(at - at.getTimezoneOffset() * 60000).toISOString().slice(0, 19)"
    find(page, by="time", topic="timed", queue="", since=page.js(moment, 1_003_000), before=page.js(moment, 1_050_000))
    shows(page, 49, 30)
    change = "const one = document.getElementById('search-order'); one.value = 'oldest'; one.dispatchEvent(new Event('change'))"
    page.js(change)
    page.wait(lambda: page.js(OFFSETS, "panel-messages") == list(range(3, 23)), "the oldest")
    press(page, "Newer")
    page.wait(lambda: page.js(OFFSETS, "panel-messages") == list(range(23, 43)), "the next ones")
    press(page, "Oldest")
    page.wait(lambda: page.js(OFFSETS, "panel-messages") == list(range(3, 23)), "the first ones again")
    find(page, by="time", topic="timed", queue="", since="", before="", order="newest")
    shows(page, 69, 50)


def test_a_queue_is_turned_from_any_offset(page: Page, console: ConsoleServer) -> None:
    """Each page begins where the other ends, in both directions."""
    page.click("#tab-messages")
    find(page, by="offset", topic="orders", queue="0", offset="40")
    shows(page, 40, 21)
    press(page, "Older")
    shows(page, 20, 5)
    press(page, "Newer")
    shows(page, 40, 21)
    press(page, "Newer")
    shows(page, 60, 41)
    press(page, "Newer")
    shows(page, 69, 50)


def test_dead_letters_are_turned_without_a_gap(page: Page, console: ConsoleServer) -> None:
    """From the newest to the oldest and back."""
    page.click("#tab-groups")
    page.click("tr[data-row=late] .expander")
    page.click("[aria-label='Dead letters of late']")
    shows(page, 44, 25, "sheet")
    turn(page, "Older")
    shows(page, 24, 5, "sheet")
    turn(page, "Older")
    shows(page, 4, 0, "sheet")
    turn(page, "Newer")
    shows(page, 24, 5, "sheet")
    turn(page, "Newest")
    shows(page, 44, 25, "sheet")


def test_a_page_of_dead_letters_that_comes_late_replaces_no_later_one(page: Page, console: ConsoleServer) -> None:
    """Whoever turns twice sees where they turned last, and resends from there."""
    page.click("#tab-groups")
    page.click("tr[data-row=late] .expander")
    page.click("[aria-label='Dead letters of late']")
    shows(page, 44, 25, "sheet")
    page.js(HOLD, "/api/dead-letters")
    turn(page, "Older")
    page.wait(lambda: page.js(HELD) == 1, "the older page is asked for")
    turn(page, "Newest")
    page.wait(lambda: page.js(HELD) == 2, "the newest page is asked for")

    for number in range(2):  # the later one is answered first
        page.js("window.held.pop()()")
        page.wait(partial(page.js, ANSWERED, number + 1), "its answer")

    assert page.js("return new Promise((resolve) => setTimeout(resolve, 0))") is None
    shows(page, 44, 25, "sheet")


def test_an_answer_that_comes_late_replaces_no_later_one(page: Page, console: ConsoleServer) -> None:
    """Whoever searches again sees what was searched for last."""
    page.click("#tab-messages")
    page.js(LATE)
    find(page, by="time", topic="slow", queue="")
    page.wait(lambda: page.js("return window.answer !== undefined"), "the first search")
    find(page, by="time", topic="orders", queue="")
    shows(page, 69, 50)

    page.js("window.answer()")
    page.wait(
        lambda: page.js(
            "return performance.getEntriesByType('resource').some((one) => one.name.includes('topic=slow'))"
        ),
        "its answer",
    )
    assert page.js("return new Promise((resolve) => setTimeout(resolve, 0))") is None
    shows(page, 69, 50)


def test_removed_messages_are_neither_lag_nor_skipped(page: Page, console: ConsoleServer) -> None:
    """A group that is behind what was removed cannot get it any more, whatever its offset."""
    page.click("tr[data-row=orders] .expander")
    page.wait(lambda: "2 (65)" in page.text("panel-topics"), "the group's place and lag")
    page.click("#tab-groups")
    page.click("tr[data-row=late] .expander")
    page.click("[aria-label='Reset the offsets of late']")
    page.js("document.getElementById('form-to').value = 'last'")
    page.click("#form-content button[type=submit]")
    page.wait(lambda: "65 messages would be skipped and not delivered." in page.text("form-dialog"), "the plan")
