"""``config/brokerState.json``: the tables as they were before one queue offset of the state topic.

It only shortens the replay of that topic, so a missing or damaged one is never an error. The file is one JSON object
``{"checksum": CRC32C, "state": {...}}``, formatted by Python's ``json``, because the checksum is that of the bytes of
``state``; it is replaced atomically.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from crc32c import crc32c

from dledger.store.fs import FileSystem, make_dirs_durably, read_whole, replace_durably
from rocketstore.state.changes import Change, MalformedStateError, changes_from_json, encode_change

SNAPSHOT_FILE: Final = "brokerState.json"
SNAPSHOT_VERSION: Final = 1
_CHANGES_MAX: Final = 4_000_000
_FORMAT: Final = b'{"checksum":%d,"state":%b}\n'

_log = logging.getLogger("rocketstore")


@dataclass(frozen=True, slots=True)
class BrokerSnapshot:
    """One node's snapshot of broker state.

    ``next_offset`` is the first message of the state topic not in it; ``last_record`` the physical offset and body CRC
    of the previous one, to recognise a different log (None: there was none). ``complete`` is false if changes are known
    to be missing. ``imported``: the SHA-256 of those of RocketMQ's files beside it whose contents are in it, by name.
    """

    changes: tuple[Change, ...] = ()
    next_offset: int = 0
    last_record: tuple[int, int] | None = None
    complete: bool = True
    imported: Mapping[str, str] = field(default_factory=dict)


def write_snapshot(fs: FileSystem, directory: Path, snapshot: BrokerSnapshot) -> None:
    """Replace the file. Raises ``OSError``."""
    value: dict[str, object] = {
        "version": SNAPSHOT_VERSION,
        "next": snapshot.next_offset,
        "last": snapshot.last_record,
        "complete": snapshot.complete,
    }
    if snapshot.imported:
        value["imported"] = dict(snapshot.imported)
    head = json.dumps(value, separators=(",", ":")).encode()[:-1]
    changes = b",".join(
        encode_change(change).data for change in snapshot.changes
    )  # each by itself: json holds the interpreter until it ends
    state = b'%b,"changes":[%b]}' % (head, changes)
    make_dirs_durably(fs, directory) if not directory.exists() else None
    replace_durably(fs, directory / SNAPSHOT_FILE, _FORMAT % (crc32c(state), state))


def read_snapshot(directory: Path) -> BrokerSnapshot | None:
    """The file's contents; None, with a log line, if it is unusable."""
    path = directory / SNAPSHOT_FILE
    try:
        return decode_snapshot(read_whole(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, MalformedStateError) as error:
        _log.warning("%s: unusable, replaying broker state from the log: %s", path, error)
        return None


def decode_snapshot(content: bytes) -> BrokerSnapshot:
    """Parse the file. Raises ``MalformedStateError``, or what Python raises for other malformed values."""
    start = content.index(b'"state":') + len(b'"state":')
    state = content[start:].rstrip()[:-1]
    checksum = json.loads(content)["checksum"]
    if crc32c(state) != checksum:
        raise MalformedStateError("its checksum is wrong")
    value = json.loads(state)
    if value["version"] != SNAPSHOT_VERSION:
        raise MalformedStateError(f"its version is {value['version']!r}")
    last = value["last"]
    return BrokerSnapshot(
        changes=changes_from_json(value["changes"], count_max=_CHANGES_MAX),
        next_offset=int(value["next"]),
        last_record=None if last is None else (int(last[0]), int(last[1])),
        complete=bool(value["complete"]),
        imported=_texts(value.get("imported", {})),
    )


def _texts(value: object) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise MalformedStateError("what it says of imported files is unusable")
    return value
