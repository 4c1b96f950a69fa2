"""Our request codes at a node's port for clients: appends, reads, roles, and what limits them."""

from __future__ import annotations

import asyncio
import json
import socket
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.config import ReplicationConfig, ServerConfig
from dledger.errors import (
    AppendsNotServedError,
    EarlierRequestFailedError,
    EmptyBatchError,
    EntryTooLargeError,
    IdentityError,
    IndexBeforeBeginError,
    IndexOutOfRangeError,
    InvalidRequestError,
    LeaderHint,
    NotLeaderError,
    PendingFullError,
    QuorumAckTimeoutError,
    ShutdownError,
    StaleConfigurationError,
    TransferFailedError,
    UnavailableError,
)
from dledger.monitoring import Conditions
from dledger.remoting.codes import ANNOUNCED, AnswerCode
from dledger.remoting.frame import FLAG_ONEWAY, Frame, encode
from dledger.remoting.log_codec import JavaCode, LogCode
from dledger.remoting.log_service import LogHandlers, log_server
from dledger.rpc import loops, options
from dledger.rpc.clients import bulk_codec, group_codec
from dledger.rpc.clients import codec as messages
from dledger.rpc.clients.codec import ReadMode
from dledger.rpc.clients.log_requests import LogRequests
from dledger.rpc.loops import LoopBridge
from dledger.rpc.ports import RoleEvent
from dledger.types import NO_INDEX, ChangeKind, LogIndex, MemberChange, NodeId, Position, ProducerBatch, Role, Term
from dledger.values import MIB
from tests.support import grpc_log
from tests.support.fake_node import FakeNode
from tests.support.waiting import wait_until
from tests.unit.dledger.remoting.log.harness import (
    GROUP,
    Served,
    append,
    append_body,
    appended,
    error_in,
    read,
    read_body,
    served,
    succeeded,
)
from tests.unit.dledger.remoting.test_connection import Transport


@pytest.fixture
def serving() -> Iterator[Served]:
    """A node that leads."""
    with served() as found:
        yield found


def test_both_protocols_serve_one_log(serving: Served) -> None:
    """What was appended over one is read over the other, each at its own port."""
    with (
        grpc.insecure_channel(f"127.0.0.1:{serving.server.grpc_port}") as channel,
        serving.dial() as remoting,
    ):

        def call(name: str, request: bytes) -> bytes:
            method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
                options.method(options.LOG_SERVICE, name), request_serializer=None, response_deserializer=None
            )
            return method(request, timeout=30)

        call("Append", grpc_log.encode_append(messages.Append("default", [b"over gRPC"])))
        append(remoting, b"over remoting")
        whole = grpc_log.encode_read(messages.Read("default", LogIndex(0), 10))
        bodies = [one.body for one in grpc_log.decode_read_answer(call("Read", whole)).entries]
        assert bodies == [b"over gRPC", b"over remoting"]
        assert [one.body for one in read(remoting, 0).entries] == bodies


def test_the_first_answer_announces_our_codes(serving: Served) -> None:
    """Whatever was asked; clients use none of ours before."""
    with serving.dial() as client:
        first = client.ask(1234)
        assert (first.code, first.fields) == (AnswerCode.REQUEST_CODE_NOT_SUPPORTED, ANNOUNCED)
        assert client.ask(1234).fields == {}


def test_an_append_is_answered_with_its_places(serving: Served) -> None:
    """Term, index and position of each entry, as over gRPC."""
    with serving.dial() as client:
        first, second = append(client, b"a"), append(client, b"b", b"", b"c")
    assert (first.term, first.first_index, first.positions) == (serving.node.term, 0, (0,))
    assert (second.first_index, second.last_index, len(second.positions)) == (1, 3, 3)
    assert serving.node.batches == [(b"a",), (b"b", b"", b"c")]


def test_appends_are_pipelined_and_answered_as_they_complete(serving: Served) -> None:
    """On one connection, without waiting for each other."""
    serving.node.hold = True
    with serving.dial() as client:
        opaques = [client.begin(LogCode.APPEND, body=append_body(b"%d" % number)) for number in range(50)]
        wait_until(lambda: len(serving.node.held) == 50, "all were submitted")
        serving.node.release()
        answers = [appended(client.answer_to(opaque)) for opaque in reversed(opaques)]
    assert [one.first_index for one in answers] == list(reversed(range(50)))


def test_a_repeated_append_of_a_producer_is_stored_once(serving: Served) -> None:
    """The answer to the second one names the places of the first."""
    with serving.dial() as client:
        body = append_body(b"a", b"b", producer=ProducerBatch("p", 0, 2))
        first = appended(client.ask(LogCode.APPEND, body=body))
        again = appended(client.ask(LogCode.APPEND, body=body))
        asked = client.ask(LogCode.PRODUCER, body=messages.encode_producer_request(GROUP, "p"))

    assert (first.first_index, first.last_index, first.duplicates) == (0, 1, ())
    assert [run.first_index + at for run in again.duplicates for at in range(run.count)] == [0, 1]
    assert again.positions == ()
    assert messages.decode_producer_answer(succeeded(asked)) == 2


def test_an_ordered_append_after_a_failed_one_of_its_stream_is_refused(serving: Served) -> None:
    """So a pipelining client's entries never overtake each other; other streams and unordered ones go on."""
    serving.node.fail_appends = [None, QuorumAckTimeoutError("no quorum")]
    with serving.dial() as client:
        append(client, b"a", stream=1)
        with pytest.raises(QuorumAckTimeoutError) as failed:
            append(client, b"b", stream=1)
        with pytest.raises(EarlierRequestFailedError) as refused:
            append(client, b"c", stream=1)
        append(client, b"d", stream=2)
        append(client, b"e")
    assert (failed.value.outcome, refused.value.outcome) == ("unknown", "not_applied")
    assert serving.node.batches == [(b"a",), (b"d",), (b"e",)]


def test_a_malformed_ordered_append_fails_its_stream(serving: Served) -> None:
    """The ones behind it must not be stored before the client knows."""
    with serving.dial() as client:
        error = error_in(client.ask(LogCode.APPEND, body=append_body(b"a", stream=3)[:-1]))
        assert isinstance(error, InvalidRequestError)
        with pytest.raises(EarlierRequestFailedError):
            append(client, b"b", stream=3)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (append_body(), EmptyBatchError),
        (append_body(b"a", group="other"), IdentityError),
        (append_body(bytes(5 << 20)), EntryTooLargeError),
        (b"", InvalidRequestError),
    ],
)
def test_an_append_is_checked_as_over_grpc(serving: Served, body: bytes, kind: type[Exception]) -> None:
    """With the same errors, whose outcome is that nothing was stored."""
    with serving.dial() as client:
        error = error_in(client.ask(LogCode.APPEND, body=body))
    assert (type(error), error.outcome) == (kind, "not_applied")
    assert not serving.node.batches


def test_an_error_names_the_leader_and_comes_back_as_itself() -> None:
    """The code of the frame is DLedger's, so that other programs can tell, too."""
    with served(node=FakeNode(leader=LeaderHint(NodeId("n7"), "example.org:7"))) as serving, serving.dial() as client:
        answer = client.ask(LogCode.APPEND, body=append_body(b"a"))
        error = error_in(answer)
    assert (answer.code, answer.remark) == (404, str(error))
    assert isinstance(error, NotLeaderError)
    assert error.leader == LeaderHint(NodeId("n7"), "example.org:7")


def test_an_applications_log_takes_no_appends() -> None:
    """Of clients; the application's own port does."""
    with (
        served(ServerConfig(client_port=0, client_appends=False)) as serving,
        serving.dial() as client,
        pytest.raises(AppendsNotServedError),
    ):
        append(client, b"a")


def test_appends_beyond_the_quota_wait_and_keep_their_order() -> None:
    """They are not refused, and the connection is read no further than its limits."""
    replication = ReplicationConfig(pending_entries_max=8)
    with served(ServerConfig(client_port=0, replication=replication)) as serving, serving.dial() as client:
        serving.node.hold = True
        opaques = [client.begin(LogCode.APPEND, body=append_body(b"%d" % number)) for number in range(40)]
        wait_until(lambda: len(serving.node.held) >= 2, "the first ones were submitted")
        assert len(serving.node.held) < 40
        serving.node.hold = False
        serving.node.release()
        for opaque in opaques:
            appended(client.answer_to(opaque))
    assert serving.node.batches == [(b"%d" % number,) for number in range(40)]


def test_what_waits_for_room_is_not_stored_once_its_client_is_gone() -> None:
    """And counts for nothing any more: the next client has room."""
    replication = ReplicationConfig(pending_entries_max=8)
    with served(ServerConfig(client_port=0, replication=replication)) as serving:
        serving.node.hold = True
        with serving.dial() as client:
            for number in range(40):
                client.begin(LogCode.APPEND, body=append_body(b"%d" % number))
            wait_until(lambda: len(serving.node.held) >= 2, "the first ones were submitted")
        with serving.dial() as client:
            client.ask(LogCode.METADATA)  # the node has seen the end of the other one by now
            serving.node.hold = False
            serving.node.release()
            append(client, b"another")
    assert 2 < len(serving.node.batches) < 40
    assert serving.node.batches[-1] == (b"another",)


# --- reads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ReadMode)
def test_reads_return_whole_records(serving: Served, mode: ReadMode) -> None:
    """With the checksums and positions that the log has; from any index, in any mode."""
    with serving.dial() as client:
        append(client, b"a", b"b", b"c")
        answer = read(client, 1, mode=mode)
    assert answer.entries == serving.node.entries[1:]
    assert (answer.begin_index, answer.committed_index, answer.end_index) == (0, 2, 2)


def test_a_read_ends_after_its_count_and_its_bytes(serving: Served) -> None:
    """At least one entry comes, however large."""
    with serving.dial() as client:
        append(client, b"a" * 1000, b"b" * 1000, b"c" * 1000)
        assert len(read(client, 0, 2).entries) == 2
        few = client.ask(LogCode.READ, body=read_body(0, max_bytes=10))
        assert [one.body[:1] for one in read(client, 0, 1).entries] == [b"a"]
        assert len(few.body) == 24 + 48 + 1000


@pytest.mark.parametrize(
    ("first", "kind"), [(-1, IndexOutOfRangeError), (5, IndexOutOfRangeError), (0, IndexBeforeBeginError)]
)
def test_a_read_outside_the_log_is_refused(serving: Served, first: int, kind: type[Exception]) -> None:
    """But at the next index to be written there is no entry, and no error."""
    with serving.dial() as client:
        append(client, b"a", b"b")
        serving.node.begin_index = 1
        assert not read(client, 2).entries
        with pytest.raises(kind):
            read(client, first)


def test_a_read_waits_for_the_next_entry(serving: Served) -> None:
    """So a follower asks once per entry, not all the time."""
    with serving.dial() as client, serving.dial() as other:
        append(client, b"a")
        waiting = client.begin(LogCode.READ, body=read_body(1, wait_ms=10_000))
        client.ask(LogCode.METADATA, body=messages.encode_metadata_request(GROUP))  # which came after it
        append(other, b"b")
        data = succeeded(client.answer_to(waiting))
    assert data.endswith(b"b")


def test_a_read_that_waited_in_vain_is_empty(serving: Served) -> None:
    """No error: the client asks again."""
    with serving.dial() as client:
        assert len(succeeded(client.ask(LogCode.READ, body=read_body(0, wait_ms=1)))) == 24


def test_waiting_reads_are_limited() -> None:
    """As the streams of gRPC are: one connection may have half of all."""
    with served(ServerConfig(client_port=0, client_streams_max=8)) as serving, serving.dial() as client:
        waiting = [client.begin(LogCode.READ, body=read_body(0, wait_ms=10_000)) for _ in range(4)]
        assert isinstance(error_in(client.ask(LogCode.READ, body=read_body(0, wait_ms=10_000))), PendingFullError)
        append(client, b"a")
        assert [client.answer_to(one).code for one in waiting] == [0] * 4


def test_a_linearizable_read_needs_the_leader() -> None:
    """Any member answers committed ones."""
    with served(node=FakeNode(leader=LeaderHint(NodeId("n1"), ""))) as serving, serving.dial() as client:
        assert not read(client, 0).entries
        with pytest.raises(NotLeaderError):
            read(client, 0, mode=ReadMode.LINEARIZABLE)


# --- the group --------------------------------------------------------------------------------------------------------


def test_metadata_are_those_of_grpc(serving: Served) -> None:
    """The same message, without a group of that name an error."""
    with serving.dial() as client:
        found = messages.decode_metadata(succeeded(client.ask(LogCode.METADATA)))
        other = client.ask(LogCode.METADATA, body=messages.encode_metadata_request("other"))
        assert isinstance(error_in(other), IdentityError)
    assert found == serving.node.status()


def test_a_watch_tells_the_role_and_then_its_changes(serving: Served) -> None:
    """Without being asked again; a second request adds no second watch."""
    with serving.dial() as client:
        for _ in range(2):
            first = messages.decode_role_event(succeeded(client.ask(LogCode.WATCH_ROLE)))
        serving.node.tell(RoleEvent(serving.node.node_id, Role.FOLLOWER, Term(2), None))
        pushed = client.request(LogCode.ROLE_CHANGED)
        client.ask(LogCode.METADATA)
        assert not client.others
    assert (first.role, first.term) == (Role.LEADER, 1)
    event = messages.decode_role_event(pushed.body)
    assert (event.role, event.term, pushed.flag & FLAG_ONEWAY) == (Role.FOLLOWER, 2, FLAG_ONEWAY)


def test_a_closed_connection_begins_no_watch(serving: Served) -> None:
    """Nothing would end it: it would take up room of its client's for ever."""

    async def watch() -> tuple[int, int]:
        server, handlers = serving.server._remoting, serving.server.log_handlers("default")
        assert server is not None
        connection = server.protocol()
        connection.data_received(encode(Frame(LogCode.WATCH_ROLE, 1)))
        assert server.requests_under_way == 1
        connection.connection_lost(None)  # in the same turn of the loop
        while server.requests_under_way:
            await asyncio.sleep(0)
        return len(handlers._watches), len(serving.server._requests["default"].hub._watchers)

    assert serving.server.bridge.run(watch()) == (0, 0)


def test_a_watch_ends_with_its_connection(serving: Served) -> None:
    """Its place is free for others."""
    for _ in range(3 * ServerConfig().client_streams_max):
        with serving.dial() as client:
            succeeded(client.ask(LogCode.WATCH_ROLE))


def test_a_transfer_names_the_new_leader(serving: Served) -> None:
    """Or why there is none."""
    with serving.dial() as client:
        body = messages.encode_transfer(GROUP, NodeId("n2"))
        assert messages.decode_transferred(succeeded(client.ask(LogCode.TRANSFER, body=body))).node_id == "n2"
        serving.node.leader = LeaderHint(NodeId("n1"), "")
        assert isinstance(error_in(client.ask(LogCode.TRANSFER, body=body)), NotLeaderError | TransferFailedError)


def test_a_change_of_members_is_made_once(serving: Served) -> None:
    """A repetition of it is answered likewise; one decided on older members is refused."""
    change = MemberChange(ChangeKind.ADD, NodeId("n4"), 7, "h", 9, expected_index=NO_INDEX)
    with serving.dial() as client:
        body = group_codec.encode_change(GROUP, change)
        first = group_codec.decode_changed(succeeded(client.ask(LogCode.CHANGE_MEMBERS, body=body)))
        assert group_codec.decode_changed(succeeded(client.ask(LogCode.CHANGE_MEMBERS, body=body))) == first
        late = group_codec.encode_change(GROUP, replace(change, change_id=8))
        assert isinstance(error_in(client.ask(LogCode.CHANGE_MEMBERS, body=late)), StaleConfigurationError)
        assert isinstance(error_in(client.ask(LogCode.CHANGE_MEMBERS, body=b"")), InvalidRequestError)
    assert serving.node.changes == [change]


class Unread(Transport):
    """Keeps what is written, as the transport of a client that reads nothing does."""

    kept = b""

    def write(self, data: bytes) -> None:
        self.kept = data
        assert self.protocol is not None
        self.protocol.pause_writing()


@pytest.mark.parametrize("code", [LogCode.READ, LogCode.FETCH, JavaCode.GET])
def test_an_answer_that_is_not_read_is_kept_once(code: LogCode | JavaCode) -> None:
    """Its client has room for one copy, the connection's: who waits for the client keeps none."""

    async def test() -> None:
        node = FakeNode()
        body = b"\xfe" * MIB
        node.submit_append([body], lambda _: None)
        requests = LogRequests(ServerConfig(client_port=0), node, LoopBridge(), None, Conditions("n0"))
        server = log_server(requests, LogHandlers(requests))
        connection, transport = server.protocol(), Unread("192.0.2.1")
        transport.protocol = connection
        connection.connection_made(cast("asyncio.Transport", transport))
        asked = {
            LogCode.READ: read_body(0),
            LogCode.FETCH: bulk_codec.encode_fetch(bulk_codec.FetchLog(GROUP, LogIndex(0), chunk_bytes=2 * MIB)),
            JavaCode.GET: json.dumps({"group": GROUP, "beginIndex": 0}).encode(),
        }
        tracemalloc.start()
        try:
            connection.data_received(encode(Frame(code, 1, body=asked[code])))
            while not transport.kept:
                await asyncio.sleep(0.001)
            while tracemalloc.get_traced_memory()[0] >= len(transport.kept) + MIB // 2:
                await asyncio.sleep(0.001)  # a thread that has read it may have a moment's more to do with it
            kept, room = tracemalloc.get_traced_memory()[0], requests.quotas.root.answer_bytes
        finally:
            tracemalloc.stop()
        assert room >= len(transport.kept) - 1024
        assert MIB < kept < len(transport.kept) + MIB // 2
        connection.connection_lost(None)
        while server.requests_under_way:
            await asyncio.sleep(0)
        assert requests.quotas.root.answer_bytes == 0
        await server.close(0)
        requests.close()

    loops.run(asyncio.wait_for(test(), 30))


# --- large reads ------------------------------------------------------------------------------------------------------


def test_a_fetch_returns_one_chunk_at_a_time(serving: Served) -> None:
    """The client asks for the next when it wants it: the node keeps nothing for it."""
    with serving.dial() as client:
        append(client, *[bytes([number]) * 1000 for number in range(10)])
        first, data, committed = 0, b"", 0
        while first < 10:
            request = bulk_codec.FetchLog(GROUP, LogIndex(first), chunk_bytes=3000)
            chunk = bulk_codec.decode_chunk(succeeded(client.ask(LogCode.FETCH, body=bulk_codec.encode_fetch(request))))
            assert chunk.first_index == first
            assert 0 < len(chunk.data) <= 3000
            first, data, committed = first + chunk.count, data + chunk.data, chunk.committed_index
        request = bulk_codec.FetchLog(GROUP, LogIndex(10))
        nothing = bulk_codec.decode_chunk(succeeded(client.ask(LogCode.FETCH, body=bulk_codec.encode_fetch(request))))
    assert (committed, len(data)) == (9, 10 * 1048)
    assert (nothing.count, nothing.data) == (0, b"")


def test_places_and_digests_are_those_of_grpc(serving: Served) -> None:
    """The same messages."""
    with serving.dial() as client:
        append(client, b"a", b"b")
        located = bulk_codec.decode_located(
            succeeded(client.ask(LogCode.LOCATE, body=bulk_codec.encode_locate(bulk_codec.Locate(GROUP, [1]))))
        )
        request = bulk_codec.encode_digests_request(bulk_codec.BlockDigests(GROUP, Position(0)))
        digested = bulk_codec.decode_digests(succeeded(client.ask(LogCode.DIGESTS, body=request)))
        wrong = replace(bulk_codec.BlockDigests(GROUP, Position(0)), block_bytes=1)
        refused = client.ask(LogCode.DIGESTS, body=bulk_codec.encode_digests_request(wrong))
    assert [one.index for one in located.places] == [1]
    assert digested.committed_index == 1
    assert isinstance(error_in(refused), InvalidRequestError)


# --- around them ------------------------------------------------------------------------------------------------------


def test_a_code_of_nobody_is_refused(serving: Served) -> None:
    """RocketMQ's brokers do the same."""
    with serving.dial() as client:
        assert client.ask(20099).code == AnswerCode.REQUEST_CODE_NOT_SUPPORTED
        assert isinstance(error_in(client.ask(20099)), UnavailableError)


def test_bytes_of_no_protocol_are_hung_up_on(serving: Served) -> None:
    """And others are served."""
    with socket.create_connection(("127.0.0.1", serving.server.port), 30) as stranger:
        stranger.sendall(b"\xff" * 16)
        assert stranger.recv(1) == b""
    with serving.dial() as client:
        append(client, b"a")
        assert client.ask(JavaCode.METADATA).code == 200


def test_a_stopping_node_hangs_up() -> None:
    """What waits is not answered for ever."""
    with served() as serving:
        client = serving.dial()
        client.ask(LogCode.WATCH_ROLE)
        waiting = client.begin(LogCode.READ, body=read_body(0, wait_ms=15_000))
        client.ask(LogCode.METADATA)
    with client:
        assert isinstance(error_in(client.answer_to(waiting)), ShutdownError)
        assert client.is_hung_up


def test_the_largest_append_is_stated(serving: Served) -> None:
    """A larger one is split by the client."""
    with serving.dial() as client:
        body = b'{"group":"default"}'
        stated = client.ask(JavaCode.METADATA, body=body).fields["requestBytesMax"]
    assert int(stated) == options.request_bytes_max(ServerConfig())


def test_any_bytes_are_answered(serving: Served) -> None:
    """Each request once, whatever its body; the node goes on."""

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from([*LogCode, *JavaCode]), st.binary(max_size=80)), max_size=8))
    def ask(requests: list[tuple[int, bytes]]) -> None:
        with serving.dial() as client:
            for opaque in [client.begin(code, body=body) for code, body in requests]:
                client.answer_to(opaque)
            assert client.ask(LogCode.METADATA).code == 0

    ask()
