"""Preparing disk space ahead: what is touched, and that appends never notice."""

from __future__ import annotations

import threading
from pathlib import Path

from dledger.store.format import segment_name
from tests.crash.crash_fs import IO_ERROR, NO_SPACE, FailingFs
from tests.unit.dledger.store.support import UnsyncedFs, bodies_of, fill, open_store, small_config


def test_the_first_segment_is_prepared_and_a_window_warmed(tmp_path: Path) -> None:
    """A new log has its segment before the first append; the window is bounded."""
    fs = FailingFs()
    store = open_store(small_config(tmp_path), fs)

    while store.warm():
        pass

    assert {path.name for path in (store.directory / "data").iterdir()} == {segment_name(0)}
    fs.calls.clear()
    assert not store.warm()
    fill(store, 1)
    assert [call for call, _ in fs.calls] == ["write", "write"]
    store.close()


def test_the_next_segment_is_prepared_once_half_is_used(tmp_path: Path) -> None:
    """Rolling over then creates nothing."""
    fs = FailingFs()
    store = open_store(small_config(tmp_path), fs)
    bodies = fill(store, 16)
    while store.warm():
        pass
    assert (store.directory / "data" / segment_name(4096)).exists()
    fs.calls.clear()
    bodies += fill(store, 16)
    assert not [call for call, path in fs.calls if call in ("allocate", "rename") and "/data/" in path]
    assert bodies_of(store) == bodies
    store.close()


def test_a_full_disk_while_preparing_is_not_yet_a_problem(tmp_path: Path) -> None:
    """Appends go on while the present segment has room."""
    fs = FailingFs()
    store = open_store(small_config(tmp_path), fs)
    fill(store, 16)
    fs.fails = lambda call, _path: NO_SPACE if call == "allocate" else None

    assert not store.warm()

    assert not store.disk_full
    fill(store, 2)
    fs.fails = lambda _call, _path: None
    store.close()


def test_warming_races_with_appends_truncations_and_rolls(tmp_path: Path) -> None:
    """The warmer only ever writes zeros where nothing is, whatever happens beside it."""
    store = open_store(small_config(tmp_path, segment_bytes=16384, warm_bytes=8192), UnsyncedFs())
    stop = threading.Event()

    def warm() -> None:
        while not stop.is_set():
            store.warm()

    thread = threading.Thread(target=warm)
    thread.start()
    expected: list[bytes] = []
    try:
        for number in range(300):
            expected += fill(store, 10, size=50 + number % 200)
            if number % 7 == 0:
                store.truncate(store.last.index)
                del expected[-1]
    finally:
        stop.set()
        thread.join()
    assert bodies_of(store) == expected
    store.close()


def test_an_io_error_while_preparing_poisons(tmp_path: Path) -> None:
    """It is the same disk."""
    fs = FailingFs(lambda call, path: IO_ERROR if call == "write" and path.endswith("0" * 20) else None)
    store = open_store(small_config(tmp_path), fs)
    error = None
    try:
        while store.warm():
            pass
    except Exception as caught:  # noqa: BLE001 - its type is what is tested
        error = caught
    assert type(error).__name__ == "DiskError"
    store.close()
