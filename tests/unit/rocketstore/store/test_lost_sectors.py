"""Whole sectors of a consume queue's file that are lost, or another place's, when retention looks for its begin."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rocketstore.consume_queue import queue_check
from rocketstore.message.message import Message
from tests.unit.rocketstore.bench import WAIT_S, bodies, running, small_config

UNIT_BYTES = 20
KIB = 1024
SECTOR, PAGE = 25, 204
"""As units."""


@pytest.mark.parametrize("what", ["zeros", "older units"])
@pytest.mark.parametrize(
    ("expired", "before", "units"),
    [
        *((60, before, SECTOR) for before in (0, 1, 3, 6, 11, 40)),
        *((450, 40, units) for units in (PAGE, 255, 270, 2 * PAGE)),
        (450, 0, 270),
        (450, 300, 270),
        (900, 1, 4 * PAGE),
    ],
)
def test_lost_sectors_hide_no_message_that_the_log_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expired: int, before: int, units: int, what: str
) -> None:
    """Its units say that their records have expired: the log finds the live ones, and those before them, all the same.

    The queue is a seldom used one: the log's first stretch, which says where queues begin, has none of its messages.
    """
    monkeypatch.setattr(queue_check, "_SCAN_BYTES", 4 * KIB)
    config = small_config(
        tmp_path, mapped_file_size_consume_queue=UNIT_BYTES * 2000, file_reserved_time=0, flush_interval_commit_log=10
    )
    with running(config) as store:

        def put(topic: str, count: int, body: bytes) -> None:
            for _ in range(count):
                assert store.put(Message(topic, body, 0)).ok

        for number in range(expired):
            put("T", 1, b"%d" % number)
        busy_from = store.log.max_offset
        put("busy", 16, b"x" * 3000)
        end = expired + before + units + 75
        for number in range(expired, end):
            put("T", 1, b"%d" % number)
        put("busy", 1, b"x")
        assert store.wait_dispatched(WAIT_S)
        store.flush()
        queue = store._derived.queues.find("T", 0)
        assert queue is not None
        first_live = queue.units(expired, 1)[0].offset
        path = next((tmp_path / "consumequeue" / "T" / "0").iterdir())
        with path.open("r+b") as file:
            file.seek(UNIT_BYTES * 10)
            older = file.read(UNIT_BYTES * units)
            file.seek(UNIT_BYTES * (expired + before))
            file.write(bytes(UNIT_BYTES * units) if what == "zeros" else older)

        kept_from = -(-busy_from // (16 * KIB)) * 16 * KIB
        store.keep_for(lambda _durable: kept_from)
        store._rounds._let_go()
        store.log.delete_expired(now_ms=sys.maxsize, immediately=True)
        store._rounds.cleaner.follow()

        assert busy_from <= store.log.min_offset <= first_live - 6 * KIB
        assert set(range(expired, end)) <= set(bodies(store, topic="T"))
