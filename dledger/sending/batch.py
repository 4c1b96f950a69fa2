"""What travels together, and what became of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

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
UNNUMBERED: Final = -1
ITEM_OVERHEAD_BYTES: Final = 64
"""What an item costs besides its bytes while it waits: without it, any number of empty ones could wait."""


class AllStored(Generic[ResultT]):
    """An answer that says of every item where it is. ``results`` may be made as they are asked for."""

    __slots__ = ("results",)

    def __init__(self, results: Sequence[ResultT]) -> None:
        self.results = results


Answer: TypeAlias = AllStored[ResultT] | Sequence[ResultT | DLedgerError] | DLedgerError
"""To a request: everything is stored, or what became of each item, or what became of all."""


@record(frozen=True, slots=True)
class WindowRules(Generic[ItemT, ResultT]):
    """What the window must know of a protocol."""

    is_retried: Callable[[DLedgerError], bool]
    """Whether sending again, perhaps elsewhere, may help and cannot store anything twice."""
    bad_answer: Callable[[str], DLedgerError]
    """The error for an answer that makes no sense."""
    is_final: Callable[[DLedgerError], bool] = lambda _error: False
    """Whether an error that leaves the outcome unknown would only come again."""
    unknown: Callable[[str], DLedgerError] = RequestTimeoutError
    """The error for what may or may not be stored."""
    queue_of: Callable[[ItemT, ResultT | None], object] | None = None
    """Where order counts of items without numbers, as sent or as stored; None: everywhere at once."""


class OutgoingBatch(Generic[ItemT, ResultT]):
    """Items that travel together. Whoever drives the window may read it without a lock once ``done`` is true."""

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
        """Its place in the order in which batches were begun."""
        self.linger_until_ms = linger_until_ms
        self.give_up_at_ms = give_up_at_ms
        self.timeout_ms = timeout_ms
        self.payloads: list[bytes] = []
        """What is sent of each item; gone once the batch is done."""
        self.items: list[ItemT] = []
        """What its results need of each item, where they need anything."""
        self.is_whole = False
        """Whether it goes in one request or not at all."""
        self.size = 0
        """Bytes that it counts for while it waits."""
        self.left: Sequence[int] = ()
        """Places of the items that are still to be sent."""
        self.part_max = 0
        """So many of them are sent at a time, to find the one that is refused; 0: all."""
        self.sent: Sequence[int] = ()
        """Places of the items that are under way."""
        self.outcomes: Sequence[ResultT | DLedgerError | None] = ()
        self.error: DLedgerError | None = None
        """Why it is sent again."""
        self.sent_at_ms = 0.0
        self.was_first = False
        """Whether nothing was under way when it was sent last."""
        self.producer = ""
        """Who numbers the items; empty: nobody."""
        self.sequence = UNNUMBERED
        """The number of the first item in ``left``."""
        self.doubtful = False
        """Whether an attempt may have been stored."""
        self.lost = False
        """Whether nobody knows if a part of it was stored, and the rest was never sent under its numbers."""
        self.done = False
        self.callbacks: list[Callable[[], object]] = []
        """What to call once it is done: see ``when_done``."""

    def complete(self) -> None:
        """Nothing is added to it any more."""
        self.left = range(len(self.payloads))

    def forget(self) -> None:
        """No attempt so far was stored, nor will one be: it may get other numbers."""
        self.producer, self.sequence, self.doubtful, self.lost = "", UNNUMBERED, False, False
        if self.outcomes:
            outcomes = list(self.outcomes)
            for place in self.left:
                outcomes[place] = None
            self.outcomes = outcomes

    # --- what became of an attempt ----------------------------------------------------------------------------------

    def begin(self, now_ms: float, *, is_first: bool) -> None:
        """It is about to be sent: as much of it as goes into one request."""
        self.sent = self.left[: self.part_max] if self.part_max else self.left
        self.sent_at_ms = now_ms
        self.was_first = is_first

    def take(
        self, answer: Answer[ResultT], rules: WindowRules[ItemT, ResultT], *, repeats: bool, given: bool
    ) -> DLedgerError | None:
        """Note an answer; returns the gravest failure in it. ``left`` is then what to send again.

        ``repeats``: also what may be stored is sent again, without numbers. ``given``: the numbers are the
        application's, so nothing may go without what was before it.
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
            trouble, left = self._take_unnumbered(outcomes, sent, results, rules, repeats=repeats)
        if not left:  # it is known what becomes of that part
            self.part_max = 0
            self.lost = bool(unsent) and self.doubtful
        self.left = [*left, *unsent]
        return trouble

    def _own_outcomes(self) -> list[ResultT | DLedgerError | None]:
        return list(self.outcomes) or [None] * len(self.payloads)

    def _may_be_parted(self, sent: Sequence[int], refusal: InvalidRequestError, *, given: bool) -> bool:
        """Whether one item may be to blame for the refusal of all that were sent together."""
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
        *,
        repeats: bool,
    ) -> tuple[DLedgerError | None, Sequence[int]]:
        trouble: DLedgerError | None = None
        overtaken: set[object] = set()  # queues in which something later is stored
        again: list[int] = []
        for place, result in zip(reversed(sent), reversed(results), strict=True):
            if not isinstance(result, DLedgerError):
                outcomes[place] = result
                if rules.queue_of is not None:
                    overtaken.add(rules.queue_of(self.items[place], result))
                continue
            if trouble is None or (result.outcome == "unknown" != trouble.outcome):
                trouble = result
            if not is_unknown(outcomes[place]):  # a later refusal does not make an earlier attempt undone
                outcomes[place] = result
            may_repeat = rules.is_retried(result) or (repeats and result.outcome == "unknown")
            if may_repeat and not (rules.queue_of and rules.queue_of(self.items[place], None) in overtaken):
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
        """What is stored are the first ones; what is left goes on with the numbers behind them."""
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
            if not is_unknown(outcomes[place]):  # a later refusal does not make an earlier attempt undone
                outcomes[place] = failure
        was_doubtful = self.doubtful
        self.doubtful = was_doubtful or any(failure.outcome == "unknown" for _, failure in rest)
        left = [place for place, failure in rest if is_sent_again(failure, rules, doubtful=was_doubtful, given=given)]
        if len(left) < len(rest) and (given or self.doubtful):
            # They cannot go without those that are refused: their numbers may be taken, or are the application's.
            left = _front(outcomes, left, rest) if given and not self.doubtful else []
        return max((failure for _, failure in rest), key=_gravity, default=None), left

    # --- the end ----------------------------------------------------------------------------------------------------

    def fail(self, error: DLedgerError) -> None:
        """Nothing more is tried: what is left fails with ``error``, or with why nobody knows what became of it."""
        outcomes = self._own_outcomes()
        for place in self.left:
            if not is_unknown(outcomes[place]):
                outcomes[place] = error
        self.outcomes, self.left = outcomes, ()

    def expire(self, rules: WindowRules[ItemT, ResultT], waited_for: str) -> None:
        """The time is over: what may be stored, or is under way, is unknown; the rest certainly is not stored.

        ``waited_for``: why nothing of it was sent, if nothing has failed.
        """
        outcomes = self._own_outcomes()
        under_way = set(self.sent)
        within = f"within {self.timeout_ms / 1000:g} s"
        waited = self.error or waited_for
        answered = self.error or "no answer"
        for place in self.left:
            if place in under_way or is_unknown(outcomes[place]):
                outcomes[place] = rules.unknown(f"unknown whether it was stored {within}: {answered}")
            else:
                outcomes[place] = UnavailableError(f"not stored {within}: {waited}")
        self.outcomes, self.left = outcomes, ()

    def take_late(self, answer: Answer[ResultT]) -> bool:
        """Note the answer to an attempt that nobody waits for any more; gives whether all of it is stored."""
        sent, self.sent = self.sent, ()
        results: Sequence[object] = (
            answer.results
            if isinstance(answer, AllStored)
            else [answer] * len(sent)
            if isinstance(answer, DLedgerError)
            else answer
        )
        if len(results) != len(sent):  # nonsense
            self.doubtful = True
            return False
        failures = [(at, one) for at, one in enumerate(results) if isinstance(one, DLedgerError)]
        if self.producer:
            self.sequence += failures[0][0] if failures else len(sent)
        self.doubtful = self.doubtful or any(is_unknown(failure) for _, failure in failures)
        return not failures

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call it once the batch is done: on a thread of the driver's, or here and now. It must not block."""
        # list.append is atomic, and the driver reads the list only after it has set ``done``: either it still finds
        # this callback, or we see ``done`` and take it back (whoever removes it calls it).
        self.callbacks.append(callback)
        if not self.done:
            return
        try:
            self.callbacks.remove(callback)
        except ValueError:
            return
        call(callback)

    def announce(self) -> None:
        """Tell whoever waits; the driver calls it once, without its lock, when the batch is done."""
        while self.callbacks:
            try:
                callback = self.callbacks.pop(0)
            except IndexError:  # taken back
                return
            call(callback)

    @property
    def failed(self) -> int:
        """How many of its items have failed."""
        outcomes = self.outcomes
        return sum(isinstance(one, DLedgerError) for one in outcomes) if isinstance(outcomes, list) else 0


def call(callback: Callable[[], object]) -> None:
    """Call what the application has given. What it raises is logged: others wait to be told, too."""
    try:
        callback()
    except Exception:  # noqa: BLE001  # whatever it is, it is not ours
        _log.exception("a callback raised an exception")


def partly_added(error: DLedgerError, added: int) -> DLedgerError:
    """Why not all of what was given together was taken, of which ``added`` items were: they may be stored."""
    if added:
        error.outcome = "unknown"
        error.add_note(f"the first {added} were accepted and may be stored; the error concerns the ones after them")
    return error


def _bad_answer(rules: WindowRules[ItemT, ResultT], why: str) -> DLedgerError:
    """The error for an answer that makes no sense: whoever gives such a one may have stored anything."""
    error = rules.bad_answer(why)
    error.outcome = "unknown"
    return error


def is_unknown(outcome: object) -> bool:
    """Whether an item may or may not be stored."""
    return isinstance(outcome, DLedgerError) and outcome.outcome == "unknown"


def is_sent_again(error: DLedgerError, rules: WindowRules[ItemT, ResultT], *, doubtful: bool, given: bool) -> bool:
    """Whether to send a numbered item again; ``doubtful``: an earlier attempt may have been stored."""
    if isinstance(error, UnknownProducerError):
        return not doubtful  # nobody can tell any more
    if given and isinstance(error, TooManyProducersError):
        return False  # it cannot go without its number
    if rules.is_final(error):
        return False
    sequence = isinstance(error, OutOfOrderSequenceError | TooManyProducersError)
    return sequence or error.outcome == "unknown" or rules.is_retried(error)


def _gravity(error: DLedgerError) -> int:
    """What concerns the stream weighs more than what concerns an item, and that more than its consequences."""
    if error.outcome == "unknown":
        return 3
    if isinstance(error, OutOfOrderSequenceError):
        return 0
    return 1 if isinstance(error, InvalidRequestError | AccessDeniedError) else 2


def _front(
    outcomes: list[ResultT | DLedgerError | None], left: Sequence[int], rest: Sequence[tuple[int, DLedgerError]]
) -> list[int]:
    """What can still be sent: the items before the first one that is refused; those behind it fail with it."""
    refused, why = next((place, failure) for place, failure in rest if place not in left)
    for place in left:
        if place > refused:
            outcomes[place] = OutOfOrderSequenceError(f"an earlier item is refused: {why}")
    return [place for place in left if place < refused]
