"""What producers and checks of transactions have in common, with threads or without."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from typing import Final

from dledger.client.discovery import Directory
from dledger.client.security import ClientSecurity
from dledger.client.shared import Deadline
from dledger.errors import ConfigError, DLedgerError, UnavailableError
from dledger.records import record
from dledger.values import MIB
from rocketstore.client.aio.errors import BadAnswerError
from rocketstore.client.aio.received import COMPRESSION_FLAGS, decompress
from rocketstore.client.connection import BrokerConnection
from rocketstore.client.errors import is_retried_read
from rocketstore.client.memberships import BrokerStreams
from rocketstore.client.methods import parse_answer
from rocketstore.client.receipts import SendReceipt
from rocketstore.message.ids import ids_of_client, new_client_id
from rocketstore.message.message import PROPERTY_CHECK_TIMES, PROPERTY_UNIQUE_KEY, SYS_FLAG_COMPRESSED, Message
from rocketstore.message.record import decode_record
from rocketstore.pb import broker_pb2 as pb

_log = logging.getLogger(__name__)
CHECKS_PENDING_MAX: Final = 1000
"""Checks that wait for the application; further ones are dropped, and come again in the next round."""
CHECKS_PENDING_BYTES_MAX: Final = 16 * MIB
LOOK_S: Final = 1.0
LOOK_S_MIN: Final = 0.05
"""The same while there is no master."""
SEEK_S: Final = 10.0
"""How often the brokers are asked who there is."""


class TransactionState(StrEnum):
    """What a local transaction has come to."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    UNKNOWN = "UNKNOWN"
    """Not known yet: ask again later."""


class TransactionEnd(StrEnum):
    """What the master did when it was told."""

    ENDED = "ENDED"
    """It has committed the message, or rolled it back."""
    ENDED_BEFORE = "ENDED_BEFORE"
    """It had ended already: by an earlier attempt to say the same, by the answer to a check, or given up."""
    OPEN = "OPEN"
    """A check will settle it."""


@record(frozen=True, slots=True)
class PreparedMessage:
    """A message that waits for its transaction. ``checks``: how often its group was asked about it."""

    message: Message
    transaction_id: str
    """The message's unique key: note it together with what the transaction does, to find that again in a check."""
    checks: int = 0


@record(frozen=True, slots=True)
class HalfSent:
    """A message that was prepared, and where it waits."""

    prepared: PreparedMessage
    receipt: SendReceipt


@record(frozen=True, slots=True)
class TransactionReceipt:
    """What became of a transaction. ``half`` is where its message waits, or waited."""

    transaction_id: str
    state: TransactionState
    """What the local transaction came to."""
    end: TransactionEnd
    half: SendReceipt
    problem: DLedgerError | None = None
    """Why the master could not be told, if so."""


def checked_message(check: pb.TransactionCheck) -> PreparedMessage:
    """What a check is about, its body decompressed if it can be. Raises ``CorruptRecordError`` for garbage."""
    message = decode_record(check.record)
    if message.sys_flag & SYS_FLAG_COMPRESSED:
        with suppress(BadAnswerError):
            body = decompress(message.body, message.sys_flag)
            message = replace(message, body=body, sys_flag=message.sys_flag & ~COMPRESSION_FLAGS)
    times = message.properties.get(PROPERTY_CHECK_TIMES, "")
    known = int(times) if times.isascii() and times.isdigit() and len(times) < 10 else 1
    return PreparedMessage(message, message.properties.get(PROPERTY_UNIQUE_KEY, ""), known)


class PendingChecks:
    """A bounded queue, which holds each transaction once. Thread-safe. ``news`` is called when there is one more."""

    def __init__(self, news: Callable[[], None]) -> None:
        self._news = news
        self._lock = threading.Lock()  # guards the fields below
        self._queue: deque[pb.TransactionCheck] = deque()
        self._known: dict[int, int] = {}  # by offset: waiting or being worked on, with their sizes
        self._bytes = 0

    def put(self, check: pb.TransactionCheck) -> bool:
        """Whether it was taken: not if there are too many, or it is here already."""
        size = len(check.record)
        with self._lock:
            is_full = len(self._known) >= CHECKS_PENDING_MAX or self._bytes + size > CHECKS_PENDING_BYTES_MAX
            if check.offset in self._known or (is_full and self._known):
                return False
            self._known[check.offset] = size
            self._bytes += size
            self._queue.append(check)
        self._news()
        return True

    def pop(self) -> pb.TransactionCheck | None:
        """The next one, which counts until it is ``done``; None if there is none."""
        with self._lock:
            return self._queue.popleft() if self._queue else None

    def done(self, check: pb.TransactionCheck) -> None:
        """It was worked on."""
        with self._lock:
            self._bytes -= self._known.pop(check.offset)


class CheckMember:
    """A member of a producer group at every broker, on threads of its own; what it is asked goes to ``pending``."""

    def __init__(
        self,
        directory: Directory,
        group: str,
        news: Callable[[], None],
        *,
        timeout_s: float,
        security: ClientSecurity | None,
    ) -> None:
        if not group:
            raise ConfigError(["a transactional producer needs the name of its group"])
        self.group: Final = group
        self.pending: Final = PendingChecks(news)
        self._connection = BrokerConnection(directory, timeout_s=timeout_s, security=security)
        client_id = new_client_id()
        self.ids: Final = ids_of_client(client_id)
        """For its half messages: the broker recognizes by them who prepared a message."""
        request = pb.ProducerMembershipRequest(group=group, client_id=client_id)
        self._streams = BrokerStreams(self._connection, "ProducerMembership", request.SerializeToString(), self._heard)
        self._closing = threading.Event()
        self._tender = threading.Thread(target=self._tend, name=f"rocketstore-checks-{group}", daemon=True)
        self._life = threading.RLock()  # guards start and end
        self._started = False

    def begin(self) -> None:
        """Begin to join. Raises ``UnavailableError`` when closed. May be called again."""
        with self._life:
            if self._closing.is_set():
                raise UnavailableError("the producer is closed")
            if not self._started:
                self._tender.start()
                self._started = True

    def wait_joined(self) -> None:
        """Return once the master knows this member. Raises what keeps it from joining."""
        deadline = Deadline(self._connection.timeout_s)
        while not self._streams.has_joined():
            error = self._streams.error()
            if error is not None and (deadline.expired or not is_retried_read(error)):
                raise error
            if deadline.expired or self._closing.is_set():
                raise UnavailableError(f"producer group {self.group}: not joined within {deadline.timeout_s:g} s")
            self._closing.wait(LOOK_S_MIN)

    def close(self) -> None:
        """Leave the group. Idempotent."""
        with self._life:
            if self._closing.is_set():
                return
            self._closing.set()
        if self._started:
            self._tender.join()
        self._streams.stop()
        self._connection.close()

    def _tend(self) -> None:
        seek_at = 0.0
        while not self._closing.is_set():
            now = time.monotonic()
            if now >= seek_at or self._connection.directory.leader is None:
                seek_at = now + SEEK_S
                self._connection.seeker.look()
            self._streams.look_after()
            self._closing.wait(LOOK_S if self._connection.directory.leader is not None else LOOK_S_MIN)

    def _heard(self, address: str, data: bytes | None) -> None:
        if data is None:
            return
        answer = parse_answer(pb.ProducerMembershipResponse, data, address)
        if answer.HasField("check") and not self.pending.put(answer.check):
            _log.debug("producer group %s: a check of %d waits for the next round", self.group, answer.check.offset)
