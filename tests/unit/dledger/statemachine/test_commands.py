"""Who waits for results: for entries of one term only, each answered once, within bounds."""

from __future__ import annotations

import pytest

from dledger.config import ReplicationConfig
from dledger.errors import PendingFullError, TermChangedError
from dledger.statemachine.commands import CommandBatch, Duplicates, Waiters
from dledger.types import AppendedBatch, LogIndex, Position, Term

CONFIG = ReplicationConfig(pending_entries_max=4)


def waiting(waiters: Waiters, index: int, term: int, answers: list[object]) -> CommandBatch:
    """A batch of two commands, written from ``index`` on."""
    waiters.reserve(2)
    batch = CommandBatch(waiters, [b"a", b"b"], None, answers.append)
    assert batch.bodies(Term(term)) == [b"a", b"b"]
    batch.placed(AppendedBatch(Term(term), LogIndex(index), LogIndex(index + 1), (Position(0), Position(9))))
    return batch


def test_entries_of_another_term_are_not_those_waited_for() -> None:
    """S3: a deposed leader's entries were replaced; the results at their place are another client's."""
    waiters, answers = Waiters(CONFIG), list[object]()
    batch = waiting(waiters, 5, 2, answers)

    assert waiters.take((LogIndex(5), Term(3))) is None
    batch.failed(TermChangedError("lost"))
    assert [type(one) for one in answers] == [TermChangedError]
    assert not waiters
    assert len(waiters) == 0


def test_a_batch_is_answered_once() -> None:
    """With the results, though the append is then reported as uncertain: they are of the committed entries."""
    waiters, answers = Waiters(CONFIG), list[object]()
    batch = waiting(waiters, 5, 2, answers)
    assert waiters.take((LogIndex(5), Term(2))) is batch
    batch.results += [b"1", b"2"]
    batch.applied(Duplicates(CONFIG))
    batch.failed(TermChangedError("lost"))

    assert answers == [(b"1", b"2")]
    assert len(waiters) == 0


def test_a_refused_batch_waits_for_nothing() -> None:
    """It was never written."""
    waiters, answers = Waiters(CONFIG), list[object]()
    waiters.reserve(1)
    batch = CommandBatch(waiters, [b"a"], None, answers.append)
    batch.bodies(Term(1))
    batch.placed(None)
    batch.failed(TermChangedError("refused"))
    assert not waiters
    assert len(answers) == 1


def test_the_bound_is_of_all_commands_together() -> None:
    """A first one that is larger than the bound is not refused for ever."""
    waiters = Waiters(CONFIG)
    waiters.reserve(9)
    with pytest.raises(PendingFullError):
        waiters.reserve(1)
    waiters.release(9)
    waiters.reserve(4)
    with pytest.raises(PendingFullError):
        waiters.reserve(1)
