"""The client service on a real loopback port, against a node without a group."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from dledger.access.quota import Quota
from dledger.config import ConnectionLimits, ReplicationConfig, ServerConfig, StoreConfig
from dledger.errors import (
    ConfigError,
    DLedgerError,
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
    ResponseCode,
    TermChangedError,
)
from dledger.host import ClientServer
from dledger.pb import client_pb2 as pb
from dledger.rpc import options
from dledger.rpc.clients import codec, group_codec, log_service
from dledger.rpc.clients.codec import ReadMode
from dledger.rpc.clients.connections import SMALL_BYTES
from dledger.rpc.clients.group_codec import Commands
from dledger.types import AppendedBatch, ChangeKind, LogIndex, MemberChange, NodeId, Role, Term
from dledger.values import MIB
from tests.support import grpc_log
from tests.support.fake_node import FakeNode, client_server
from tests.support.grpc_client import CHANNEL_OPTIONS
from tests.support.waiting import wait_until

N1 = LeaderHint(NodeId("n1"), "h:1")


@dataclass
class Service:
    """A served fake node and raw access to it."""

    node: FakeNode
    server: ClientServer
    channel: grpc.Channel

    def call(self, name: str, data: bytes) -> bytes:
        method = self.channel.unary_unary(_path(name), request_serializer=None, response_deserializer=None)
        answer: bytes = method(data, timeout=60)
        return answer

    def append(self, *bodies: bytes, group: str = "default") -> AppendedBatch | DLedgerError:
        return grpc_log.decode_appended(self.call("Append", grpc_log.encode_append(codec.Append(group, bodies))))[1]

    def read(self, first: int, **more: object) -> codec.ReadAnswer:
        request = replace(codec.Read("default", LogIndex(first)), **more)  # type: ignore[arg-type]  # by name
        return grpc_log.decode_read_answer(self.call("Read", grpc_log.encode_read(request)))

    def stream(self, name: str, data: bytes) -> grpc.CallIterator[bytes]:
        method = self.channel.unary_stream(_path(name), request_serializer=None, response_deserializer=None)
        call: grpc.CallIterator[bytes] = method(data, timeout=60)
        return call

    def append_stream(self) -> tuple[Callable[[bytes | None], None], grpc.CallIterator[bytes]]:
        """A function that sends (None ends), and the answers."""
        requests: SimpleQueue[bytes | None] = SimpleQueue()
        method = self.channel.stream_stream(_path("AppendStream"), request_serializer=None, response_deserializer=None)
        return requests.put, method(iter(requests.get, None), timeout=60)


def _path(name: str) -> str:
    return options.method(options.LOG_SERVICE, name)


@contextmanager
def _serve(config: ServerConfig) -> Iterator[Service]:
    before = set(threading.enumerate())
    node = FakeNode()
    server = client_server(config, node)
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", CHANNEL_OPTIONS) as channel:
            yield Service(node, server, channel)
    finally:
        server.close()
        server.close()  # idempotent
    assert node.listeners == []
    wait_until(lambda: {t for t in threading.enumerate() if not _is_grpcs(t)} <= before, "all threads joined")


def _cancel(call: grpc.CallIterator[bytes]) -> None:
    call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped


def _is_grpcs(thread: threading.Thread) -> bool:
    """grpc.aio keeps one poller thread per process for good."""
    return "_poll" in thread.name


@pytest.fixture
def service() -> Iterator[Service]:
    with _serve(ServerConfig(client_port=0)) as service:
        yield service


def append_request(*bodies: bytes, request_id: int = 1, ordered: bool = False) -> bytes:
    return grpc_log.encode_append(codec.Append("default", bodies, request_id, ordered))


# --- commands -------------------------------------------------------------------------------------------------------


def test_commands_whose_results_find_no_room_are_applied(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal that looks like one of the request would have its client send them again."""
    monkeypatch.setattr(Quota, "try_answer", lambda _quota, _size: False)
    command = bytes(SMALL_BYTES)
    request = group_codec.encode_commands(Commands("default", [command]))

    with pytest.raises(DLedgerError, match="no room") as told:
        group_codec.decode_results(service.call("Command", request))

    assert told.value.outcome == "unknown"
    assert service.node.bodies() == [command]


# --- append ---------------------------------------------------------------------------------------------------------


def test_append_answers_where_the_entries_are(service: Service) -> None:
    """Index, term and one position per entry."""
    outcome = service.append(b"a", b"bc")

    assert outcome == AppendedBatch(Term(1), LogIndex(0), LogIndex(1), (0, 49))
    assert service.node.bodies() == [b"a", b"bc"]


def test_the_log_of_an_application_takes_no_appends_from_clients() -> None:
    """They would put entries among its records that it cannot read; reads and metadata are served all the same."""
    with _serve(ServerConfig(client_port=0, client_appends=False)) as service:
        service.node.submit_append([b"a record"], lambda _result: None)

        refused = service.append(b"x")

        assert isinstance(refused, DLedgerError)
        assert (refused.code, refused.outcome) == (ResponseCode.UNSUPPORTED, "not_applied")
        assert "belongs to an application" in str(refused)
        assert [entry.body for entry in service.read(0).entries] == [b"a record"]
        assert service.node.bodies() == [b"a record"]


def test_append_fails_with_the_nodes_error(service: Service) -> None:
    """A domain error travels in the answer, with its leader hint and outcome."""
    service.node.leader = N1
    refused = service.append(b"a")
    service.node.leader = None
    service.node.fail_appends = [TermChangedError("lost")]
    changed = service.append(b"a")

    assert isinstance(refused, NotLeaderError)
    assert (refused.leader, refused.outcome) == (N1, "not_applied")
    assert isinstance(changed, TermChangedError)
    assert changed.outcome == "unknown"


@pytest.mark.parametrize(
    ("bodies", "group", "kind", "reason", "code"),
    [
        ((), "default", EmptyBatchError, "at least one entry", 420),
        ((b"x" * 1000,), "default", EntryTooLargeError, "because of max_entry_bytes=1024", 411),
        ((b"x",), "other", IdentityError, "serves group 'default', not 'other'", 400),
    ],
)
def test_append_refuses_what_cannot_be_stored(
    bodies: tuple[bytes, ...], group: str, kind: type[DLedgerError], reason: str, code: int
) -> None:
    """Before the node sees it, with DLedger's code and the limit's name."""
    with _serve(ServerConfig(client_port=0, store=StoreConfig(max_entry_bytes=1024))) as service:
        data = service.call("Append", grpc_log.encode_append(codec.Append(group, bodies)))

        outcome = grpc_log.decode_appended(data)[1]
        assert type(outcome) is kind
        assert reason in str(outcome)
        assert pb.AppendResponse.FromString(data).status.code == code
        assert service.node.entries == []


@pytest.mark.parametrize("name", ["Append", "Read", "Metadata", "TransferLeadership"])
def test_garbage_is_an_invalid_argument(service: Service, name: str) -> None:
    """Bytes that are no request get a gRPC status that says so."""
    with pytest.raises(grpc.RpcError) as caught:
        service.call(name, b"\xff\xff")

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("length", [100, 20_000, 1_000_000])
def test_errors_that_repeat_what_was_said_stay_short_and_keep_their_status(service: Service, length: int) -> None:
    """gRPC would replace the status of an error whose text is above 16 KiB."""
    group = "\N{SNOWMAN}" * length
    with pytest.raises(IdentityError) as told:
        grpc_log.decode_read_answer(service.call("Read", grpc_log.encode_read(codec.Read(group, LogIndex(0)))))
    assert len(str(told.value)) <= 1000

    with pytest.raises(grpc.RpcError) as caught:
        list(service.stream("WatchRole", pb.WatchRoleRequest(group=group).SerializeToString()))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(caught.value.details() or "") <= 1000


@pytest.mark.parametrize("name", ["Follow", "WatchRole"])
def test_garbage_on_a_stream_is_an_invalid_argument(service: Service, name: str) -> None:
    """As above."""
    with pytest.raises(grpc.RpcError) as caught:
        list(service.stream(name, b"\xff\xff"))

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_request_beyond_the_receive_limit_is_refused(service: Service) -> None:
    """It is not even read."""
    with pytest.raises(grpc.RpcError) as caught:
        service.call("Append", b"x" * (9 * MIB))

    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert service.node.entries == []


def test_thousands_of_appends_wait_without_threads() -> None:
    """Pending appends cost a future each, not a thread (issue, section 4)."""
    pending = 2_000

    before = threading.active_count()
    limits = ConnectionLimits(connection_calls_max=pending, call_ms_max=300_000)
    replication = ReplicationConfig(pending_entries_max=2 * pending)  # of which a connection has half
    with _serve(ServerConfig(client_port=0, limits=limits, replication=replication)) as service:
        service.node.hold = True
        append = service.channel.unary_unary(_path("Append"), request_serializer=None, response_deserializer=None)

        calls = [append.future(append_request(b"x", request_id=number), timeout=300) for number in range(pending)]
        wait_until(lambda: len(service.node.held) == pending or any(call.done() for call in calls), "pending", 240)
        assert [call.exception() for call in calls if call.done()] == []
        threads = threading.active_count()
        service.node.release()

        assert threads - before <= 16
        assert threads <= 64
        assert len({grpc_log.decode_appended(call.result())[0] for call in calls}) == pending


# --- append stream --------------------------------------------------------------------------------------------------


def test_append_stream_answers_as_requests_complete(service: Service) -> None:
    """Requests are submitted without waiting; answers carry the request's id."""
    service.node.hold = True
    send, answers = service.append_stream()
    for number in range(10):
        send(append_request(b"x", request_id=100 + number))
    wait_until(lambda: len(service.node.held) == 10, "all submitted before any is answered")

    service.node.held.reverse()
    service.node.release()
    send(None)

    assert [grpc_log.decode_appended(data)[0] for data in answers] == [109 - number for number in range(10)]


def test_append_stream_refuses_ordered_requests_after_a_failed_one(service: Service) -> None:
    """So that a pipelining client's entries never overtake each other."""
    service.node.fail_appends = [None, PendingFullError("full (pending_entries_max)")]
    send, answers = service.append_stream()
    for number in range(4):
        send(append_request(b"%d" % number, request_id=number, ordered=True))
    send(append_request(b"free", request_id=4))
    send(None)

    outcomes = dict(grpc_log.decode_appended(data) for data in answers)

    assert isinstance(outcomes[0], AppendedBatch)
    assert isinstance(outcomes[1], PendingFullError)
    assert isinstance(outcomes[2], EarlierRequestFailedError)
    assert isinstance(outcomes[3], EarlierRequestFailedError)
    assert isinstance(outcomes[4], AppendedBatch)
    assert service.node.bodies() == [b"0", b"free"]
    told = [(one.kind, one.subject) for one in service.server.conditions.now()]
    assert told == [("at_limit", "pending_entries_max")]


def test_append_stream_ends_on_garbage(service: Service) -> None:
    """After garbage nothing of the stream can be trusted."""
    send, answers = service.append_stream()
    send(b"\xff\xff")

    with pytest.raises(grpc.RpcError) as caught:
        list(answers)
    send(None)

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_append_stream_is_not_read_beyond_its_limit(service: Service) -> None:
    """What one stream may have pending is bounded; the rest waits at the client."""
    service.node.hold = True
    send, answers = service.append_stream()
    total = log_service.REQUESTS_PENDING_MAX + 100
    for number in range(total):
        send(append_request(b"x", request_id=number))
    send(None)
    wait_until(lambda: len(service.node.held) == log_service.REQUESTS_PENDING_MAX, "the limit")

    service.node.hold = False
    service.node.release()

    assert len(list(answers)) == total


def test_append_stream_survives_a_client_that_leaves(service: Service) -> None:
    """Completions for a cancelled stream are dropped."""
    service.node.hold = True
    send, answers = service.append_stream()
    send(append_request(b"x"))
    wait_until(lambda: len(service.node.held) == 1, "submitted")

    _cancel(answers)
    send(None)
    service.node.hold = False
    service.node.release()

    assert isinstance(service.append(b"y"), AppendedBatch)


# --- read and follow ------------------------------------------------------------------------------------------------


def test_read_gives_committed_entries_only(service: Service) -> None:
    """LOCAL shows what is stored; the others end at the commit index."""
    service.append(b"a", b"b")
    service.node.hold = True
    send, _answers = service.append_stream()
    send(append_request(b"c"))
    wait_until(lambda: len(service.node.entries) == 3, "an uncommitted entry")

    committed, local = service.read(0), service.read(0, mode=ReadMode.LOCAL)
    send(None)

    assert [entry.body for entry in committed.entries] == [b"a", b"b"]
    assert (committed.committed_index, committed.begin_index, committed.end_index) == (1, 0, 2)
    assert [entry.body for entry in local.entries] == [b"a", b"b", b"c"]
    assert service.read(2).entries == []
    with pytest.raises(IndexOutOfRangeError, match="index 3 is not readable yet: the last readable index is 1"):
        service.read(3)
    with pytest.raises(IndexOutOfRangeError):
        service.read(-1)


def test_read_is_bounded_and_gives_at_least_one_entry(service: Service) -> None:
    """By count, by bytes, and by 1 MiB when nothing is said."""
    for _ in range(5):
        service.append(b"x" * (MIB // 2))

    assert len(service.read(0, count=3).entries) == 1
    assert len(service.read(1, count=1).entries) == 1
    assert len(service.read(0).entries) == 1
    assert len(service.read(0, max_bytes=1).entries) == 1
    assert len(service.read(0, max_bytes=4 * MIB, count=3).entries) == 3
    assert len(service.read(0, max_bytes=1 << 40).entries) == 5


def test_read_before_the_begin_says_so(service: Service) -> None:
    """What retention removed is another error than what is not there yet."""
    service.append(b"a", b"b")
    service.node.begin_index = 1

    with pytest.raises(IndexBeforeBeginError, match="begins at 1"):
        service.read(0)


def test_linearizable_read_asks_the_leader_first(service: Service) -> None:
    """ReadIndex, and its refusal."""
    service.append(b"a")

    assert len(service.read(0, mode=ReadMode.LINEARIZABLE).entries) == 1
    service.node.leader = N1
    with pytest.raises(NotLeaderError) as caught:
        service.read(0, mode=ReadMode.LINEARIZABLE)
    assert caught.value.leader == N1


def test_follow_streams_as_commits_advance(service: Service) -> None:
    """Old entries first, new ones when committed, none twice."""
    service.append(b"0", b"1", b"2")
    call = service.stream("Follow", grpc_log.encode_follow(codec.Read("default", LogIndex(1))))
    answers = iter(call)

    assert [entry.body for entry in grpc_log.decode_read_answer(next(answers)).entries] == [b"1", b"2"]
    service.append(b"3")
    assert [entry.body for entry in grpc_log.decode_read_answer(next(answers)).entries] == [b"3"]
    _cancel(call)


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (codec.Read("other", LogIndex(0)), IdentityError),
        (codec.Read("default", LogIndex(-1)), IndexOutOfRangeError),
        (codec.Read("default", LogIndex(0)), IndexBeforeBeginError),
        (codec.Read("default", LogIndex(0), mode=ReadMode.LINEARIZABLE), NotLeaderError),
    ],
)
def test_follow_ends_with_an_error(service: Service, request_: codec.Read, kind: type[DLedgerError]) -> None:
    """In the stream's last message."""
    service.append(b"0", b"1")
    service.node.begin_index = 1
    service.node.leader = N1

    (answer,) = list(service.stream("Follow", grpc_log.encode_follow(request_)))

    with pytest.raises(kind):
        grpc_log.decode_read_answer(answer)


def test_follow_has_no_local_mode(service: Service) -> None:
    """Uncommitted entries may vanish again: a stream of them would lie."""
    request = grpc_log.encode_follow(codec.Read("default", LogIndex(0), mode=ReadMode.LOCAL))

    with pytest.raises(grpc.RpcError) as caught:
        list(service.stream("Follow", request))

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# --- the group ------------------------------------------------------------------------------------------------------


def test_metadata_tells_the_status(service: Service) -> None:
    """An empty group asks for whichever the node serves; another one is refused with DLedger's code."""
    service.append(b"a")

    assert codec.decode_metadata(service.call("Metadata", codec.encode_metadata_request(""))) == service.node.status()
    refused = service.call("Metadata", codec.encode_metadata_request("other"))
    assert pb.MetadataResponse.FromString(refused).status.code == ResponseCode.UNKNOWN_GROUP


def test_watch_role_tells_the_present_role_and_every_change(service: Service) -> None:
    """First the present, then events; one that changes nothing is not repeated."""
    call = service.stream("WatchRole", codec.encode_watch_role("default"))
    answers = iter(call)

    first = codec.decode_role_event(next(answers))
    service.node.become(N1)
    service.node.tell(codec.decode_role_event(codec.encode_role_event(replace(first, role=Role.CANDIDATE))))
    second, third = (codec.decode_role_event(next(answers)) for _ in range(2))
    _cancel(call)

    assert (first.role, first.term) == (Role.LEADER, 1)
    assert (second.role, second.term, second.leader) == (Role.FOLLOWER, 2, N1)
    assert third.role is Role.CANDIDATE
    with pytest.raises(grpc.RpcError) as caught:
        list(service.stream("WatchRole", codec.encode_watch_role("other")))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_transfer_leadership_names_the_new_leader(service: Service) -> None:
    """Or says why not."""
    request = codec.encode_transfer("default", NodeId("n2"))

    assert codec.decode_transferred(service.call("TransferLeadership", request)) == LeaderHint(NodeId("n2"))
    with pytest.raises(IdentityError):
        codec.decode_transferred(service.call("TransferLeadership", codec.encode_transfer("x", None)))
    service.node.leader = N1
    with pytest.raises(NotLeaderError):
        codec.decode_transferred(service.call("TransferLeadership", request))


def test_change_members_returns_the_new_configuration(service: Service) -> None:
    """Or says why not, and at a follower who leads."""
    change = MemberChange(ChangeKind.ADD, NodeId("n4"), 7, "h", 9)
    request = group_codec.encode_change("default", change)

    changed = group_codec.decode_changed(service.call("ChangeMembers", request))
    assert (changed.learners, changed.change_id, service.node.changes) == (("n4",), 7, [change])
    with pytest.raises(IdentityError):
        group_codec.decode_changed(service.call("ChangeMembers", group_codec.encode_change("x", change)))
    service.node.leader = N1
    with pytest.raises(NotLeaderError) as elsewhere:
        group_codec.decode_changed(service.call("ChangeMembers", request))
    assert elsewhere.value.leader == N1
    with pytest.raises(grpc.RpcError) as malformed:
        service.call("ChangeMembers", pb.ChangeMembersRequest(group="default", change_id=1).SerializeToString())
    assert malformed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_long_lived_streams_are_limited() -> None:
    """``client_streams_max``, of which a connection has half; watchers leave room for appends and followers."""
    with _serve(ServerConfig(client_port=0, client_streams_max=4)) as service:
        request = codec.encode_watch_role("default")
        calls = [service.stream("WatchRole", request) for _ in range(2)]
        for call in calls:
            next(iter(call))

        with pytest.raises(grpc.RpcError) as caught:
            list(service.stream("WatchRole", request))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "has 2 open watch streams" in str(caught.value.details())
        assert "client_streams_max" in str(caught.value.details())
        send, answers = service.append_stream()
        send(append_request(b"x"))
        assert next(iter(answers))
        _cancel(calls[0])
        wait_until(lambda: _can_watch(service), "a place to become free")
        _cancel(calls[1])
        send(None)


def _can_watch(service: Service) -> bool:
    call = service.stream("WatchRole", codec.encode_watch_role("default"))
    try:
        next(iter(call))
    except grpc.RpcError:
        return False
    _cancel(call)
    return True


# --- the server -----------------------------------------------------------------------------------------------------


def test_health_and_reflection_are_served(service: Service) -> None:
    """``grpcurl`` lists and describes; health checkers see SERVING."""
    health = health_pb2_grpc.HealthStub(service.channel)
    for name in ("", options.LOG_SERVICE):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    database = ProtoReflectionDescriptorDatabase(service.channel)
    names = set(database.get_services())
    assert {options.LOG_SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names
    described = DescriptorPool(database).FindServiceByName(options.LOG_SERVICE)
    assert described.methods_by_name["Metadata"].output_type.full_name == "dledger.v1.MetadataResponse"


@pytest.mark.parametrize("kind", ["health", "reflection"])
def test_streams_of_tools_leave_room_for_clients(kind: str) -> None:
    """Whoever can connect may open them, without an account, and keep them for ever."""
    config = ServerConfig(client_port=0, client_streams_max=4, replication=ReplicationConfig(pending_entries_max=4))
    held = threading.Event()
    with _serve(config) as service:
        watch = health_pb2_grpc.HealthStub(service.channel).Watch
        info = reflection_pb2_grpc.ServerReflectionStub(service.channel).ServerReflectionInfo
        calls, answered = [], 0
        for _ in range(40):
            call = watch(health_pb2.HealthCheckRequest()) if kind == "health" else info(_asking(held))
            calls.append(call)
            try:
                next(call)
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017
            else:
                answered += 1

        assert service.append(b"x") == AppendedBatch(Term(1), LogIndex(0), LogIndex(0), (0,))
        assert answered == config.client_streams_max // 2, "a connection has half of them, an address its share"
        held.set()
        for call in calls:
            _cancel(call)


@pytest.mark.parametrize("asked", [b"\xff" * 4, b"\x0a\x81\x10" + b"x" * 2049], ids=["malformed", "long"])
@pytest.mark.parametrize(
    "path",
    [
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
def test_what_strangers_ask_of_health_and_reflection_is_short_and_leaves_no_trace(
    service: Service, caplog: pytest.LogCaptureFixture, path: str, asked: bytes
) -> None:
    """gRPC logs a traceback for what it cannot decode, and holds the request of an open stream, four times over."""
    call = service.channel.stream_stream(path, None, None)(iter([asked]), timeout=60)

    with pytest.raises(grpc.RpcError) as refused:
        next(iter(call))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not caplog.records


def test_reflection_that_is_not_read_is_hung_up_on() -> None:
    """As is every client that reads no answers."""
    with _serve(ServerConfig(client_port=0, limits=ConnectionLimits(call_ms_max=1000))) as service:
        info = reflection_pb2_grpc.ServerReflectionStub(service.channel).ServerReflectionInfo
        unread = info(itertools.repeat(_DESCRIBE))

        wait_until(lambda: not unread.is_active(), "it is hung up on")


_DESCRIBE = reflection_pb2.ServerReflectionRequest(file_containing_symbol=options.LOG_SERVICE)


def _asking(held: threading.Event) -> Iterator[reflection_pb2.ServerReflectionRequest]:
    yield reflection_pb2.ServerReflectionRequest(list_services="")
    held.wait(60)


def test_a_taken_port_is_a_config_error(service: Service) -> None:
    """Two nodes on one port must not share it silently (SO_REUSEPORT is off)."""
    second = client_server(ServerConfig(client_port=service.server.port), FakeNode())

    with pytest.raises(ConfigError, match=f"client address 127.0.0.1:{service.server.port}: the port is in use"):
        second.start()
    second.close()


def test_the_advertised_address_is_what_clients_are_told() -> None:
    """Behind NAT or in a container, the address listened on is of no use to clients."""
    server = client_server(ServerConfig(client_port=0, advertised_client_address="example.org:5"), FakeNode())

    assert server.address == "example.org:5"
    server.close()  # never started


def test_close_ends_what_is_under_way(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    """Pending appends and streams of a stopping node end at once, without a traceback in the log."""
    service.node.hold = True
    call = service.stream("WatchRole", codec.encode_watch_role("default"))
    next(iter(call))
    send, answers = service.append_stream()
    send(append_request(b"x"))
    wait_until(lambda: len(service.node.held) == 1, "submitted")

    with caplog.at_level(logging.ERROR):
        service.server.close()
    service.node.release()  # nobody waits for it any more
    send(None)

    for ended in (call, answers):
        with pytest.raises(grpc.RpcError) as caught:
            list(ended)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert caplog.text == ""


def test_invalid_request_error_is_what_garbage_raises_in_the_codec() -> None:
    """The service relies on it to tell garbage from domain errors."""
    with pytest.raises(InvalidRequestError):
        codec.decode_append(b"\xff\xff")
