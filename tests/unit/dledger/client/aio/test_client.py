"""The asyncio client over remoting, against fake nodes behind real ports."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dledger.access.guard import AccessGuard
from dledger.access.rules import parse_rules
from dledger.client import AppendResult, ClientSecurity, ReadMode, TlsFiles
from dledger.client.aio import DLedgerClient
from dledger.client.aio import client as module
from dledger.client.aio.connections import NodeConnections
from dledger.client.shared import TimeLimit
from dledger.clock import Clock
from dledger.config import ClientAuth, SecurityConfig, ServerConfig
from dledger.errors import (
    AccessDeniedError,
    ConfigError,
    DLedgerError,
    EmptyBatchError,
    EntryTooLargeError,
    IdentityError,
    IndexOutOfRangeError,
    InvalidRequestError,
    LeaderNotReadyError,
    PendingFullError,
    RequestTimeoutError,
    TermChangedError,
    TlsError,
    UnavailableError,
)
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from dledger.remoting.server import Handlers, RemotingServer, ServerLimits
from dledger.rpc import loops
from dledger.types import Role
from dledger_cli import certs
from dledger_cli.local.group import free_ports
from tests.support.certificates import expire, files, resetting_server
from tests.support.fake_group import FakeGroup, fake_group
from tests.support.fake_node import FakeNode, client_server

TIMEOUT_S = 60
Test = Callable[[FakeGroup, DLedgerClient], Awaitable[None]]


def with_client(test: Test, *, uvloop: bool = True, **options: Any) -> None:  # noqa: ANN401  # the client's own
    """Run a test with a group and a client of all its addresses."""

    async def main(group: FakeGroup) -> None:
        async with DLedgerClient(group.addresses, **options) as client:
            await asyncio.wait_for(test(group, client), TIMEOUT_S)

    with fake_group() as group:
        (loops.run if uvloop else asyncio.run)(main(group))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("uvloop", [True, False])
def test_appends_and_reads(uvloop: bool) -> None:
    """Where each entry is; on uvloop and on asyncio's own loop."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        result = await client.append(b"a")
        many = await client.append_many([b"b"] * 1500)
        entries = await client.read(0, count=2, address=group.addresses[0])

        assert result == AppendResult(result.index, group.nodes[0].term, result.position)
        assert (result.index, [one.index for one in many]) == (0, list(range(1, 1501)))
        assert [entry.body for entry in entries] == [b"a", b"b"]
        assert len(await client.read(0, mode=ReadMode.LINEARIZABLE)) == 1501
        with pytest.raises(IndexOutOfRangeError):
            await client.read(5000, address=group.addresses[0])
        with pytest.raises(EmptyBatchError):
            await client.append_many([])

    with_client(test, uvloop=uvloop)


def test_submitted_entries_are_stored_in_order_in_few_requests() -> None:
    """Thousands of cheap calls."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        sent = [await client.submit(b"%d" % number) for number in range(5000)]
        many = await client.submit_many([b"x"] * 3000)
        await client.flush()
        assert [(await one).index for one in sent] == list(range(5000))
        assert len(await many.results()) == 3000
        assert group.nodes[0].bodies()[:5000] == [b"%d" % number for number in range(5000)]
        assert len(group.nodes[0].batches) < 100

    with_client(test)


def test_closing_stores_what_was_submitted() -> None:
    """And what is asked afterwards fails for certain."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        sent = await client.submit(b"a")
        await client.close()
        assert sent.result().index == 0
        for call in (client.append(b"b"), client.read(0), client.submit(b"c")):
            with pytest.raises(UnavailableError) as error:
                await call
            assert error.value.outcome == "not_applied"

    with_client(test)


@pytest.mark.parametrize("idempotent", [True, False])
def test_appends_follow_a_new_leader(idempotent: bool) -> None:
    """A refusal names it."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        await client.append(b"a")
        group.elect(1)
        assert (await client.append(b"b")).index == 1
        assert group.nodes[1].bodies() == [b"a", b"b"]
        assert bool(group.nodes[1].producers) == idempotent

    with_client(test, enable_idempotence=idempotent)


def test_appends_survive_a_killed_leader_and_are_stored_once() -> None:
    """What was in flight is repeated under its numbers, although nobody knows whether it was stored."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        await client.append(b"a")
        group.nodes[0].hold = True
        lost = asyncio.ensure_future(client.append(b"b"))
        await until(lambda: len(group.nodes[0].held) == 1)
        await asyncio.to_thread(group.kill, 0)
        group.nodes[0].committed = 1  # the others have it
        group.elect(1)

        assert (await lost).index == 1
        assert group.nodes[1].bodies() == [b"a", b"b"]
        assert group.nodes[1].repeated == 1

    with_client(test)


def test_without_numbers_a_lost_answer_is_unknown() -> None:
    """It is not repeated: it may be stored."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        group.nodes[0].hold = True
        lost = asyncio.ensure_future(client.append(b"b"))
        await until(lambda: len(group.nodes[0].held) == 1)
        await asyncio.to_thread(group.kill, 0)
        with pytest.raises(DLedgerError) as error:
            await lost
        assert error.value.outcome == "unknown"

    with_client(test, enable_idempotence=False)


@pytest.mark.parametrize("error", [LeaderNotReadyError("not yet"), PendingFullError("full"), TermChangedError("lost")])
def test_what_may_pass_is_tried_again(error: DLedgerError) -> None:
    """Until the deadline."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        group.nodes[0].fail_appends = [error]
        assert (await client.append(b"a")).index == 0
        assert group.nodes[0].bodies() == [b"a"]

    with_client(test)


def test_an_answer_that_never_comes_is_unknown() -> None:
    """At the deadline, not later."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        await client.append(b"a")
        group.nodes[0].hold = True
        with pytest.raises(RequestTimeoutError) as error:
            await client.append(b"b", timeout_s=0.3)
        assert error.value.outcome == "unknown"

    with_client(test)


def test_entries_that_no_request_can_hold_are_refused() -> None:
    """Before they are sent; others go on."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        for size in (5 << 20, 9 << 20, 17 << 20):
            with pytest.raises(EntryTooLargeError) as error:
                await client.append(bytes(size))
            assert error.value.outcome == "not_applied"
        assert (await client.append(b"a")).index == 0

    with_client(test)


def test_a_producers_own_numbers() -> None:
    """A repetition is recognized, whoever repeats it."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        first = await client.append_as("p", 0, [b"a", b"b"])
        again = await client.append_as("p", 0, [b"a", b"b", b"c"])
        assert [one.index for one in first] == [0, 1]
        assert [one.index for one in again][-1] == 2
        assert group.nodes[0].bodies() == [b"a", b"b", b"c"]
        assert await client.producer_sequence("p") == 3
        assert await client.producer_sequence("q") == 0

    with_client(test)


def test_a_follower_goes_on_at_another_node() -> None:
    """Every entry once, in order; new ones as they come."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        await client.append_many([b"%d" % number for number in range(10)])
        group.elect(0)
        found: list[bytes] = []
        async with aclosing(client.follow(0)) as entries:
            async for entry in entries:
                found.append(entry.body)
                if len(found) == 10:
                    await asyncio.to_thread(group.kill, 0)
                    group.elect(1)
                    await client.append(b"10")
                if len(found) == 11:
                    break
        assert found == [b"%d" % number for number in range(11)]

    with_client(test)


def test_a_watch_tells_changes_and_goes_on_at_another_node() -> None:
    """The role at first, then each change."""

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        roles: list[tuple[str, Role]] = []
        async with aclosing(client.watch_role(group.addresses[0])) as events:
            async for event in events:
                roles.append((event.node_id, event.role))
                if len(roles) == 1:
                    group.elect(1)
                elif event.role is Role.FOLLOWER:
                    break
        assert roles[0] == ("n0", Role.LEADER)
        assert roles[-1] == ("n0", Role.FOLLOWER)
        async with aclosing(client.watch_role()) as events:
            first = await anext(events)
            await asyncio.to_thread(group.kill, int(first.node_id[1]))
            second = await anext(events)
        assert first.node_id != second.node_id

    with_client(test)


def test_a_watch_leaves_a_node_that_answers_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen one closes no connection."""
    monkeypatch.setattr(module, "WATCH_CHECK_S", 0.05)
    thaw = threading.Event()

    def freeze() -> None:
        thaw.wait(TIMEOUT_S)

    async def test(group: FakeGroup, client: DLedgerClient) -> None:
        try:
            async with aclosing(client.watch_role()) as events:
                first = await anext(events)
                group.servers[int(first.node_id[1])].bridge.post(freeze)
                second = await anext(events)
        finally:
            thaw.set()
        assert first.node_id != second.node_id

    with_client(test, timeout_s=1.5)


def test_the_group_is_known_from_one_address() -> None:
    """Members, leader, transfer."""

    async def main(group: FakeGroup) -> None:
        async with DLedgerClient(group.addresses[2]) as client:
            assert (await client.metadata()).node_id == "n2"
            assert set(await client.members_status()) == {"n0", "n1", "n2"}
            assert (await client.append(b"a")).index == 0
            assert (await client.metadata()).role is Role.LEADER
            assert (await client.transfer_leadership()).node_id == "n1"
            with pytest.raises(IdentityError):
                async with DLedgerClient(group.addresses[2], group="other", timeout_s=60) as other:
                    await other.append(b"a")

    with fake_group() as group:
        loops.run(asyncio.wait_for(main(group), TIMEOUT_S))


# --- what is there --------------------------------------------------------------------------------------------------


def test_nobody_there_is_unavailable() -> None:
    """At the deadline, and not applied."""

    async def main() -> None:
        async with DLedgerClient(f"127.0.0.1:{free_ports(1)[0]}", timeout_s=0.5) as client:
            for call in (client.append(b"a"), client.read(0), client.metadata()):
                with pytest.raises(UnavailableError) as error:
                    await call
                assert error.value.outcome == "not_applied"

    loops.run(asyncio.wait_for(main(), TIMEOUT_S))


def test_a_server_that_announces_nothing_is_asked_nothing() -> None:
    """RocketMQ's own brokers and DLedger's nodes do not know our codes."""
    asked: list[int] = []

    async def main() -> None:
        def answer(connection: RemotingConnection, frame: Frame) -> None:
            asked.append(frame.code)
            connection.done(frame, frame.answer())

        handlers = Handlers({50000: answer}, {}, lambda _: None, lambda _: None)
        server = RemotingServer("another", handlers, ServerLimits(9, 9, 9, 9, 9.0, *[1 << 20] * 4))
        listening = await asyncio.get_running_loop().create_server(server.protocol, "127.0.0.1", 0)
        host, port = listening.sockets[0].getsockname()
        async with DLedgerClient(f"{host}:{port}", timeout_s=60) as client:
            with pytest.raises(InvalidRequestError, match="not a node of this project"):
                await client.append(b"a")
        listening.close()
        await server.close(0)

    loops.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert set(asked) == {50000}


def test_plaintext_stays_on_this_machine() -> None:
    """Unless it is insisted on."""
    with pytest.raises(ConfigError, match="TLS"):
        DLedgerClient("192.0.2.1:1")


def test_tls_verifies_the_certificate_and_its_name(tmp_path: Path) -> None:
    """And a client without it is told what to do."""
    certs.make_authority(tmp_path)
    certs.make_node(tmp_path, "n0")
    own = files(tmp_path, "n0")
    security = SecurityConfig(
        tls_cert_path=own.cert, tls_key_path=own.key, tls_trust_cert_path=own.ca, tls_client_auth=ClientAuth.NONE
    )
    server = client_server(ServerConfig(client_port=0, security=security), FakeNode())
    server.start()

    async def main() -> None:
        trusted = ClientSecurity(TlsFiles(tmp_path / "ca.crt"))
        async with DLedgerClient(f"localhost:{server.port}", security=trusted) as client:
            assert (await client.append(b"a")).index == 0
        (tmp_path / "other").mkdir()
        certs.make_authority(tmp_path / "other")
        stranger = ClientSecurity(TlsFiles(tmp_path / "other" / "ca.crt"))
        for security, told in ((None, "accepts only TLS.*--tls-ca"), (stranger, "certificate")):
            connections = NodeConnections([f"localhost:{server.port}"], "default", security)
            with pytest.raises(DLedgerError, match=told) as error:
                await connections.link(f"localhost:{server.port}", TimeLimit(TIMEOUT_S))
            assert error.value.outcome == "not_applied"
            await connections.close()
        async with DLedgerClient(f"localhost:{server.port}", timeout_s=10 * TIMEOUT_S) as client:
            with pytest.raises(TlsError, match="--tls-ca"):  # at once
                await client.append(b"a")

    try:
        loops.run(asyncio.wait_for(main(), TIMEOUT_S))
    finally:
        server.close()


@pytest.mark.parametrize("uvloop", [True, False])
def test_a_reset_during_the_handshake_is_explained_as_a_refused_certificate(tmp_path: Path, uvloop: bool) -> None:
    """As if the server had hung up after it: which of both the client sees is a matter of time."""
    certs.make_authority(tmp_path)
    certs.make_client(tmp_path, "late")
    certs.make_client(tmp_path, "good")
    expire(tmp_path, "late")
    cases = [
        (files(tmp_path, "late"), TlsError, "rejected our certificate .*late.crt: certificate has expired"),
        (files(tmp_path, "good"), UnavailableError, "does not trust the CA of our certificate .*good.crt"),
        (TlsFiles(tmp_path / "ca.crt"), UnavailableError, "requires a client certificate: give one .--tls-cert"),
    ]

    async def main() -> None:
        async with resetting_server() as address:
            for given, kind, told in cases:
                connections = NodeConnections([address], "default", ClientSecurity(given))
                with pytest.raises(kind, match=told) as error:
                    await connections.link(address, TimeLimit(TIMEOUT_S))
                assert error.value.outcome == "not_applied"
                await connections.close()

    (loops.run if uvloop else asyncio.run)(asyncio.wait_for(main(), TIMEOUT_S))


RULES = """\
accounts:
- accessKey: writer
  secretKey: writer-secret
  topicPerms:
  - default=PUB
"""


def test_requests_are_signed() -> None:
    """Each: appends on the short road, too; and what an account may not do, it is told."""
    guard = AccessGuard(parse_rules(RULES), name="n0", clock=Clock())
    server = client_server(ServerConfig(client_port=0), FakeNode(), guard)
    server.start()

    async def main() -> None:
        signed = ClientSecurity(access_key="writer", secret_key="writer-secret")
        async with DLedgerClient(server.address, security=signed) as client:
            assert (await client.append(b"a")).index == 0
            with pytest.raises(AccessDeniedError, match="SUB"):
                await client.read(0)
        wrong = ClientSecurity(access_key="writer", secret_key="another-secret")
        for security in (None, wrong):
            async with DLedgerClient(server.address, security=security, timeout_s=60) as client:
                with pytest.raises(AccessDeniedError):
                    await client.append(b"b")

    try:
        loops.run(asyncio.wait_for(main(), TIMEOUT_S))
    finally:
        server.close()


def test_without_tls_no_signature_goes_to_an_address_that_a_node_named() -> None:
    """It would be good for any request, for ever: one wrong answer of whoever has a node's port must not be enough."""
    security = ClientSecurity(access_key="writer", secret_key="writer-secret")

    async def main(group: FakeGroup) -> None:
        group.elect(1)
        async with DLedgerClient(group.addresses[0], security=security, timeout_s=2) as client:
            with pytest.raises(AccessDeniedError, match="was not given to this client"):
                await client.append(b"a")
        assert not group.nodes[1].entries
        trusting = replace(security, trust_name_servers=True)
        for addresses, signer in ((group.addresses, security), (group.addresses[:1], trusting)):
            async with DLedgerClient(addresses, security=signer) as client:
                await client.append(b"a")
        async with DLedgerClient(group.addresses[0]) as client:
            await client.append(b"a")

    with fake_group() as group:
        loops.run(asyncio.wait_for(main(group), TIMEOUT_S))
        assert len(group.nodes[1].entries) == 3


def test_nodes_behind_published_ports_are_used_at_the_given_addresses() -> None:
    """Containers name addresses that nobody outside can resolve."""

    async def main(group: FakeGroup) -> None:
        async with DLedgerClient(group.addresses) as client:
            for leader in (1, 2, 0):
                group.elect(leader)
                await client.append(b"a")
            assert set(await client.members_status()) == {"n0", "n1", "n2"}

    with fake_group(advertised=[f"n{number}.invalid:30911" for number in range(3)]) as group:
        loops.run(asyncio.wait_for(main(group), TIMEOUT_S))
