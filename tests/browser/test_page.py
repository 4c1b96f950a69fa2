"""The page in a real browser: finding messages, the keyboard, names for screen readers, themes, small screens."""

# ruff: noqa: E501  # JavaScript, which nobody wraps here

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from dledger_cli.console.guard import ConsoleRules
from dledger_cli.console.server import ConsoleServer, ListenAddress, open_console
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import LocalGroup
from dledger_cli.targets import BrokerTarget, GroupTarget
from rocketstore.client.blocking import Admin, Producer
from rocketstore.message.message import Message
from tests.browser.chromium import Page
from tests.support.waiting import wait_until

ATTACK = "<img src=x onerror='window.attacked=1'><script>window.attacked=1</script>\u202e\x1b[31m"
"""Markup, a character that turns the reading direction, and a terminal's escape."""

# Each gives a list of what is wrong, with enough to find it.
NAMELESS = """
const name = (one) => (one.getAttribute('aria-label') ?? '') + one.textContent + (one.labels ? [...one.labels].map((l) => l.textContent).join('') : '');
return [...document.querySelectorAll('button, input, select, a, [role=tab], [role=img], dialog, canvas[role=img]')]
  .filter((one) => !one.closest('[hidden]') && !name(one).trim() && !one.getAttribute('aria-labelledby'))
  .map((one) => one.outerHTML.slice(0, 120));
"""
BROKEN_REFERENCES = """
const bad = [];
for (const attribute of ['aria-labelledby', 'aria-describedby', 'aria-controls', 'for', 'list'])
  for (const one of document.querySelectorAll(`[${attribute}]`))
    for (const id of one.getAttribute(attribute).split(' '))
      if (!document.getElementById(id)) bad.push(`${attribute}=${id}`);
return bad;
"""
DOUBLE_IDS = """
const ids = [...document.querySelectorAll('[id]')].map((one) => one.id);
return ids.filter((id, place) => ids.indexOf(id) !== place);
"""
SKIPPED_HEADINGS = """
const levels = [...document.querySelectorAll('h1, h2, h3')].filter((one) => one.checkVisibility() || one.className === 'hidden').map((one) => Number(one.tagName[1]));
return levels.filter((level, place) => place && level > levels[place - 1] + 1).concat(levels.filter((one) => one === 1).length === 1 ? [] : ['h1']);
"""
LOW_CONTRAST = """
const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
const ground = (one) => { for (; one; one = one.parentElement) { const c = parse(getComputedStyle(one).backgroundColor); if (c.length < 4 || c[3] === 1) return c; } return [255, 255, 255]; };
const bad = [];
for (const one of document.querySelectorAll('body *')) {
  const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!own || !one.checkVisibility() || one.closest('.hidden, noscript, .skip, svg')) continue;
  const [a, b] = [light(parse(getComputedStyle(one).color)), light(ground(one))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) bad.push(`${one.tagName}.${one.className} ${one.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
}
return bad;
"""
TOPS = """
return JSON.stringify([...document.querySelectorAll('.lane, .hero, .plot, .strip, .tail, #browser')].map((one) => Math.round(one.getBoundingClientRect().top)));
"""
TOO_SMALL = """
return [...document.querySelectorAll('button, select, input:not([type=radio]):not([type=checkbox])')]
  .filter((one) => one.checkVisibility() && !one.closest('[hidden]'))
  .filter((one) => { const box = one.getBoundingClientRect(); return box.height < 24 || box.width < 24; })
  .map((one) => `${one.textContent} ${one.getBoundingClientRect().width}x${one.getBoundingClientRect().height}`);
"""


def wait_for_rows(page: Page, panel: str, text: str) -> None:
    script = "return document.getElementById(arguments[0]).textContent.includes(arguments[1])"
    page.wait(lambda: page.js(script, panel, text), f"{panel} shows {text}")


def find(page: Page, **fields: str) -> None:
    """Fill in the search form and submit it by the keyboard."""
    script = (
        "for (const [name, value] of Object.entries(arguments[0])) {"
        " const field = document.getElementById(`search-${name}`); field.value = value;"
        " field.dispatchEvent(new Event('change')); }"
    )
    page.js(script, fields)
    page.click("#panel-messages button[type=submit]")


@pytest.fixture(scope="module")
def broker_console(brokers: LocalBrokers) -> Iterator[ConsoleServer]:
    """One for all tests here: they look, and end no broker."""
    with open_console(brokers, port=0) as server:
        yield server


@pytest.fixture(scope="module")
def shared_log_console(shared_log_group: LocalGroup) -> Iterator[ConsoleServer]:
    """The same of the log nodes."""
    with open_console(shared_log_group, port=0) as server:
        yield server


@pytest.fixture
def log_console(shared_log_console: ConsoleServer, log_group: LocalGroup) -> ConsoleServer:
    """It, with all nodes running."""
    assert all(log_group.is_running(node) for node in log_group.nodes)
    return shared_log_console


@pytest.fixture
def sent(brokers: LocalBrokers) -> dict[str, Any]:
    """A message whose body is an attack on whoever shows it."""
    with Producer(brokers.addresses) as producer:
        message = Message("orders", ATTACK.encode(), keys="attack-1", tags="<b>bold</b>")
        stored = producer.send(message, queue=1)
    with Admin(brokers.addresses) as admin:
        wait_until(lambda: bool(admin.messages_by_key("orders", "attack-1")), "the key is in the index")
    return {"offset": stored.offset, "id": stored.offset_id, "queue": stored.queue}


# --- messages and entries --------------------------------------------------------------------------------------------


def test_a_message_is_found_by_key_by_offset_and_by_id_and_harms_nobody(
    page: Page, broker_console: ConsoleServer, sent: dict[str, Any]
) -> None:
    """The same message each time; its markup is text, and what hides is escaped."""
    page.open(broker_console.url)
    page.click("#tab-messages")

    find(page, by="key", topic="orders", key="attack-1")
    wait_for_rows(page, "panel-messages", "attack-1")
    assert "<img src=x onerror=" in page.text("panel-messages")

    find(page, by="id", id=sent["id"])
    wait_for_rows(page, "panel-messages", "1 found")

    find(page, by="offset", topic="orders", queue="1", offset=str(sent["offset"]))
    wait_for_rows(page, "panel-messages", f"1:{sent['offset']}")

    page.click("#panel-messages td button")
    page.wait(lambda: page.js("return document.getElementById('detail').open"), "all of it is shown")
    shown = page.js("return document.querySelector('#detail pre').textContent")
    assert shown == ATTACK.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b")
    assert page.js("return window.attacked ?? null") is None
    assert page.js("return document.querySelector('#detail pre').children.length") == 0

    page.click("#detail .segments label:last-child")
    assert page.js("return document.querySelector('#detail pre').textContent").startswith("00000000  3c 69 6d 67")


def test_the_newest_messages_are_shown_without_being_asked_for(
    page: Page, broker_console: ConsoleServer, brokers: LocalBrokers
) -> None:
    """Of the first topic, across its queues, as soon as the tab is opened; older ones by a button, and back again."""
    with Producer(brokers.addresses) as producer:  # two pages, whenever this test runs
        for number in range(48):
            producer.send(Message("orders", b"{}"), queue=number % 4)
    page.open(broker_console.url)
    page.click("#tab-messages")
    places = "return [...document.querySelectorAll('#panel-messages td button')].map((one) => one.textContent)"
    times = "return [...document.querySelectorAll('#panel-messages td:nth-child(2)')].map((one) => one.textContent)"
    page.wait(lambda: len(page.js(places)) == 20, "a page of messages")

    newest = page.js(places)
    assert {one.split(":")[0] for one in newest} == {"0", "1", "2", "3"}
    assert page.js(times) == sorted(page.js(times), reverse=True)
    press(page, "Older")
    page.wait(lambda: "Older messages" in page.text("panel-messages"), "older ones")
    assert not set(page.js(places)) & set(newest)
    press(page, "Newer")
    page.wait(lambda: "The newest messages at" in page.text("panel-messages"), "the newest again")


def test_one_queue_of_a_topic_is_a_click_away(page: Page, broker_console: ConsoleServer) -> None:
    """From the topic's row; another queue's messages by its number alone."""
    page.open(broker_console.url)
    wait_for_rows(page, "panel-topics", "orders")
    page.click("tr[data-row=orders] .expander")
    page.click("[aria-label='Messages of queue 2 of orders']")
    places = "return [...document.querySelectorAll('#panel-messages td button')].map((one) => one.textContent)"
    page.wait(lambda: {one.split(":")[0] for one in page.js(places)} == {"2"}, "messages of that queue")

    page.js(
        "const one = document.getElementById('search-queue'); one.value = '3'; one.dispatchEvent(new Event('change'))"
    )
    page.wait(lambda: {one.split(":")[0] for one in page.js(places)} == {"3"}, "messages of the other queue")


def press(page: Page, words: str) -> None:
    """A button of the line above the messages, which has none while a search goes on."""
    script = """
        const all = [...document.querySelectorAll('#panel-messages .result-line button')];
        const found = all.find((one) => one.textContent === arguments[0]);
        found?.click();
        return found !== undefined;
    """
    page.wait(lambda: page.js(script, words), f"{words} can be pressed")


def test_a_search_that_finds_nothing_and_one_that_makes_no_sense_say_so(
    page: Page, broker_console: ConsoleServer
) -> None:
    """Empty and error states are sentences."""
    page.open(broker_console.url)
    page.click("#tab-messages")

    find(page, by="key", topic="orders", key="nobody-has-this")
    wait_for_rows(page, "panel-messages", "No matching messages.")

    find(page, by="offset", topic="no-such-topic", queue="0", offset="")
    page.wait(lambda: "no-such-topic" in page.text("panel-messages") or "not" in page.text("panel-messages"), "why")
    page.found += [one for one in page.complaints() if "/api/messages" not in one]  # the browser logs every 404


def test_topics_and_groups_show_offsets_and_lag_that_move(page: Page, broker_console: ConsoleServer) -> None:
    """Totals, then queue by queue; sorted by a click on a head."""
    page.open(broker_console.url)
    wait_for_rows(page, "panel-topics", "orders")
    count = "return Number(document.querySelector('#panel-topics tr[data-row=orders] td:nth-child(3)').textContent.replaceAll(',', ''))"
    before = page.wait(lambda: page.js(count), "messages are counted")
    page.wait(lambda: page.js(count) > before, "the count moves")

    page.click("#panel-topics .expander")
    wait_for_rows(page, "panel-topics", "billing: committed (lag)")
    assert page.js("return document.querySelectorAll('#panel-topics tr.inner tbody tr').length") == 4

    page.click("#tab-groups")
    wait_for_rows(page, "panel-groups", "audit")
    page.click("#panel-groups th:first-child button")
    head = "return document.querySelector('#panel-groups th').getAttribute('aria-sort')"
    assert page.js(head) == "ascending"
    page.click("#panel-groups th:first-child button")
    assert page.js(head) == "descending"
    first = "return document.querySelector('#panel-groups tbody tr').dataset.row"
    page.wait(lambda: page.js(first) == "billing", "the last one is first")


def test_entries_of_a_log_are_shown(page: Page, log_console: ConsoleServer, log_group: LocalGroup) -> None:
    """No topics there; the newest entries at once and first, any by its index."""
    with log_group.client() as client:
        result = client.append(ATTACK.encode())
    page.open(log_console.url)
    wait_for_rows(page, "panel-entries", "Committed: 0 to")
    assert page.js("return document.getElementById('tab-topics').hidden")

    page.js("document.getElementById('entry-index').value = arguments[0]", str(result.index))
    page.click("#panel-entries button[type=submit]")
    first = "return document.querySelector('#panel-entries td button')?.textContent"
    page.wait(lambda: page.js(first) == str(result.index), "that entry comes first")
    page.click("#panel-entries td button")
    assert "<img src=x" in page.text("panel-entries")
    page.wait(lambda: page.js("return document.getElementById('detail').open"), "all of it is shown")
    assert page.js("return window.attacked ?? null") is None


# --- hands that use no mouse, eyes that do not see --------------------------------------------------------------------


def test_leadership_can_be_handed_over_by_keys_alone(
    page: Page, log_console: ConsoleServer, log_group: LocalGroup
) -> None:
    """Skip link, Tab to a button, Enter, Tab to the answer, Enter; then the focus is where it was."""
    page.open(log_console.url)
    old = page.wait(page.leader, "somebody leads")
    page.js("document.activeElement.blur()")
    page.press(Keys.TAB)
    assert page.js("return document.activeElement.className") == "skip"
    page.press(Keys.ENTER)

    for _ in range(30):
        page.press(Keys.TAB)
        if page.js("return document.activeElement.textContent") == "Make leader":
            break
    target = page.js("return document.activeElement.closest('.lane').dataset.node")
    assert page.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press(Keys.ENTER)
    assert page.js("return document.activeElement.textContent") == "Cancel"
    page.press(Keys.TAB)
    page.press(Keys.ENTER)

    page.wait(lambda: page.leader() == target, "the new leader")
    assert target != old
    assert page.js("return document.activeElement.closest('.lane').dataset.node") == target
    page.wait(lambda: f"{target} leads in term" in page.text("announcer"), "screen readers are told")


def test_escape_cancels(page: Page, log_console: ConsoleServer) -> None:
    """And nothing is done."""
    page.open(log_console.url)
    old = page.wait(page.leader, "somebody leads")

    page.click(f"[data-node={old}] [data-action=kill]")
    page.press(Keys.ESCAPE)

    page.wait(lambda: not page.js("return document.getElementById('confirm').open"), "the question is gone")
    assert page.leader() == old
    assert page.text("toasts") == ""


def test_tabs_move_with_arrows(page: Page, broker_console: ConsoleServer) -> None:
    """One stop in the tab order; arrows, Home and End choose."""
    page.open(broker_console.url)
    wait_for_rows(page, "panel-topics", "orders")
    page.js("document.getElementById('tab-topics').focus()")

    for key, wanted in ((Keys.ARROW_RIGHT, "groups"), (Keys.END, "delayed"), (Keys.ARROW_RIGHT, "topics")):
        page.press(key)
        assert page.js("return document.activeElement.id") == f"tab-{wanted}"
        assert page.js("return document.querySelector('[role=tabpanel]:not([hidden])').id") == f"panel-{wanted}"
    assert (
        page.js("return document.querySelectorAll('[role=tab][tabindex=\"0\"], [role=tab]:not([tabindex])').length")
        == 1
    )


def test_charts_can_be_read_by_keys(page: Page, log_console: ConsoleServer) -> None:
    """Arrow keys move a cursor whose values are text."""
    page.open(log_console.url)
    page.wait(
        lambda: page.text("rate-series").startswith("entries/s") and "\u2013" not in page.text("rate-series"), "a rate"
    )
    page.js("document.getElementById('rate-plot').focus()")

    page.press(Keys.ARROW_LEFT)

    assert "entries/s" in page.js("return document.querySelector('#rate-plot .plot-tip').textContent")
    assert page.js("return document.querySelector('#rate-plot .plot-tip').hidden") is False


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_passes_our_own_audit(page: Page, broker_console: ConsoleServer, theme: str) -> None:
    """Names, references, ids, headings, contrast as computed, size of targets; in every tab and with a dialog open."""
    page.open(broker_console.url, theme=theme)
    wait_for_rows(page, "panel-topics", "orders")
    ground = page.js("return getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(244, 246, 248)", "dark": "rgb(14, 18, 22)"}[theme]

    for tab in ("topics", "groups", "messages"):
        page.click(f"#tab-{tab}")
        if tab == "messages":
            find(page, by="offset", topic="orders", queue="0", offset="")
            wait_for_rows(page, "panel-messages", "The queue holds")
        audit(page)
    page.click("#panel-messages td button")
    page.wait(lambda: page.js("return document.getElementById('detail').open"), "the dialog")
    audit(page)


def audit(page: Page) -> None:
    for script in (NAMELESS, BROKEN_REFERENCES, DOUBLE_IDS, SKIPPED_HEADINGS, LOW_CONTRAST, TOO_SMALL):
        assert page.js(script) == [], script


# --- signing in ------------------------------------------------------------------------------------------------------


def test_a_console_with_a_token_asks_for_it_once(page: Page, log_group: LocalGroup) -> None:
    """A wrong one is told; the right one leads to the page, and is remembered by the browser."""
    target = GroupTarget(tuple(log_group.addresses), "", 5.0)
    brokers, place = BrokerTarget(target.bootstrap, 5.0), ListenAddress(port=0)
    with ConsoleServer(target, brokers, place=place, rules=ConsoleRules(token="a long enough token")) as console:
        page.driver.get(console.url)
        page.wait(lambda: page.driver.current_url.endswith("/login"), "it asks")
        audit(page)
        page.press("a wrong one", Keys.ENTER)
        page.wait(lambda: page.js("return document.getElementById('wrong')?.hidden === false"), "it is told")

        page.press("a long enough token", Keys.ENTER)
        page.wait(lambda: page.text("live-text") == "live", "the page is live")
        page.open(console.url)
        page.leave()


# --- themes, sizes, motion -------------------------------------------------------------------------------------------


def test_the_theme_follows_the_system_and_the_button_and_is_remembered(page: Page, log_console: ConsoleServer) -> None:
    """auto, light, dark, auto."""
    ground = "return getComputedStyle(document.body).backgroundColor"
    page.open(log_console.url, theme="dark")
    assert page.js(ground) == "rgb(14, 18, 22)"

    page.click("#theme")
    assert (page.text("theme"), page.js(ground)) == ("Theme: light", "rgb(244, 246, 248)")
    page.open(log_console.url, theme="dark")
    assert page.js(ground) == "rgb(244, 246, 248)"

    page.click("#theme")
    assert page.text("theme") == "Theme: dark"
    page.click("#theme")
    assert page.text("theme") == "Theme: auto"
    page.prefer("light")
    page.wait(lambda: page.js(ground) == "rgb(244, 246, 248)", "the system's change is followed")


@pytest.mark.parametrize("width", [375, 768, 1000, 1180, 1360, 2000])
def test_nothing_sticks_out_at_any_width(page: Page, broker_console: ConsoleServer, width: int) -> None:
    """No sideways scrolling of the page, no words outside their buttons, down to a small phone."""
    page.open(broker_console.url, width=width, height=900)
    wait_for_rows(page, "panel-topics", "orders")

    assert page.js("return document.documentElement.scrollWidth") <= width
    overflowing = page.js(
        "return [...document.querySelectorAll('button')].filter((one) => one.checkVisibility()"
        " && one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent)"
    )
    assert overflowing == []


def test_lanes_keep_their_place_while_things_happen(page: Page, log_group: LocalGroup) -> None:
    """No layout jumps: everything stays where it is while figures and roles change, and while a note becomes an error
    of two lines (this console knows no processes, only that connections are refused).
    """
    target = GroupTarget(tuple(log_group.addresses), "", 5.0)
    with ConsoleServer(target, BrokerTarget(target.bootstrap, 5.0), place=ListenAddress(port=0)) as console:
        page.open(console.url, width=375, height=1400)  # where everything is below everything else
        leader = page.wait(page.leader, "somebody leads")
        page.wait(lambda: page.text("figure-rate") not in ("\u2013", "0"), "figures are there")
        before = json.loads(page.js(TOPS))
        victim = next(node for node in log_group.nodes if node != leader)

        page.click(f"[data-node={leader}] [data-action=transfer]")
        page.click("#confirm-yes")
        page.wait(lambda: "leads now" in page.text("toasts"), "leadership moved")
        log_group.kill(victim)
        page.wait(lambda: page.state(victim) == "unreachable", "it is missed")
        page.wait(lambda: "refused" in page.text("lanes"), "why it is missed is said")

        assert json.loads(page.js(TOPS)) == before
        page.leave()


def test_nothing_moves_by_itself_for_those_who_asked_for_calm(page: Page, log_console: ConsoleServer) -> None:
    """prefers-reduced-motion."""
    page.open(log_console.url)
    page.prefer("light", motion="reduce")

    assert page.js("return getComputedStyle(document.querySelector('.tail i')).transitionDuration") == "0s"


def test_the_list_of_what_happened_tells_a_transfer(
    page: Page, log_console: ConsoleServer, log_group: LocalGroup
) -> None:
    """With times, newest first."""
    page.open(log_console.url)
    old = page.wait(page.leader, "somebody leads")
    term = log_group.statuses()[log_group.leader()].term

    page.click(f"[data-node={old}] [data-action=transfer]")
    page.click("#confirm-yes")

    page.wait(lambda: f"leads in term {term + 1}" in page.text("events"), "the change is listed")
    times = page.js("return [...document.querySelectorAll('#events time')].map((one) => one.dateTime)")
    assert times == sorted(times, reverse=True)
