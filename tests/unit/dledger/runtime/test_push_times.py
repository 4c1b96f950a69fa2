"""How long pushes take: each is told of once, when an answer covers it."""

from __future__ import annotations

from dledger.core.messages import PushAppend, PushKind, PushResponse
from dledger.errors import ResponseCode
from dledger.monitoring import Instruments
from dledger.runtime.events import REMEMBERED_MAX, PushTimes
from dledger.types import NO_ENTRY, EntryId, EntryRun, LogIndex, NodeId, Position, Term

N1 = NodeId("n1")


class Noting(Instruments):
    def __init__(self) -> None:
        self.told: list[tuple[NodeId, int, int]] = []

    def push_acknowledged(self, peer: NodeId, entries: int, size_bytes: int, took_s: float) -> None:
        assert took_s >= 0
        self.told.append((peer, entries, size_bytes))


def push(first: int, last: int, *, term: int = 1) -> PushAppend:
    """A push of 10 bytes per entry."""
    data = b"x" * 10 * (last - first + 1)
    run = EntryRun(EntryId(Term(1), LogIndex(first - 1)), 0, LogIndex(first), LogIndex(last), Position(0), data)
    return PushAppend(Term(term), 1, LogIndex(-1), run)


def answer(
    flushed: int, *, kind: PushKind = PushKind.APPEND, code: ResponseCode = ResponseCode.SUCCESS, term: int = 1
) -> PushResponse:
    """What a follower says that holds everything up to ``flushed``."""
    index = LogIndex(flushed)
    return PushResponse(Term(term), 1, kind, code, index, index, index, NO_ENTRY, 7)


def test_one_answer_tells_of_all_pushes_that_it_covers() -> None:
    """A follower acknowledges several pushes with one flush; a push half of which is durable waits."""
    noting = Noting()
    times = PushTimes(noting)
    for first, last in ((0, 4), (5, 9), (10, 19)):
        times.sent(N1, push(first, last))

    times.answered(N1, answer(12))
    assert noting.told == [(N1, 5, 50), (N1, 5, 50)]
    times.answered(N1, answer(12))
    times.answered(N1, answer(19))

    assert noting.told == [(N1, 5, 50), (N1, 5, 50), (N1, 10, 100)]


def test_refusals_other_answers_and_other_terms_tell_nothing() -> None:
    """Only an append that a follower took in the push's own term was replicated by it."""
    noting = Noting()
    times = PushTimes(noting)
    times.sent(N1, push(0, 4))

    times.answered(N1, answer(4, kind=PushKind.COMMIT))
    times.answered(N1, answer(4, code=ResponseCode.DISK_FULL))
    times.answered(N1, answer(4, term=2))

    assert noting.told == []


def test_what_a_broken_connection_carried_is_forgotten() -> None:
    """A push that was lost took no time; nor are more remembered than can be under way."""
    noting = Noting()
    times = PushTimes(noting)
    times.sent(N1, push(0, 4))
    times.lost(N1)
    for index in range(REMEMBERED_MAX + 5):
        times.sent(N1, push(index, index))

    times.answered(N1, answer(REMEMBERED_MAX + 10))

    assert len(noting.told) == REMEMBERED_MAX
