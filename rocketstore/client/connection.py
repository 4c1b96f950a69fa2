"""A client's connections to brokers: channels, discovery of brokers and of the master, and retried unary calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator
from functools import partial
from typing import TypeVar

from google.protobuf.message import Message

from dledger.client.channel_maker import ChannelMaker
from dledger.client.channels import Answer, Channels, Seeker, Service, retry
from dledger.client.discovery import Addresses, directory_of
from dledger.client.security import ClientSecurity
from dledger.client.shared import Deadline
from dledger.errors import DLedgerError, UnavailableError
from rocketstore.client.errors import NotMasterError, failure_of, hint_of, is_retried_read
from rocketstore.client.methods import SERVICE, STATUS, AnswerT, Method, is_master, parse_answer, report_of_broker
from rocketstore.pb import broker_pb2 as pb

_T = TypeVar("_T")


class BrokerConnection:
    """Channels to all brokers and calls on them. Every call ends by its deadline.

    ``addresses``: listen addresses (``host:port``) of one or more brokers; the others of the group are discovered.
    """

    def __init__(self, addresses: Addresses, *, timeout_s: float = 5.0, security: ClientSecurity | None = None) -> None:
        self.timeout_s = timeout_s
        self.directory = directory_of(addresses, "master")
        self._maker = ChannelMaker(security, self.directory.addresses)
        self.channels = Channels(self._maker, Service(SERVICE, failure_of))
        self.seeker = Seeker(self.directory, self.ask_all, report_of_broker)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.channels.closed

    def close(self) -> None:
        """Close every channel; calls in progress fail. Idempotent."""
        self.channels.close()

    @property
    def signs(self) -> bool:
        """Whether requests are signed with an access key."""
        return bool(self._maker.security.access_key)

    def deadline(self, timeout_s: float | None = None) -> Deadline:
        """A deadline from now on; default: the connection's own timeout."""
        return Deadline(self.timeout_s if timeout_s is None else timeout_s)

    # --- calls ------------------------------------------------------------------------------------------------------

    def ask(self, method: Method[AnswerT], request: Message, address: str, deadline: Deadline) -> AnswerT:
        """One attempt at one broker."""
        data = self.channels.call(method.name, address, request.SerializeToString(), deadline, changes=True)
        return parse_answer(method.answer, data, address)

    def ask_master(
        self, method: Method[AnswerT], request: Message, deadline: Deadline, *, attempt_s: float = math.inf
    ) -> AnswerT:
        """Call the master, wherever it is by then; only for requests that are safe to repeat.

        ``attempt_s``: how long one master may take before another is sought, at most half of the time.
        """
        return self._ask_until(method, request, deadline, self.seeker.leader, attempt_s)

    def ask_reader(self, method: Method[AnswerT], request: Message, deadline: Deadline) -> AnswerT:
        """Call the master, or any live broker while there is none; each has at most half of the time."""
        return self._ask_until(method, request, deadline, self.seeker.reader)

    def _ask_until(
        self,
        method: Method[AnswerT],
        request: Message,
        deadline: Deadline,
        where: Callable[[Deadline], Answer[str]],
        attempt_s: float = math.inf,
    ) -> AnswerT:
        said: DLedgerError | None = None
        attempt_s = min(attempt_s, deadline.timeout_s / 2)

        def attempt() -> AnswerT:
            nonlocal said
            try:
                address = where(deadline)
            except UnavailableError as error:
                if said is not None and deadline.expired:  # the search was cut short: a broker's response says more
                    raise said from error
                raise
            try:
                part = deadline if attempt_s >= deadline.remaining_s else Deadline(attempt_s)
                return self.ask(method, request, address, part)
            except DLedgerError as error:
                said = error
                self.directory.note_failure(address, error)
                raise

        return self.retry(deadline, attempt)

    def retry(self, deadline: Deadline, attempt: Callable[[], Answer[_T]]) -> _T:
        """Retry what is safe to retry, with growing pauses, until the deadline."""
        try:
            return attempt()  # keep the usual case free of the retry overhead
        except DLedgerError as error:
            if self.closed or deadline.expired or not is_retried_read(error):
                raise
        return retry(deadline, attempt, lambda error: not self.closed and is_retried_read(error))

    def check_master(self, address: str, deadline: Deadline) -> None:
        """Ask a broker whether it accepts writes. Raises ``NotMasterError`` if not.

        Called before anything is sent, so that a failure to connect certainly has no effect.
        """
        try:
            status = self.ask(STATUS, pb.StatusRequest(), address, deadline)
        except DLedgerError as error:
            error.outcome = "not_applied"
            if deadline.expired:
                raise UnavailableError(f"{address} did not answer within {deadline.timeout_s:g} s") from error
            raise
        self.directory.learn(address, report_of_broker(status))
        if not is_master(status):
            raise NotMasterError(f"{address} is not the master now", leader=hint_of(status.leader_address))

    def ask_all(
        self, addresses: Collection[str], deadline: Deadline
    ) -> Generator[tuple[str, pb.StatusResponse | DLedgerError], None]:
        """The statuses of several brokers, as they arrive; remaining requests are cancelled when the caller stops."""
        request = pb.StatusRequest().SerializeToString()
        parse = partial(parse_answer, pb.StatusResponse)
        return self.channels.ask_all(STATUS.name, request, parse, addresses, deadline)
