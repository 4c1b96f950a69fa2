"""The first start of a group whose members have a plain broker's log: the group's log continues it.

Steps, each repeated by a start that follows a crash, because until the group's log has an entry, every start does all
of them:

1. Recover the plain log, as a plain broker would.
2. Fill its last file with a blank, durably. The log still is a plain one, which a plain broker could go on with.
3. Read and verify it, and record where it ends and what it holds (``rocketstore.commit_log.base_log``), durably.
4. The node opens its own log, whose first entry goes where the old one ends (``dledger.store.opening``).

Once the group's log has entries, only the record counts. A plain broker must not write any more then: see
``rocketstore.server``. A log that RocketMQ took over is recognized by the start of its first segment.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from dledger.clock import Clock
from dledger.errors import ConfigError, DiskError
from dledger.store.fs import FileSystem, non_zero_end
from dledger.store.identity import Layout
from dledger.store.mmap_file import FoundFile, list_segments
from dledger.types import BaseLog, why_apart
from rocketstore.commit_log.base_log import ExpiredFiles, describe, read_base_log, write_base_log
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.config import MessageStoreConfig
from rocketstore.mapped.allocation import check_sizes
from rocketstore.message.record import BLANK, BLANK_MAGIC, MESSAGE_MAGICS
from rocketstore.store.directory import CHECKPOINT_FILE, UNKNOWN, StoreCheckpointFile, StoreDirectory

_log = logging.getLogger("rocketstore")


class SealedLog:
    """The plain log that a group's log continues: opened by the store, like the log that continues it."""

    def __init__(self, files: PlainCommitLog, record: BaseLog, expired: ExpiredFiles) -> None:
        self.files: Final = files
        self.record: Final = record
        self.expired: Final = expired

    def now(self) -> BaseLog:
        """The record, and from where its files still are there."""
        return replace(self.record, kept_from=self.files.min_offset)


def take_over(
    config: MessageStoreConfig, layout: Layout, segment_bytes: int, *, clock: Clock, fs: FileSystem | None = None
) -> SealedLog | None:
    """The log that the group's log in ``layout``, of segments of ``segment_bytes``, continues; None if there is none.

    Raises ``ConfigError``, ``DirectoryLockedError``, ``CorruptLogError``, ``DiskError``.
    """
    fs = fs or FileSystem()
    config = replace(config, transient_store_pool_enable=False)
    expired = ExpiredFiles(fs, layout.directory)
    try:
        record = _TakeOver(config, layout, segment_bytes, clock, fs).run()
        if record is None:
            return None
        expired.prepare()
    except OSError as error:
        raise DiskError(f"taking over the plain log of {config.store_path_root_dir} failed: {error}") from error
    return SealedLog(PlainCommitLog(config, clock=clock, fs=fs), record, expired)


class _TakeOver:
    def __init__(
        self, config: MessageStoreConfig, layout: Layout, segment_bytes: int, clock: Clock, fs: FileSystem
    ) -> None:
        self._config = config
        self._layout = layout
        self._segment_bytes = segment_bytes
        self._clock = clock
        self._fs = fs

    def run(self) -> BaseLog | None:
        """The record of the old log, made if there is none yet or if the group's log is empty."""
        self._refuse_shared_directory()
        config = self._config
        plain = [path for path in config.commit_log_dirs if path not in self._layout.data]
        check_sizes(plain, config.mapped_file_size_commit_log, "mappedFileSizeCommitLog")
        known = read_base_log(self._layout.directory)
        begun = next(_written(self._layout.data, self._segment_bytes), None)
        if begun is None:
            return self._begin(known)
        if known is None:
            return self._of_rocketmq(begun)
        own = set(self._config.commit_log_dirs) - set(self._config.read_only_commit_log_dirs) - set(self._layout.data)
        after = next(_written(own, self._config.mapped_file_size_commit_log, known.end), None)
        if after is not None:
            raise ConfigError(
                [
                    f"{after.path} was written by a plain broker after the group had continued its log at "
                    f"{known.end}: its messages would become unreadable. Give the plain broker another "
                    "storePathRootDir, and move the file away"
                ]
            )
        return known

    def _refuse_shared_directory(self) -> None:
        """The node would take the plain log's files for its own segments, or for what was left of removed ones."""
        for found in _written(set(self._config.commit_log_dirs) & set(self._layout.data), self._segment_bytes):
            with found.path.open("rb") as file:
                _, magic = BLANK.unpack(file.read(BLANK.size))  # of an entry or its blank: its size
            if magic in MESSAGE_MAGICS or magic == BLANK_MAGIC:
                raise ConfigError(
                    [
                        f"{found.path} belongs to the log of a plain broker: the group needs a directory of its own "
                        "(storePathDLedgerCommitLog)"
                    ]
                )

    def _begin(self, known: BaseLog | None) -> BaseLog | None:
        """Take over the plain log; the record of an earlier start counts if the files have expired since."""
        first = next(self._plain_files(), None)
        if first is None:  # unless all has expired but the file that says where the log goes on
            first = next((one for one in self._plain_files(blank=True) if one.base), None)
        if first is None:
            return known
        with self._locked() as directory, self._plain_log() as log:
            checkpoint = StoreCheckpointFile(self._fs, self._config.store_path_root_dir / CHECKPOINT_FILE).read()
            is_known = checkpoint.replay_from != UNKNOWN
            log.load(
                clean_stop=directory.stopped_cleanly,
                from_timestamp_ms=checkpoint.replay_time(with_index=False) if is_known else None,
                durable_offset=checkpoint.replay_from if is_known else None,
            )
            end = log.seal()
            if end % self._segment_bytes:
                raise ConfigError(
                    [
                        f"the files of the plain log have {self._config.mapped_file_size_commit_log} bytes, those of "
                        f"the group's log {self._segment_bytes}: make them equal (mappedFileSizeCommitLog)"
                    ]
                )
            _log.info("reading the old log up to %d, to compare it with the other members'", end)
            return self._record(log, end, known)

    def _record(self, log: PlainCommitLog, end: int, known: BaseLog | None = None) -> BaseLog:
        record = describe(log.paths(), self._config.mapped_file_size_commit_log, end)
        if known is not None and self._is_rest_of(known, record):
            return known
        write_base_log(self._fs, self._layout.directory, record)
        _log.info("the group's log continues the plain log of %d to %d", record.begin, end)
        return record

    def _is_rest_of(self, known: BaseLog, now: BaseLog) -> bool:
        """Whether the files are those ``known`` that have not expired since: the group's log was set aside."""
        expired_end = ExpiredFiles(self._fs, self._layout.directory).end()
        rest = replace(known, kept_from=now.begin)
        return known.begin < now.begin <= expired_end and not why_apart(rest, now, "before", "now")

    def _of_rocketmq(self, begun: FoundFile) -> BaseLog | None:
        """RocketMQ, in its DLedger mode, has filled the old log's last file and begun its own where that ends."""
        files = list(self._plain_files())
        if not files or files[0].path.parent in self._layout.data:
            return None
        if files[-1].base + self._config.mapped_file_size_commit_log != begun.base:
            raise ConfigError(
                [
                    f"{files[-1].path.parent} holds the log of a plain broker, which the group's log in "
                    f"{begun.path.parent} does not continue: its messages would be unreadable. Move it to another "
                    "storePathRootDir"
                ]
            )
        with self._locked(), self._plain_log() as log:
            log.load_sealed(begun.base)
            return self._record(log, begun.base)

    @contextmanager
    def _locked(self) -> Iterator[StoreDirectory]:
        directory = StoreDirectory(self._config.store_path_root_dir, self._fs)
        try:
            yield directory
        finally:
            directory.release()

    @contextmanager
    def _plain_log(self) -> Iterator[PlainCommitLog]:
        log = PlainCommitLog(self._config, clock=self._clock, fs=self._fs)
        try:
            yield log
        finally:
            log.shutdown()

    def _plain_files(self, *, blank: bool = False) -> Iterator[FoundFile]:
        config = self._config
        directories = (*config.commit_log_dirs, *config.read_only_commit_log_dirs)
        return _written(directories, config.mapped_file_size_commit_log, blank=blank)


def _written(
    directories: Iterable[Path], file_bytes: int, start: int = 0, *, blank: bool = False
) -> Iterator[FoundFile]:
    """The segments from ``start`` on that contain anything (or, ``blank``, nothing), in order."""
    there = dict.fromkeys(path for path in directories if path.is_dir())
    for found in list_segments(there, file_bytes).segments:
        if found.base < start:
            continue
        with found.path.open("rb") as file:
            if blank or non_zero_end(file.fileno(), 0, found.size):
                yield found
