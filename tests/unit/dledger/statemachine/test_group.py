"""Three members with a state machine each, their clients, and leaders that come and go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from dledger.client import DLedgerClient, aio
from dledger.config import Member, ServerConfig, StoreConfig
from dledger.errors import DLedgerError, InvalidRequestError, NoStateMachineError, NotLeaderError
from dledger.rpc import options
from dledger.rpc.clients import group_codec
from dledger.rpc.clients.codec import ReadMode
from dledger.rpc.clients.group_codec import Commands, Query
from dledger.server import DLedgerServer
from dledger.types import LogIndex, NodeId, ProducerBatch, Role
from dledger_cli.local.group import free_ports
from tests.support.counting import History
from tests.support.waiting import wait_until

NAMES = tuple(map(NodeId, ("n0", "n1", "n2")))


@dataclass
class Group:
    """Members that can be stopped and started again."""

    configs: dict[NodeId, ServerConfig]
    machines: dict[NodeId, History]
    servers: dict[NodeId, DLedgerServer]

    def start(self, name: NodeId) -> None:
        self.machines[name] = History()
        self.servers[name] = DLedgerServer(self.configs[name], state_machine=self.machines[name]).start()

    def stop(self, name: NodeId, *, graceful: bool = True) -> None:
        self.servers.pop(name).stop(graceful=graceful)

    def stop_all(self) -> None:
        for name in list(self.servers):
            self.stop(name)

    @property
    def addresses(self) -> list[str]:
        return [one.client_address for one in self.servers.values()]

    def leader(self) -> NodeId:
        def found() -> list[NodeId]:
            return [name for name, one in self.servers.items() if one.status().role is Role.LEADER]

        wait_until(lambda: bool(found()), "somebody leads")
        return found()[0]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    ports = free_ports(9)
    members = tuple(Member(name, "127.0.0.1", port) for name, port in zip(NAMES, ports[:3], strict=True))
    configs = {
        name: ServerConfig(
            node_id=name,
            members=members,
            client_port=port,
            grpc_server_port=grpc_port,
            store=StoreConfig(tmp_path / name, segment_bytes=1 << 20, index_segment_bytes=1 << 17),
        )
        for name, port, grpc_port in zip(NAMES, ports[3:6], ports[6:], strict=True)
    }
    group = Group(configs, {}, {})
    with ExitStack() as ending:
        for name in NAMES:
            group.start(name)
        ending.callback(group.stop_all)
        group.leader()
        yield group


def test_commands_are_applied_once_by_all_while_leaders_change(group: Group) -> None:
    """S3, S4: each has its own result, though its request was repeated at another leader; members hold the same."""

    async def run() -> list[bytes]:
        async with aio.DLedgerClient(group.addresses, timeout_s=60) as client:
            results: list[bytes] = []
            for round_ in range(4):
                batch = [asyncio.create_task(client.command(f"{round_}-{one}".encode())) for one in range(50)]
                await asyncio.sleep(0)
                if round_ in (1, 2):
                    await asyncio.to_thread(group.stop, group.leader(), graceful=round_ == 1)
                results += await asyncio.gather(*batch)
                for name in NAMES:
                    if name not in group.servers:
                        await asyncio.to_thread(group.start, name)
            return results

    results = asyncio.run(run())
    assert results == [str(number).encode() for number in range(1, 201)]
    wait_until(lambda: all(len(one.bodies) == 200 for one in group.machines.values()), "all have applied everything")
    expected = [f"{round_}-{one}".encode() for round_ in range(4) for one in range(50)]
    assert all(one.bodies == expected for one in group.machines.values())


def test_queries_see_what_was_answered_and_watches_what_comes(group: Group) -> None:
    """S5: linearizable at the leader; any member tells its own state, and when the next entry is applied."""
    with DLedgerClient(group.addresses, timeout_s=30) as client:
        assert client.command(b"a") == b"1"
        assert json.loads(client.query(b"").result) == ["a"]
        seen = client.query(b"").applied_index
        follower = next(name for name in NAMES if name != group.leader())
        at = group.servers[follower].client_address
        with pytest.raises(NotLeaderError):
            client.query(b"", address=at, timeout_s=3)
        late = client.query(b"", mode=ReadMode.COMMITTED, after=seen - 1, wait_s=10, address=at)
        assert json.loads(late.result) == ["a"]
        assert late.applied_index >= seen
        with pytest.raises(InvalidRequestError):
            client.query(b"", mode=ReadMode.LOCAL)
        status = client.metadata(at)
        assert status.applied_index == status.committed_index
        assert status.snapshot_index == -1
        state = client.create_snapshot(at)
        assert state.index >= seen
        status = client.metadata(at)
        assert (status.snapshot_index, status.snapshot_bytes) == (state.index, state.size)


def test_the_same_over_grpc(group: Group) -> None:
    """So that the machine can be used without a service of its own, from any language."""
    with grpc.insecure_channel(f"127.0.0.1:{group.servers[group.leader()].grpc_port}") as channel:

        def ask(method: str, body: bytes) -> bytes:
            path = options.method(options.LOG_SERVICE, method)
            answer: bytes = channel.unary_unary(path, bytes, bytes)(body, timeout=60)
            return answer

        def command(*commands: bytes, sequence: int) -> tuple[bytes, ...]:
            body = group_codec.encode_commands(Commands("default", commands, ProducerBatch("p", sequence)))
            return group_codec.decode_results(ask("Command", body))

        assert command(b"a", b"b", sequence=0) == (b"1", b"2")
        assert command(b"b", b"c", sequence=1) == (b"2", b"3")
        answer = group_codec.decode_answer(ask("Query", group_codec.encode_query(Query("default", b""))))
        assert json.loads(answer.result) == ["a", "b", "c"]
        state = group_codec.decode_snapshot_state(ask("Snapshot", group_codec.encode_snapshot_request("default")))
        assert state.index == answer.applied_index
        with pytest.raises(DLedgerError, match="serves group"):
            group_codec.decode_results(ask("Command", group_codec.encode_commands(Commands("other", (b"x",)))))
        for method, body in (
            ("Command", group_codec.encode_commands(Commands("default", ()))),
            ("Command", group_codec.encode_commands(Commands("default", (b"",) * 33, ProducerBatch("p", 0)))),
            ("Query", group_codec.encode_query(Query("default", b"", ReadMode.LOCAL))),
            ("Query", group_codec.encode_query(Query("default", b"", after=LogIndex(3), wait_ms=5))),
        ):
            with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
                ask(method, body)


def test_a_log_without_machine_refuses_commands(tmp_path: Path) -> None:
    """The error says what to do."""
    (port,) = free_ports(1)
    store = StoreConfig(tmp_path, segment_bytes=1 << 16, index_segment_bytes=1 << 14)
    config = ServerConfig(members=(Member(NodeId("n0"), "127.0.0.1", port),), client_port=0, store=store)
    server = DLedgerServer(config).start()
    try:
        with DLedgerClient(server.client_address, timeout_s=60) as client:
            with pytest.raises(NoStateMachineError, match="append and read"):
                client.command(b"a")
            with pytest.raises(NoStateMachineError):
                client.query(b"")
            assert client.metadata().applied_index is None
    finally:
        server.stop()
