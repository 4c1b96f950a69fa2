"""Exactly-once append under SIGKILL: every entry is acknowledged, and every entry is in the log once."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

from dledger.client import AppendFuture, DLedgerClient
from dledger.errors import DLedgerError
from tests.integration.harness import Group
from tests.support.waiting import wait_until
from tests.support.workload import read_log

KILLS = 2
TIMEOUT_S = 120.0
PACE_S = 0.002


class Load:
    """Three ways to append at once, each numbering its bodies, until told to stop; every failure is kept."""

    def __init__(self, client: DLedgerClient) -> None:
        self._client = client
        self._stop = threading.Event()
        self.acked: dict[bytes, int] = {}
        self.failures: list[DLedgerError] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(self._single, name)) for name in ("a", "b", "c")
        ] + [threading.Thread(target=self._guarded, args=(way, way.__name__)) for way in (self._named, self._pipelined)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def await_more(self, count: int) -> None:
        """Return when so many more entries are acknowledged."""
        goal = len(self.acked) + count
        wait_until(lambda: len(self.acked) >= goal or bool(self.failures), f"{count} more acknowledged")

    def _guarded(self, way: Callable[[str], None], name: str) -> None:
        try:
            way(name)
        except DLedgerError as error:
            self.failures.append(error)

    def _single(self, name: str) -> None:
        for number in itertools.count():
            if self._stop.is_set():
                return
            body = b"%s/%d" % (name.encode(), number)
            self.acked[body] = self._client.append(body).index

    def _named(self, name: str) -> None:
        sequence = self._client.producer_sequence("app/0")
        while not self._stop.is_set():
            bodies = [b"%s/%d" % (name.encode(), sequence + offset) for offset in range(5)]
            places = self._client.append_as("app/0", sequence, bodies)
            self.acked.update(zip(bodies, (one.index for one in places), strict=True))
            sequence += len(bodies)

    def _pipelined(self, name: str) -> None:
        for number in itertools.count():
            if self._stop.wait(PACE_S):
                self._client.flush()
                return
            body = b"%s/%d" % (name.encode(), number)
            self._client.submit(body).add_done_callback(partial(self._note, body))

    def _note(self, body: bytes, done: AppendFuture) -> None:
        error = done.exception(0)
        if error is None:
            self.acked[body] = done.result(0).index
        else:
            self.failures.append(error)


def test_every_entry_is_stored_once_while_leaders_are_killed(make_group: Callable[..., Group]) -> None:
    """No append fails, none is stored twice, and each is where its result says; small bounds make snapshots many."""
    group = make_group(settings={"producer_snapshot_entries": "50"})
    group.start_all()
    group.leader()
    with DLedgerClient(group.addresses, timeout_s=TIMEOUT_S) as client, Load(client) as load:
        for _ in range(KILLS):
            load.await_more(150)
            leader = group.leader()
            group.kill(leader)
            load.await_more(150)
            group.start(leader)
        load.await_more(50)

    assert load.failures == []
    digests = group.digests()
    assert len(set(digests.values())) == 1
    with DLedgerClient(group.addresses) as client:
        log = read_log(client, 0, max(one.committed_index for one in group.told_by().values()))
    counts = Counter(body for body in log.values() if body is not None)
    assert [body for body, count in counts.items() if count > 1] == []
    assert sorted(counts) == sorted(load.acked)
    assert [body for body, index in load.acked.items() if index >= 0 and log[index] != body] == []
