"""The directories above queues: durable once ``sync`` has returned, whoever has synced them."""

from __future__ import annotations

import threading
from pathlib import Path

from rocketstore.consume_queue.files import QueueDirectories
from tests.crash.crash_fs import FailingFs


def test_nobody_takes_another_threads_beginning_for_the_end(tmp_path: Path) -> None:
    """A checkpoint would tell of queues whose directories are still being synced."""
    fs = FailingFs()
    directories = QueueDirectories(fs)
    other = threading.Thread(target=directories.sync)
    waited: list[bool] = []

    def slowly(call: str, _path: str) -> None:
        if call == "sync_dir" and other.ident is None:
            other.start()
            other.join(0.2)  # it cannot end before this one has
            waited.append(other.is_alive())

    fs.fails = slowly
    directories.make(tmp_path / "T" / "0")

    directories.sync()
    other.join()

    assert waited == [True]
