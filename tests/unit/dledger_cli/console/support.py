"""A probe that says what a test wants, and a client of the console that is no browser."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPResponse

from dledger.errors import DLedgerError, UnavailableError
from dledger_cli.console.probe import Answer, BrokerSummary, GroupProbe, NodeState, NodeSummary
from rocketstore.client import BrokerStatus
from rocketstore.client.aio.routes import RoutedBroker
from rocketstore.remoting.runtime import RuntimeInfo
from rocketstore.remoting.topics import KVTable

MEMBERS = (("n0", "h:1"), ("n1", "h:2"), ("n2", "h:3"))


def summary(node: str, state: NodeState = NodeState.FOLLOWER, term: int = 1, **more: object) -> NodeSummary:
    """One node's word."""
    made = NodeSummary(node, "g", state, term, MEMBERS, begin=0, end=9, committed=9, flushed=9, end_position=900)
    return replace(made, **more)  # type: ignore[arg-type]  # of whatever field a test names


NAMED = RoutedBroker("c", "b", {0: "h:1"})


def broker_status(**told: object) -> BrokerStatus:
    """What a broker says of itself: a plain master, idle and empty, unless it says something else."""
    table = {"brokerRole": "SYNC_MASTER"} | {name: str(value) for name, value in told.items()}
    return BrokerStatus("h:1", RuntimeInfo.decode(KVTable(table).encode()), table)


def answer(made: NodeSummary, latency_ms: float = 1.0, broker: BrokerSummary | None = None) -> Answer:
    """The same as an answer."""
    return Answer(made, broker, latency_ms)


@dataclass
class FakeProbe(GroupProbe):
    """An answer or an error per address."""

    answers: dict[str, Answer | DLedgerError] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    blocked: dict[str, threading.Event] = field(default_factory=dict)
    closed: bool = False

    def ask(self, address: str, timeout_s: float) -> Answer:
        self.asked[address] = self.asked.get(address, 0) + 1
        if address in self.blocked:
            self.blocked[address].wait(timeout_s)
        found = self.answers.get(address, UnavailableError(f"{address} is unreachable"))
        if isinstance(found, DLedgerError):
            raise found
        return found

    def close(self) -> None:
        self.closed = True
        for event in self.blocked.values():
            event.set()


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Shows redirections instead of following them."""

    def redirect_request(self, *_arguments: object) -> None:
        return None


@dataclass
class Reply:
    """Status, headers (lower case) and body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, object]:
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found


def request(
    url: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: object = None,
) -> Reply:
    """One request, whatever its status; ``body`` is sent as JSON, or as it is if it is bytes."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data=data, headers=dict(headers or {}), method=method)
    opener = urllib.request.build_opener(NoRedirect, urllib.request.ProxyHandler({}))
    try:
        with opener.open(asked, timeout=60) as found:
            return Reply(found.status, {name.lower(): text for name, text in found.headers.items()}, found.read())
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, {name.lower(): text for name, text in error.headers.items()}, error.read())


@contextmanager
def stream(url: str) -> Iterator[Iterator[tuple[str, dict[str, object]]]]:
    """Server-sent events by name, as they come."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=60) as found:
        yield _events(found)


def _events(found: HTTPResponse) -> Iterator[tuple[str, dict[str, object]]]:
    name = ""
    for line in found:
        text = line.decode().rstrip("\n")
        if text.startswith("event: "):
            name = text.removeprefix("event: ")
        elif text.startswith("data: "):
            yield name, json.loads(text.removeprefix("data: "))
