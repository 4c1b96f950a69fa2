"""The page of all groups in a real browser: a group of real brokers, others that are none, two clusters."""

# ruff: noqa: E501  # JavaScript, which nobody wraps here

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from dledger_cli.console.server import ConsoleServer, ListenAddress
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.targets import BrokerTarget, GroupTarget
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin, Producer
from rocketstore.message.message import Message
from tests.browser.chromium import Page
from tests.browser.test_page import ATTACK, audit
from tests.support.runtime_broker import JAVA, RuntimeBroker, runtime_broker
from tests.unit.dledger_cli.console.support import request
from tests.unit.rocketstore.nameserver.wire import calling, config_in, running

NO_SUCH_NAME_SERVER = "127.0.0.1:1"


def shown(*name_servers: str) -> ConsoleServer:
    """A console of all groups behind name servers."""
    target = GroupTarget(("127.0.0.1:1",), "", 5.0)
    return ConsoleServer(
        target, BrokerTarget(target.bootstrap, 5.0, name_servers=name_servers), place=ListenAddress(port=0)
    )


@dataclass
class Known:
    """Who is behind a name server, and their console."""

    brokers: LocalBrokers
    java: list[RuntimeBroker]
    url: str


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    """Group real with three brokers, group java with two of RocketMQ's in another cluster."""
    root = tmp_path_factory.mktemp("cluster")
    with ExitStack() as stack:
        server = stack.enter_context(running(config_in(root)))
        settings = {"namesrvAddr": server.address, "mappedFileSizeCommitLog": "16m"}
        brokers = stack.enter_context(LocalBrokers(root / "brokers", name="real", settings=settings))
        java = [stack.enter_context(runtime_broker()) for _ in range(2)]
        caller = stack.enter_context(calling(server))
        for number, one in enumerate(java):
            caller.register(number, one.address, name="java", cluster="LegacyCluster", topics=("invoices", "orders"))
        brokers.master()
        with Admin(brokers.addresses) as admin:
            admin.put_topic(TopicInfo("orders", 4, 4))
        with Producer(brokers.addresses) as producer:
            producer.send(Message("orders", b"one"))
        yield Known(brokers, java, stack.enter_context(shown(server.address)).url)


def level(page: Page, name: str) -> str:
    """A card's level; empty if there is none."""
    return str(page.js("return document.querySelector(`[data-group='${arguments[0]}']`)?.dataset.level ?? ''", name))


def card(page: Page, name: str) -> str:
    return str(page.js("return document.querySelector(`[data-group='${arguments[0]}']`)?.innerText ?? ''", name))


def opened(page: Page, known: Known, **options: object) -> Page:
    known.java[1].table = JAVA
    page.open(known.url, **options)  # type: ignore[arg-type]  # whichever a test names
    page.wait(lambda: level(page, "real") == level(page, "java") == "good", "all are well")
    return page


def test_all_groups_are_shown_and_what_changes_without_reload(page: Page, known: Known) -> None:
    """Members, term, rates; then a broker that falls silent, the problem alone, and its return."""
    opened(page, known)
    page.js("window.notReloaded = true")
    master = known.brokers.master()

    assert page.text("verdict") == "All 2 groups serve"
    assert (page.text("figure-groups"), page.text("figure-brokers")) == ("2", "5 of 5")
    assert page.text("cluster-names") == "LegacyCluster, RaftCluster"
    words = card(page, "real")
    assert f"{master}\n{known.brokers.nodes[master].client_address}\nmaster" in words
    assert words.count("slave") == 2
    assert "RocketMQ V4_9_7" in card(page, "java")

    known.java[1].table = {}
    page.wait(lambda: level(page, "java") == "warn", "it is noticed")
    assert page.text("verdict") == "java: refuses to tell"
    assert page.text("problems") == "Problems (1)"
    page.click("input[value=problems]")
    visible = "return [...document.querySelectorAll('.group')].filter((one) => one.checkVisibility()).map((one) => one.dataset.group)"
    assert page.js(visible) == ["java"]

    known.java[1].table = JAVA
    page.wait(lambda: "No group has a problem." in page.text("groups-say"), "all is well again")
    page.wait(lambda: "java: serving" in page.text("events"), "it is told")
    assert page.js("return window.notReloaded")


def test_groups_are_found_by_name_and_address(page: Page, known: Known) -> None:
    """With many groups, nobody scrolls."""
    opened(page, known)
    page.js("document.getElementById('filter').focus()")
    visible = "return [...document.querySelectorAll('.group')].filter((one) => one.checkVisibility()).map((one) => one.dataset.group)"

    page.press("REA")
    assert page.js(visible) == ["real"]
    page.press(Keys.CONTROL, "a")
    page.press(known.java[0].address)
    assert page.js(visible) == ["java"]
    page.press("x")
    assert (page.js(visible), page.text("groups-say")) == ([], "No group matches.")


def test_a_group_can_be_looked_into_and_left_again(page: Page, known: Known) -> None:
    """The same page as a console for that group alone; RocketMQ's own have none, and a bad address says why."""
    opened(page, known)
    assert page.js("return document.querySelector('[data-group=java] a').checkVisibility()") is False

    page.click("[data-group=real] a")
    page.wait(lambda: page.leader() == known.brokers.leader(), "the page of the group")
    assert page.text("group-name") == "real"
    page.wait(lambda: "orders" in page.text("panel-topics"), "its topics")
    page.click("#panel-topics .expander")
    page.wait(
        lambda: page.js("return document.querySelectorAll('#panel-topics tr.inner tbody tr').length") == 4, "queues"
    )
    audit(page)

    page.click("#all-groups")
    page.wait(lambda: level(page, "real") == "good", "back again")

    page.driver.get(f"{known.url}group?broker=java")
    page.wait(lambda: page.text("verdict") == "Nothing to show", "it is refused")
    assert "RocketMQ's own brokers" in page.text("verdict-more")
    assert page.js("return document.getElementById('nodes').checkVisibility()") is False
    page.leave()
    page.found = [one for one in page.found if "broker=java" not in one]  # the browser logs every refusal


def test_pages_that_were_left_hold_no_connections(page: Page, known: Known) -> None:
    """Browsers keep them for the way back, and allow six connections to a server. Back and forth, each is live again."""
    opened(page, known)
    for _ in range(4):
        page.click("[data-group=real] a")
        page.wait(lambda: page.leader() == known.brokers.leader(), "the page of the group")
        page.click("#all-groups")
        page.wait(lambda: level(page, "real") == "good", "all groups")
    page.wait(lambda: request(f"{known.url}healthz").json()["pages"] == 1, "only this page is open")

    page.driver.back()
    page.wait(lambda: page.text("live-text") == "live" and page.leader() == known.brokers.leader(), "the group again")
    page.wait(lambda: request(f"{known.url}healthz").json()["pages"] == 1, "only this page is open")


def test_topics_are_shown_with_their_queues_in_all_groups(page: Page, known: Known) -> None:
    """How many where; opened, each queue's ends, of both kinds of brokers."""
    opened(page, known)
    row = "return document.querySelector('#topics tr[data-row=orders]')?.innerText ?? ''"
    page.wait(lambda: "java (4), real (4)" in page.js(row), "where it is")
    assert page.js("return document.querySelector('#topics tr[data-row=RaftCluster]')") is None

    page.click("#topics [data-row=orders] .expander")
    page.wait(lambda: page.js("return document.querySelectorAll('#topics tr.inner tbody tr').length") == 6, "queues")
    assert page.js("return [...document.querySelectorAll('#topics tr.inner h4 a')].map((one) => one.textContent)") == [
        "real"
    ]
    audit(page)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_passes_our_own_audit(page: Page, tmp_path: Path, theme: str) -> None:
    """Names, references, headings, contrast as computed; while all is well, and with trouble of each kind."""
    with running(config_in(tmp_path)) as server, calling(server) as caller, runtime_broker() as one:
        caller.register(0, one.address, name="java")
        with shown(server.address) as console:
            page.open(console.url, theme=theme)
            page.wait(lambda: level(page, "java") == "good", "it is well")
            page.wait(lambda: "No events yet" in page.text("events-empty"), "nothing has happened")
            audit(page)

            caller.register(1, "127.0.0.1:1", name="lost", cluster="LegacyCluster")
            one.table = {}
            page.wait(lambda: level(page, "lost") == "bad" and level(page, "java") == "warn", "trouble")
            audit(page)
            page.leave()


@pytest.mark.parametrize("width", [375, 768, 1000, 1360, 2000])
def test_nothing_sticks_out_at_any_width(page: Page, known: Known, width: int) -> None:
    """No sideways scrolling of the page, no words outside their buttons, down to a small phone."""
    page.open(known.url, width=width, height=900)
    page.wait(lambda: level(page, "real") == "good", "it is there")
    page.wait(lambda: "orders" in page.text("topics"), "topics")

    assert page.js("return document.documentElement.scrollWidth") <= width
    overflowing = page.js(
        "return [...document.querySelectorAll('button, a.ghost')].filter((one) => one.checkVisibility()"
        " && one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent)"
    )
    assert overflowing == []


def test_a_cluster_of_many_groups_with_names_that_attack(page: Page, tmp_path: Path) -> None:
    """Anybody who reaches a name server may register any printable name: it is text. Of 90 groups, those are shown that
    fit.
    """
    attack = "".join(filter(str.isprintable, ATTACK))
    with running(config_in(tmp_path)) as server, calling(server) as caller, runtime_broker() as broker:
        caller.register(0, broker.address, name="a" + attack, cluster="c" + attack, topics=("t",))
        for number in range(90):
            for broker_id in range(3):
                caller.register(
                    broker_id, f"127.0.{number}.{broker_id + 1}:1", name=f"group-{number:02}", cluster="many"
                )
        with shown(server.address, NO_SUCH_NAME_SERVER) as console:
            page.open(console.url)
            page.wait(lambda: page.text("verdict").startswith("79 of 80 groups do not serve"), "all have been asked")
            page.wait(lambda: "more brokers have registered" in page.text("groups-say"), "what is left out is told")
            page.leave()
            assert page.js("return window.attacked ?? null") is None


def test_topics_are_unknown_while_no_broker_is_registered(page: Page, tmp_path: Path) -> None:
    """To create one would be bad advice: the brokers, which are down, may have thousands."""
    with running(config_in(tmp_path)) as server, runtime_broker() as broker, shown(server.address) as console:
        page.open(console.url)
        page.wait(lambda: "No topics yet." in page.text("topics"), "there is nothing")
        with calling(server) as caller:
            caller.register(0, broker.address, name="gone", cluster="c", topics=("t",))
            page.wait(lambda: "gone (" in page.text("topics"), "its topic is there")
        page.wait(lambda: level(page, "gone") == "bad", "it is no longer registered")
        page.wait(lambda: "No broker is registered, so no topic is known." in page.text("topics"), "it is told")
        assert "Topics\n\u2013" in card(page, "gone")
        page.leave()


def test_name_servers_that_do_not_answer_are_told(page: Page) -> None:
    """Of both, why; and that nothing is known."""
    with shown(NO_SUCH_NAME_SERVER, "127.0.0.1:2") as console:
        page.open(console.url)
        page.wait(lambda: page.text("verdict") == "No name server answers", "it is told")
        assert page.js("return document.querySelectorAll('#servers [data-state=silent]').length") == 2
        assert "Connection refused" in page.text("servers")
        assert page.text("groups-say") == "No groups to show."
        audit(page)
        page.leave()
