"""Changes in a real browser: by keyboard alone, in both themes, on a wide and a narrow screen."""

# ruff: noqa: E501  # JavaScript, which nobody wraps here

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from dledger_cli.console import changes
from dledger_cli.console.control import NoControl
from dledger_cli.console.server import ConsoleServer, ListenAddress
from dledger_cli.targets import BrokerTarget, GroupTarget
from rocketstore.client import Message, TopicInfo
from tests.browser.chromium import Page
from tests.browser.test_page import BROKEN_REFERENCES, DOUBLE_IDS, LOW_CONTRAST, NAMELESS, TOO_SMALL
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.console.group_pages import Broker, plain_broker
from tests.unit.dledger_cli.console.support import request

FOCUSED = "const one = document.activeElement; return one.id || one.getAttribute('aria-label') || one.textContent;"
ASKED = """
const direct = window.fetch;
window.asked = [];
window.fetch = (...request) => {
  if (request[1]?.method === 'POST') window.asked.push(request[1].body);
  return direct(...request);
};
document.getElementById('confirm').addEventListener('close', () => setTimeout(() => { window.answered = true; }, 0));
"""
"""Notes what the page asks for, and when a question is over."""
OVERFLOWING = """
return [...document.querySelectorAll('dialog[open], dialog[open] .tools, dialog[open] .field')]
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1 || one.scrollWidth > one.clientWidth + 1)
  .map((one) => one.outerHTML.slice(0, 120));
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """In this process; ``orders`` has four queues, a message, a group that is behind, and a dead letter."""
    with plain_broker(tmp_path_factory.mktemp("broker")) as made:
        made.add_topic("orders", 4)
        made.put(Message("orders", b"one", keys="k-1"), 1)
        made.producer.send(Message("orders", b"tea", delay_level=17))
        made.commit("audit", "orders", 1, 0)
        made.bury("audit", "orders", 1, 0)
        yield made


def console_of(broker: Broker, *, read_only: bool = False) -> ConsoleServer:
    target = GroupTarget((broker.address,), "", 20.0)
    control = NoControl() if read_only else None
    return ConsoleServer(target, BrokerTarget(target.bootstrap, 20.0), place=ListenAddress(port=0), control=control)


HOLD = """
const real = window.fetch;
window.held = window.told = false;
window.fetch = async (...asked) => {
  const answer = await real(...asked);
  if (!String(asked[0]).includes(arguments[0])) return answer;
  const found = await answer.json();
  await new Promise((resolve) => { window.held = true; window.letGo = resolve; });
  setTimeout(() => { window.fetch = real; window.told = true; }); // when the page has taken it
  return { ok: answer.ok, status: answer.status, json: async () => found };
};
"""
"""The answer to the request whose address contains this comes when ``letGo`` is called."""


def is_warning(page: Page, selector: str) -> bool:
    """Whether a button has the colour of what is bad, as its words or as its ground."""
    script = """
    const probe = document.createElement('span'); probe.className = 'empty bad'; document.body.append(probe);
    const bad = getComputedStyle(probe).color; probe.remove();
    const one = getComputedStyle(document.querySelector(arguments[0]));
    return one.color === bad || one.backgroundColor === bad;
    """
    return bool(page.js(script, selector))


def until_says(page: Page, words: str) -> None:
    page.wait(lambda: words in page.js("return document.body.innerText"), f"the page says {words}")


def focus(page: Page, label: str) -> None:
    """By Tab alone."""
    for _ in range(80):
        page.press(Keys.TAB)
        if page.js(FOCUSED) == label:
            return
    raise AssertionError(f"Tab does not lead to {label}")


def flaws(page: Page) -> list[str]:
    """What is wrong with what is shown now."""
    scripts = (NAMELESS, BROKEN_REFERENCES, DOUBLE_IDS, LOW_CONTRAST, TOO_SMALL, OVERFLOWING)
    return [str(one) for script in scripts for one in page.js(script)]


def test_everything_can_be_done_by_keyboard(page: Page, broker: Broker) -> None:
    """Create a topic, send a message to it, move a group, delete the topic; every dialog gives the focus back."""
    with console_of(broker) as console:
        page.open(console.url)
        until_says(page, "New topic…")

        focus(page, "Create a topic")
        page.press(Keys.ENTER)
        page.press("made-by-hand", Keys.TAB, Keys.BACKSPACE, "2", Keys.TAB, Keys.BACKSPACE, "3", Keys.ENTER)
        until_says(page, "created topic made-by-hand: 2 write queues, 3 read queues, rw")
        assert broker.about("made-by-hand") == TopicInfo("made-by-hand", 3, 2)
        page.wait(lambda: page.js(FOCUSED) == "Create a topic", "the focus is back")

        page.wait(lambda: page.js("return document.querySelector('tr[data-row=made-by-hand]') !== null"), "its row")
        page.js("document.querySelector('tr[data-row=made-by-hand] .expander').focus()")
        page.press(Keys.ENTER)
        until_says(page, "Send a message…")
        focus(page, "Send a message to made-by-hand")
        page.press(Keys.ENTER)
        page.press("1", Keys.TAB, Keys.TAB, Keys.TAB, "key-7", Keys.TAB, "<b>hello</b>", Keys.TAB, Keys.TAB, Keys.ENTER)
        until_says(page, "Stored in queue 1 of made-by-hand at offset 0.")
        page.press(Keys.ESCAPE)
        page.wait(lambda: page.js(FOCUSED) == "Send a message to made-by-hand", "the focus is back")

        focus(page, "Delete topic made-by-hand")
        page.press(Keys.ENTER)
        until_says(page, "Its 1 message can no longer be read.")
        assert page.js("return document.activeElement.textContent") == "Cancel"
        page.press(Keys.TAB, Keys.ENTER)
        until_says(page, "deleted topic made-by-hand")
        page.wait(lambda: "made-by-hand" not in page.text("panel-topics"), "it is gone")
        assert page.js(FOCUSED) == "tab-topics"
        page.leave()


def test_a_reset_shows_what_it_does_before_it_does_it(page: Page, broker: Broker) -> None:
    """A changed choice hides the plan again; only the button of a plan resets."""
    with console_of(broker) as console:
        page.open(console.url)
        page.click("#tab-groups")
        page.click("tr[data-row=audit] .expander")
        page.click("[aria-label='Reset the offsets of audit']")
        assert page.js("return document.getElementById('form-to').value") == "first"  # nothing is skipped unasked
        page.click("#form-content button[type=submit]")
        until_says(page, "No message would be skipped or delivered again.")
        assert broker.offsets("audit") == {("orders", 1): 0}

        page.js(
            "const to = document.getElementById('form-to'); to.value = 'last'; to.dispatchEvent(new Event('input', {bubbles: true}))"
        )
        assert page.js("return document.querySelector('.plan').childElementCount") == 0
        page.click("#form-content button[type=submit]")
        until_says(page, "1 message would be skipped and not delivered. No member of the group is connected.")
        assert flaws(page) == []
        until_says(page, "Reset 4 queues")
        page.click("#form-content button[type=submit]")
        until_says(page, "reset audit in orders: queue 0 to 0, queue 1 to 1")
        assert broker.offsets("audit")["orders", 1] == 1
        broker.commit("audit", "orders", 1, 0)
        page.leave()


@pytest.mark.parametrize(("permission", "chosen"), [(4, "r"), (2, "w"), (0, "none")])
def test_a_change_of_a_topic_begins_with_what_it_is(page: Page, broker: Broker, permission: int, chosen: str) -> None:
    """Whoever changes the queues only, leaves permission, type and retention as they were."""
    with console_of(broker) as console:
        shape = TopicInfo("limited", 3, 2, permission, message_type="FIFO", retention="36h")
        broker.admin.put_topic(shape)
        page.open(console.url)
        page.click("tr[data-row=limited] .expander")
        page.click("[aria-label='Change topic limited']")
        given = (
            "return [...document.querySelectorAll('#form-content input, #form-content select')].map((one) => one.value)"
        )
        page.wait(lambda: page.js(given) == ["2", "3", chosen, "FIFO", "36h"], "its shape")
        page.click("#form-content button[type=submit]")
        until_says(page, "changed topic limited")
        assert broker.about("limited") == shape
        broker.admin.delete_topic("limited")
        page.leave()


def test_an_impatient_finger_does_it_once(page: Page, broker: Broker) -> None:
    """A button that was pressed waits for its answer."""
    with console_of(broker) as console:
        broker.put(Message("orders", b"x"), 3)
        broker.bury("hasty", "orders", 3, 0)
        broker.commit("hasty", "orders", 3, 0)
        before = broker.server.store.max_offset("orders", 3)
        page.open(console.url)
        page.click("tr[data-row=orders] .expander")
        page.click("[aria-label='Send a message to orders']")
        page.js(
            "document.getElementById('form-queue').value = '3'; const form = document.querySelector('#form-content form'); form.requestSubmit(); form.requestSubmit()"
        )
        until_says(page, "Stored in queue 3 of orders")
        page.press(Keys.ESCAPE)
        page.click("#tab-groups")
        page.click("tr[data-row=hasty] .expander")
        page.click("[aria-label='Dead letters of hasty']")
        until_says(page, "1 dead letter")
        page.js(
            "const one = document.querySelector('[aria-label=\"Send dead letter 0 again\"]'); one.click(); one.click()"
        )
        until_says(page, "dead letter 0 of hasty goes to its consumers again, once")
        page.leave()

        wait_until(lambda: broker.server.store.max_offset("orders", 3) > before, "the message")
        wait_until(lambda: broker.server.store.max_offset("%RETRY%hasty", 0) > 0, "the copy, after a second")
        assert broker.server.store.max_offset("orders", 3) == before + 1
        state: Any = request(f"{console.url}api/state").json()
        assert sum("dead letter 0 of hasty" in one["text"] for one in state["events"]) == 1
        broker.admin.delete_group("hasty")


def test_groups_with_clients_are_turned_page_by_page(
    page: Page, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No group is left out between two pages."""
    monkeypatch.setattr(changes, "GROUPS_PER_PAGE", 1)
    with console_of(broker) as console:
        for group in ("turned-1", "turned-2", "turned-3"):
            broker.commit(group, "orders", 0, 0)
        page.open(console.url)
        page.click("#tab-clients")
        until_says(page, "Groups 1 to 1 of ")
        for words, numbers in (("Next", "2 to 2"), ("Next", "3 to 3"), ("Previous", "2 to 2")):
            page.js(
                "[...document.querySelectorAll('#panel-clients .result-line button')].find((one) => one.textContent === arguments[0]).click()",
                words,
            )
            until_says(page, f"Groups {numbers} of ")
        page.leave()
        for group in ("turned-1", "turned-2", "turned-3"):
            broker.admin.delete_group(group)


def test_a_yes_counts_for_one_question(page: Page, broker: Broker) -> None:
    """Escape is a no, whatever the answer to the question before was."""
    with console_of(broker) as console:
        for name in ("gone", "kept"):
            broker.admin.put_topic(TopicInfo(name, 1, 1))
        page.open(console.url)
        page.click("tr[data-row=gone] .expander")
        page.click("[aria-label='Delete topic gone']")
        until_says(page, "It has no messages.")
        page.click("#confirm-yes")
        page.wait(lambda: "deleted topic gone" in page.text("toasts"), "the answer")
        assert page.js("return document.querySelector('tr[data-row=gone]')") is None  # the next row moves up no later

        page.click("tr[data-row=kept] .expander")
        page.js(ASKED)
        page.click("[aria-label='Delete topic kept']")
        page.wait(lambda: page.js("return document.getElementById('confirm').open"), "the question")
        page.press(Keys.ESCAPE)
        page.wait(lambda: page.js("return window.answered"), "the dialog is closed")

        assert page.js("return window.asked") == ['{"name":"kept"}']
        assert page.js(FOCUSED) == "Delete topic kept"
        broker.admin.delete_topic("kept")
        page.leave()


def test_a_plan_that_comes_late_is_not_that_of_another_choice(page: Page, broker: Broker) -> None:
    """Offsets of one topic would be set in another."""
    with console_of(broker) as console:
        broker.admin.put_topic(TopicInfo("returns", 4, 4))
        broker.commit("both", "orders", 1, 0)
        broker.commit("both", "returns", 1, 0)
        page.open(console.url)
        page.click("#tab-groups")
        page.click("tr[data-row=both] .expander")
        page.click("[aria-label='Reset the offsets of both']")
        page.js(HOLD, "/api/reset-plan")
        page.click("#form-content button[type=submit]")
        page.wait(lambda: page.js("return held"), "the plan is on its way")
        page.js(
            "const one = document.getElementById('form-topic'); one.value = 'returns'; one.dispatchEvent(new Event('input', {bubbles: true}))"
        )
        page.js("letGo()")
        page.wait(lambda: page.js("return told"), "it has come")

        assert page.js("return document.querySelector('.plan').childElementCount") == 0
        assert page.js("return document.querySelector('#form-content button[type=submit]').textContent") == (
            "Show what it does"
        )
        page.click("#form-content button[type=submit]")
        until_says(page, "Reset 4 queues")
        assert broker.offsets("both") == {("orders", 1): 0, ("returns", 1): 0}
        broker.admin.delete_group("both")
        broker.admin.delete_topic("returns")
        page.leave()


def test_an_answer_that_comes_late_is_not_shown_as_that_of_another_question(page: Page, broker: Broker) -> None:
    """Else one would resend the dead letters of a group that the dialog does not name, or read another message."""
    with console_of(broker) as console:
        broker.admin.put_topic(TopicInfo("letters", 1, 1))
        broker.commit("billing", "letters", 0, 0)
        for body in (b"first", b"second"):
            broker.put(Message("letters", body))
        page.open(console.url)
        page.click("#tab-groups")
        for name in ("audit", "billing"):
            page.click(f"tr[data-row={name}] .expander")
        page.js(HOLD, "/api/members?group=audit")
        page.click("[aria-label='Members of audit']")
        page.wait(lambda: page.js("return held"), "the answer about the one is on its way")
        page.press(Keys.ESCAPE)
        page.click("[aria-label='Members of billing']")
        page.wait(lambda: "letters" in page.text("sheet-body"), "the queues of the other")
        page.js("letGo()")
        page.wait(lambda: page.js("return told"), "it has come")
        assert page.text("sheet-title") == "Members of billing"
        assert "letters" in page.text("sheet-body")
        page.press(Keys.ESCAPE)

        page.js(HOLD, "/api/dead-letters?group=audit")
        page.click("[aria-label='Dead letters of audit']")
        page.wait(lambda: page.js("return held"), "the answer about the one is on its way")
        page.press(Keys.ESCAPE)
        page.click("[aria-label='Dead letters of billing']")
        until_says(page, "None. Messages come here")
        page.js("letGo()")
        page.wait(lambda: page.js("return told"), "it has come")
        assert page.text("sheet-title") == "Dead letters of billing"
        assert page.text("sheet-body").startswith("None.")
        page.press(Keys.ESCAPE)

        page.click("#tab-messages")
        page.js("document.getElementById('search-topic').value = 'letters'")
        page.click("#panel-messages button[type=submit]")
        page.wait(lambda: "second" in page.text("panel-messages"), "both messages")
        page.js(HOLD, "/api/message?topic=letters&queue=0&offset=0")
        page.click("[aria-label='Show message 0 of queue 0']")
        page.wait(lambda: page.js("return held"), "the answer about the one is on its way")
        page.click("[aria-label='Show message 1 of queue 0']")
        page.wait(lambda: page.js("return document.getElementById('detail').open"), "the other")
        page.js("letGo()")
        page.wait(lambda: page.js("return told"), "it has come")
        assert page.text("detail-title") == "Message 1 of queue 0 of letters"
        assert "second" in page.text("detail-body")
        broker.admin.delete_topic("letters")
        broker.admin.delete_group("billing")
        page.leave()


@pytest.mark.parametrize(("theme", "width"), [("light", 1360), ("dark", 375)])
def test_dialogs_and_lists_can_be_read_and_used(page: Page, broker: Broker, theme: str, width: int) -> None:
    """Names, contrast, sizes of targets, nothing beyond the edge; a wrong field is marked and says why."""
    with console_of(broker) as console:
        page.open(console.url, theme=theme, width=width)
        page.click("tr[data-row=orders] .expander")
        page.click("[aria-label='Send a message to orders']")
        page.press("9", Keys.ENTER)
        until_says(page, "topic orders has 4 queues, numbered from 0")
        (complaint,) = page.complaints()
        assert "status of 400" in complaint
        assert page.js("return document.activeElement.getAttribute('aria-invalid')") == "true"
        assert flaws(page) == []
        page.press(Keys.ESCAPE)
        page.click("[aria-label='Change topic orders']")
        assert flaws(page) == []
        page.press(Keys.ESCAPE)
        looks = [is_warning(page, f"[aria-label='{one} topic orders']") for one in ("Change", "Delete")]
        assert looks == [False, True]
        page.click("[aria-label='Delete topic orders']")
        until_says(page, "audit loses its offsets in it.")
        assert is_warning(page, "#confirm-yes")
        assert flaws(page) == []
        page.press(Keys.ESCAPE)

        page.click("#tab-groups")
        page.click("tr[data-row=audit] .expander")
        page.click("[aria-label='Members of audit']")
        until_says(page, "No member of this group is connected.")
        assert flaws(page) == []
        page.press(Keys.ESCAPE)
        page.click("[aria-label='Dead letters of audit']")
        until_says(page, "1 dead letter")
        assert flaws(page) == []
        page.click("[aria-label='Send dead letter 0 again']")
        until_says(page, "dead letter 0 of audit goes to its consumers again, once")
        page.press(Keys.ESCAPE)
        page.click("#tab-clients")
        until_says(page, "No producer is listed.")
        assert flaws(page) == []
        page.click("#tab-delayed")
        page.click("[data-key=level-17]")
        until_says(page, "Delay level 17: 1 message waits")
        assert flaws(page) == []
        page.leave()


def test_a_read_only_console_offers_no_changes(page: Page, broker: Broker) -> None:
    """Looking stays possible."""
    with console_of(broker, read_only=True) as console:
        page.open(console.url)
        page.click("tr[data-row=orders] .expander")
        page.wait(lambda: page.js("return document.querySelectorAll('tr.inner tbody tr').length") == 4, "queues")
        page.click("#tab-groups")
        page.click("tr[data-row=audit] .expander")
        page.click("[aria-label='Dead letters of audit']")
        until_says(page, "dead letter")
        buttons = "return [...document.querySelectorAll('#browser .tools button, #sheet td button')].filter((one) => one.checkVisibility()).map((one) => one.textContent)"
        assert page.js(buttons)[:2] == ["Members", "Dead letters (1)"]
        assert set(page.js(buttons)[2:]) <= {"0", "1", "2"}
        page.press(Keys.ESCAPE)
        for tab in ("topics", "messages", "clients", "delayed"):
            page.click(f"#tab-{tab}")
            assert page.js(buttons) == []
        page.leave()
