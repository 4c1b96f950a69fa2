"""The page in a real browser while the group lives: the right leader, a kill, a pause, a transfer; without reload."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dledger.errors import DLedgerError
from dledger.types import NodeId, Role
from dledger_cli.console.server import ConsoleServer
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import LocalGroup
from tests.browser.chromium import Page
from tests.support.waiting import PATIENCE_S

SHOWN_WITHIN_S = 15.0
"""On a machine that the browser, nodes and other tests share; alone it takes a second."""


class Witness:
    """Asks the survivors themselves, on a thread, when they have a new leader: what the page is measured against."""

    def __init__(self, group: LocalGroup, old: NodeId) -> None:
        self._group = group
        self._old = old
        self.leader = NodeId("")
        self.at = 0.0
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _watch(self) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        addresses = [one.client_address for one in self._group.nodes.values() if one.node_id != self._old]
        pause = threading.Event()
        with self._group.client(timeout_s=0.5) as client:
            while time.monotonic() < give_up_at:
                for address in addresses:
                    try:
                        status = client.metadata(address)
                    except DLedgerError:
                        continue
                    if status.role is Role.LEADER:
                        self.leader, self.at = status.node_id, time.monotonic()
                        return
                pause.wait(0.01)


def fail_over(page: Page, group: LocalGroup, harm: Callable[[NodeId], None]) -> float:
    """Harm the leader, and give how long after its successor first said LEADER to us the page showed it."""
    old = group.leader()
    page.wait(lambda: page.leader() == old, "the page shows the leader")
    # Asked for once, of whoever leads: that it may get no answer any more is not what this is about.
    page.wait(lambda: "Committed:" in page.text("panel-entries"), "the page shows the newest entries")
    page.js("window.notReloaded = true")

    with Witness(group, old) as witness:
        harm(old)
        page.wait(
            lambda: page.leader() not in ("", old) and page.text("verdict") == f"{page.leader()} leads", "a successor"
        )
        shown_at = time.monotonic()
    assert witness.leader == page.leader()
    assert page.js("return window.notReloaded")
    page.wait(lambda: page.state(old) == "unreachable", "the old leader is missed", SHOWN_WITHIN_S)
    return shown_at - witness.at


def test_the_page_shows_the_leader_that_the_nodes_name(
    page: Page, log_console: ConsoleServer, log_group: LocalGroup
) -> None:
    """Title, sentence, lane and term agree with what the nodes say of themselves."""
    page.open(log_console.url)
    leader = log_group.leader()
    status = log_group.statuses()[leader]

    assert page.leader() == leader
    assert page.text("verdict") == f"{leader} leads"
    assert page.driver.title.startswith(f"{leader} leads")
    assert page.text("figure-term") == str(status.term)
    assert page.text("verdict-level") == "✓ healthy"


def test_a_killed_leader_is_replaced_on_the_page_soon(
    page: Page, log_console: ConsoleServer, log_group: LocalGroup
) -> None:
    """From the moment a survivor says LEADER, asked directly every 10 ms, to the successor's name in the lanes and in
    the headline; no reload. And the dead node is shown as such soon after.
    """
    page.open(log_console.url)

    took_s = fail_over(page, log_group, log_group.kill)

    assert took_s < SHOWN_WITHIN_S
    assert page.text("verdict-level") == "! degraded"
    page.wait(
        lambda: "leads in term" in page.text("announcer") or "stopped answering" in page.text("announcer"), "it is told"
    )


def test_a_paused_leader_is_replaced_on_the_page_too(
    page: Page, log_console: ConsoleServer, log_group: LocalGroup
) -> None:
    """It keeps its connections and says nothing more, which is harder to see than a refused connection."""
    page.open(log_console.url)
    old = log_group.leader()

    took_s = fail_over(page, log_group, log_group.pause)

    assert took_s < SHOWN_WITHIN_S
    log_group.resume(old)
    page.wait(lambda: page.state(old) == "follower", "it follows again")


def test_kill_and_start_by_the_buttons(page: Page, broker_console: ConsoleServer, brokers: LocalBrokers) -> None:
    """What a newcomer does within a minute: press Kill, confirm, watch; press Start, watch."""
    page.open(broker_console.url)
    old = brokers.leader()
    page.wait(lambda: page.leader() == old, "the page shows the leader")

    page.click(f"[data-node={old}] [data-action=kill]")
    page.click("#confirm-yes")
    page.wait(lambda: page.leader() not in ("", old), "a successor leads")
    page.wait(lambda: page.state(old) == "unreachable", "the old leader is gone")
    assert not brokers.is_running(old)

    page.click(f"[data-node={old}] [data-action=restart]")
    page.wait(lambda: page.state(old) == "follower", "it is back")
    assert brokers.is_running(old)
    page.wait(lambda: page.text("verdict-level") == "✓ healthy", "all is well")


def test_pause_and_resume_by_the_buttons(page: Page, broker_console: ConsoleServer, brokers: LocalBrokers) -> None:
    """The same button turns into its opposite; the bar falls behind, and catches up."""
    page.open(broker_console.url)
    page.wait(page.leader, "somebody leads")
    follower = next(node for node in brokers.nodes if node != page.leader())
    button = f"[data-node={follower}] [data-action=pause]"
    lag = f"return Number(document.querySelector('[data-node={follower}] dd.lag').textContent.replaceAll(',', ''))"

    page.click(button)
    page.wait(lambda: page.state(follower) == "unreachable", "it is missed")
    assert page.js(f"return document.querySelector('{button}').textContent") == "Resume"
    page.wait(lambda: page.js(lag) > 5, "it falls behind")

    page.click(button)
    page.wait(lambda: page.state(follower) == "follower", "it answers again")
    page.wait(lambda: page.js(lag) <= 2, "it has caught up")


def test_leadership_is_handed_over_by_the_button(page: Page, log_console: ConsoleServer, log_group: LocalGroup) -> None:
    """After a question; the answer says who leads and how long it took. Cancelling does nothing."""
    page.open(log_console.url)
    old = log_group.leader()
    page.wait(lambda: page.leader() == old, "the page shows the leader")
    target = next(node for node in log_group.nodes if node != old)

    page.click(f"[data-node={target}] [data-action=transfer]")
    assert page.text("confirm-title") == f"Make {target} the leader?"
    page.click("#confirm button[value=no]")
    assert page.leader() == old

    page.click(f"[data-node={target}] [data-action=transfer]")
    page.click("#confirm-yes")
    page.wait(lambda: f"{target} leads now" in page.text("toasts"), "the result is shown")
    page.wait(lambda: page.leader() == target, "the page shows the new leader")
    assert log_group.leader() == target


def test_a_group_without_a_majority_is_told_as_such(
    page: Page, log_console: ConsoleServer, log_group: LocalGroup
) -> None:
    """Nobody leads; why; and that it goes on by itself when nodes are back."""
    page.open(log_console.url)
    leader = log_group.leader()
    others = [node for node in log_group.nodes if node != leader]

    for node in others:
        log_group.kill(node)
    page.wait(lambda: page.text("verdict") == "No leader", "nobody leads")
    page.wait(lambda: "2 are needed" in page.text("verdict-more"), "the reason is told")

    log_group.kill(leader)
    page.wait(lambda: page.text("verdict") == "No node responds", "nobody answers")

    log_group.start_all()
    page.wait(lambda: page.text("verdict").endswith(" leads"), "somebody leads again", 40)


def test_a_console_that_goes_is_noticed_and_one_that_returns_is_joined(page: Page, log_group: LocalGroup) -> None:
    """What is shown is marked as old; nobody has to reload."""
    from dledger_cli.console.server import open_console

    with open_console(log_group, port=0) as first:
        page.open(first.url)
        port = first.port
    page.wait(lambda: page.js("return document.getElementById('live').dataset.state") == "lost", "the loss is shown")
    assert page.js("return document.getElementById('main').classList.contains('stale')")

    with open_console(log_group, port=port):
        page.wait(lambda: page.text("live-text") == "live", "it is live again")
        page.leave()  # else it complains of this one's end, too, sooner or later
    page.found = [one for one in page.found if "ERR_CONNECTION_REFUSED" not in one and "ERR_INCOMPLETE" not in one]
