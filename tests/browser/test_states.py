"""What the page says when somebody does not answer, and whether its pictures can be read whatever they show."""

# ruff: noqa: E501  # JavaScript, which nobody wraps here

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from dledger.rpc.ports import PeerStatus
from dledger.types import LogIndex, NodeId
from dledger_cli.console.sampler import SamplePace
from dledger_cli.console.server import ConsoleServer, ListenAddress
from dledger_cli.local.group import free_ports
from dledger_cli.targets import BrokerTarget, GroupTarget
from tests.browser.chromium import Page
from tests.support.fake_group import FakeGroup, fake_group
from tests.unit.dledger_cli.console.group_pages import plain_broker

PACE = SamplePace(watched_s=0.1, unwatched_s=0.2, unsettled_s=0.1, unreachable_s=0.1, timeout_s=0.5)
CLIPPED = """
// Draw a chart with these values, note every word that goes to the canvas, and tell which of them do not fit.
const [values, floor, kind, width] = arguments;
const done = arguments[arguments.length - 1];
(async () => {
  const { Chart } = await import('/static/chart.js');
  const format = await import('/static/format.js');
  const { state, now } = await import('/static/store.js');
  const plot = document.createElement('div');
  plot.className = 'plot';
  plot.style.width = `${width}px`;
  document.body.append(plot);
  const at = now();
  const points = values.map((value, place) => ({ at_ms: at - (values.length - place) * 1000, value }));
  const kept = state.points;
  state.points = points;
  const words = [];
  const whole = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const size = this.measureText(text).width;
    const left = this.textAlign === 'right' ? x - size : this.textAlign === 'center' ? x - size / 2 : x;
    const top = this.textBaseline === 'middle' ? y - 6 : y;
    words.push({ text, left, right: left + size, top, bottom: top + 12 });
    whole.call(this, text, x, y);
  };
  const chart = new Chart(plot, document.createElement('ul'), () => [{ name: 'n', color: 'series-1', dash: [], value: (point) => point.value }], () => 60000, format[kind], floor);
  chart.render();
  CanvasRenderingContext2D.prototype.fillText = whole;
  state.points = kept;
  const height = plot.getBoundingClientRect().height;
  plot.remove();
  const clipped = words.filter((one) => one.left < 0 || one.right > width || one.top < 0 || one.bottom > height).map((one) => one.text);
  const over = words.flatMap((one, place) => words.slice(place + 1)
    .filter((other) => one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom)
    .map((other) => `${one.text} over ${other.text}`));
  const known = values.filter((value) => value !== null);
  done({ clipped, over, words: words.length, top: chart.top, highest: Math.max(floor, ...known) });
})();
"""


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    """Three log nodes; n0 leads."""
    with fake_group() as made:
        yield made


def console_of(addresses: list[str], port: int = 0) -> ConsoleServer:
    target = GroupTarget(tuple(addresses), "", 2.0)
    return ConsoleServer(target, BrokerTarget(target.bootstrap, 2.0), place=ListenAddress(port=port), pace=PACE)


def until_says(page: Page, element: str, words: str) -> None:
    page.wait(lambda: words in page.text(element), f"{element} says {words}: {page.text(element)}")


def test_nodes_that_never_answered_are_told_with_the_reason(page: Page) -> None:
    """No figure is made up, and nothing is loading for ever."""
    with console_of([f"127.0.0.1:{port}" for port in free_ports(2)]) as console:
        page.open(console.url)
        until_says(page, "verdict", "No node responds")
        until_says(page, "panel-topics", "No node responds.")

        assert "Connection refused" in page.js("return document.querySelector('.lane-note').textContent")
        figures = ["figure-term", "figure-committed", "figure-rate", "figure-latency"]
        assert [page.text(one) for one in figures] == ["\u2013"] * 4
        page.leave()


def test_a_node_that_fell_silent_is_shown_as_it_was_last_seen(page: Page, group: FakeGroup) -> None:
    """Its figures are marked as old, and say when that was; the others' are not."""
    with console_of(group.addresses) as console:
        page.open(console.url)
        until_says(page, "verdict", "n0 leads")
        group.kill(2)
        page.wait(lambda: page.state("n2") == "unreachable", "it is missed")

        old = "return [...document.querySelectorAll('.lane.old')].map((one) => one.dataset.node)"
        page.wait(lambda: page.js(old) == ["n2"], "its figures are marked")
        note = page.js("return document.querySelector('[data-node=n2] .lane-note').textContent")
        assert "last seen " in note
        assert (
            float(page.js("return getComputedStyle(document.querySelector('.lane.old .lane-figures')).opacity")) < 0.7
        )

        group.kill(0)
        group.kill(1)
        until_says(page, "verdict", "No node responds")
        assert "The last response was at" in page.text("verdict-more")
        group.restart(2)
        page.wait(lambda: "n2" not in page.js(old), "it is back")
        page.leave()


def test_without_the_console_nothing_is_said_to_be_true_now(page: Page, group: FakeGroup) -> None:
    """Neither in the headline nor in the window's title; what was true has its time."""
    with console_of(group.addresses) as console:
        page.open(console.url)
        until_says(page, "verdict", "n0 leads")
        port = console.port
    until_says(page, "verdict", "No connection to the console")

    assert page.text("verdict-level") == "? unknown"
    assert "stale" in page.js("return [...document.getElementById('main').classList]")
    assert ": n0 leads." in page.text("verdict-more")
    assert "n0 leads" not in page.js("return document.title")
    with console_of(group.addresses, port):
        until_says(page, "verdict", "n0 leads")
        assert "stale" not in page.js("return [...document.getElementById('main').classList]")
        page.leave()
    page.found = [one for one in page.found if "ERR_CONNECTION_REFUSED" not in one and "ERR_INCOMPLETE" not in one]


def test_half_of_a_group_is_no_majority(page: Page) -> None:
    """Of four nodes, three are needed."""
    with fake_group(4) as group, console_of(group.addresses) as console:
        page.open(console.url)
        until_says(page, "verdict-more", "All 4 nodes respond. Up to 1 may fail.")
        group.kill(0)
        group.kill(1)
        until_says(page, "verdict", "No leader")
        until_says(page, "verdict-more", "2 of 4 nodes respond; 3 are needed.")
        page.leave()


def test_lists_stay_with_their_time_while_no_broker_answers(page: Page, tmp_path: Path) -> None:
    """And the reason."""
    with plain_broker(tmp_path) as brokers:
        brokers.add_topic("orders", 2)
        with console_of(brokers.addresses) as console:
            page.open(console.url)
            until_says(page, "panel-topics", "orders")
            brokers.stop()
            until_says(page, "panel-topics", "As last seen at ")
            assert "orders" in page.text("panel-topics")
            page.leave()


CHARTS: list[tuple[str, float, list[float | None]]] = [
    ("rate", 10, [0.0] * 30),
    ("rate", 10, [None] * 30),
    ("rate", 10, [3.0]),
    ("rate", 10, [0.2, 0.4, 11.2]),
    ("rate", 10, [485.0] * 30),
    ("rate", 10, [1_234_567.0] * 30),
    ("rate", 10, [98_765_432_109.0, 1.0]),
    ("milliseconds", 2, [0.01] * 30),
    ("milliseconds", 2, [5.5, 2.5, None, 3.0]),
    ("milliseconds", 2, [123_456.0, 0.1]),
]


def test_words_on_charts_are_whole_and_the_scale_fits(page: Page, group: FakeGroup) -> None:
    """Whatever is shown: no word beyond the edge or over another, and the highest value in the upper part."""
    with console_of(group.addresses) as console:
        page.open(console.url)
        for (kind, floor, values), width in product(CHARTS, [300, 560, 1500]):
            found = page.driver.execute_async_script(CLIPPED, values, floor, kind, width)
            assert (kind, values, width, found["clipped"], found["over"]) == (kind, values, width, [], [])
            assert found["words"] >= 3 + (width > 300)
            assert found["highest"] <= found["top"] <= 2 * found["highest"], (kind, values)
        page.leave()


def test_a_learner_says_how_far_it_is_and_a_lost_voter_can_be_replaced(page: Page, group: FakeGroup) -> None:
    """The form asks who comes; the learner neither counts nor can be made the leader."""
    leader = group.nodes[0]
    with console_of(group.addresses) as console:
        page.open(console.url)
        until_says(page, "verdict-more", "All 3 nodes respond. Up to 1 may fail.")
        group.kill(2)
        button = "return document.querySelector('[data-node=n2] [data-action=replace]')"
        page.wait(lambda: page.js(f"{button}?.hidden === false"), "a lost voter has the button")
        assert page.js("return document.querySelector('[data-node=n1] [data-action=replace]').hidden")
        page.js(f"{button[7:]}.click()")
        page.wait(lambda: "Replace n2" in page.text("form-title"), "the form is open")
        page.js(
            "document.getElementById('form-new').value = 'n4'; document.getElementById('form-address').value = '10.0.0.4:20911'"
        )
        page.js("document.querySelector('#form-content form').requestSubmit()")
        page.wait(lambda: len(leader.changes) == 1, "the leader is asked")
        assert (leader.changes[0].node_id, leader.changes[0].replaces) == ("n4", "n2")

        leader.peers = (
            PeerStatus(NodeId("n4"), LogIndex(0), LogIndex(1), "APPEND", 9, 1, 4, "catching up", 0, 1 << 20, "behind"),
        )
        note = "return document.querySelector('[data-node=n4] .lane-note')?.textContent ?? ''"
        page.wait(lambda: "learner \u00b7 catching up" in page.js(note), "how far it is")
        assert "replaces n2" in page.js(note)
        assert (
            page.js(
                "return document.querySelector('[data-node=n4] [data-action=transfer]').getAttribute('aria-disabled')"
            )
            == "true"
        )
        until_says(page, "verdict-more", "No more may fail.")
        page.leave()
