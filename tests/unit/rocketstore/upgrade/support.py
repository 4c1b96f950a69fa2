"""Directories of plain brokers that shall become a group."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rocketstore.commit_log.base_log import PlainFileReader, digest_log, find_plain_files
from rocketstore.upgrade.compare import OldLog
from tests.support.waiting import ManualClock
from tests.unit.rocketstore.commit_log.support import message, open_log, put, small_config

FILE_BYTES = 4096


def write_broker(root: Path, bodies: Sequence[bytes], file_bytes: int = FILE_BYTES) -> Path:
    """A broker's directory with these messages of ``orders``, whose keys are their numbers; cleanly stopped."""
    log = open_log(small_config(root, mapped_file_size_commit_log=file_bytes), clock=ManualClock(1_700_000_000_000))
    try:
        for number, body in enumerate(bodies):
            one = message(body, "orders", number % 4, properties={"KEYS": f"key{number}"}, born_timestamp=1)
            (result,) = put(log, one)
            assert result.ok
    finally:
        log.shutdown()
    return root


def bodies(count: int) -> list[bytes]:
    """Bodies of which about twelve fit into a file."""
    return [b"%0200d" % number for number in range(count)]


def copied(root: Path, name: str) -> Path:
    """A copy beside it."""
    return Path(shutil.copytree(root, root.with_name(name)))


def cut(root: Path, offset: int, file_bytes: int = FILE_BYTES) -> None:
    """Take away what a log holds from ``offset`` on."""
    base = offset - offset % file_bytes
    for path in sorted((root / "commitlog").iterdir()):
        if int(path.name) > base:
            path.unlink()
        elif int(path.name) == base:
            kept = path.read_bytes()[: offset - base]
            path.write_bytes(kept.ljust(file_bytes, b"\0"))


def overwrite(root: Path, offset: int, data: bytes, file_bytes: int = FILE_BYTES) -> None:
    """Change bytes of a log."""
    base = offset - offset % file_bytes
    with (root / "commitlog" / f"{base:020d}").open("r+b") as file:
        file.seek(offset - base)
        file.write(data)


def old_log(root: Path) -> OldLog:
    """A directory's log, as ``dledger upgrade check`` reads it."""
    files = find_plain_files([root / "commitlog"] if (root / "commitlog").is_dir() else [])
    return OldLog(root.name, files, digest_log(files))


def record_offsets(root: Path) -> list[int]:
    """Where the records of a log start."""
    log = old_log(root)
    return [
        head.offset
        for base, path in sorted(log.files.paths.items())
        for piece in PlainFileReader(path, base, log.files.segment_bytes)
        for head in piece.heads
    ]
