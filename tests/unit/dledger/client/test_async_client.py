"""The client for asyncio. The servers run on the test's own loop: grpc.aio works best with one loop per process."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest

from cluster.local.group import free_ports
from dledger.client import AsyncDLedgerClient, ReadMode
from dledger.client.aio_channels import AsyncChannels, AsyncSeeker
from dledger.client.appends import INFLIGHT_REQUESTS_MAX
from dledger.client.channel_maker import ChannelMaker
from dledger.client.channels import Service
from dledger.client.discovery import Directory, ServerReport
from dledger.client.rpc_failures import rpc_failure
from dledger.client.shared import Deadline
from dledger.conditions import Conditions
from dledger.config import ServerConfig
from dledger.errors import (
    DLedgerError,
    EmptyBatchError,
    IdentityError,
    IndexOutOfRangeError,
    LeaderNotReadyError,
    PendingFullError,
    RequestTimeoutError,
    TermChangedError,
    UnavailableError,
)
from dledger.rpc import options
from dledger.rpc.bridge import LoopBridge
from dledger.rpc.clients.aio_server import add_methods, aio_server
from dledger.rpc.clients.connections import Connections
from dledger.rpc.clients.log_requests import LogRequests
from dledger.rpc.clients.log_service import LogService
from dledger.rpc.ports import MemberStatus, NodeStatus
from dledger.sending import window
from dledger.sending.window import LOOK_AGAIN_MS
from dledger.types import NodeId, Role
from tests.support.fake_group import elect
from tests.support.fake_node import FakeNode


@dataclass
class AsyncGroup:
    """Two nodes; n0 leads at first."""

    nodes: list[FakeNode]
    servers: list[grpc.aio.Server]
    addresses: list[str]

    def elect(self, leader: int) -> None:
        elect(self.nodes, self.addresses, leader)

    async def kill(self, number: int) -> None:
        await self.servers[number].stop(None)


Test = Callable[[AsyncGroup, AsyncDLedgerClient], Awaitable[None]]


def run(test: Test, *, group: str = "default", timeout_s: float = 30.0, idempotent: bool = True) -> None:
    """Run a test body with a served group and a client."""

    async def main() -> None:
        async with (
            asyncio.timeout(120),
            _served() as served,
            AsyncDLedgerClient(
                served.addresses, group=group, timeout_s=timeout_s, enable_idempotence=idempotent
            ) as client,
        ):
            await test(served, client)

    asyncio.run(main())


@asynccontextmanager
async def _served() -> AsyncIterator[AsyncGroup]:
    ports = free_ports(2)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    members = tuple(MemberStatus(NodeId(f"n{i}"), "", address) for i, address in enumerate(addresses))
    nodes = [FakeNode(node_id=member.node_id, members=members) for member in members]
    servers = [await _serve(ServerConfig(client_port=port), node) for port, node in zip(ports, nodes, strict=True)]
    group = AsyncGroup(nodes, servers, addresses)
    group.elect(0)
    try:
        yield group
    finally:
        for server in servers:
            await server.stop(None)


async def _serve(config: ServerConfig, node: FakeNode) -> grpc.aio.Server:
    """A client server on the present loop."""
    requests = LogRequests(config, node, LoopBridge(), None, Conditions(config.node_id))
    service = LogService(requests, Connections("unwatched", config.limits, share_percent=75))
    server = aio_server(options.client_server_options(config))
    add_methods(server, options.LOG_SERVICE, service.methods())
    options.bind(server, "127.0.0.1", config.client_port or 0, "client")
    await server.start()
    return server


def test_async_append_and_read() -> None:
    """Results are those of the sync client."""

    async def test(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        result = await client.append(b"a")
        many = await client.append_many([b"b"] * 1500)
        entries = await client.read(0, count=2, address=group.addresses[0])

        assert (result.index, result.term, result.position) == (0, group.nodes[0].term, 0)
        assert [one.index for one in many] == list(range(1, 1501))
        assert [entry.body for entry in entries] == [b"a", b"b"]
        assert len(await client.read(0, mode=ReadMode.LINEARIZABLE)) == 1501
        with pytest.raises(IndexOutOfRangeError):
            await client.read(5000, address=group.addresses[0])
        with pytest.raises(EmptyBatchError):
            await client.append_many([])

    run(test)


def test_async_appends_run_at_once() -> None:
    """Many coroutines share one stream."""

    async def test(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        results = await asyncio.gather(*(client.append(b"%d" % number) for number in range(500)))

        assert sorted(result.index for result in results) == list(range(500))
        assert len(group.nodes[0].entries) == 500

    run(test)


def test_async_append_retries_only_what_is_safe() -> None:
    """As the sync client."""

    async def test(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        group.nodes[0].fail_appends = [LeaderNotReadyError("x"), LeaderNotReadyError("x"), None, TermChangedError("x")]

        assert (await client.append(b"a")).index == 0
        with pytest.raises(TermChangedError):
            await client.append(b"b")
        group.elect(1)
        assert (await client.append(b"c")).index == 1
        group.nodes[1].hold = True
        with pytest.raises(RequestTimeoutError) as caught:
            await client.append(b"d", timeout_s=0.1)
        assert caught.value.outcome == "unknown"

    run(test, idempotent=False)


def test_async_append_in_flight_at_a_broken_stream_is_unknown() -> None:
    """As the sync client."""

    async def test(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        group.nodes[0].hold = True
        pending = asyncio.create_task(client.append(b"a"))
        while not group.nodes[0].held:
            await asyncio.sleep(0)  # yields to the server on this loop
        await group.kill(0)

        with pytest.raises(DLedgerError) as caught:
            await pending
        assert caught.value.outcome == "unknown"

    run(test, idempotent=False)


def test_async_append_without_a_group() -> None:
    """Not applied, within the deadline; a wrong group is told at once."""

    async def dead(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        await group.kill(0)
        await group.kill(1)
        with pytest.raises(UnavailableError) as caught:
            await client.append(b"a")
        assert caught.value.outcome == "not_applied"
        with pytest.raises(UnavailableError):
            await client.members_status()

    async def wrong(_group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        with pytest.raises(IdentityError):
            await client.append(b"a")

    run(dead, timeout_s=0.4)
    run(wrong, group="other")


def test_async_follow_survives_the_loss_of_its_node() -> None:
    """Nothing twice, nothing left out."""

    async def test(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        await client.append_many([b"0", b"1"])
        entries = client.follow(0)
        seen = [(await anext(entries)).body, (await anext(entries)).body]
        group.elect(1)
        await client.append(b"2")  # through the old leader's hint, before that one is gone
        await group.kill(0)
        seen.append((await anext(entries)).body)
        await entries.aclose()

        assert seen == [b"0", b"1", b"2"]

    run(test)


def test_async_group_calls() -> None:
    """Metadata, members, roles, transfer."""

    async def test(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        assert (await client.metadata(group.addresses[1])).node_id == "n1"
        assert list(await client.members_status()) == ["n0", "n1"]
        events = client.watch_role(group.addresses[1])
        first = await anext(events)
        group.elect(1)
        second = await anext(events)
        await events.aclose()
        assert (first.role, second.role) == (Role.FOLLOWER, Role.LEADER)
        assert (await client.transfer_leadership(NodeId("n0"))).node_id == "n0"
        assert (await client.metadata()).role in Role

    run(test)


def test_async_appender() -> None:
    """Futures of the loop, fed by the pipelining appender."""

    async def test(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        group.nodes[0].fail_appends = [TermChangedError("lost")]
        async with client.appender(batch_entries=100, pending_bytes_max=1000) as appender:
            lost = await appender.append(b"lost")
            await appender.flush()
            futures = [await appender.append(b"x" * 10) for _ in range(1000)]
            results = await asyncio.gather(*futures)
            with pytest.raises(TermChangedError):
                await lost
        assert [result.index for result in results] == list(range(1000))
        assert appender.failed_entries == 1

    run(test, idempotent=False)


def test_async_client_is_closed_for_good() -> None:
    """Calls after close are refused; those under way end."""

    async def test(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        await client.append(b"a")
        group.nodes[0].hold = True
        pending = asyncio.create_task(client.append(b"b"))
        while not group.nodes[0].held:
            await asyncio.sleep(0)  # yields to the server on this loop
        await client.close()

        with pytest.raises(RequestTimeoutError):
            await pending
        with pytest.raises(UnavailableError, match="closed"):
            await client.append(b"c")

    run(test)


def test_async_appends_are_repeated_until_they_are_stored() -> None:
    """Lost answers, refusals and a new leader: each entry is there once, where its result says."""

    async def test(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        bodies = [b"%d" % number for number in range(50)]
        await client.append(b"first")
        group.nodes[0].hold = True
        tasks = [asyncio.create_task(client.append(body)) for body in bodies]
        while len(group.nodes[0].held) < INFLIGHT_REQUESTS_MAX:
            await asyncio.sleep(0)  # yields to the server on this loop
        group.elect(1)
        group.nodes[1].fail_appends = [TermChangedError("lost"), PendingFullError("full"), None, TermChangedError("x")]
        await group.kill(0)
        places = [result.index for result in await asyncio.gather(*tasks)]

        stored = group.nodes[1].bodies()
        assert len(stored) == 51
        assert [stored[place] for place in places] == bodies

    run(test, timeout_s=10)


def test_async_frozen_leader_is_left_when_another_one_leads() -> None:
    """As the sync client."""

    async def test(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        await client.append(b"a")
        group.nodes[0].hold = True
        task = asyncio.create_task(client.append(b"b", timeout_s=60))
        while not group.nodes[0].held:
            await asyncio.sleep(0)  # yields to the server on this loop
        group.elect(1)

        assert (await task).index == 1

    run(test)


def test_reads_at_once_look_for_the_leader_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question for each of them would keep a busy group from answering any."""
    asked: list[str] = []
    call = AsyncChannels.call

    async def counted(
        channels: AsyncChannels, name: str, address: str, request: bytes, deadline: Deadline, *, changes: bool = False
    ) -> bytes:
        if name == "Metadata":
            asked.append(address)
        return await call(channels, name, address, request, deadline, changes=changes)

    monkeypatch.setattr(AsyncChannels, "call", counted)

    async def test(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        await asyncio.gather(*(client.read(0, mode=ReadMode.LINEARIZABLE) for _ in range(100)))

        assert len(asked) < 100 / 5, "a round or two: a busy machine may not answer the first one in time"

    run(test)


def test_overdue_appends_ask_together_who_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are overdue: one question every now and then."""
    monkeypatch.setattr(window, "LOOK_AFTER_MS", 50.0)
    looks: list[float] = []

    async def look(seeker: AsyncSeeker[NodeStatus]) -> str | None:
        looks.append(time.monotonic())
        return seeker._directory.leader

    monkeypatch.setattr(AsyncSeeker, "look", look)

    async def test(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        await client.append(b"first")
        group.nodes[0].hold = True
        appends = [asyncio.create_task(client.append(b"x")) for _ in range(200)]
        while len(looks) < 3 or len(group.nodes[0].held) < INFLIGHT_REQUESTS_MAX:
            await asyncio.sleep(0)  # yields to the server on this loop
        group.nodes[0].hold = False
        group.nodes[0].release()
        await asyncio.gather(*appends)

        assert min(after - before for before, after in itertools.pairwise(looks)) >= LOOK_AGAIN_MS / 1000 * 0.9

    run(test)


def test_appends_behind_a_broken_stream_go_together() -> None:
    """One request for each of thousands, one after the other, would take minutes; each is stored once, in order."""

    async def test(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        await client.append(b"000")
        group.nodes[0].hold = True
        bodies = [b"%03d" % number for number in range(1, 200)]
        appends = [asyncio.create_task(client.append(body)) for body in bodies]
        while len(group.nodes[0].held) < INFLIGHT_REQUESTS_MAX:
            await asyncio.sleep(0)  # yields to the server on this loop
        group.elect(1)
        await group.kill(0)
        places = [one.index for one in await asyncio.gather(*appends)]

        assert group.nodes[1].bodies() == [b"000", *bodies]
        assert places == list(range(1, 200))

    run(test)


def test_async_cancelled_append_does_not_hold_up_others() -> None:
    """Whoever gives up waiting does not take it back; what comes later is stored behind it."""

    async def test(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        await client.append(b"a")
        group.nodes[0].hold = True
        task = asyncio.create_task(client.append(b"b"))
        while not group.nodes[0].held:
            await asyncio.sleep(0)  # yields to the server on this loop
        task.cancel()
        await asyncio.wait([task])
        group.nodes[0].hold = False

        assert (await client.append(b"c")).index == 2
        assert group.nodes[0].bodies() == [b"a", b"b", b"c"]

    run(test)


def test_async_cancelled_append_as_ends_before_its_deadline() -> None:
    """Whoever is cancelled waits for nothing."""

    async def test(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        group.nodes[0].hold = True
        task = asyncio.create_task(client.append_as("job", 0, [b"a"], timeout_s=600.0))
        while not group.nodes[0].held:
            await asyncio.sleep(0)  # yields to the server on this loop
        task.cancel()
        async with asyncio.timeout(30):
            await asyncio.wait([task])
        assert task.cancelled()

    run(test)


def test_async_append_as_repeats_under_the_given_name() -> None:
    """As the sync client."""

    async def test(group: AsyncGroup, client: AsyncDLedgerClient) -> None:
        await client.append(b"another")
        first = await client.append_as("job", 0, [b"a", b"b"])
        group.nodes[0].fail_appends = [TermChangedError("lost")]

        assert await client.append_as("job", 1, [b"b", b"c"]) == [first[1], *await client.append_as("job", 2, [b"c"])]
        assert await client.producer_sequence("job") == 3
        assert group.nodes[0].bodies() == [b"another", b"a", b"b", b"c"]

    run(test)


@pytest.mark.parametrize("changes", [False, True])
def test_async_what_is_under_way_when_it_is_closed_fails_and_is_not_cancelled(*, changes: bool) -> None:
    """Its task goes on; only what changes nothing is certain not to have been applied."""

    async def main() -> None:
        held = asyncio.Event()

        async def hold(_request: bytes, _context: object) -> bytes:
            held.set()
            await asyncio.Event().wait()
            return b""

        server = aio_server(options.client_server_options(ServerConfig()))
        add_methods(server, "test.Holder", {"Hold": grpc.unary_unary_rpc_method_handler(hold)})
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        channels = AsyncChannels(ChannelMaker(None, (address,)), Service("test.Holder", rpc_failure))
        task = asyncio.create_task(channels.call("Hold", address, b"", Deadline(60), changes=changes))
        await held.wait()
        await channels.close()
        with pytest.raises(RequestTimeoutError if changes else UnavailableError) as caught:
            await task
        assert caught.value.outcome == ("unknown" if changes else "not_applied")
        await server.stop(None)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_async_a_search_that_nobody_waits_for_any_more_fails_in_silence() -> None:
    """The loop would log an error that the application can do nothing about."""
    complaints: list[dict[str, object]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
        given_up = asyncio.Event()

        async def ask_all(
            addresses: Collection[str], _deadline: Deadline
        ) -> AsyncGenerator[tuple[str, ServerReport | DLedgerError], None]:
            await given_up.wait()
            for address in addresses:
                yield address, UnavailableError("gone")

        seeker = AsyncSeeker(Directory(("n0:1",)), ask_all, lambda report: report)
        with pytest.raises(UnavailableError, match="no leader found within 0 s"):
            await seeker.leader(Deadline(0))
        search = seeker._seeking
        assert search is not None
        given_up.set()
        await asyncio.wait([search])

    asyncio.run(main())
    gc.collect()
    assert complaints == []
