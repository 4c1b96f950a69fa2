"""What is the matter with a node: it begins, it ends, it is bounded, and everybody who looks is told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.clock import Clock
from dledger.config import Member, ServerConfig, StoreConfig
from dledger.monitoring import CONDITIONS_MAX, LIMIT_TOLD_MS, TEXT_MAX, Condition, ConditionKind, Conditions
from dledger.rpc.clients import codec as client_codec
from dledger.server import DLedgerServer
from dledger.types import NodeId
from dledger_cli.local.group import free_ports
from tests.support.waiting import ManualClock, wait_until

KIND = ConditionKind


class _Clock(Clock):
    """Time that a test moves; the wall goes along."""

    def __init__(self) -> None:
        self.now_ms = 1_000

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + self.now_ms


@pytest.fixture
def clock() -> _Clock:
    """Time of the test's own."""
    return _Clock()


@pytest.fixture
def conditions(clock: _Clock) -> Conditions:
    """Of a node with which nothing is the matter."""
    return Conditions("n0", clock)


def test_a_condition_holds_from_its_beginning_until_it_is_cleared(conditions: Conditions, clock: _Clock) -> None:
    """Since when is that of the first time; a new message replaces the old one; other subjects are other conditions."""
    conditions.set(KIND.DAMAGED, "entry 7", subject="/data/0")
    clock.now_ms += 500
    conditions.set(KIND.DAMAGED, "entry 8", subject="/data/0")
    conditions.set(KIND.DAMAGED, "missing", subject="/data/1")

    since_ms = 1_700_000_001_000
    assert conditions.now() == (
        Condition("damaged", "entry 8", since_ms, "/data/0"),
        Condition("damaged", "missing", since_ms + 500, "/data/1"),
    )
    conditions.clear(KIND.DAMAGED, "/data/0")
    conditions.clear(KIND.DAMAGED, "/data/none")
    assert [one.subject for one in conditions.now()] == ["/data/1"]
    conditions.clear(KIND.DAMAGED, "/data/1")
    assert conditions.now() == ()


def test_a_limit_ends_by_itself_once_nobody_runs_into_it(conditions: Conditions, clock: _Clock) -> None:
    """Whoever refuses a request knows that the limit is reached; nobody knows when it no longer is."""
    conditions.set(KIND.AT_LIMIT, "too many", subject="streams_max", for_ms=60_000)
    clock.now_ms += 59_000
    conditions.set(KIND.AT_LIMIT, "too many", subject="streams_max", for_ms=60_000)
    clock.now_ms += 59_000
    assert conditions.holds(KIND.AT_LIMIT)
    assert conditions.holds(KIND.AT_LIMIT, "streams_max")
    assert not conditions.holds(KIND.AT_LIMIT, "topics_max")

    clock.now_ms += 1_000
    assert not conditions.holds(KIND.AT_LIMIT)


def test_beginning_and_end_are_a_line_each_however_often_it_is_said(
    conditions: Conditions, clock: _Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Not once per refused request."""
    with caplog.at_level(logging.INFO, "dledger"):
        for _ in range(5):
            conditions.set(KIND.DISK_FULL, "no room")
        clock.now_ms += 2_500
        for _ in range(5):
            conditions.clear(KIND.DISK_FULL)

    assert [record.getMessage() for record in caplog.records] == [
        "n0: disk_full: no room",
        "n0: disk_full: over after 2.5 s (no room)",
    ]
    assert [getattr(record, "began", None) for record in caplog.records] == [True, False]


def test_there_is_a_bound_and_one_line_says_that_it_is_reached(
    conditions: Conditions, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk on which every file is bad fills no memory and no log; texts are bounded and can be sent."""
    for number in range(CONDITIONS_MAX + 50):
        conditions.set(KIND.DAMAGED, "x" * 10_000, subject=f"{number}\udcff")

    assert len(conditions.now()) == CONDITIONS_MAX
    assert len(caplog.records) == CONDITIONS_MAX + 1
    assert all(len(one.message) == TEXT_MAX for one in conditions.now())
    assert conditions.now()[0].subject == "0?"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DLedgerServer]:
    """A group of one."""
    (port,) = free_ports(1)
    member = Member(NodeId("n0"), "127.0.0.1", port)
    store = StoreConfig(tmp_path, segment_bytes=1 << 20, index_segment_bytes=1 << 16)
    server = DLedgerServer(ServerConfig(node_id=NodeId("n0"), members=(member,), client_port=0, store=store))
    server.start()
    yield server
    server.stop(graceful=False)


def test_a_node_tells_its_conditions_in_its_status_over_the_wire(node: DLedgerServer) -> None:
    """Kinds of later versions arrive as they are."""
    wait_until(lambda: node.status().leader is not None, "it leads")
    node.conditions.clear(KIND.NO_STANDING)
    node.conditions.set(KIND.REPAIRING, "2 segments left", subject="data")

    (told,) = client_codec.decode_metadata(client_codec.encode_metadata(node.status())).conditions

    assert (told.kind, told.message, told.subject) == ("repairing", "2 segments left", "data")
    assert (told,) == node.conditions.now()


def test_a_limit_is_told_by_the_setting_that_its_refusal_names() -> None:
    """The last one in brackets; it ends by itself when nothing was refused for a minute."""
    clock = ManualClock()
    conditions = Conditions("n0", clock)
    conditions.limit("(x) 5 pulls are waiting, the limit (pulls_waiting_max)")
    conditions.limit("no room")

    assert [(one.kind, one.subject) for one in conditions.now()] == [
        ("at_limit", "pulls_waiting_max"),
        ("at_limit", "requests"),
    ]

    clock.now_ms += LIMIT_TOLD_MS
    assert conditions.now() == ()


def test_a_node_says_which_segments_it_removed_early_until_an_hour_after_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acknowledged entries went, as ``force_clean`` asks; once none has gone for so long, nothing is the matter."""
    monkeypatch.setattr("dledger.maintenance.REMOVED_EARLY_TOLD_MS", 1500)
    (port,) = free_ports(1)
    store = StoreConfig(
        tmp_path,
        segment_bytes=1 << 16,
        index_segment_bytes=1 << 13,
        force_clean=True,
        disk_check_ratio=1e-9,
        disk_clean_ratio=1e-9,
        disk_full_ratio=1.0,
        clean_interval_ms=20,
    )
    member = Member(NodeId("n0"), "127.0.0.1", port)
    server = DLedgerServer(ServerConfig(node_id=NodeId("n0"), members=(member,), client_port=0, store=store))
    server.start()
    try:
        wait_until(lambda: server.status().leader is not None, "it leads")
        for _ in range(8):
            server.submit_append([bytes(30_000)], lambda _result: None)
        told: list[str] = []

        def is_told() -> bool:
            told.extend(one.message for one in server.conditions.now() if one.kind == KIND.REMOVED_EARLY)
            return bool(told)

        wait_until(is_told, "a segment was removed")
        assert "segments were removed before they had expired, the last one with entries " in told[0]
        assert told[0].endswith("full, and force_clean=true")
        wait_until(lambda: not server.conditions.holds(KIND.REMOVED_EARLY), "none was removed for a while")
        assert server.log.forced_segments > 0
    finally:
        server.stop(graceful=False)
