"""The bare loop really makes records: a baseline that skipped work would flatter nobody."""

from __future__ import annotations

import mmap
import os

from crc32c import crc32c

from benchmarks.scenarios import store
from benchmarks.store_access import BODY_BYTES, RECORD_BYTES
from dledger.store.format import HEADER


def test_the_bare_loop_writes_every_record_once() -> None:
    """Header with the body's CRC, then the body, record after record to the end of the target."""
    bodies = [os.urandom(BODY_BYTES) for _ in range(4)]

    with mmap.mmap(-1, 3 * 4 * RECORD_BYTES) as target:
        per_second = store.bare_appends_per_second(target, bodies)
        written = bytes(target)

    assert per_second > 0
    for number in range(12):
        record = written[number * RECORD_BYTES : (number + 1) * RECORD_BYTES]
        fields = HEADER.unpack_from(record)
        assert record[HEADER.size :] == bodies[number % 4]
        assert (fields[0], fields[1], fields[7]) == (1, RECORD_BYTES, crc32c(bodies[number % 4]))
