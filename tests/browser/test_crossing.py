"""Answers that arrive late, in a real browser: what is done is what was asked for, whatever was pressed meanwhile."""

# ruff: noqa: E501  # JavaScript, which nobody wraps here

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from rocketstore.client import Message
from tests.browser.chromium import Page
from tests.browser.test_changes import console_of, until_says
from tests.unit.dledger_cli.console.group_pages import Broker, plain_broker

HOLD = """
const [part] = arguments;
const really = window.fetch;
window.held = [];
window.fetch = async (address, ...rest) => {
  if (String(address).includes(part)) await new Promise((go) => window.held.push(go));
  return really(address, ...rest);
};
"""
"""From now on, requests whose addresses have this part wait."""
LET_GO = "window.held.splice(0).forEach((go) => go());"
HELD = "return window.held.length"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """In this process; ``audit`` is behind in ``orders`` and in ``bills``, which have two messages in queue 0 each."""
    with plain_broker(tmp_path_factory.mktemp("broker")) as made:
        for topic, messages in (("bills", 1), ("orders", 2)):
            made.add_topic(topic, 1)
            for _ in range(messages):
                made.put(Message(topic, b"one"))
            made.commit("audit", topic, 0, 0)
        yield made


def test_a_plan_resets_only_the_topic_it_is_of(page: Page, broker: Broker) -> None:
    """A plan that arrives after another topic was chosen is not shown, and moves no offsets of that topic."""
    with console_of(broker) as console:
        page.open(console.url)
        page.click("#tab-groups")
        page.click("tr[data-row=audit] .expander")
        page.click("[aria-label='Reset the offsets of audit']")
        page.js(HOLD, "/api/reset-plan")
        page.js("document.getElementById('form-to').value = 'last'")
        assert page.js("return document.getElementById('form-topic').value") == "bills"
        page.click("#form-content button[type=submit]")
        page.wait(lambda: page.js(HELD) == 1, "the plan is asked for")
        page.js(
            "const topic = document.getElementById('form-topic'); topic.value = 'orders'; topic.dispatchEvent(new Event('input', {bubbles: true}))"
        )

        page.js(LET_GO)
        page.wait(
            lambda: page.js("return document.querySelector('#form-content button[type=submit]').ariaDisabled") is None,
            "the answer is there",
        )

        assert page.js("return document.querySelector('.plan').childElementCount") == 0
        assert page.js("return document.querySelector('#form-content button[type=submit]').textContent") == (
            "Show what it does"
        )
        page.click("#form-content button[type=submit]")
        page.wait(lambda: page.js(HELD) == 1, "another plan is asked for")
        page.js(LET_GO)
        until_says(page, "2 messages would be skipped and not delivered.")
        page.click("#form-content button[type=submit]")
        until_says(page, "reset audit in orders: queue 0 to 2")
        assert broker.offsets("audit") == {("bills", 0): 0, ("orders", 0): 2}
        page.leave()


def test_every_question_has_its_own_answer(page: Page, broker: Broker) -> None:
    """A question that arrives while another one is open does not replace it: one yes deletes one topic."""
    with console_of(broker) as console:
        names = ("first-one", "second-one")
        for name in names:
            broker.add_topic(name, 1)
        page.open(console.url)
        for name in names:
            page.click(f"tr[data-row={name}] .expander")
        for name in names:
            page.wait(
                partial(page.js, f"return document.querySelector(`[aria-label='Delete topic {name}']`)"), "buttons"
            )
        page.js(HOLD, "/api/do/delete-topic")
        for name in names:
            page.click(f"[aria-label='Delete topic {name}']")
        page.wait(lambda: page.js(HELD) == 2, "both are asked about")

        page.js("window.held.shift()()")
        until_says(page, "Delete topic first-one and its messages?")
        page.js(LET_GO)
        until_says(page, "nothing was done, because another question was open")

        assert page.text("confirm-title") == "Delete topic first-one and its messages?"
        page.click("#confirm-yes")
        page.wait(lambda: page.js(HELD) == 1, "it is deleted")
        page.js(LET_GO)
        until_says(page, "deleted topic first-one")
        assert {one.name for one in broker.admin.topics()}.intersection(names) == {"second-one"}
        page.leave()
