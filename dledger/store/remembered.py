"""This member's knowledge of how far the others were durable, kept for reporting after a restart.

A small JSON file with a CRC, replaced as a whole. It is as old as its last write: about a second while the group works.
A missing (an earlier version's directory) or unreadable one counts as empty.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from crc32c import crc32c

from dledger.store.fs import FileSystem, read_whole, replace_durably
from dledger.types import EntryId, LogIndex, NodeId, Term

REMEMBERED_FILE: Final = "remembered"
_log = logging.getLogger(__name__)


def read_remembered(directory: Path) -> dict[NodeId, EntryId]:
    """The last saved state; empty if it cannot be known."""
    path = directory / REMEMBERED_FILE
    try:
        crc, _, text = read_whole(path).partition(b"\n")
    except FileNotFoundError:
        return {}
    except OSError as error:
        _log.warning("%s cannot be read, so nothing is remembered: %s", path, error)
        return {}
    if crc != b"%08x" % crc32c(text):
        _log.warning("%s is damaged, so nothing is remembered", path)
        return {}
    found = json.loads(text)
    return {NodeId(one): EntryId(Term(term), LogIndex(index)) for one, (term, index) in found.items()}


class RememberedFile:
    """The file of a running member; used by one thread at a time."""

    def __init__(self, fs: FileSystem, directory: Path) -> None:
        self._fs = fs
        self._directory = directory
        self._saved: dict[NodeId, EntryId] = {}

    def save(self, remembered: Mapping[NodeId, EntryId]) -> None:
        """Write it unless it is up to date. A failed write (a full disk) is tried again."""
        if remembered == self._saved:
            return
        entries = {one: [held.term, held.index] for one, held in sorted(remembered.items())}
        text = json.dumps(entries).encode() + b"\n"
        with suppress(OSError):
            replace_durably(self._fs, self._directory / REMEMBERED_FILE, b"%08x\n" % crc32c(text) + text)
            self._saved = dict(remembered)


def forget_remembered(fs: FileSystem, directory: Path) -> None:
    """Make the next start remember nothing. Raises ``OSError``."""
    with suppress(FileNotFoundError):
        fs.unlink(directory / REMEMBERED_FILE)
        fs.sync_dir(directory)
