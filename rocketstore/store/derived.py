"""All that is built from a log, and can be built again: consume queues, key index, the next offset of every queue, and
when timed messages are due.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from dledger.clock import Clock
from dledger.conditions import ConditionKind, Conditions
from dledger.errors import CorruptLogError, DiskError
from dledger.store.fs import FileSystem
from rocketstore.commit_log.port import CommitLog
from rocketstore.config import MessageStoreConfig
from rocketstore.consume_queue.queue import QueueContext
from rocketstore.consume_queue.queue_check import QueueCheck
from rocketstore.consume_queue.queue_ends import QUEUE_ENDS_FILE, read_queue_ends, write_queue_ends
from rocketstore.consume_queue.table import ConsumeQueueTable
from rocketstore.index.service import IndexService
from rocketstore.queue_numbers import LoggedNumbering, RepeatAlarm
from rocketstore.store.checkpoint import CHECKPOINT_FILE, UNKNOWN, StoreCheckpoint, StoreCheckpointFile
from rocketstore.store.deleted import DELETED_FILE, DeletedQueues
from rocketstore.store.recovery import RecoveryPlan, queue_units, recover
from rocketstore.timer.files import TimerFiles
from rocketstore.types import TIMED_TOPIC

_log = logging.getLogger("rocketstore")


class Derived:
    """One store's, with the files that say how far they are durable."""

    def __init__(
        self,
        config: MessageStoreConfig,
        log: CommitLog,
        clock: Clock,
        fs: FileSystem,
        conditions: Conditions,
        queue_check: Callable[[], QueueCheck],
        on_damage: Callable[[], None],
    ) -> None:
        """Queues ask ``queue_check`` about their units; ``on_damage`` of index or timers is called on any thread."""
        self.config: Final = config
        self.log: Final = log
        self.clock: Final = clock
        self.fs: Final = fs
        self.conditions: Final = conditions
        self.durable = 0
        """Everything derived from the log before it is durable, so the log is no longer needed for that."""
        self.alarm: Final = RepeatAlarm(conditions)
        self.queues: Final = ConsumeQueueTable(
            config.consume_queue_dir,
            config.consume_queue_file_bytes,
            fs,
            QueueContext(
                lambda: log.min_offset,
                self.alarm.repeated,
                lambda: self.durable,
                believe=lambda queue, offset, unit: queue_check().believed_unit(queue, offset, unit),
                firsts=lambda physical: queue_check().first_messages(physical),
            ),
        )
        self.index: Final = self._make_index() if config.message_index_enable else None
        self.timers: Final = TimerFiles(config.timers_dir, fs, self._is_damaged)
        self.deleted: Final = DeletedQueues(fs, config.config_dir / DELETED_FILE)
        self.numbering: Final = LoggedNumbering(log, self.queues, deleted=lambda: self.deleted.ends)
        self.checkpoint: Final = StoreCheckpointFile(fs, config.store_path_root_dir / CHECKPOINT_FILE)
        self._ends_path = config.config_dir / QUEUE_ENDS_FILE
        self._on_damage = on_damage

    def _make_index(self) -> IndexService:
        config = self.config
        return IndexService(
            config.index_dir,
            config.max_hash_slot_num,
            config.max_index_num,
            self.fs,
            self.clock,
            on_damage=self._is_damaged,
        )

    def _is_damaged(self, error: CorruptLogError) -> None:
        self.conditions.set(ConditionKind.DAMAGED, str(error), subject=str(error.path))
        self._on_damage()

    @property
    def files(self) -> list[ConsumeQueueTable | IndexService]:
        """The files that take up disk space."""
        return [self.queues] if self.index is None else [self.queues, self.index]

    def recover(self, checkpoint: StoreCheckpoint, *, clean_stop: bool) -> RecoveryPlan:
        """Open queues and index over the recovered log; returns what is to be dispatched again."""
        place = (checkpoint.replay_from, checkpoint.queue_units)
        self.queues.load(read_queue_ends(self._ends_path, place) if clean_stop and UNKNOWN not in place else None)
        decided = recover(
            self.log,
            self.queues,
            self.index,
            checkpoint,
            clean_stop=clean_stop,
            index_safe=self.config.message_index_safe,
        )
        timed = self.queues.find(TIMED_TOPIC, 0)
        is_whole = self.timers.load(decided.cut_queues, has_messages=timed is not None and timed.max_offset > 0)
        return decided if is_whole else replace(decided, replay_from=min(decided.replay_from, self.log.min_offset))

    def note_ends(self) -> None:
        """Write down where queues end, so that the next start need not read them."""
        try:
            write_queue_ends(self.fs, self._ends_path, (self.durable, queue_units(self.queues)), self.queues.at_rest())
        except (OSError, DiskError) as error:
            _log.warning("the next start will read all consume queues: %s", error)
