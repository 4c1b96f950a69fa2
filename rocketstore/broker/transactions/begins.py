"""What happens to a message that begins a transaction before the store sees it, whichever protocol it came by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from rocketstore.broker.live_config import LiveConfig
from rocketstore.broker.transactions.messages import make_half
from rocketstore.broker.transactions.service import TransactionService
from rocketstore.message.checks import check_client_topic, check_keys, check_message, check_timed
from rocketstore.message.message import PROPERTY_CHECK_TIMES, Message
from rocketstore.types import PutMessageStatus, PutResult

_CHECKS: Final = f"\x02{PROPERTY_CHECK_TIMES}\x011000".encode()


class HalfRefusedError(Exception):
    """Raised when a message may begin no transaction, or not now."""

    def __init__(self, status: PutMessageStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status

    @property
    def result(self) -> PutResult:
        """The refusal as the result of a send."""
        return PutResult(self.status, outcome="not_applied", reason=str(self))


class Begun(NamedTuple):
    """A half message on its way to the store: its place in the request, its group, and the queue it is for."""

    place: int
    group: str
    queue_id: int


class HalfMessages:
    """On the loop."""

    def __init__(self, live: LiveConfig, transactions: TransactionService) -> None:
        self._live = live
        self._transactions = transactions
        self._on_their_way: Counter[str] = Counter()  # by group

    def check_begin(self, group: str, *, is_plain: bool) -> None:
        """Raises ``HalfRefusedError`` unless ``group`` may begin a transaction. ``is_plain``: neither delayed nor of a
        batch.
        """
        if self._live.now.reject_transaction_message:
            reason = "this broker takes no transactional messages (rejectTransactionMessage)"
            raise HalfRefusedError(PutMessageStatus.NO_PERMISSION, reason)
        if not is_plain or not group:
            reason = (
                "a transaction is of one message, without delay" if group else "a transaction needs a producer group"
            )
            raise HalfRefusedError(PutMessageStatus.MESSAGE_ILLEGAL, reason)
        if not self._transactions.is_running:
            reason = "this broker is not quite the master yet"
            raise HalfRefusedError(PutMessageStatus.SERVICE_NOT_AVAILABLE, reason)
        waiting = self._on_their_way
        problem = self._transactions.refusal(group, waiting.total(), waiting[group])
        if problem:
            raise HalfRefusedError(PutMessageStatus.OS_PAGECACHE_BUSY, problem)

    def problem(self, message: Message) -> str:
        """Why a half message does not do. What it may become must fit into a record, too: its commit, whose topic may
        be longer, and what producers are asked about, with the number of checks.
        """
        probe = replace(message, queue_id=max(message.queue_id, 0))
        make_half(probe)
        probe.property_string += _CHECKS
        probe.topic = max(message.topic, probe.topic, key=len)
        refusal = check_message(probe, self._live.now.store)
        keys_max = self._live.now.store.message_keys_max
        problem = check_client_topic(message.topic) or check_keys(message, keys_max) or check_timed(message)
        return problem or ("" if refusal is None else refusal.reason)

    def begin(self, message: Message, group: str, place: int = 0) -> Begun:
        """Turn a message whose queue is chosen into a half message; it counts as open until ``stored``."""
        begun = Begun(place, group, message.queue_id)
        make_half(message)
        self._on_their_way[group] += 1
        return begun

    def stored(self, begun: Begun) -> None:
        """The store has answered."""
        self._on_their_way[begun.group] -= 1
        if not self._on_their_way[begun.group]:
            del self._on_their_way[begun.group]

    def all_stored(
        self, begun: Sequence[Begun], done: Callable[[Sequence[PutResult]], None], results: Sequence[PutResult]
    ) -> None:
        """The store has answered a request; its results name the queues that the messages are for."""
        told = list(results)
        for one in begun:
            self.stored(one)
            stored = told[one.place].stored
            if stored is not None:
                told[one.place] = told[one.place]._replace(stored=stored._replace(queue_id=one.queue_id))
        done(told)
