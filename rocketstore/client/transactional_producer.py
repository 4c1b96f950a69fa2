"""``TransactionalProducer``: sends messages that are delivered if, and only if, a local transaction has succeeded."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Self

from dledger.client.channels import Answer
from dledger.client.discovery import Addresses
from dledger.client.security import ClientSecurity
from dledger.errors import DLedgerError, UnavailableError
from rocketstore.client.checks import WORKERS, CheckWorkers
from rocketstore.client.methods import END_TRANSACTION
from rocketstore.client.outgoing import check_properties
from rocketstore.client.producer import BODY_BYTES_MAX, Producer
from rocketstore.client.receipts import SendReceipt
from rocketstore.client.transactions import (
    HalfSent,
    PreparedMessage,
    TransactionEnd,
    TransactionReceipt,
    TransactionState,
    checked_message,
)
from rocketstore.message.message import PROPERTY_PRODUCER_GROUP, PROPERTY_TRANSACTION, PROPERTY_UNIQUE_KEY, Message
from rocketstore.pb import broker_pb2 as pb
from rocketstore.types import PutMessageStatus

_log = logging.getLogger(__name__)
ATTEMPT_S_MAX: Final = 2.5
"""How long a master may take to end a transaction before another is sought: a new one may need 2 s to know it."""
_SET_HERE: Final = frozenset({PROPERTY_TRANSACTION, PROPERTY_PRODUCER_GROUP, PROPERTY_UNIQUE_KEY})
NO_PLACE: Final = -1
"""In a receipt: an earlier attempt has stored the message, and the broker does not remember where."""


class TransactionalProducer(Producer):
    """A member of the producer group ``group``, beside its other members, in Python or in RocketMQ's languages.

    ``check`` says what became of a transaction that has been open for too long: of any member of the group, because the
    one that began it may be gone. It must look where all members note their transactions, by ``transaction_id`` or by a
    key of the message. What it finds no trace of it rolls back, unless the local transaction may still be under way
    somewhere: then it says UNKNOWN, and is asked again. What this producer is working on it is not asked about.
    ``check`` is called for up to ``check_workers`` transactions at once. If it raises, the group is asked again.

    It also sends ordinary messages. The other options are those of ``Producer``.
    """

    def __init__(  # noqa: PLR0913  # one parameter per option
        self,
        addresses: Addresses,
        *,
        group: str,
        check: Callable[[PreparedMessage], Answer[TransactionState]],
        check_workers: int = WORKERS,
        timeout_s: float = 5.0,
        body_bytes_max: int = BODY_BYTES_MAX,
        security: ClientSecurity | None = None,
        on_failure: Callable[[str, DLedgerError], object] | None = None,
    ) -> None:
        super().__init__(
            addresses, timeout_s=timeout_s, body_bytes_max=body_bytes_max, security=security, on_failure=on_failure
        )
        self.group = group
        self._check = check
        self._under_way: Counter[str] = Counter()
        self._under_way_lock = threading.Lock()  # guards it
        self._checks = CheckWorkers(
            self._connection.directory,
            group,
            self._take_check,
            timeout_s=timeout_s,
            security=security,
            workers=check_workers,
        )

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def start(self) -> None:
        """Join the group: from now on this producer is asked about its transactions. Sending does it, too.

        Returns once the master knows it. Raises what keeps it from joining.
        """
        self._checks.start()

    def close(self) -> None:
        """Wait for a check that the application is answering, leave the group, and do what ``Producer.close`` does."""
        self._checks.close()
        super().close()

    def send_in_transaction(
        self,
        message: Message,
        execute: Callable[[PreparedMessage], Answer[TransactionState]],
        *,
        key: str | None = None,
        queue_id: int | None = None,
    ) -> TransactionReceipt:
        """Prepare a message, call ``execute``, and commit the message or roll it back as that says.

        If the message cannot be prepared, ``execute`` is not called, and the error is that of ``Producer.send``; with
        ``outcome="unknown"`` there may be a message that nobody commits: ``check`` will be asked. If the broker has the
        message without the safety it is set to have (``half.status`` is not ``PUT_OK``), it is rolled back without
        calling ``execute``, as in RocketMQ.

        If ``execute`` raises, the transaction stays open, and the error is passed on: ``check`` will be asked. If the
        master cannot be told how it ended, the receipt says ``OPEN`` and why; ``check`` will be asked then, too.
        """
        return self.conclude(self.prepare(message, key=key, queue_id=queue_id), execute)

    def begin(self) -> None:
        """As ``start``, without waiting."""
        self._checks.begin()

    def prepare(self, message: Message, *, key: str | None = None, queue_id: int | None = None) -> HalfSent:
        """The first half of ``send_in_transaction``; the second must follow."""
        check_properties(message)
        self.start()
        transaction_id = self._checks.new_transaction_id()
        named = {**message.properties, PROPERTY_UNIQUE_KEY: transaction_id}
        half_properties = {**named, PROPERTY_TRANSACTION: "true", PROPERTY_PRODUCER_GROUP: self.group}
        half_message = replace(message, properties=half_properties, meant=message.meant | _SET_HERE)
        self._begin(transaction_id)
        try:
            half = self.send(half_message, key=key, queue_id=queue_id)
        except BaseException:
            self._end_here(transaction_id)
            raise
        return HalfSent(PreparedMessage(replace(message, properties=named), transaction_id), half)

    def conclude(
        self, sent: HalfSent, execute: Callable[[PreparedMessage], Answer[TransactionState]]
    ) -> TransactionReceipt:
        """The second half of ``send_in_transaction``."""
        try:
            state = TransactionState.ROLLBACK
            if sent.receipt.status is PutMessageStatus.PUT_OK:
                state = execute(sent.prepared)
            return self._finish(sent.receipt, _checked_state(state))
        finally:
            self._end_here(sent.prepared.transaction_id)

    # --- machinery of transactions ----------------------------------------------------------------------------------

    def _finish(self, half: SendReceipt, state: TransactionState) -> TransactionReceipt:
        end, problem = TransactionEnd.OPEN, None
        if state is not TransactionState.UNKNOWN:
            try:
                if half.offset == NO_PLACE:
                    raise UnavailableError("the broker does not remember where an earlier attempt stored the message")
                end = self._tell(half.offset, half.queue_offset, state)
            except DLedgerError as error:
                problem = error
                _log.warning(
                    "transaction %s: %s is not told, a check will settle it: %s", half.unique_key, state, error
                )
        return TransactionReceipt(half.unique_key, state, end, half, problem)

    def _tell(self, offset: int, queue_offset: int, state: TransactionState) -> TransactionEnd:
        """Tell the master, wherever it is by then; it does no harm to repeat this."""
        connection = self._connection
        deadline = connection.deadline()
        attempt_s = min(ATTEMPT_S_MAX, deadline.timeout_s / 2)
        request = pb.EndTransactionRequest(group=self.group, offset=offset, queue_offset=queue_offset, state=state)

        def attempt() -> TransactionEnd:
            answer = connection.ask_master(END_TRANSACTION, request, deadline, attempt_s=attempt_s)
            if answer.result not in TransactionEnd.__members__:  # it is still on its way into the log
                raise UnavailableError(f"the master says {answer.result!r}: the end is not in its log yet")
            return TransactionEnd(answer.result)

        return connection.retry(deadline, attempt)

    def _take_check(self, check: pb.TransactionCheck) -> None:
        prepared = checked_message(check)
        if self._is_under_way(prepared.transaction_id):
            return
        state = _checked_state(self._check(prepared))
        if state is TransactionState.UNKNOWN:
            return
        try:
            self._tell(check.offset, check.queue_offset, state)
        except DLedgerError as error:
            _log.warning(
                "transaction %s: %s is not told, another check will: %s", prepared.transaction_id, state, error
            )

    def _begin(self, transaction_id: str) -> None:
        with self._under_way_lock:
            self._under_way[transaction_id] += 1

    def _end_here(self, transaction_id: str) -> None:
        with self._under_way_lock:
            self._under_way[transaction_id] -= 1
            if not self._under_way[transaction_id]:
                del self._under_way[transaction_id]

    def _is_under_way(self, transaction_id: str) -> bool:
        with self._under_way_lock:
            return transaction_id in self._under_way


def _checked_state(state: TransactionState) -> TransactionState:
    """Raises ``TypeError``: a callback that forgets to return something must decide nothing."""
    if not isinstance(state, TransactionState):
        raise TypeError(f"a transaction's callback must return a TransactionState, not {state!r}: it stays open")
    return state
