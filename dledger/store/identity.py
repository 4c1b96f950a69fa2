"""A node's directory: its paths, its identity, and the lock that only one process can hold on it.

The file ``members`` says whose memory this directory is, and what it knows of the group besides its log:

- ``uid``: 64 random bits, made when the directory is first opened. A member with another one has forgotten (M11).
- ``configuration``: the newest *committed* one, or none while the configured peers are the members. It counts even
  above the log's end (M10). Others are in the log alone, in its no-ops from ``clear_to + 1`` on.
- ``clear_to``: every committed configuration at or below this index is known here, so segments up to it may go (M3).
- ``remembered``: how far other members were durable, for reporting after a restart (as old as its last write).

JSON with a CRC, replaced as a whole. Where it is missing or unreadable although the directory is not new, the member
knows no configuration (``lost``) until the log or a leader tells it one, and has a new uid.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from crc32c import crc32c

from dledger.config import StoreConfig
from dledger.errors import ConfigError, CorruptLogError, DirectoryLockedError, DiskError, IdentityError
from dledger.records import record
from dledger.store.fs import FileSystem, read_whole, replace_durably
from dledger.types import NO_INDEX, ClusterMember, Configuration, EntryId, LogIndex, MemberRole, NodeId, Term

_FORMAT_VERSION: Final = 1
IDENTITY_FILE: Final = "identity"
LOCK_FILE: Final = "lock"
CHECKPOINT_FILE: Final = "checkpoint"
SNAPSHOTS_DIRECTORY: Final = "snapshots"


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """The values on which a directory and the node that opens it must agree."""

    cluster_id: str
    group: str
    node_id: str
    segment_bytes: int
    index_segment_bytes: int
    format_version: int = _FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of a node's files."""

    directory: Path
    data: tuple[Path, ...]
    read_only: tuple[Path, ...]
    index: Path

    @property
    def checkpoint(self) -> Path:
        return self.directory / CHECKPOINT_FILE


def layout_of(config: StoreConfig, node_id: str) -> Layout:
    """The paths of a configuration. Raises ``ConfigError`` if no data directory is writable."""
    directory = config.base_dir / f"dledger-{node_id}"
    data = config.data_dirs or (directory / "data",)
    if not set(data) - set(config.read_only_data_dirs):
        raise ConfigError(["every data directory is read-only: name at least one writable one in data_dirs"])
    return Layout(directory, data, config.read_only_data_dirs, directory / "index")


def read_identity(directory: Path) -> StoreIdentity | None:
    """The directory's identity; ``None`` if it has none yet. Raises ``CorruptLogError`` if it is unreadable."""
    path = directory / IDENTITY_FILE
    if not path.exists():
        return None
    try:
        found = StoreIdentity(**json.loads(read_whole(path)))
    except (ValueError, TypeError, RecursionError):
        found = None
    if found is None or any(type(value) is not type(asdict(_EXAMPLE)[name]) for name, value in asdict(found).items()):
        advice = "Copy the file from another member of the group and put this node's id into it"
        raise CorruptLogError(path, 0, "cannot read the file that identifies the owner of this directory", advice)
    return found


_EXAMPLE: Final = StoreIdentity("", "", "", 0, 0)


def as_text(identity: StoreIdentity) -> str:
    return json.dumps(asdict(identity), indent=2) + "\n"


def write_identity(fs: FileSystem, directory: Path, identity: StoreIdentity) -> None:
    """Record the identity durably."""
    replace_durably(fs, directory / IDENTITY_FILE, as_text(identity).encode())


def check_identity(directory: Path, found: StoreIdentity, wanted: StoreIdentity) -> None:
    """Raise ``IdentityError`` naming every field in which the directory and the configuration differ."""
    there, here = asdict(found), asdict(wanted)
    differences = [
        f"{name} is {there[name]!r} there and {here[name]!r} here" for name in here if there[name] != here[name]
    ]
    if differences:
        raise IdentityError(
            f"{directory} belongs to another node, or was created with other settings: {'; '.join(differences)}: "
            "start it with the settings that it was created with, or give this node its own directory"
        )


class DirectoryLock:
    """An exclusive ``flock`` on a directory's lock file, held until ``release`` or the end of the process."""

    def __init__(self, directory: Path) -> None:
        self._fd = _open_lock(directory / LOCK_FILE)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise DirectoryLockedError(f"{directory} is in use by process {holder}: stop it first") from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        self._held = True

    def release(self) -> None:
        """Let another process open the directory; idempotent."""
        if self._held:
            self._held = False
            os.close(self._fd)


def _open_lock(path: Path) -> int:
    """Create it for this user only, since readers can hold the lock; never follow a link, which would be written
    through.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DiskError(f"{path} is a symbolic link, which is not allowed here: remove it") from error
        raise
    with suppress(PermissionError):  # not our file: its owner has let us open it
        os.fchmod(fd, 0o600)
    return fd


MEMBERS_FILE: Final = "members"
_log = logging.getLogger(__name__)


@record(frozen=True, slots=True)
class SavedMembers:
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
