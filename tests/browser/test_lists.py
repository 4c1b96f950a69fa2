"""Lists too long for a page, in a real browser: ten thousand topics, a thousand groups."""

# ruff: noqa: E501  # JavaScript, which nobody wraps here

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from dledger_cli.console.listing import PAGE_ROWS
from dledger_cli.console.server import ConsoleServer, ListenAddress
from dledger_cli.targets import BrokerTarget, GroupTarget
from rocketstore.client import Message
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.topics import TopicConfigData, TopicConfigList
from tests.browser.chromium import Page
from tests.browser.test_page import BROKEN_REFERENCES, DOUBLE_IDS, LOW_CONTRAST, NAMELESS, TOO_SMALL
from tests.support.remoting import RemotingSocket
from tests.unit.dledger_cli.console.group_pages import Broker, plain_broker
from tests.unit.dledger_cli.console.support import request

TOPICS, GROUPS = 10_000, 1_000
NAMES = "return [...document.querySelectorAll(`#${arguments[0]} tr[data-row]`)].map((one) => one.dataset.row)"
PRESS = "document.querySelector(`#${arguments[0]} [aria-label='${arguments[1]}']`).click()"
HEAD = "[...document.querySelectorAll(`#${arguments[0]} th button`)].find((one) => one.textContent === arguments[1]).click()"


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Topics of one queue, of which the one called busy has messages; groups that consumed none of them."""
    with plain_broker(tmp_path_factory.mktemp("many")) as made:
        names = ["busy", "%RETRY%group-00007", *(f"topic-{number:05}" for number in range(TOPICS - 1))]
        with RemotingSocket(made.server.port) as asking:
            for first in range(0, len(names), 1000):
                some = tuple(TopicConfigData(name, 1, 1, 6) for name in names[first : first + 1000])
                answer = asking.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, None, TopicConfigList(some).encode())
                assert answer.code == 0, answer.remark
        for _ in range(3):
            made.put(Message("busy", b"x"))
        for number in range(GROUPS):
            at = 1 if number == 777 else 0
            made.commit(f"group-{number:05}", "busy" if number == 777 else f"topic-{number:05}", 0, at)
        yield made


@pytest.fixture
def lists(page: Page, brokers: Broker) -> Iterator[ConsoleServer]:
    """Their console, open."""
    target = GroupTarget(tuple(brokers.addresses), "", 20.0)
    with ConsoleServer(target, BrokerTarget(target.bootstrap, 20.0), place=ListenAddress(port=0)) as server:
        page.open(server.url)
        page.wait(lambda: len(rows(page)) == PAGE_ROWS, "a page of topics")
        yield server
        page.leave()


@pytest.fixture
def quiet(tmp_path: Path) -> Iterator[ConsoleServer]:
    """The console of a broker with one topic, in which nothing happens."""
    with plain_broker(tmp_path) as made:
        made.add_topic("orders", 1)
        target = GroupTarget(tuple(made.addresses), "", 20.0)
        with ConsoleServer(target, BrokerTarget(target.bootstrap, 20.0), place=ListenAddress(port=0)) as server:
            yield server


def rows(page: Page, panel: str = "panel-topics") -> list[str]:
    found: list[str] = page.js(NAMES, panel)
    return found


def search(page: Page, words: str, panel: str = "panel-topics") -> None:
    page.js(
        "const one = document.querySelector(`#${arguments[0]} input.find`); one.value = arguments[1]; one.dispatchEvent(new Event('input', { bubbles: true }))",
        panel,
        words,
    )


def test_what_is_shown_is_asked_for_while_nothing_changes(page: Page, quiet: ConsoleServer) -> None:
    """So the console looks at it in every round, and not only in its turn among thousands."""
    page.open(quiet.url)
    page.wait(lambda: rows(page) == ["orders"], "the topic")
    page.wait(lambda: "still being asked for" not in page.text("panel-topics"), "its figures")
    before: Any = request(f"{quiet.url}api/state").json()
    page.js("performance.clearResourceTimings()")

    asked = "return performance.getEntriesByType('resource').filter((one) => one.name.includes('/api/topics')).length"
    page.wait(lambda: page.js(asked) >= 2, "two questions")

    after: Any = request(f"{quiet.url}api/state").json()
    assert after["catalog"]["version"] == before["catalog"]["version"]
    page.leave()


def test_no_list_is_longer_than_a_page_and_all_of_it_can_be_reached(page: Page, lists: ConsoleServer) -> None:
    """Page by page, and from one end to the other."""
    assert "1 to 25 of 10,000 topics" in page.text("panel-topics")
    assert rows(page)[:2] == ["busy", "topic-00000"]

    page.js(PRESS, "panel-topics", "Next page of topics")
    page.wait(lambda: rows(page)[0] == "topic-00024", "the second page")
    page.js(PRESS, "panel-topics", "Last page of topics")
    page.wait(lambda: rows(page)[-1] == f"topic-{TOPICS - 2:05}", "the last page")
    assert "9,976 to 10,000 of 10,000 topics" in page.text("panel-topics")
    page.js(PRESS, "panel-topics", "Next page of topics")  # there is none: it says so, and does nothing
    page.js(PRESS, "panel-topics", "Previous page of topics")
    page.wait(lambda: rows(page)[-1] == f"topic-{TOPICS - 27:05}", "the last but one")
    page.js(PRESS, "panel-topics", "First page of topics")
    page.wait(lambda: rows(page)[0] == "busy", "the first page")


def test_a_topic_is_found_by_a_part_of_its_name(page: Page, lists: ConsoleServer) -> None:
    """From any page, in small letters or capitals; what nobody is called is said."""
    page.js(PRESS, "panel-topics", "Last page of topics")
    page.wait(lambda: "busy" not in rows(page), "the last page")

    search(page, "PIC-0777")
    page.wait(lambda: rows(page) == [f"topic-0777{number}" for number in range(10)], "ten of them")
    assert "10 found in 10,000 topics" in page.text("panel-topics")
    search(page, "nobody")
    page.wait(lambda: "No topics have “nobody” in their names." in page.text("panel-topics"), "none")
    assert rows(page) == []
    search(page, "RETRY")
    page.js("document.querySelector('#panel-topics .toggle input').click()")
    page.wait(lambda: rows(page) == ["%RETRY%group-00007"], "internal ones")


def test_heads_sort_the_whole_list_and_not_the_page(page: Page, lists: ConsoleServer) -> None:
    """Numbers from the largest on; a second press turns it round."""
    page.js(HEAD, "panel-topics", "Topic")
    page.wait(lambda: rows(page)[0] == f"topic-{TOPICS - 2:05}", "from Z to A")
    page.js(HEAD, "panel-topics", "Messages")
    page.wait(lambda: rows(page)[0] == "busy", "most messages first")
    assert page.js("return document.querySelector('#panel-topics th[aria-sort=descending]').textContent") == "Messages"


def test_the_group_that_is_furthest_behind_comes_first(page: Page, lists: ConsoleServer) -> None:
    """Out of a thousand, once it was looked at; until then the page says that figures are missing."""
    page.click("#tab-groups")
    page.wait(lambda: len(rows(page, "panel-groups")) == PAGE_ROWS, "groups")
    search(page, "group-00777", "panel-groups")  # what is shown is looked at first
    lag = "return document.querySelector('#panel-groups tr[data-row=group-00777] td:last-child')?.textContent ?? ''"
    page.wait(lambda: page.js(lag) == "2", "its lag")
    search(page, "", "panel-groups")
    page.wait(lambda: rows(page, "panel-groups")[0] == "group-00777", "it comes first")


def test_a_field_for_a_topic_offers_those_that_fit_what_is_typed(page: Page, lists: ConsoleServer) -> None:
    """Not the first few of ten thousand."""
    options = "return [...document.querySelectorAll('#topic-names option')].map((one) => one.value)"
    page.wait(lambda: len(page.js(options)) == PAGE_ROWS, "some at first")
    page.click("#tab-messages")
    page.js(
        "const one = document.getElementById('search-topic'); one.value = 'c-0999'; one.dispatchEvent(new Event('input', { bubbles: true }))"
    )
    page.wait(lambda: page.js(options) == [f"topic-0999{number}" for number in range(9)], "those that fit")


def test_a_row_stays_open_while_it_is_there(page: Page, lists: ConsoleServer) -> None:
    """And is closed when the list is turned: nobody asks for what is not shown."""
    page.click("tr[data-row=busy] .expander")
    page.wait(
        lambda: page.js("return document.querySelectorAll('#panel-topics tr.inner tbody tr').length") == 1, "a queue"
    )
    page.js(PRESS, "panel-topics", "Next page of topics")
    page.wait(lambda: "busy" not in rows(page), "the second page")
    page.js(PRESS, "panel-topics", "First page of topics")
    page.wait(lambda: "busy" in rows(page), "the first page")
    assert page.js("return document.querySelector('#panel-topics tr.inner')") is None


def test_lists_can_be_used_by_keyboard(page: Page, lists: ConsoleServer) -> None:
    """The search, the heads, the pages; the focus stays where it was when the page turns."""
    figures = "return [...document.querySelectorAll('#panel-topics td:nth-child(3)')].map((one) => one.textContent)"
    page.wait(
        lambda: page.js(figures) == ["3", *["0"] * (PAGE_ROWS - 1)],
        "the figures of all that is shown: rows that change are drawn anew",
    )
    page.js("document.querySelector('#panel-topics input.find').focus()")
    for _ in range(80):
        page.press(Keys.TAB)
        if page.js("return document.activeElement.getAttribute('aria-label')") == "Next page of topics":
            break
    page.press(Keys.ENTER)
    page.wait(lambda: rows(page)[0] == "topic-00024", "the second page")
    page.press(Keys.ENTER)
    page.wait(lambda: rows(page)[0] == "topic-00049", "the third page")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1240])
def test_lists_can_be_read_and_nothing_sticks_out(page: Page, lists: ConsoleServer, theme: str, width: int) -> None:
    """Contrast, sizes, names for whoever does not see them."""
    page.open(lists.url, width=width, theme=theme)
    page.wait(lambda: len(rows(page)) == PAGE_ROWS, "a page of topics")

    flaws = [
        str(one)
        for script in (NAMELESS, BROKEN_REFERENCES, DOUBLE_IDS, LOW_CONTRAST, TOO_SMALL)
        for one in page.js(script)
    ]
    assert flaws == []
    assert page.js("return document.documentElement.scrollWidth <= innerWidth")
