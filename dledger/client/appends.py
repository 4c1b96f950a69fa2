"""Single appends of the client for threads: streams to the nodes, and what to do when one of them fails.

With lanes, an append is repeated until it is stored or its time is over, whatever became of the attempts before: the
group knows it again (``dledger.client.lanes``). Without, only what was certainly not applied is tried again.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from dledger.client.lanes import LanePool, Ticket
from dledger.client.pipe import AppendPipe
from dledger.client.shared import RETRY_WAIT_S_MAX, RETRY_WAIT_S_MIN, Deadline, Directory, is_retried
from dledger.errors import DLedgerError, UnavailableError
from dledger.types import AppendedBatch, ProducerBatch


@dataclass(frozen=True, slots=True)
class Links:
    """What appends need of the client that they belong to."""

    group: str
    directory: Directory
    closing: threading.Event
    channel: Callable[[str], grpc.Channel]
    leader: Callable[[Deadline], str]
    retry: Callable[..., Any]  # Any: gives what the attempt that it is given gives
    is_led_by_another: Callable[[str], bool]


class Appends:
    """The appending half of ``DLedgerClient``. Thread-safe."""

    def __init__(self, links: Links, lanes: LanePool | None) -> None:
        self._links = links
        self._lanes = lanes
        self._turns = threading.Condition()  # guards the lanes and their tickets; taken inside a pipe's lock
        self._lock = threading.Lock()  # guards the fields below
        self._pipes: dict[str, AppendPipe] = {}
        self._opening: dict[str, threading.Lock] = {}  # one at a time opens a pipe to an address

    def close(self) -> None:
        """End all streams, once the client's ``closing`` is set; what is under way becomes unknown."""
        with self._lock:
            pipes, self._pipes = self._pipes, {}
        for pipe in pipes.values():
            pipe.close()

    # --- one append, until it is stored or its time is over ---------------------------------------------------------

    def append(self, bodies: Sequence[bytes], deadline: Deadline) -> AppendedBatch:
        """Append a batch, all or nothing, once."""
        lanes = self._lanes
        if lanes is None:
            once: AppendedBatch = self._links.retry(deadline, lambda: self._attempt(bodies, deadline))
            return once
        ticket = Ticket(len(bodies))
        number = partial(self._number, lanes, ticket)
        try:
            try:
                batch = self._attempt(bodies, deadline, number)
            except DLedgerError as error:
                batch = self._append_again(lanes, ticket, bodies, deadline, error)
        except BaseException:
            self._leave(lanes, ticket)
            raise
        with self._turns:
            if lanes.settle(ticket):
                self._turns.notify_all()
        return batch

    def _append_again(
        self, lanes: LanePool, ticket: Ticket, bodies: Sequence[bytes], deadline: Deadline, error: DLedgerError
    ) -> AppendedBatch:
        """Repeat a failed append until it is stored, is certainly not, or the time is over."""
        links, number = self._links, partial(self._number, lanes, ticket)
        pause_s, hinted = RETRY_WAIT_S_MIN, False
        while True:
            with self._turns:
                final = lanes.judge(ticket, error)
                if final is None and (links.closing.is_set() or deadline.remaining_s < RETRY_WAIT_S_MIN):
                    final = lanes.give_up(ticket, error)
                self._turns.notify_all()
            if final is not None:
                raise final from error
            hinted = not hinted and error.leader is not None and links.directory.leader is not None
            if not hinted:
                links.closing.wait(min(pause_s * random.uniform(1, 1.5), deadline.remaining_s / 2))
                pause_s = min(2 * pause_s, RETRY_WAIT_S_MAX)
            try:
                self._await_turn(lanes, ticket, deadline)
                return self._attempt(bodies, deadline, number)
            except DLedgerError as again:
                error = again

    def _await_turn(self, lanes: LanePool, ticket: Ticket, deadline: Deadline) -> None:
        with self._turns:
            if not self._turns.wait_for(lambda: lanes.is_first(ticket), deadline.remaining_s):
                raise UnavailableError(f"earlier appends were still under way after {deadline.timeout_s} s")

    def _leave(self, lanes: LanePool, ticket: Ticket) -> None:
        """The caller hears of an error, or was interrupted: nobody must wait for this append any more."""
        with self._turns:
            if ticket.lane is not None:
                ticket.uncertain = True
                lanes.give_up(ticket, None)
            self._turns.notify_all()

    def _number(self, lanes: LanePool, ticket: Ticket, pipe: AppendPipe) -> ProducerBatch | None:
        """What an append is sent as: what it was sent as before, or the next of its stream; None: without number."""
        with self._turns:
            if ticket.lane is None:
                pipe.lane = lanes.enter(ticket, pipe.lane)
            return ticket.producer

    def append_as(self, batch: ProducerBatch, bodies: Sequence[bytes], deadline: Deadline) -> AppendedBatch:
        """Append as a producer that the caller has named and numbered."""
        uncertain = False

        def retried(error: BaseException) -> bool:
            nonlocal uncertain
            unknown = isinstance(error, DLedgerError) and error.outcome == "unknown"
            uncertain = uncertain or unknown
            return is_retried(error) or unknown

        try:
            stored: AppendedBatch = self._links.retry(
                deadline, lambda: self._attempt(bodies, deadline, lambda _pipe: batch), retried
            )
        except DLedgerError as error:
            if uncertain:
                error.outcome = "unknown"
            raise
        return stored

    def _attempt(
        self,
        bodies: Sequence[bytes],
        deadline: Deadline,
        number: Callable[[AppendPipe], ProducerBatch | None] | None = None,
    ) -> AppendedBatch:
        links = self._links
        address = links.leader(deadline)
        try:
            pipe = self._pipe(address, deadline)
            if number is None:
                return pipe.append(bodies, deadline)
            return pipe.append(bodies, deadline, partial(number, pipe), partial(links.is_led_by_another, address))
        except DLedgerError as error:
            links.directory.note_failure(address, error)
            raise

    # --- streams ----------------------------------------------------------------------------------------------------

    def _pipe(self, address: str, deadline: Deadline) -> AppendPipe:
        pipe = self._pipes.get(address)
        if pipe is not None and not pipe.broken:
            return pipe
        with self._lock:
            opening = self._opening.setdefault(address, threading.Lock())
        if not opening.acquire(timeout=deadline.remaining_s):
            raise UnavailableError(f"{address} did not accept a stream within {deadline.timeout_s} s")
        try:
            pipe = self._pipes.get(address)
            if pipe is None or pipe.broken:
                stale, pipe = pipe, self._open(address, deadline)
                if stale is not None:
                    stale.close()
                    with self._turns:
                        if self._lanes is not None:
                            self._lanes.close(stale.lane)
                with self._lock:
                    closed = self._links.closing.is_set()
                    if not closed:
                        self._pipes[address] = pipe
                if closed:
                    pipe.close()
                    raise UnavailableError("the client is closed")
            return pipe
        finally:
            opening.release()

    def _open(self, address: str, deadline: Deadline) -> AppendPipe:
        return AppendPipe(self._links.channel(address), address, self._links.group, deadline)

    def open_pipe(self, deadline: Deadline) -> AppendPipe:
        """A stream of one's own to the leader."""
        links = self._links

        def attempt() -> AppendPipe:
            address = links.leader(deadline)
            try:
                return self._open(address, deadline)
            except DLedgerError as error:
                links.directory.note_failure(address, error)
                raise

        pipe: AppendPipe = links.retry(deadline, attempt)
        return pipe
