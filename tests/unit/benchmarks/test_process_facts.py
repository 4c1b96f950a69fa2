"""Reading /proc."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from benchmarks import process_facts
from tests.support.waiting import wait_until

SMAPS = """\
55d0c0a00000-55d0c0b00000 r-xp 00000000 08:01 131                        /usr/bin/python3.11
Size:               1024 kB
Rss:                 700 kB
Pss:                 350 kB
7f0000000000-7f0040000000 rw-s 00000000 08:01 77                         {data}/n0/data/00000000000000000000
Rss:                4096 kB
7f0050000000-7f0050001000 rw-s 00000000 08:01 78                         {data}/n0/old name (deleted)
Rss:                   4 kB
7f0060000000-7f0060001000 rw-s 00000000 08:01 78                         {data}-of-another/file
Rss:                   8 kB
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]
Rss:                 100 kB
7ffd00100000-7ffd00121000 rw-p 00000000 00:00 0
Rss:                  50 kB
VmFlags: rd wr
"""


def test_resident_memory_is_split_at_the_directory(tmp_path: Path) -> None:
    """Only mappings of files below the directory count as mapped; a common prefix of names does not."""
    found = process_facts.resident(SMAPS.format(data=tmp_path), tmp_path)

    assert found == (4958 * 1024, 4100 * 1024)
    assert found.own == 858 * 1024


def test_this_process_has_memory_and_threads(tmp_path: Path) -> None:
    """The real files have the expected shape."""
    assert process_facts.resident_of(os.getpid(), tmp_path).own > 1 << 20
    wait_until(
        lambda: process_facts.threads_of(os.getpid()) >= threading.active_count(), "none begins or ends meanwhile"
    )


def test_processor_time_is_that_of_all_threads() -> None:
    """As much as this process knows to have used, to a tick."""
    before, known = process_facts.processor_s(os.getpid()), time.process_time()
    busy = threading.Thread(target=lambda: [None for _ in iter(lambda: time.process_time() < known + 0.1, False)])
    busy.start()
    busy.join()

    used = process_facts.processor_s(os.getpid()) - before
    assert abs(used - (time.process_time() - known)) <= 2 / os.sysconf("SC_CLK_TCK")
