"""A batch of items sent together, its outcomes, its producer's name, and the numbers of its items.

A server stores a numbered batch only if it directly follows its producer's last one, and recognizes one that it has
already stored. So a batch whose outcome is unknown (it is *doubtful*) can be sent again under the same numbers, which
stay fixed while any attempt may have been stored. Every other batch may be renumbered, because each attempt at it was
refused.

After a failure (``regroup``, when nothing is in flight and all unfinished batches wait in order):

1. No batch is doubtful: numbering continues after the last item known to be stored. A refused item leaves no gap.
2. A batch is doubtful, and the waiting ones continue what is stored: the numbers stay.
3. A batch was refused for good or given up before it was sent, and a later one is doubtful: the later one cannot have
   been stored and never will be, because its numbers are never reached. Everything from there on is sent under a new
   name.
4. A doubtful batch was given up, so its numbers may or may not be taken. Other doubtful batches keep their name and
   numbers (they are stored if the lost one is, and given up otherwise); the rest is sent under a new name, which no gap
   blocks.
5. The server does not know what precedes the first batch (it has forgotten the producer): a new name.
6. The server cannot track another producer: nothing is numbered for a while. Nothing is sent twice during that time,
   but an unknown outcome stays unknown.

Names and numbers given by the application are never replaced: after a failed item, the ones behind it fail.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar

from dledger.core.noop_payload import MADE_UP_BYTES, made_up_name
from dledger.errors import (
    AccessDeniedError,
    DLedgerError,
    InvalidRequestError,
    OutOfOrderSequenceError,
    RequestTimeoutError,
    TooManyProducersError,
    UnavailableError,
    UnknownProducerError,
)
from dledger.records import record

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)
_UNNUMBERED: Final = -1
ITEM_OVERHEAD_BYTES: Final = 64
"""The cost of a waiting item besides its bytes: without it, the number of waiting empty items would be unbounded."""


class AllStored(Generic[ResultT]):
    """An answer that gives the place of every item. ``results`` may be built lazily."""

    __slots__ = ("results",)

    def __init__(self, results: Sequence[ResultT]) -> None:
        self.results = results


Answer: TypeAlias = AllStored[ResultT] | Sequence[ResultT | DLedgerError] | DLedgerError
"""The answer to a request: all stored, one outcome per item, or one error for the whole request."""


@record(frozen=True, slots=True)
class WindowRules(Generic[ItemT, ResultT]):
    """The parts of a protocol that the window needs."""

    is_retried: Callable[[DLedgerError], bool]
    """Whether sending again, perhaps to another server, may help and cannot store anything twice."""
    bad_answer: Callable[[str], DLedgerError]
    """The error for a malformed answer."""
    is_final: Callable[[DLedgerError], bool] = lambda _error: False
    """Whether an error with an unknown outcome would only recur."""
    unknown: Callable[[str], DLedgerError] = RequestTimeoutError
    """The error for an item that may or may not be stored."""


class OutgoingBatch(Generic[ItemT, ResultT]):
    """Items sent together. The driver's callers may read it without a lock once ``done`` is true."""

    __slots__ = (
        "callbacks",
        "done",
        "doubtful",
        "error",
        "give_up_at_ms",
        "is_whole",
        "items",
        "left",
        "linger_until_ms",
        "lost",
        "number",
        "outcomes",
        "part_max",
        "payloads",
        "producer",
        "sent",
        "sent_at_ms",
        "sequence",
        "size",
        "timeout_ms",
        "was_first",
    )

    def __init__(self, number: int, linger_until_ms: float, give_up_at_ms: float, timeout_ms: float) -> None:
        self.number = number
        """Its place in the order in which batches were opened."""
        self.linger_until_ms = linger_until_ms
        self.give_up_at_ms = give_up_at_ms
        self.timeout_ms = timeout_ms
        self.payloads: list[bytes] = []
        """The items' bytes; emptied when the batch is done."""
        self.items: list[ItemT] = []
        """Data that the results need about each item, if any."""
        self.is_whole = False
        """Whether it is sent in one request or not at all."""
        self.size = 0
        """The bytes it counts for while it waits."""
        self.left: Sequence[int] = ()
        """Places of the items still to be sent."""
        self.part_max = 0
        """How many of them to send at a time, to isolate the one that is refused; 0: all."""
        self.sent: Sequence[int] = ()
        """Places of the items in flight."""
        self.outcomes: Sequence[ResultT | DLedgerError | None] = ()
        self.error: DLedgerError | None = None
        """Why it is sent again."""
        self.sent_at_ms = 0.0
        self.was_first = False
        """Whether nothing else was in flight when it was last sent."""
        self.producer = ""
        """The producer whose numbers the items carry; empty: unnumbered."""
        self.sequence = _UNNUMBERED
        """The number of the first item in ``left``."""
        self.doubtful = False
        """Whether an attempt may have been stored."""
        self.lost = False
        """Whether part of it may or may not be stored while the rest was never sent under its numbers."""
        self.done = False
        self.callbacks: list[Callable[[], object]] = []
        """Called once it is done: see ``when_done``."""

    def complete(self) -> None:
        """Close it to further items."""
        self.left = range(len(self.payloads))

    def forget(self) -> None:
        """Drop its numbers: no attempt so far was stored or will be."""
        self.producer, self.sequence, self.doubtful, self.lost = "", _UNNUMBERED, False, False
        if self.outcomes:
            outcomes = list(self.outcomes)
            for place in self.left:
                outcomes[place] = None
            self.outcomes = outcomes

    # --- the outcome of an attempt ----------------------------------------------------------------------------------

    def begin(self, now_ms: float, *, is_first: bool) -> None:
        """Start an attempt with as many items as go into one request."""
        self.sent = self.left[: self.part_max] if self.part_max else self.left
        self.sent_at_ms = now_ms
        self.was_first = is_first

    def take(self, answer: Answer[ResultT], rules: WindowRules[ItemT, ResultT], *, given: bool) -> DLedgerError | None:
        """Record an answer; returns its gravest failure. ``left`` then holds what to send again.

        ``given``: the application assigned the numbers, so no item may be sent without those before it.
        """
        sent, self.sent = self.sent, ()
        if isinstance(answer, AllStored):
            if len(answer.results) == len(sent):
                self._note_all_stored(sent, answer.results)
                return None
            answer = _bad_answer(rules, f"{len(answer.results)} places returned for {len(sent)} items")
        if isinstance(answer, InvalidRequestError) and self._may_be_parted(sent, answer, given=given):
            self.part_max = (len(sent) + 1) // 2
            return answer
        results = [answer] * len(sent) if isinstance(answer, DLedgerError) else list(answer)
        if len(results) != len(sent):
            wrong = _bad_answer(rules, f"{len(results)} results returned for {len(sent)} items")
            results = [wrong] * len(sent)
        unsent = self.left[len(sent) :]
        self.outcomes = outcomes = self._own_outcomes()
        if self.producer:
            trouble, left = self._take_numbered(outcomes, sent, results, rules, given=given)
        else:
            trouble, left = self._take_unnumbered(outcomes, sent, results, rules)
        if not left:  # the outcome of every item sent is known
            self.part_max = 0
            self.lost = bool(unsent) and self.doubtful
        self.left = [*left, *unsent]
        return trouble

    def _own_outcomes(self) -> list[ResultT | DLedgerError | None]:
        return list(self.outcomes) or [None] * len(self.payloads)

    def _may_be_parted(self, sent: Sequence[int], refusal: InvalidRequestError, *, given: bool) -> bool:
        """Whether a single item may have caused the refusal of the whole request."""
        return len(sent) > 1 and refusal.outcome == "not_applied" and not (self.is_whole or self.doubtful or given)

    def _note_all_stored(self, sent: Sequence[int], results: Sequence[ResultT]) -> None:
        if self.producer:
            self.sequence += len(sent)
        self.doubtful = False
        if len(sent) == len(self.payloads):
            self.outcomes = results
        else:
            self.outcomes = outcomes = self._own_outcomes()
            for place, result in zip(sent, results, strict=True):
                outcomes[place] = result
        self.left = self.left[len(sent) :]

    def _take_unnumbered(
        self,
        outcomes: list[ResultT | DLedgerError | None],
        sent: Sequence[int],
        results: Sequence[ResultT | DLedgerError],
        rules: WindowRules[ItemT, ResultT],
    ) -> tuple[DLedgerError | None, Sequence[int]]:
        trouble: DLedgerError | None = None
        again: list[int] = []
        for place, result in zip(reversed(sent), reversed(results), strict=True):
            if not isinstance(result, DLedgerError):
                outcomes[place] = result
                continue
            if trouble is None or (result.outcome == "unknown" != trouble.outcome):
                trouble = result
            if not is_unknown(outcomes[place]):  # a later refusal does not undo an earlier attempt
                outcomes[place] = result
            if rules.is_retried(result):
                again.append(place)
        return trouble, again[::-1]

    def _take_numbered(
        self,
        outcomes: list[ResultT | DLedgerError | None],
        sent: Sequence[int],
        results: Sequence[ResultT | DLedgerError],
        rules: WindowRules[ItemT, ResultT],
        *,
        given: bool,
    ) -> tuple[DLedgerError | None, Sequence[int]]:
        """The stored items are a prefix; the remaining ones continue with the next numbers."""
        stored = next((at for at, result in enumerate(results) if isinstance(result, DLedgerError)), len(results))
        for place, result in zip(sent[:stored], results, strict=False):
            outcomes[place] = result
        self.sequence += stored
        wrong = _bad_answer(rules, "an item of a numbered request was stored without those before it")
        rest = [
            (place, result if isinstance(result, DLedgerError) else wrong)
            for place, result in zip(sent[stored:], results[stored:], strict=True)
        ]
        for place, failure in rest:
            if not is_unknown(outcomes[place]):  # a later refusal does not undo an earlier attempt
                outcomes[place] = failure
        was_doubtful = self.doubtful
        self.doubtful = was_doubtful or any(failure.outcome == "unknown" for _, failure in rest)
        left = [place for place, failure in rest if _is_sent_again(failure, rules, doubtful=was_doubtful, given=given)]
        if len(left) < len(rest) and (given or self.doubtful):
            # They cannot be sent without the refused ones: their numbers may be taken, or belong to the application.
            left = _front(outcomes, left, rest) if given and not self.doubtful else []
        return max((failure for _, failure in rest), key=_gravity, default=None), left

    # --- the end ----------------------------------------------------------------------------------------------------

    def fail(self, error: DLedgerError) -> None:
        """Stop trying: the items left fail with ``error``, except those whose outcome is already unknown."""
        outcomes = self._own_outcomes()
        for place in self.left:
            if not is_unknown(outcomes[place]):
                outcomes[place] = error
        self.outcomes, self.left = outcomes, ()

    def expire(self, rules: WindowRules[ItemT, ResultT], waited_for: DLedgerError | str) -> None:
        """The deadline has passed: items in flight or possibly stored become unknown; the others are not stored.

        ``waited_for``: why nothing was sent, if there was no failure. A failure is the cause of the items' errors.
        """
        outcomes = self._own_outcomes()
        under_way = set(self.sent)
        within = f"within {round(self.timeout_ms / 1000, 2):g} s"
        waited = self.error or waited_for
        answered = self.error or "no answer"
        for place in self.left:
            error: DLedgerError
            if place in under_way or is_unknown(outcomes[place]):
                error = rules.unknown(f"unknown whether it was stored {within}: {answered}")
                error.__cause__ = self.error
            else:
                error = UnavailableError(f"not stored {within}: {waited}")
                error.__cause__ = waited if isinstance(waited, DLedgerError) else None
            outcomes[place] = error
        self.outcomes, self.left = outcomes, ()

    def take_late(self, answer: Answer[ResultT]) -> bool:
        """Record the answer to an attempt that has already expired; returns whether all of it is stored."""
        sent, self.sent = self.sent, ()
        results: Sequence[object] = (
            answer.results
            if isinstance(answer, AllStored)
            else [answer] * len(sent)
            if isinstance(answer, DLedgerError)
            else answer
        )
        if len(results) != len(sent):  # malformed
            self.doubtful = True
            return False
        failures = [(at, one) for at, one in enumerate(results) if isinstance(one, DLedgerError)]
        if self.producer:
            self.sequence += failures[0][0] if failures else len(sent)
        self.doubtful = self.doubtful or any(is_unknown(failure) for _, failure in failures)
        return not failures

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call it once the batch is done, on a thread of the driver, or immediately if it is. It must not block."""
        # list.append is atomic, and the driver reads the list only after it has set ``done``: either it finds this
        # callback, or we see ``done`` and take it back (the thread that removes it calls it).
        self.callbacks.append(callback)
        if not self.done:
            return
        try:
            self.callbacks.remove(callback)
        except ValueError:
            return
        call(callback)

    def announce(self) -> None:
        """Run the callbacks; the driver calls this once, without its lock, when the batch is done."""
        while self.callbacks:
            try:
                callback = self.callbacks.pop(0)
            except IndexError:  # taken back
                return
            call(callback)

    @property
    def failed(self) -> int:
        """How many of its items failed."""
        outcomes = self.outcomes
        return sum(isinstance(one, DLedgerError) for one in outcomes) if isinstance(outcomes, list) else 0


def call(callback: Callable[[], object]) -> None:
    """Run an application callback and log what it raises, because other callbacks still have to run."""
    try:
        callback()
    except Exception:  # noqa: BLE001  # it is the application's error, not ours
        _log.exception("a callback raised an exception")


def partly_added(error: DLedgerError, added: int) -> DLedgerError:
    """The error for a call that queued only the first ``added`` of its items, which may be stored."""
    if added:
        error.outcome = "unknown"
        error.add_note(f"the first {added} were accepted and may be stored; the error concerns the ones after them")
    return error


def _bad_answer(rules: WindowRules[ItemT, ResultT], why: str) -> DLedgerError:
    """The error for a malformed answer: a server that sends one may have stored anything."""
    error = rules.bad_answer(why)
    error.outcome = "unknown"
    return error


def is_unknown(outcome: object) -> bool:
    """Whether an item may or may not be stored."""
    return isinstance(outcome, DLedgerError) and outcome.outcome == "unknown"


def _is_sent_again(error: DLedgerError, rules: WindowRules[ItemT, ResultT], *, doubtful: bool, given: bool) -> bool:
    """Whether to send a numbered item again; ``doubtful``: an earlier attempt may have been stored."""
    if isinstance(error, UnknownProducerError):
        return not doubtful  # the producer's history that could decide is gone
    if given and isinstance(error, TooManyProducersError):
        return False  # it cannot be sent without its number
    if rules.is_final(error):
        return False
    sequence = isinstance(error, OutOfOrderSequenceError | TooManyProducersError)
    return sequence or error.outcome == "unknown" or rules.is_retried(error)


def _gravity(error: DLedgerError) -> int:
    """Rank an error: a failure of the stream outweighs an item's, which outweighs a consequence of another item's."""
    if error.outcome == "unknown":
        return 3
    if isinstance(error, OutOfOrderSequenceError):
        return 0
    return 1 if isinstance(error, InvalidRequestError | AccessDeniedError) else 2


def _front(
    outcomes: list[ResultT | DLedgerError | None], left: Sequence[int], rest: Sequence[tuple[int, DLedgerError]]
) -> list[int]:
    """The items that can still be sent: those before the first refused one; the ones after it fail with it."""
    refused, why = next((place, failure) for place, failure in rest if place not in left)
    for place in left:
        if place > refused:
            outcomes[place] = OutOfOrderSequenceError(f"an earlier item was refused: {why}")
    return [place for place in left if place < refused]


UNNUMBERED_MS: Final = 60_000.0
"""How long nothing is numbered after a server had no room for another producer."""
AnyBatch = OutgoingBatch[Any, Any]  # Any: numbering does not depend on the item type


def new_producer_name() -> str:
    """A unique producer name."""
    return made_up_name(secrets.token_bytes(MADE_UP_BYTES))


class ProducerNumbering:
    """One window's numbering. ``given_name``: a valid producer name from the application, which then numbers items
    itself.
    """

    def __init__(self, given_name: str = "", *, make_name: Callable[[], str] = new_producer_name) -> None:
        self.are_given: Final = bool(given_name)
        self._make_name = make_name
        self._name = given_name or make_name()  # empty: nothing is numbered
        self._next = 0  # the first number of the next batch to be numbered
        self._stored = 0  # every number of the producer below this one is known to be stored
        self._lost = False  # a doubtful batch was given up
        self._broken: DLedgerError | None = None  # numbers from the application: the failure of an item
        self._following: int | None = None  # numbers from the application: the next one expected; None: any
        self._unnumbered_until_ms = 0.0

    # --- numbering --------------------------------------------------------------------------------------------------

    def check(self, sequence: int | None) -> None:
        """Validate the number, or its absence, of an item about to be added.

        Raises ``InvalidRequestError`` and, for a number out of order, ``OutOfOrderSequenceError``.
        """
        if not self.are_given:
            if sequence is not None:
                raise InvalidRequestError("explicit sequence numbers require a named producer: set producer_name")
            return
        if sequence is None or sequence < 0:
            raise InvalidRequestError(
                f"the producer {self._name!r} must give every sequence number itself, starting at its next one"
            )
        if self._following is not None and sequence != self._following:
            raise OutOfOrderSequenceError(
                f"sequence {sequence} of producer {self._name!r} is out of order: next is {self._following}"
            )

    def follow(self, sequence: int) -> None:
        """Set the number expected of the next item."""
        self._following = sequence

    def begin(self, batch: AnyBatch, sequence: int | None) -> None:
        """Give the batch the number that the application assigned to its first item, if any."""
        if sequence is not None:
            batch.producer, batch.sequence = self._name, sequence

    def assign(self, batch: AnyBatch, now_ms: float) -> None:
        """Number the items of a batch about to be sent, unless they are numbered."""
        if batch.producer or self.are_given:
            return
        if not self._name and now_ms >= self._unnumbered_until_ms:
            self._take_new_name()
        if self._name:
            batch.producer, batch.sequence = self._name, self._next
            self._next += len(batch.left)

    # --- outcomes ---------------------------------------------------------------------------------------------------

    def stored(self, batch: AnyBatch) -> None:
        """Items of the batch, and so all before them, are stored; its ``sequence`` has moved past them."""
        if batch.producer == self._name:
            self._stored = max(self._stored, batch.sequence)

    def failed(self, batch: AnyBatch) -> None:
        """The batch is given up, and at least one of its items failed."""
        if self.are_given:
            self._broken = self._broken or next(one for one in batch.outcomes if isinstance(one, DLedgerError))
        elif batch.doubtful and batch.producer == self._name:
            self._lost = True

    def is_orphan(self, batch: AnyBatch, refusal: DLedgerError) -> bool:
        """Whether a doubtful batch was refused because of an earlier one that is no longer sent.

        Only a late copy of that one could help; the batches behind must not wait for it.
        """
        if self.are_given or not (batch.doubtful and batch.was_first):
            return False
        given_up = self._lost or batch.producer != self._name
        return given_up and isinstance(refusal, OutOfOrderSequenceError)

    # --- after a failure --------------------------------------------------------------------------------------------

    def is_broken(self, waiting: Sequence[AnyBatch]) -> bool:
        """Whether the waiting items can no longer be stored because an earlier one was not."""
        if not self.are_given:
            return False
        if self._broken is None and waiting and is_misplaced(waiting[0]):
            self._broken = waiting[0].error
        return self._broken is not None

    def mend(self) -> DLedgerError:
        """Accept any number next; returns the error with which all waiting items fail."""
        why, self._broken, self._following = self._broken, None, None
        return OutOfOrderSequenceError(
            f"an earlier item was not stored ({why}): ask for the next number of {self._name!r} and continue from there"
        )

    def regroup(self, waiting: Sequence[AnyBatch], now_ms: float) -> None:
        """Renumber the unfinished batches, given in order, while nothing is in flight."""
        if self.are_given or not self._name:
            return
        head = waiting[0] if waiting else None
        if head is not None and isinstance(head.error, TooManyProducersError) and not head.doubtful:
            self._unnumbered_until_ms = now_ms + UNNUMBERED_MS
            self._name = ""
            _clear(waiting)
        elif self._lost or (head is not None and is_misplaced(head)):
            self._take_new_name()
            _clear(waiting)
        elif any(batch.doubtful and batch.producer == self._name for batch in waiting):
            self._keep(waiting)
        else:
            self._next = self._stored
            _clear(waiting)

    def _keep(self, waiting: Sequence[AnyBatch]) -> None:
        """Keep the batches that continue what is stored, and send the rest under a new name."""
        name, expected = self._name, self._stored
        for place, batch in enumerate(waiting):
            if batch.producer != name:
                continue
            if batch.sequence > expected:
                for later in waiting[place:]:
                    if later.producer == name:
                        later.forget()
                self._take_new_name()
                return
            # Below the expected number: something after it is stored, so an unknown attempt was stored, too.
            expected = max(expected, batch.sequence + len(batch.left))
        self._next = expected

    def _take_new_name(self) -> None:
        self._name = self._make_name()
        self._next = self._stored = 0
        self._lost = False


def is_misplaced(head: AnyBatch) -> bool:
    """Whether the server reports that the numbers do not follow what it knows of the producer, with no other cause.

    A doubtful batch may be refused this way by a server that does not know yet that it lost leadership. One sent behind
    another may be refused because of that one.
    """
    lost = isinstance(head.error, OutOfOrderSequenceError | UnknownProducerError)
    return lost and head.was_first and not head.doubtful


def _clear(waiting: Sequence[AnyBatch]) -> None:
    """Remove the numbers from all batches that are not doubtful."""
    for batch in waiting:
        if not batch.doubtful:
            batch.forget()
