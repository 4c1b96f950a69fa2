"""A client's commands: the numbers of its requests, and what it is told of them, with a fake leader."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from dledger.client.aio.appending import CommandSender
from dledger.client.aio.connections import Calls, NodeConnections
from dledger.client.discovery import Directory
from dledger.client.shared import REQUEST_BYTES_MAX, TimeLimit
from dledger.errors import (
    DLedgerError,
    LeaderNotReadyError,
    RequestTimeoutError,
    UnavailableError,
    UnknownProducerError,
)
from dledger.remoting.log_codec import LogCode
from dledger.rpc.clients import group_codec
from dledger.types import ProducerBatch

ADDRESS = "127.0.0.1:1"
PATIENCE_S = 0.3


class Leader(NodeConnections):
    """Applies each number of a producer once, as a group does, and is otherwise as it is told."""

    def __init__(self) -> None:
        super().__init__((ADDRESS,), "")
        self.applied: list[bytes] = []
        self.producers: dict[str, list[bytes]] = {}
        """Their results."""
        self.unanswered: set[int] = set()
        """Requests that are applied and not answered, by their number from 1 on."""
        self.is_ready = True
        self.requests = 0

    async def call(self, address: str, code: int, body: bytes, deadline: TimeLimit, *, changes: bool = False) -> bytes:
        if code != LogCode.COMMAND:
            raise UnavailableError(f"{address} is not there")
        assert changes
        self.requests += 1
        if not self.is_ready:
            raise LeaderNotReadyError("not yet")
        request = group_codec.decode_commands(body)
        assert request.producer is not None
        results = self._results(request.commands, request.producer)
        if self.requests in self.unanswered:
            raise RequestTimeoutError("the connection broke")
        return group_codec.encode_results(results)

    def _results(self, commands: Sequence[bytes], producer: ProducerBatch) -> list[bytes]:
        known = self.producers.setdefault(producer.producer, [])
        if producer.sequence > len(known):
            raise UnknownProducerError("forgotten")
        fresh = commands[len(known) - producer.sequence :]
        self.applied += fresh
        known += [b"result of " + one for one in fresh]
        return known[producer.sequence : producer.sequence + len(commands)]


Test = Callable[[Leader, Calls, CommandSender], Awaitable[None]]


def with_leader(test: Test) -> None:
    """Run a test with a sender that knows who leads."""

    async def main() -> None:
        leader = Leader()
        calls = Calls(leader, Directory((ADDRESS,)), "")
        calls.directory.set_leader(ADDRESS)
        sender = CommandSender(leader, calls, "")
        await test(leader, calls, sender)
        await sender.close()

    asyncio.run(main())


async def failed(sender: CommandSender, command: bytes) -> DLedgerError:
    """What the caller is told once the sender has given up, which may be a little later than the caller itself."""
    with pytest.raises(DLedgerError) as told:
        await sender.send(command, PATIENCE_S)
    if sender._sending is not None:
        await asyncio.wait((sender._sending,))
    return told.value


def test_a_command_that_may_be_applied_keeps_its_numbers_for_itself() -> None:
    """S4: the leader dies before it answers, and no other is found in time. Under the same numbers, the next command
    would be taken for its repetition: never applied, and answered with its result.
    """

    async def test(leader: Leader, calls: Calls, sender: CommandSender) -> None:
        leader.unanswered = {1}
        assert (await failed(sender, b"a")).outcome == "unknown"
        calls.directory.set_leader(ADDRESS)

        assert await sender.send(b"b", 10) == b"result of b"
        assert leader.applied == [b"a", b"b"]

    with_leader(test)


def test_a_command_sent_under_a_new_name_keeps_its_numbers_for_itself_too() -> None:
    """The same after the group has forgotten an idle client."""

    async def test(leader: Leader, calls: Calls, sender: CommandSender) -> None:
        assert await sender.send(b"idle", 10) == b"result of idle"
        leader.producers.clear()
        leader.unanswered = {3}
        assert (await failed(sender, b"a")).outcome == "unknown"
        assert leader.requests >= 3
        calls.directory.set_leader(ADDRESS)

        assert await sender.send(b"b", 10) == b"result of b"
        assert leader.applied == [b"idle", b"a", b"b"]

    with_leader(test)


def test_a_client_that_was_forgotten_begins_anew() -> None:
    """Also if it was refused before: nothing of that was applied."""

    async def test(leader: Leader, calls: Calls, sender: CommandSender) -> None:
        assert await sender.send(b"idle", 10) == b"result of idle"
        leader.producers.clear()
        leader.is_ready = False
        waiting = asyncio.create_task(sender.send(b"a", 10))
        while leader.requests < 3:
            await asyncio.sleep(0)
        leader.is_ready = True

        assert await waiting == b"result of a"
        assert leader.applied == [b"idle", b"a"]

    with_leader(test)


def test_all_that_waits_fails_when_the_client_is_closed() -> None:
    """However much it is: nobody waits for an answer that cannot come."""

    async def test(leader: Leader, calls: Calls, sender: CommandSender) -> None:
        leader.is_ready = False
        waiting = [asyncio.create_task(sender.send(bytes(REQUEST_BYTES_MAX // 2), 600)) for _ in range(8)]
        while not leader.requests:
            await asyncio.sleep(0)
        await sender.close()

        told = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
        assert all(isinstance(one, DLedgerError) for one in told)
        assert not leader.applied

    with_leader(test)
