"""The file ``members``: whose memory this directory is, and what it knows of the group besides its log.

- ``uid``: 64 random bits, made when the directory is first opened. A member with another one has forgotten (M11).
- ``configuration``: the newest *committed* one, or none while the configured peers are the members. It counts even
  above the log's end (M10). Others are in the log alone, in its no-ops from ``clear_to + 1`` on.
- ``clear_to``: every committed configuration at or below this index is known here, so segments up to it may go (M3).
- ``remembered``: how far other members were durable, for reporting after a restart (as old as its last write).

JSON with a CRC, replaced as a whole. Where it is missing or unreadable although the directory is not new, the member
knows no configuration (``lost``) until the log or a leader tells it one, and has a new uid.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Final

from crc32c import crc32c

from dledger.members import ClusterMember, Configuration, MemberRole
from dledger.records import record
from dledger.store.fs import FileSystem, read_whole, replace_durably
from dledger.types import NO_INDEX, EntryId, LogIndex, NodeId, Term

MEMBERS_FILE: Final = "members"
_log = logging.getLogger(__name__)


@record(frozen=True, slots=True)
class SavedMembers:
    """The file's content."""

    uid: int
    configuration: Configuration | None = None
    clear_to: LogIndex = NO_INDEX
    remembered: Mapping[NodeId, EntryId] = field(default_factory=dict)
    lost: bool = False
    """An earlier file is lost, so ``configuration`` is unknown unless the whole log is there."""
    owner: str = ""
    """The member whose uid it is: a directory may be seeded with a copy of another member's."""


class MembersFile:
    """The file of an open directory. Thread-safe; a save may wait for the disk."""

    def __init__(self, fs: FileSystem, directory: Path, owner: str) -> None:
        """Read the file of the node ``owner``; in place of one that is lost, write another. Raises ``OSError``."""
        self._fs = fs
        self._directory = directory
        self._lock = threading.Lock()  # one save at a time
        found = read_members(directory)
        if found is None:
            found = SavedMembers(_new_uid(), lost=True, owner=owner)
            write_members(fs, directory, found)
        elif found.owner != owner:
            found = replace(found, uid=0, owner=owner)
            write_members(fs, directory, found)
        self._saved = found
        self._is_written = True

    @property
    def saved(self) -> SavedMembers:
        """The durable state, except perhaps ``clear_to``: see ``hold_to``."""
        return self._saved

    @property
    def uid(self) -> int:
        """Of this memory."""
        return self._saved.uid

    def save_committed(self, configuration: Configuration | None, clear_to: LogIndex) -> None:
        """Record that ``configuration`` is the newest committed one as of the entry ``clear_to``. Raises ``OSError``.

        None: there is none, if the file is not ``lost``. Nothing goes back: an older statement changes nothing.
        """
        with self._lock:
            self._put(self._merged(configuration, clear_to))

    def recall(self, uid: int) -> None:
        """The log tells the uid that the file held, or that a person vouched for: this is no other memory."""
        with self._lock, suppress(OSError):
            self._put(replace(self._saved, uid=uid))

    def vouch(self) -> None:
        """A person confirms that this memory is that of the member, whatever uid the group knows: so it has none.

        ``recall`` gives it that one, once the log tells it. Records of others are dropped: they may be the ones for
        which the same is confirmed. Raises ``OSError``.
        """
        with self._lock:
            self._put(replace(self._saved, uid=0, remembered={}))

    def hold_to(self, committed: LogIndex) -> None:
        """The log was opened, and nothing above ``committed`` is certain to stay in it.

        1. In ``flush_mode=async``, ``clear_to`` is recorded as 1000, and a power cut takes the entries from 900 on.
        2. Others are written in their place, of which entry 950 is a configuration; this member acknowledges it.
        3. It restarts before it knows that to be committed: it would look for configurations after 1000 only.

        On a full disk, the next save makes up for it.
        """
        with self._lock, suppress(OSError):
            if self._saved.clear_to > committed:
                self._saved, self._is_written = replace(self._saved, clear_to=committed), False
                self._put(self._saved)

    def settle(self) -> None:
        """The log told everything that a lost file would have. On a full disk that is so again at the next start."""
        with self._lock, suppress(OSError):
            self._put(replace(self._saved, lost=False))

    def remember(self, remembered: Mapping[NodeId, EntryId]) -> None:
        """Record what is known of others; a failed write (a full disk) is made up for by the next one."""
        with self._lock, suppress(OSError):
            self._put(replace(self._saved, remembered=dict(remembered)))

    def save_all(
        self, configuration: Configuration | None, clear_to: LogIndex, remembered: Mapping[NodeId, EntryId]
    ) -> None:
        """Both, with one write at most; a failed one is made up for by the next."""
        with self._lock, suppress(OSError):
            self._put(replace(self._merged(configuration, clear_to), remembered=dict(remembered)))

    def _merged(self, configuration: Configuration | None, clear_to: LogIndex) -> SavedMembers:
        saved = self._saved
        known = saved.configuration
        if configuration is not None and (known is None or configuration.index > known.index):
            known = configuration
        lost = saved.lost and known is None
        return replace(saved, configuration=known, clear_to=max(saved.clear_to, clear_to), lost=lost)

    def _put(self, wanted: SavedMembers) -> None:
        if wanted != self._saved or not self._is_written:
            write_members(self._fs, self._directory, wanted)
            self._saved, self._is_written = wanted, True


def create_members(fs: FileSystem, directory: Path, owner: str) -> None:
    """Write the file of the new directory of a node. Raises ``OSError``."""
    write_members(fs, directory, SavedMembers(_new_uid(), owner=owner))


def begin_new_memory(fs: FileSystem, directory: Path) -> None:
    """The log and what it promised are gone: from now on this is another memory. Raises ``OSError``."""
    if (found := read_members(directory)) is not None:
        write_members(fs, directory, replace(found, uid=_new_uid()))


def _new_uid() -> int:
    return secrets.randbits(64) or 1  # 0 means "not known"


def read_members(directory: Path) -> SavedMembers | None:
    """The file's content; None if it is missing or unreadable."""
    path = directory / MEMBERS_FILE
    try:
        crc, _, text = read_whole(path).partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("%s cannot be read, so the group's members are unknown: %s", path, error)
        return None
    try:
        if crc == b"%08x" % crc32c(text):
            return _from_json(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    _log.warning("%s is damaged, so the group's members are unknown", path)
    return None


def write_members(fs: FileSystem, directory: Path, saved: SavedMembers) -> None:
    """Replace the file durably. Raises ``OSError``."""
    text = json.dumps(_to_json(saved)).encode() + b"\n"
    replace_durably(fs, directory / MEMBERS_FILE, b"%08x\n" % crc32c(text) + text)


def _to_json(saved: SavedMembers) -> dict[str, object]:
    return {
        "uid": saved.uid,
        "configuration": None if saved.configuration is None else configuration_to_json(saved.configuration),
        "clear_to": saved.clear_to,
        "remembered": {one: [held.term, held.index] for one, held in sorted(saved.remembered.items())},
        "lost": saved.lost,
        "owner": saved.owner,
    }


def configuration_to_json(configuration: Configuration) -> dict[str, object]:
    """A configuration, with its index and term, as a JSON object."""
    return {
        "index": configuration.index,
        "term": configuration.term,
        "next_number": configuration.next_number,
        "change_id": configuration.change_id,
        "members": [
            {
                "id": one.node_id,
                "host": one.host,
                "port": one.port,
                "role": one.role.name.lower(),
                "number": one.number,
                "uid": one.uid,
                "promote": one.promote,
                "replaces": one.replaces,
            }
            for one in configuration.members
        ],
    }


def _from_json(found: dict[str, Any]) -> SavedMembers:  # Any: whatever the JSON holds, which fails below
    known = found["configuration"]
    return SavedMembers(
        uid=int(found["uid"]),
        configuration=None if known is None else configuration_from_json(known),
        clear_to=LogIndex(int(found["clear_to"])),
        remembered={
            NodeId(one): EntryId(Term(int(term)), LogIndex(int(index)))
            for one, (term, index) in found["remembered"].items()
        },
        lost=bool(found["lost"]),
        owner=str(found["owner"]),
    )


def configuration_from_json(known: dict[str, Any]) -> Configuration:  # Any: as above
    """The inverse. Raises ``ValueError``, ``TypeError``, ``KeyError`` or ``AttributeError``."""
    members = tuple(
        ClusterMember(
            NodeId(str(one["id"])),
            str(one["host"]),
            int(one["port"]),
            MemberRole[str(one["role"]).upper()],
            int(one["number"]),
            int(one["uid"]),
            bool(one["promote"]),
            str(one["replaces"]),
        )
        for one in known["members"]
    )
    index, term = LogIndex(int(known["index"])), Term(int(known["term"]))
    return Configuration(members, index, term, int(known["next_number"]), int(known["change_id"]))
