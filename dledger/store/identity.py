"""A node's directory: its paths, its identity, and the lock that only one process can hold on it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from dledger.config import StoreConfig
from dledger.errors import ConfigError, CorruptLogError, DirectoryLockedError, DiskError, IdentityError
from dledger.store.fs import FileSystem, read_whole, replace_durably

FORMAT_VERSION: Final = 1
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
    format_version: int = FORMAT_VERSION


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
    """The file's content."""
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
