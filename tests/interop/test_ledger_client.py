"""DLedger's own Java client, unmodified, with a group of ours: ``make interop``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dledger.client import DLedgerClient
from tests.interop import java
from tests.support.running_group import RunningGroup
from tests.support.waiting import wait_until

pytestmark = pytest.mark.interop

Ask = Callable[[str], dict[str, Any]]  # Any: whatever JSON holds


@pytest.fixture(scope="module", autouse=True)
def _programs() -> None:
    java.build()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[RunningGroup]:
    """Three members."""
    found = RunningGroup(tmp_path / "group")
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture
def ask(group: RunningGroup, tmp_path: Path) -> Iterator[Ask]:
    """What the client answers to a command."""
    group.wait_for_leader()
    peers = ";".join(f"{node.config.node_id}-{node.client_address}" for node in group.nodes)
    directory = tmp_path / "client"
    directory.mkdir()
    with java.ledger_client("default", peers, directory) as found:
        yield found


def appended(ask: Ask, body: bytes) -> dict[str, Any]:
    """The response to an append that is stored; it may come while there is no leader."""
    found: dict[str, Any] = {}

    def is_stored() -> bool:
        found.update(ask(f"append {body.hex()}"))
        assert found["code"] in (200, 301, 404, 500), found  # stored, or no leader is known
        return bool(found["code"] == 200)

    wait_until(is_stored, f"an append of {body!r} is stored", 60)
    return found


def body_of(entry: dict[str, Any]) -> bytes:
    """As the library writes it: signed numbers, or nothing."""
    return bytes(number & 0xFF for number in entry["body"])


def test_what_it_appends_it_gets_and_so_do_our_clients(group: RunningGroup, ask: Ask) -> None:
    """Any bytes, an empty body too; with the same indexes and positions on both sides."""
    bodies = [b"first", bytes(range(256)) * 8, b"", b"last"]
    responses = [appended(ask, body) for body in bodies]
    got = [ask(f"get {response['index']}") for response in responses]

    indexes = [response["index"] for response in responses]
    assert indexes == list(range(indexes[0], indexes[0] + len(bodies)))
    entries = [one["entries"][0] for one in got]
    assert [body_of(one) for one in entries] == bodies
    with DLedgerClient([node.client_address for node in group.nodes]) as client:
        ours = client.read(indexes[0], count=len(bodies))
    assert [one.body for one in ours] == bodies
    assert [(one["index"], one["pos"], one["term"]) for one in entries] == [
        (entry.index, entry.position, entry.term) for entry in ours
    ]
    assert [response["pos"] for response in responses] == [entry.position for entry in ours]


def test_it_finds_the_next_leader(group: RunningGroup, ask: Ask) -> None:
    """When the one that it knows has stopped; nothing that was acknowledged is lost."""
    before = appended(ask, b"before")
    group.nodes[group.leader()].stop()

    after = appended(ask, b"after")

    assert after["index"] > before["index"]
    found = ask(f"get {before['index']}")
    assert body_of(found["entries"][0]) == b"before"


def test_it_transfers_the_leadership(group: RunningGroup, ask: Ask) -> None:
    """To the member that it names; its next append goes there."""
    appended(ask, b"a")
    group.wait_converged()
    leader = group.leader()
    target = (leader + 1) % 3
    term = group.nodes[leader].status().term

    response = ask(f"transfer n{leader} n{target} {term}")

    assert response["code"] == 200
    wait_until(lambda: group.leader() == target, "it leads", 20)
    assert appended(ask, b"b")["index"] > 0


def test_an_error_has_dledgers_code(ask: Ask) -> None:
    """Here: there is no such entry yet."""
    assert ask("get 1000000")["code"] == 410
