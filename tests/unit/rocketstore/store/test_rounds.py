"""Periodic work: after an interval, or at once when asked for."""

from __future__ import annotations

import threading

from dledger.clock import Clock
from dledger.runtime.threads import Supervisor
from rocketstore.store.rounds import Periodic
from tests.support.waiting import wait_until


def periodic(interval_ms: int, done: list[str], failures: list[BaseException]) -> Periodic:
    def act() -> None:
        done.append(threading.current_thread().name)

    return Periodic("rocketstore-test", interval_ms, act, clock=Clock(), supervisor=Supervisor(failures.append))


def test_it_acts_at_intervals_and_stops() -> None:
    done: list[str] = []
    work = periodic(5, done, [])
    work.start()

    wait_until(lambda: len(done) >= 3, "three rounds")

    assert work.stop(60)
    assert set(done) == {"rocketstore-test"}


def test_it_acts_at_once_when_asked_even_before_it_starts() -> None:
    done: list[str] = []
    work = periodic(3_600_000, done, [])
    work.request()
    work.start()
    wait_until(lambda: len(done) == 1, "the first request")

    work.request()
    wait_until(lambda: len(done) == 2, "the second request")

    assert work.stop(60)


def test_stopping_what_never_started_is_nothing() -> None:
    assert periodic(5, [], []).stop(60)
