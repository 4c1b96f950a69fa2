"""A member of a group keeps a stream to every broker, which says what a member must know."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import grpc

from dledger.backoff import Backoff
from dledger.client.shared import RETRY_WAIT_S_MIN
from dledger.errors import DLedgerError, UnavailableError
from dledger.escapes import escaped
from rocketstore.client.connection import BrokerConnection
from rocketstore.client.errors import failure_of
from rocketstore.client.methods import parse_answer
from rocketstore.pb import broker_pb2 as pb

if TYPE_CHECKING:
    _Call = grpc.CallIterator[bytes]

_log = logging.getLogger(__name__)
HEARTBEAT_S: Final = 10.0
RECONNECT_S_MAX: Final = 0.5
WARNINGS_MAX: Final = 16
"""Different ones that a member logs, each once: they name other members, who come and go."""
Heard = Callable[[str, bytes | None], None]
"""Called with the address of a broker and what it says, or None at the end of its stream; on any thread."""


class BrokerStreams:
    """Streams of ``method``; every broker answers each heartbeat, ``request``."""

    def __init__(self, connection: BrokerConnection, method: str, request: bytes, heard: Heard) -> None:
        self._connection = connection
        self._method = method
        self._request = request
        self._heard = heard
        self._lock = threading.Lock()  # guards the fields below
        self._streams: dict[str, _BrokerStream] = {}
        self._stopped = False

    def look_after(self) -> None:
        """Join brokers that are new, leave those that are gone, and streams that are silent; called periodically."""
        addresses = self._connection.directory.addresses
        with self._lock:
            if self._stopped:
                return
            gone = [self._streams.pop(one) for one in self._streams.keys() - set(addresses)]
            for address in addresses:
                if address not in self._streams:
                    self._streams[address] = _BrokerStream(
                        self._connection, self._method, address, self._request, self._heard
                    )
            streams = list(self._streams.values())
        for stream in gone:
            stream.stop()
        for stream in streams:
            stream.look_after()

    def has_joined(self) -> bool:
        """Whether the master has answered a heartbeat."""
        stream = self._to_master()
        return stream is not None and stream.has_joined

    def error(self) -> DLedgerError | None:
        """Why there is no stream to the master, if so."""
        stream = self._to_master()
        return None if stream is None else stream.error

    def stop(self) -> None:
        """Leave the group at every broker."""
        with self._lock:
            self._stopped = True
            streams = list(self._streams.values())
        for stream in streams:
            stream.stop()
        for stream in streams:
            stream.join()

    def _to_master(self) -> _BrokerStream | None:
        master = self._connection.directory.leader
        return self._streams.get(master) if master is not None else None


class MemberStreams(BrokerStreams):
    """A member of a consumer group. ``changed`` is called, on any thread, when the members may have changed."""

    def __init__(
        self, connection: BrokerConnection, request: pb.MembershipRequest, changed: Callable[[], None]
    ) -> None:
        super().__init__(connection, "Membership", request.SerializeToString(), self._take)
        self._changed = changed
        self._members: dict[str, list[str]] = {}  # the last list of each broker to which there is a stream
        self._warned: set[str] = set()

    def members(self) -> list[str] | None:
        """The members according to the master; None if that is unknown now."""
        master = self._connection.directory.leader
        return None if master is None else self._members.get(master)

    def _take(self, address: str, data: bytes | None) -> None:
        if data is None:
            self._members.pop(address, None)
            return
        answer = parse_answer(pb.MembershipResponse, data, address)
        members, warning = list(answer.client_ids), answer.warning
        if warning and warning not in self._warned and len(self._warned) < WARNINGS_MAX:
            self._warned.add(warning)
            _log.warning("%s", escaped(warning))
        if self._members.get(address) != members:
            self._members[address] = members
            self._changed()


class _BrokerStream:
    """The stream to one broker, on a thread that opens it anew whenever it ends."""

    def __init__(self, connection: BrokerConnection, method: str, address: str, request: bytes, heard: Heard) -> None:
        self._connection = connection
        self._method = method
        self._address = address
        self._request = request
        self._heard = heard
        self._stop = threading.Event()
        self._call: _Call | None = None
        self._heard_at = time.monotonic()
        self.has_joined = False
        """Whether the broker has answered on the present stream."""
        self.error: DLedgerError | None = None
        """Why the last stream ended; None while there is one."""
        self._thread = threading.Thread(target=self._run, name=f"rocketstore-member-{address}", daemon=True)
        self._thread.start()

    def look_after(self) -> None:
        """End the stream if the broker does not answer heartbeats."""
        call = self._call
        if call is not None and time.monotonic() > self._heard_at + HEARTBEAT_S + self._connection.timeout_s:
            call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped

    def stop(self) -> None:
        """Make the thread end; ``join`` waits for it."""
        self._stop.set()
        call = self._call
        if call is not None:
            call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        backoff = Backoff(RETRY_WAIT_S_MIN, RECONNECT_S_MAX)
        told = ""
        while not self._stop.is_set():
            try:
                self._session(backoff.succeeded)
                error: DLedgerError = UnavailableError(f"{self._address} ended the stream")
            except DLedgerError as failure:
                error = failure
            self.has_joined = False
            self._heard(self._address, None)
            if self._stop.is_set():
                return
            self.error = error
            if str(error) != told:  # once, not for every attempt
                told = str(error)
                _log.info("no membership at %s: %s; retrying", self._address, told)
            self._stop.wait(backoff.pause())

    def _session(self, succeeded: Callable[[], None]) -> None:
        ended: SimpleQueue[None] = SimpleQueue()

        def heartbeats() -> Iterator[bytes]:
            while True:
                yield self._request
                try:
                    ended.get(timeout=HEARTBEAT_S)
                except Empty:
                    continue
                return

        self._heard_at = time.monotonic()
        call = self._call = self._connection.channels.open_stream(self._method, self._address, heartbeats())
        if self._stop.is_set():
            call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped
        try:
            for data in call:
                self._heard(self._address, data)
                self._heard_at = time.monotonic()
                self.error = None
                self.has_joined = True
                succeeded()
        except grpc.RpcError as error:
            raise failure_of(error, self._address, sent=False) from error
        finally:
            self._call = None
            ended.put(None)
            call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped
