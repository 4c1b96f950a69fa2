"""Whole sectors of a consume queue's file that are lost, or another place's, when retention looks for its begin."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rocketstore import queue_truth
from rocketstore.message.message import Message
from tests.unit.rocketstore.bench import WAIT_S, bodies, running, small_config

EXPIRED, UNITS, UNIT_BYTES = 60, 25, 20
KIB = 1024


@pytest.mark.parametrize("what", ["zeros", "older units"])
@pytest.mark.parametrize("before", [0, 1, 3, 6, 11, 40])
def test_a_lost_sector_hides_no_message_that_the_log_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, what: str
) -> None:
    """Its units say that their records have expired: the log finds the live ones, and those before them, all the same.

    The queue is a seldom used one: the log's first stretch, which says where queues begin, has none of its messages.
    """
    monkeypatch.setattr(queue_truth, "_SCAN_BYTES", 4 * KIB)
    config = small_config(
        tmp_path, mapped_file_size_consume_queue=UNIT_BYTES * 200, file_reserved_time=0, flush_interval_commit_log=10
    )
    with running(config) as store:

        def put(topic: str, count: int, body: bytes) -> None:
            for _ in range(count):
                assert store.put(Message(topic, body, 0)).ok

        for number in range(EXPIRED):
            put("T", 1, b"%d" % number)
        put("busy", 8, b"x" * 3000)
        end = EXPIRED + before + UNITS + 75
        for number in range(EXPIRED, end):
            put("T", 1, b"%d" % number)
        put("busy", 1, b"x")
        assert store.wait_dispatched(WAIT_S)
        store.flush()
        queue = store._queues.find("T", 0)
        assert queue is not None
        first_live = queue.units(EXPIRED, 1)[0].offset
        path = next((tmp_path / "consumequeue" / "T" / "0").iterdir())
        with path.open("r+b") as file:
            file.seek(UNIT_BYTES * 10)
            older = file.read(UNIT_BYTES * UNITS)
            file.seek(UNIT_BYTES * (EXPIRED + before))
            file.write(bytes(UNIT_BYTES * UNITS) if what == "zeros" else older)

        store.keep_for(lambda _durable: 16 * KIB)
        store._let_go()
        store.log.delete_expired(now_ms=sys.maxsize, immediately=True)
        store._cleaner.follow()

        assert 0 < store.log.min_offset <= first_live
        assert set(range(EXPIRED, end)) <= set(bodies(store, topic="T"))
