"""One thread per node asks it: often while somebody looks, seldom otherwise, and never waits for another node."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from dledger.errors import RequestTimeoutError, UnavailableError
from dledger_cli.console.history import History
from dledger_cli.console.probe import NodeState
from dledger_cli.console.sampler import SamplePace, Sampler
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.console.support import FakeProbe, answer, summary

QUICK = SamplePace(
    watched_s=0.01, unwatched_s=30, unsettled_s=0.01, unreachable_s=0.02, timeout_s=0.2, retry_timeout_s=0.1
)


@pytest.fixture
def probe() -> FakeProbe:
    made = FakeProbe()
    made.answers = {
        "h:1": answer(summary("n0", NodeState.LEADER)),
        "h:2": answer(summary("n1")),
        "h:3": answer(summary("n2")),
    }
    return made


@pytest.fixture
def history() -> History:
    return History(["h:1"])


@pytest.fixture
def sampler(probe: FakeProbe, history: History) -> Iterator[Sampler]:
    made = Sampler(probe, history, QUICK)
    yield made
    made.stop()


def state_of(history: History, node: str) -> str:
    nodes = history.snapshot(0)["nodes"]
    assert isinstance(nodes, list)
    return next((str(one["state"]) for one in nodes if one["node"] == node), "")


def test_members_that_are_learnt_are_asked_too(sampler: Sampler, history: History) -> None:
    """From one address to the whole group."""
    sampler.start()

    wait_until(lambda: state_of(history, "n2") == "follower", "the third node was asked")


def test_nobody_looks_means_hardly_any_questions(sampler: Sampler, probe: FakeProbe, history: History) -> None:
    """And somebody looking means questions at once, without waiting for the slow turn's end."""
    sampler.start()
    wait_until(lambda: state_of(history, "n2") == "follower", "everybody was asked once")
    assert probe.asked["h:1"] == 1

    sampler.watch(watched=True)
    wait_until(lambda: probe.asked["h:1"] > 5, "it is asked often")

    sampler.watch(watched=False)
    wait_until(lambda: len({_asked_after(probe, 0.1) for _ in range(2)}) == 1, "it is asked no more")


def _asked_after(probe: FakeProbe, seconds: float) -> int:
    threading.Event().wait(seconds)
    return probe.asked["h:1"]


def test_a_node_that_hangs_delays_nobody(sampler: Sampler, probe: FakeProbe, history: History) -> None:
    """A paused process keeps its requests until their deadline."""
    probe.blocked["h:1"] = threading.Event()
    probe.answers["h:1"] = RequestTimeoutError("no answer from h:1 in time")
    sampled = Sampler(probe, History(["h:1", "h:2"]), QUICK)
    sampled.watch(watched=True)
    try:
        sampled.start()
        started = time.monotonic()
        wait_until(lambda: probe.asked.get("h:2", 0) >= 5, "the other one is asked on")
        assert probe.asked.get("h:1", 0) <= 1 + (time.monotonic() - started) / QUICK.retry_timeout_s
    finally:
        sampled.stop()


def test_a_dead_node_is_asked_on_and_seen_when_it_is_back(sampler: Sampler, probe: FakeProbe, history: History) -> None:
    """Unreachable, then what it says again."""
    sampler.watch(watched=True)
    sampler.start()
    wait_until(lambda: state_of(history, "n2") == "follower", "it answers")
    back = probe.answers["h:3"]

    probe.answers["h:3"] = UnavailableError("h:3 is unreachable")
    wait_until(lambda: state_of(history, "n2") == "unreachable", "it is missed")

    probe.answers["h:3"] = back
    wait_until(lambda: state_of(history, "n2") == "follower", "it is back")


def test_stopping_ends_every_thread(probe: FakeProbe, history: History) -> None:
    """Also one whose request hangs."""
    probe.blocked["h:2"] = threading.Event()
    sampler = Sampler(probe, history, QUICK)
    sampler.start()
    wait_until(lambda: "h:2" in probe.asked, "the second one is asked")

    sampler.stop()

    assert probe.closed
    assert not [one for one in threading.enumerate() if one.name.startswith("dledger-console-h:")]
