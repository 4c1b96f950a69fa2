"""Bytes of logs for tests of replication."""

from __future__ import annotations

from pathlib import Path

from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.config import MessageStoreConfig
from tests.unit.rocketstore.commit_log.support import message, open_log, put, small_config

_open: list[PlainCommitLog] = []


def opened(config: MessageStoreConfig) -> PlainCommitLog:
    """A log that ``close_all`` closes, whatever becomes of the test."""
    return kept(open_log(config))


def kept(log: PlainCommitLog) -> PlainCommitLog:
    """The same for a log that the test has opened."""
    _open.append(log)
    return log


def close_all() -> None:
    """Close what the test has left open."""
    while _open:
        _open.pop().shutdown()


def filled(directory: Path, count: int, body: bytes = b"hello") -> PlainCommitLog:
    """A log of ``count`` messages, each its own put."""
    log = opened(small_config(directory))
    more(log, count, body)
    return log


def more(log: PlainCommitLog, count: int, body: bytes = b"hello") -> None:
    """Put further messages."""
    for number in range(count):
        put(log, message(body + b"%d" % number))


def bytes_of(log: PlainCommitLog) -> bytes:
    """The whole log, blanks included."""
    found, at = b"", log.min_offset
    while data := log.stretch(at, 1 << 20):
        found += data
        at += len(data)
    return found


def files_of(directory: Path) -> dict[str, bytes]:
    """The files of a log that is closed, without those that are blank."""
    found = {path.name: path.read_bytes() for path in (directory / "commitlog").iterdir()}
    return {name: content for name, content in found.items() if content.strip(b"\0")}
