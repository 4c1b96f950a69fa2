"""Commands on their way: written as a batch, committed, applied; then their results go to their submitters (S3).

A waiter is registered while the batch is written, under the node's lock, so before it can be committed. It is of an
index *and a term*: entries of another leader that take the place of this one's are not what it waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from dledger.config import ReplicationConfig
from dledger.errors import DLedgerError, PendingFullError, ResultForgottenError
from dledger.statemachine.duplicates import Duplicates
from dledger.types import AppendedBatch, Body, LogIndex, ProducerBatch, Term

CommandDone = Callable[[tuple[bytes, ...] | DLedgerError], None]


class CommandBatch:
    """One request's commands. A ``PreparedAppend``, whose methods run under the node's lock.

    ``done`` gets one result for each command, or the error, exactly once, on any thread.
    """

    def __init__(
        self, waiters: Waiters, commands: Sequence[Body], producer: ProducerBatch | None, done: CommandDone
    ) -> None:
        self._waiters = waiters
        self._commands = commands
        self._producer = producer
        self._done = [done]
        self._term = Term(0)
        self._at: tuple[LogIndex, Term] | None = None
        self._stored = 0
        self.results: list[bytes] = []
        """Of its new entries, as far as they are applied."""

    def bodies(self, term: Term, stored: int = 0) -> Sequence[Body]:
        """See ``PreparedAppend``."""
        self._term, self._stored = term, stored
        return self._commands[stored:] if stored else self._commands

    def placed(self, batch: AppendedBatch | None) -> None:
        """See ``PreparedAppend``."""
        if batch is not None:
            self._at = batch.first_index, self._term
            self._waiters.register(self._at, self)

    @property
    def awaits(self) -> tuple[LogIndex, Term] | None:
        """The entry whose result comes next; None before it is written."""
        if self._at is None:
            return None
        index, term = self._at
        return LogIndex(index + len(self.results)), term

    @property
    def wanted(self) -> int:
        """The number of its new entries."""
        return len(self._commands) - self._stored

    @property
    def count(self) -> int:
        """The number of its commands."""
        return len(self._commands)

    def failed(self, error: DLedgerError) -> None:
        """The append failed, or may have: if it is applied nevertheless, nobody waits for it."""
        if self._at is not None:
            self._waiters.forget(self._at, self)
        self._finish(error)

    def applied(self, duplicates: Duplicates) -> None:
        """All its entries are applied; those stored earlier have their first results. On the applier's thread."""
        first: list[bytes] = []
        if self._producer is not None:
            for number in range(self.count - len(self.results)):
                sequence = self._producer.sequence + number
                result = duplicates.find(self._producer.producer, sequence)
                if result is None:
                    self._finish(
                        ResultForgottenError(
                            f"command {sequence} of producer {self._producer.producer!r} was applied, but its result "
                            "is not kept any more: look at the state, and go on with the next one"
                        )
                    )
                    return
                first.append(result)
        self._finish((*first, *self.results))

    def _finish(self, result: tuple[bytes, ...] | DLedgerError) -> None:
        try:
            done = self._done.pop()
        except IndexError:
            return
        self._waiters.release(self.count)
        done(result)


class Waiters:
    """The batches that wait for their results. Thread-safe; its lock is a leaf."""

    def __init__(self, config: ReplicationConfig) -> None:
        self._max: Final = config.pending_entries_max
        self._lock = threading.Lock()  # guards all below
        self._waiting: dict[tuple[LogIndex, Term], CommandBatch] = {}
        self._entries = 0

    def reserve(self, count: int) -> None:
        """Make room for ``count`` commands, until they are released. Raises ``PendingFullError``."""
        with self._lock:
            if self._entries and self._entries + count > self._max:
                raise PendingFullError(
                    f"{self._entries} commands already wait for their results; the limit is {self._max}: slow down and "
                    "retry (pending_entries_max)"
                )
            self._entries += count

    def release(self, count: int) -> None:
        """Commands are answered."""
        with self._lock:
            self._entries -= count

    def register(self, at: tuple[LogIndex, Term], batch: CommandBatch) -> None:
        """A batch was written from this entry on."""
        with self._lock:
            self._waiting[at] = batch

    def forget(self, at: tuple[LogIndex, Term], batch: CommandBatch) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            if self._waiting.get(at) is batch:
                del self._waiting[at]

    def take(self, at: tuple[LogIndex, Term]) -> CommandBatch | None:
        """The batch that begins with this entry, which is being applied."""
        with self._lock:
            return self._waiting.pop(at, None)

    def take_all(self) -> list[CommandBatch]:
        """All of them: nothing more will be applied."""
        with self._lock:
            taken, self._waiting = list(self._waiting.values()), {}
            return taken

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __len__(self) -> int:
        return self._entries
