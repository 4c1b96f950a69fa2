"""A directory that grows by complete batches, for any reader of Parquet.

::

    OUT/
      batch=00000000/                    visible to readers: Spark, pyarrow, DuckDB
        _manifest.json                   its contents, and how far it reaches
        topic=orders/date=2026-11-20/part-….parquet
      _state/                            readers skip names that begin with _ or .
        about.json                       what belongs here; another log or selection of rows is refused
        lock                             held while a job writes
        staging-…/                       a batch being written

A batch is written to a staging directory, synced, and then renamed: from the rename on it counts, together with its
manifest. So no other state can contradict the batches. A killed run leaves a staging directory, which the next run
removes. Two runs at once are refused by the lock and, on file systems without locks, by the rename, which never
replaces a batch.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dledger.errors import ConfigError
from dledger_spark.errors import JobBusyError, JobError

MANIFEST: Final = "_manifest.json"
STATE: Final = "_state"
_STAGING: Final = "staging-"
_BATCH: Final = re.compile(r"batch=(\d{8,})")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True, slots=True)
class BatchDirectory:
    """An open directory, whose lock is held. Created by ``open_batches``."""

    path: Path
    """Absolute, because staging directories are passed to Spark as URIs."""

    def numbers(self) -> list[int]:
        """The batches, in order."""
        found = (_BATCH.fullmatch(one.name) for one in self.path.iterdir() if one.is_dir())
        return sorted(int(one[1]) for one in found if one)

    def place(self, number: int) -> Path:
        """The path of a batch, existing or not."""
        return self.path / f"batch={number:08d}"

    def manifest(self, number: int) -> dict[str, Any]:  # Any: a JSON document
        """A batch's manifest. Raises ``JobError`` if it is missing or invalid."""
        path = self.place(number) / MANIFEST
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise JobError(
                f"{path} cannot be read ({error}): was the batch changed by something else? Move it away, and "
                "its contents will be written again"
            ) from error
        if not isinstance(document, dict):
            raise JobError(f"{path} is not a manifest: move the batch away, and its contents will be written again")
        return document

    def staging(self) -> Path:
        """A new staging directory for a batch, not created yet."""
        return self.path / STATE / f"{_STAGING}{uuid.uuid4().hex}"

    def publish(self, number: int, staging: Path, manifest: Mapping[str, Any]) -> Path:
        """Make the staged files batch ``number``, durably and atomically.

        Raises ``JobBusyError`` if the batch exists already, because another run has written it meanwhile.
        """
        staging.mkdir(exist_ok=True)  # a batch without rows has no files
        (staging / MANIFEST).write_text(json.dumps(manifest, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        _sync_below(staging)
        place = self.place(number)
        try:
            staging.rename(place)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise JobBusyError(
                    f"{place} already exists: another run is writing to {self.path}; wait for it to end"
                ) from error
            raise
        _sync(self.path)
        return place


@contextmanager
def open_batches(path: Path, about: Mapping[str, Any]) -> Iterator[BatchDirectory]:
    """Open a directory of batches for writing, or create one.

    ``about`` identifies its contents. Raises ``JobBusyError`` while another run writes, ``ConfigError`` if the
    directory has other contents or is not a directory of batches.
    """
    refuse_uri(path)
    path = path.absolute()
    state = path / STATE
    if path.is_dir() and not state.is_dir() and any(not one.name.startswith(".") for one in path.iterdir()):
        raise ConfigError([f"{path} is not empty and was not written by such a job: name another directory"])
    state.mkdir(parents=True, exist_ok=True)
    with locked(state / "lock", path):
        _check_about(state / "about.json", about, path)
        for left in state.glob(f"{_STAGING}*"):
            shutil.rmtree(left)
        yield BatchDirectory(path)


def refuse_uri(path: Path) -> None:
    """Raises ``ConfigError`` for an address of an object store, where files cannot be synced and renamed."""
    found = _SCHEME.match(str(path).replace(":/", "://", 1))
    if found:
        raise ConfigError(
            [
                f"{path}: {found[1]} is not a mounted file system: write to a directory that all workers share, and "
                "copy it from there"
            ]
        )


@contextmanager
def locked(file: Path, path: Path) -> Iterator[None]:
    """Hold the lock ``file`` of the directory ``path``. Raises ``JobBusyError`` while another run does."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            raise JobBusyError(
                f"another run (process {who}) is writing to {path}: wait for it to end, or stop it"
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)  # releases the lock, as a kill does


def _check_about(file: Path, about: Mapping[str, Any], path: Path) -> None:
    wanted = json.loads(json.dumps(about))
    with suppress(FileNotFoundError):
        try:
            there = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise JobError(f"{file} cannot be read ({error}): write to a new directory") from error
        differing = [name for name in sorted({*wanted, *there}) if wanted.get(name) != there.get(name)]
        if differing:
            said = "; ".join(f"{name} was {there.get(name)!r}, is {wanted.get(name)!r}" for name in differing)
            raise ConfigError([f"{path} holds something else ({said}): name another directory"])
        return
    half = file.with_suffix(".tmp")
    half.write_text(json.dumps(wanted, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    _sync(half)
    half.replace(file)
    _sync(file.parent)


def _sync_below(directory: Path) -> None:
    """Sync all files in it, then the directories, deepest first."""
    for base, _, files in os.walk(directory, topdown=False):
        for name in files:
            _sync(Path(base, name))
        _sync(Path(base))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
