"""The broker's ``SendStream`` protocol for ``dledger.sending``, and a sender's guarantees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar, overload

import grpc

from dledger.errors import ConfigError, DLedgerError
from dledger.limits import AboveZero, Bytes, Positive, Range, out_of_range
from dledger.records import record
from dledger.rpc import options
from dledger.sending.batch import ITEM_OVERHEAD_BYTES, AllStored, Answer, OutgoingBatch, WindowRules
from dledger.sending.futures import NO_OUTCOME, SentItem, SentMany
from dledger.sending.numbering import ProducerNumbering
from dledger.sending.stream import Wire
from dledger.sending.window import Window, WindowOptions
from dledger.values import MIB
from rocketstore.client.aio.errors import BadAnswerError
from rocketstore.client.errors import (
    MessageRefusedError,
    NotMasterError,
    SendOutcomeUnknownError,
    failure_of,
    is_retried,
    send_failure,
)
from rocketstore.client.methods import parse_answer
from rocketstore.client.receipts import SendReceipt
from rocketstore.message.producer_names import MEMORY_KEY, check_producer_name
from rocketstore.pb import broker_pb2 as pb
from rocketstore.types import PutMessageStatus

MESSAGE_OVERHEAD_BYTES: Final = ITEM_OVERHEAD_BYTES
INFLIGHT_MESSAGES_MAX: Final = 1 << 16
"""More than the messages of all requests in flight."""


@record(frozen=True, slots=True)
class SendOptions:
    """A sender's guarantees and limits.

    A message that was certainly not stored is resent until ``timeout_s`` after its batch was started. With
    ``idempotent``, so is one of unknown outcome: messages are numbered, and the broker stores each number once (see
    ``dledger.sending.numbering``); only if there is no response by the deadline does it fail with
    ``outcome="unknown"``. With ``producer_name``, the application assigns the name and the numbers.

    Without ``idempotent``, a message of unknown outcome fails with ``outcome="unknown"`` at once, or with
    ``allow_duplicates`` is resent, so that it may be stored twice (at least once, as with RocketMQ's own producers).

    ``ordered`` keeps the order of the ``send`` calls within each queue, also across retries; without ``idempotent``, at
    the cost of only one request in flight. ``send`` blocks while ``pending_bytes_max`` bytes are waiting, at most for
    ``timeout_s``.
    """

    linger_s: Annotated[float, Range(0)] = 0.002
    batch_bytes: Bytes = 3 * MIB // 4
    batch_messages: Positive = 1024
    pending_bytes_max: Bytes = 16 * MIB
    inflight_requests_max: Positive = 12
    timeout_s: AboveZero = 5.0
    allow_duplicates: bool = False
    ordered: bool = False
    idempotent: bool = True
    producer_name: str = ""

    def __post_init__(self) -> None:
        problems = out_of_range(self)
        if self.producer_name and not self.idempotent:
            problems.append("producer_name numbers messages: it requires enable_idempotence")
        if problems:
            raise ConfigError(problems)


class Sent(NamedTuple):
    """The data of a message for its receipt."""

    topic: str
    queue_id: int
    unique_key: str


class EncodedMessage(NamedTuple):
    """A message ready to be sent: its bytes as a field of a ``SendRequest``."""

    data: bytes
    sent: Sent


class StoredAt(NamedTuple):
    """One message of a ``StoredBatch``; thousands are created per second, receipts only on request."""

    id_prefix: str
    offset: int
    queue_id: int
    queue_offset: int
    store_timestamp_ms: int


Result: TypeAlias = StoredAt | pb.SendResult
_StreamT = TypeVar("_StreamT")
_DoneT = TypeVar("_DoneT")
SendBatch: TypeAlias = OutgoingBatch[Sent, Result]


class SendFuture(SentItem[Any]):
    """The result of one message."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> SendReceipt:
        """The message's receipt; raises its error, or ``TimeoutError`` if there is neither within ``timeout`` seconds.

        Without ``timeout`` it still ends, because everything sent has a deadline.
        """
        return receipt_of(super().result(timeout), self._batch.items[self._place])


class SendManyFuture(SentMany[Any]):
    """The results of many messages that were queued together: one future, with a receipt for each on request."""

    __slots__ = ()

    def outcomes(self, timeout: float | None = None) -> Iterator[SendReceipt | DLedgerError]:
        """A receipt or an error for each message, in order; waits for all."""
        self.wait(timeout)
        for batch, first, count in self._spans:
            for place in range(first, first + count):
                outcome = batch.outcomes[place] or NO_OUTCOME
                yield outcome if isinstance(outcome, DLedgerError) else receipt_of(outcome, batch.items[place])


class StoredResults(Sequence[Result]):
    """The places in a ``StoredBatch``, created on request. Its lists are equally long."""

    __slots__ = ("_batch",)

    def __init__(self, batch: pb.StoredBatch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch.offsets)

    @overload
    def __getitem__(self, place: int) -> Result: ...
    @overload
    def __getitem__(self, place: slice) -> list[Result]: ...
    def __getitem__(self, place: int | slice) -> Result | list[Result]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        batch = self._batch
        return StoredAt(
            batch.id_prefix,
            batch.offsets[place],
            batch.queue_ids[place],
            batch.queue_offsets[place],
            batch.store_timestamps_ms[place],
        )


def receipt_of(result: Result, message: Sent) -> SendReceipt:
    if isinstance(result, StoredAt):
        message_id, status = f"{result.id_prefix}{result.offset:016X}", PutMessageStatus.PUT_OK
    else:
        message_id, status = result.message_id, PutMessageStatus(result.status)
    return SendReceipt(
        topic=message.topic,
        queue_id=result.queue_id,
        queue_offset=result.queue_offset,
        message_id=message_id,
        unique_key=message.unique_key,
        offset=result.offset,
        store_timestamp=result.store_timestamp_ms,
        status=status,
    )


def _queue_of(message: Sent, result: Result | None) -> tuple[str, int]:
    return message.topic, message.queue_id if result is None else result.queue_id


def window_of(options: SendOptions) -> Window[Sent, Result]:
    """The send window of a sender."""
    rules: WindowRules[Sent, Result] = WindowRules(
        is_retried=is_retried,
        bad_answer=BadAnswerError,
        is_final=lambda error: isinstance(error, BadAnswerError),
        unknown=SendOutcomeUnknownError,
        queue_of=_queue_of if options.ordered else None,
    )
    settings = WindowOptions(
        linger_ms=options.linger_s * 1000.0,
        batch_bytes=options.batch_bytes,
        batch_items=options.batch_messages,
        pending_bytes_max=options.pending_bytes_max,
        inflight_requests_max=options.inflight_requests_max,
        inflight_items_max=INFLIGHT_MESSAGES_MAX,
        timeout_ms=options.timeout_s * 1000.0,
        retry_unknown=options.allow_duplicates,
        one_at_a_time=options.ordered,
    )
    if options.producer_name:
        check_producer_name(options.producer_name)
    return Window(settings, rules, ProducerNumbering(options.producer_name) if options.idempotent else None)


def noting_refusals(
    on_answer: Callable[[_StreamT, SendBatch, Answer[Result]], _DoneT], note: Callable[[], None]
) -> Callable[[_StreamT, SendBatch, Answer[Result]], _DoneT]:
    """``on_answer``, after ``note`` if the broker has refused a message for good."""

    def take(stream: _StreamT, batch: SendBatch, answer: Answer[Result]) -> _DoneT:
        if isinstance(answer, list) and any(isinstance(one, MessageRefusedError) for one in answer):
            note()
        return on_answer(stream, batch, answer)

    return take


# --- what is said -----------------------------------------------------------------------------------------------------


def _encode(batch: SendBatch, number: int) -> bytes:
    payloads = batch.payloads
    messages = payloads if len(batch.sent) == len(payloads) else [payloads[place] for place in batch.sent]
    # Fields of a protobuf message may be in any order: the messages are already encoded, the id follows.
    rest = pb.SendRequest(
        request_id=number, packed_answer=True, producer=batch.producer, sequence=batch.sequence if batch.producer else 0
    )
    return b"".join((*messages, rest.SerializeToString()))


def _decode(data: bytes, address: str) -> tuple[int, Answer[Result]]:
    response = parse_answer(pb.SendResponse, data, address)
    if not response.HasField("stored"):
        return response.request_id, [send_failure(result, address) or result for result in response.results]
    stored = response.stored
    lengths = {
        len(stored.offsets), len(stored.queue_ids), len(stored.queue_offsets), len(stored.store_timestamps_ms)
    }  # fmt: skip
    if len(lengths) > 1:
        return response.request_id, BadAnswerError(f"{address} answered lists of different lengths")
    return response.request_id, AllStored(StoredResults(stored))


def _failure_of(error: grpc.RpcError, address: str, sent: bool) -> DLedgerError:
    return failure_of(error, address, sent=sent)


def _too_large(why: str) -> MessageRefusedError:
    return MessageRefusedError(f"{why}: send smaller messages, or raise maxMessageSize on every broker")


def _memory(told: Any) -> str:  # noqa: ANN401  # gRPC's metadata
    return next((str(value) for key, value in told or () if key == MEMORY_KEY), "")


WIRE: Final[Wire[Sent, Result]] = Wire(
    encode=_encode,
    decode=_decode,
    failure_of=_failure_of,
    bad_answer=BadAnswerError,
    too_large=_too_large,
    unknown=SendOutcomeUnknownError,
    # From a broker that is not the master: nothing on the stream was stored.
    concerns_all=lambda failure: isinstance(failure, NotMasterError) and failure.outcome == "not_applied",
    server_memory=_memory,
    request_bytes_max=options.stated_limit,
)
