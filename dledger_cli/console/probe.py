"""Polls one node, over the same kind of connections as other commands."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dledger.errors import DLedgerError, InvalidRequestError
from dledger_cli.console.node_summaries import (
    BrokerSummary,
    NodeState,
    NodeSummary,
    broker_summary_of,
    summary_of_node,
    summary_of_plain_broker,
)
from rocketstore.client import RequestNotKnownError

if TYPE_CHECKING:
    from dledger.client.blocking import DLedgerClient
    from rocketstore.client import Admin
    from rocketstore.client.aio.routes import RoutedBroker

BROKER_TIMEOUT_S: Final = 1.0
BROKER_INTERVAL_S: Final = 2.0
"""How often a broker that has a log is asked for its own figures, which are over ten seconds anyway."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A node's status, and how long the request took; -1 for the first one, which includes connecting."""

    summary: NodeSummary
    broker: BrokerSummary | None
    latency_ms: float


@dataclass(frozen=True, slots=True)
class _Known:
    """A broker's own figures, the role and term in which it told them, and when it was asked."""

    summary: BrokerSummary | None
    role: tuple[NodeState, int]
    asked_s: float


class GroupProbe:
    """Polls nodes; detects whether an address is a log node, a broker of a group or a plain broker.

    Thread-safe; ``close`` closes both clients.
    """

    def __init__(self, client: DLedgerClient, admin: Admin) -> None:
        self._client = client
        self._admin = admin
        self._named: RoutedBroker | None = None  # of all brokers here, once known
        self._connected: set[str] = set()  # set.add and discard are atomic
        self._no_broker: set[str] = set()
        self._broker_facts: dict[str, _Known] = {}  # so is setting an item
        self._plain: set[str] = set()

    def ask(self, address: str, timeout_s: float) -> Answer:
        """The status of the node at ``address``: a timed metadata request, then the broker's status.

        Raises ``DLedgerError`` if there is no response in time.
        """
        if address in self._plain:
            return self._ask_plain(address)
        started = time.perf_counter()
        try:
            status = self._client.metadata(address, timeout_s=timeout_s)
        except InvalidRequestError:  # it has no log service
            return self._ask_plain(address)
        except DLedgerError:
            self._no_broker.discard(address)  # another server may be there after a restart
            self._broker_facts.pop(address, None)
            self._connected.discard(address)
            raise
        latency_ms = self._latency_ms(address, started)
        summary = summary_of_node(status)
        return Answer(summary, self._ask_broker(address, summary), latency_ms)

    def _latency_ms(self, address: str, started: float) -> float:
        if address not in self._connected:
            self._connected.add(address)
            return -1.0
        return (time.perf_counter() - started) * 1000

    def close(self) -> None:
        """Calls in progress fail."""
        self._client.close()
        self._admin.close()

    def _ask_broker(self, address: str, summary: NodeSummary) -> BrokerSummary | None:
        """Its own figures: now and then, and as soon as its role in the group has changed."""
        if address in self._no_broker:
            return None
        known = self._broker_facts.get(address)
        role = summary.state, summary.term
        if known is not None and known.role == role and time.monotonic() - known.asked_s < BROKER_INTERVAL_S:
            return known.summary
        asked_s, told = time.monotonic(), None
        try:
            status = self._admin.status(address)
            told = broker_summary_of(status, self._name())
        except RequestNotKnownError:
            self._no_broker.add(address)
        except DLedgerError:  # it is starting or stopping: the log service's status is enough
            return None
        self._broker_facts[address] = _Known(told, role, asked_s)
        return told

    def _ask_plain(self, address: str) -> Answer:
        started = time.perf_counter()
        try:
            status = self._admin.status(address)
            named = self._name()
        except DLedgerError:
            self._plain.discard(address)
            self._connected.discard(address)
            raise
        latency_ms = self._latency_ms(address, started)
        if status.runtime.role:  # its log service is not up yet
            self._plain.discard(address)
            raise InvalidRequestError(f"{address} is a broker of a group, but its log does not answer")
        self._plain.add(address)
        return Answer(summary_of_plain_broker(status, named), broker_summary_of(status, named), latency_ms)

    def _name(self) -> RoutedBroker:
        """The name and the cluster of the brokers."""
        if self._named is None:
            (self._named,) = self._admin.brokers()
        return self._named
