"""What only the transport over the network has: ports, sockets, garbage, dead and stopped peers."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Final

import pytest

from dledger.config import Member, ReplicationConfig, ServerConfig
from dledger.core.messages import (
    Envelope,
    HeartbeatRequest,
    HeartbeatResponse,
    Message,
    PushCommit,
    PushKind,
    PushResponse,
    TakeLeadership,
    VoteRequest,
)
from dledger.errors import ConfigError, InvariantError, ResponseCode
from dledger.rpc import loops, options
from dledger.rpc.loops import Report, log_failure
from dledger.rpc.peers import codec, frames, server
from dledger.rpc.peers.frames import FrameBuffer, FrameKind, PeerConnection, Purpose
from dledger.rpc.peers.link import HEARTBEATS_MAX, OTHERS_MAX, PeerLink
from dledger.rpc.peers.port import PeerCaller
from dledger.rpc.peers.server import LeaderWatch
from dledger.rpc.peers.transport import PeerTransport
from dledger.types import NO_ENTRY, LogIndex, NodeId, Term
from dledger_cli.local.group import free_ports
from tests.support.peer_wire import PeerWire, handshake_frame
from tests.support.receiver import RecordingReceiver
from tests.support.waiting import wait_until

N0, N1 = NodeId("n0"), NodeId("n1")
CONTROL: Final = (
    (FrameKind.VOTE, "2 bytes are not a valid VoteRequest"),
    (FrameKind.HEARTBEAT, "2 bytes are not a valid HeartbeatRequest"),
    (FrameKind.HEARTBEATS, "2 bytes are not a valid Heartbeats"),
    (FrameKind.TAKE_LEADERSHIP, "2 bytes are not a valid TakeLeadershipRequest"),
)


@pytest.fixture
def config() -> ServerConfig:
    ports = free_ports(2)
    members = tuple(Member(NodeId(f"n{i}"), "127.0.0.1", port) for i, port in enumerate(ports))
    return ServerConfig(node_id=N1, members=members, client_port=0, cluster_id="c")


@pytest.fixture
def receiver() -> RecordingReceiver:
    return RecordingReceiver()


@dataclass
class Peer:
    """n1, as a process that connects to it sees it."""

    config: ServerConfig
    transport: PeerTransport
    receiver: RecordingReceiver

    def connect(self) -> PeerWire:
        return PeerWire((self.config.self_member.host, self.config.self_member.port))

    def connected(self, purpose: Purpose) -> PeerWire:
        """A connection of n0's whose handshake is done."""
        return self.connect().begin(self.config, N0, purpose)


@pytest.fixture
def peer(config: ServerConfig, receiver: RecordingReceiver) -> Iterator[Peer]:
    transport = PeerTransport(config)
    transport.start(receiver)
    yield Peer(config, transport, receiver)
    transport.close()


def envelope(message: Message, sender: NodeId = N0, target: NodeId = N1) -> Envelope:
    return Envelope("c", "default", sender, target, message)


def push_answer(index: int) -> PushResponse:
    at = LogIndex(index)
    return PushResponse(Term(1), 0, PushKind.APPEND, ResponseCode.SUCCESS, at, at, at, NO_ENTRY, 1)


COMMIT: Final = PushCommit(Term(1), 0, LogIndex(0))


def refusals(wire: PeerWire) -> list[str]:
    """What the other side says before it hangs up."""
    return [bytes(payload).decode() for kind, payload in wire.rest() if kind is FrameKind.REFUSAL]


# --- what arrives -----------------------------------------------------------------------------------------------------


def test_garbage_is_refused_with_a_sentence_that_says_why(peer: Peer) -> None:
    """Whatever the garbage is, before the handshake and after it; once per reason in the log, too."""
    handshake = handshake_frame(peer.config, N0, Purpose.PUSH)
    control = handshake_frame(peer.config, N0, Purpose.CONTROL)
    for garbage, reason in (
        (frames.pack(FrameKind.PUSH, b""), "expected a handshake first, got PUSH"),
        (frames.pack(FrameKind.HANDSHAKE, b"\xff\xff"), "2 bytes are not a valid HandshakeRequest"),
        (b"\xff" * 100, "a frame of kind 255 is unknown"),
        (b"GET / HTTP/1.1\r\n\r\n", "only members of the group connect to this port"),
        (frames.pack(FrameKind.HANDSHAKE, bytes(65 * 1024)), "HANDSHAKE frame of 66560 bytes: at most 65536"),
        (handshake_frame(peer.config, N0, 9), "purpose 9 is unknown"),
        (handshake + frames.pack(FrameKind.PUSH, b"\xff\xff"), "a push of 2 bytes and of no known kind"),
        (handshake + frames.pack(FrameKind.PUSH_ANSWER, b""), "expected a push, got PUSH_ANSWER"),
        (handshake + frames.pack(FrameKind.VOTE, b""), "expected a push, got VOTE"),
        (handshake + struct.pack(">BI", FrameKind.PUSH, 1 << 31), "PUSH frame of 2147483648 bytes"),
        (control + frames.pack(FrameKind.PUSH, b""), "expected a control message, got PUSH"),
        (control + struct.pack(">BI", FrameKind.VOTE, 2 << 20), "VOTE frame of 2097152 bytes: at most 1048576"),
        *((control + frames.pack(kind, b"\xff\xff"), complaint) for kind, complaint in CONTROL),
    ):
        with peer.connect() as wire:
            wire.link.sendall(garbage)
            refused = refusals(wire)

        assert len(refused) == 1, reason
        assert reason in refused[0]
    assert peer.receiver.received == []
    assert peer.receiver.requested == []


def test_a_peer_of_another_version_is_told_so(peer: Peer) -> None:
    """Whatever it wants: the rest of its handshake may mean something else."""
    with peer.connect() as wire:
        wire.link.sendall(handshake_frame(peer.config, N0, 77, version=codec.PROTOCOL_VERSION + 1))
        frame = wire.frame()
        assert wire.rest() == []

    assert frame is not None
    answer = codec.decode_handshake_answer(frame[1])
    assert answer.code is ResponseCode.UNEXPECTED_ARGUMENT
    assert f"protocol version of n0 is {codec.PROTOCOL_VERSION + 1}, of n1 {codec.PROTOCOL_VERSION}" in answer.reason


@pytest.mark.parametrize(
    ("purpose", "kind", "message"),
    [
        (Purpose.PUSH, FrameKind.PUSH, PushCommit(Term(1), 0, LogIndex(0))),
        (Purpose.CONTROL, FrameKind.VOTE, VoteRequest(Term(1), NO_ENTRY)),
        (Purpose.CONTROL, FrameKind.HEARTBEAT, HeartbeatRequest(Term(1))),
        (Purpose.CONTROL, FrameKind.TAKE_LEADERSHIP, TakeLeadership(Term(1))),
    ],
)
def test_a_message_is_of_whoever_has_shaken_hands(
    peer: Peer, purpose: Purpose, kind: FrameKind, message: Message
) -> None:
    """It says nothing of its sender itself; one that claims to be the addressee is refused, and not heard."""
    with peer.connected(purpose) as wire:
        wire.send(kind, message)
        wait_until(lambda: bool(peer.receiver.received + peer.receiver.requested), "the message")
    with peer.connect() as wire:
        wire.link.sendall(handshake_frame(peer.config, N1, purpose))
        wire.send(kind, message)
        (refused,) = refusals(wire)

    assert "a message to 'n1' from another 'n1'" in refused
    assert peer.receiver.received + peer.receiver.requested == [envelope(message)]


def test_control_messages_are_answered_in_the_order_in_which_they_came(peer: Peer) -> None:
    """By that order the sender knows which answer is whose."""
    with peer.connected(Purpose.CONTROL) as wire:
        for number in range(3):
            wire.send(FrameKind.HEARTBEAT, HeartbeatRequest(Term(1), number))
            wire.send(FrameKind.VOTE, VoteRequest(Term(1), NO_ENTRY))
        wire.send(FrameKind.TAKE_LEADERSHIP, TakeLeadership(Term(1)))
        found = [wire.frame() for _ in range(7)]

    kinds = [one[0] for one in found if one is not None]
    assert kinds == [FrameKind.HEARTBEAT_ANSWER, FrameKind.VOTE_ANSWER] * 3 + [FrameKind.TAKE_LEADERSHIP_ANSWER]
    answers = [codec.decode_heartbeat_response(one[1]) for one in found[:6:2] if one is not None]
    assert answers == [HeartbeatResponse(Term(1), number) for number in range(3)]


def test_a_newer_connection_replaces_the_older(peer: Peer) -> None:
    """A connection that nobody noticed is dead must not swallow the answers."""
    with peer.connected(Purpose.PUSH) as older:
        older.send(FrameKind.PUSH, COMMIT)
        wait_until(lambda: len(peer.receiver.received) == 1, "the first push")
        with peer.connected(Purpose.PUSH) as newer, peer.connected(Purpose.CONTROL) as control:
            newer.send(FrameKind.PUSH, COMMIT)
            wait_until(lambda: len(peer.receiver.received) == 2, "the second push")

            assert older.rest() == []
            peer.transport.send(envelope(push_answer(3), sender=N1, target=N0))
            frame = newer.frame()
            assert not control.has_ended  # it serves another purpose

    assert frame is not None
    assert frame[0] is FrameKind.PUSH_ANSWER
    assert frames.decode_answer(frame[1]) == push_answer(3)


def test_the_newest_connection_is_in_use_whichever_thread_begins_first(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause a member accepts all that a peer has tried meanwhile, and only the last of them is alive."""
    late, serve = threading.Event(), server.PeerServer._serve
    begun: list[int] = []

    def begin_late(self: server.PeerServer, connection: PeerConnection, caller: PeerCaller, number: int) -> None:
        begun.append(number)
        if number == 1:
            late.wait(60)
        serve(self, connection, caller, number)

    monkeypatch.setattr(server.PeerServer, "_serve", begin_late)
    with peer.connected(Purpose.PUSH) as older, peer.connected(Purpose.PUSH) as newer:
        newer.send(FrameKind.PUSH, COMMIT)
        wait_until(lambda: len(peer.receiver.received) == 1, "a push on the newer one")
        late.set()
        assert older.rest() == []
        peer.transport.send(envelope(push_answer(3), sender=N1, target=N0))
        frame = newer.frame()

    assert begun == [1, 2]
    assert frame is not None
    assert frame[0] is FrameKind.PUSH_ANSWER


def test_connections_whose_threads_wait_are_limited_per_peer(peer: Peer) -> None:
    """A peer that dials again and again, while this member's disk hangs, takes few threads, and none of others."""
    peer.receiver.release.clear()
    wires = []
    try:
        for number in range(1, 2 * server.CONNECTIONS_MAX):
            wires.append(peer.connected(Purpose.CONTROL))
            if number <= server.CONNECTIONS_MAX:
                wires[-1].send(FrameKind.VOTE, VoteRequest(Term(number), NO_ENTRY))
                wait_until(lambda number=number: len(peer.receiver.requested) == number, "the vote waits")  # type: ignore[misc]  # the default argument
        assert wires[-1].rest() == []
        with peer.connected(Purpose.PUSH) as other:
            other.send(FrameKind.PUSH, COMMIT)
            wait_until(lambda: len(peer.receiver.received) == 1, "a push")
    finally:
        peer.receiver.release.set()
        for wire in wires:
            wire.link.close()
    with peer.connect() as wire:
        wait_until(lambda: not _control_threads(), "the threads have ended")
        wire.begin(peer.config, N0, Purpose.CONTROL).send(FrameKind.VOTE, VoteRequest(Term(9), NO_ENTRY))
        assert wire.frame() is not None


def _control_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "dledger-control-in-n1"]


def test_a_leader_that_takes_no_answers_is_hung_up_on(peer: Peer) -> None:
    """Waiting for it would stop the flusher; what it does not take is counted."""
    with peer.connected(Purpose.PUSH):
        before = peer.transport.dropped_answers

        def hung_up() -> bool:
            for _ in range(1000):
                peer.transport.send(envelope(push_answer(3), sender=N1, target=N0))
            return peer.transport.dropped_answers > before

        wait_until(hung_up, "answers to be dropped")


def test_a_member_without_a_log_to_give_says_so(peer: Peer) -> None:
    """A transport in a test, say."""
    with peer.connected(Purpose.LOG) as wire:
        assert refusals(wire) == ["this member gives no log to its peers"]


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_a_taken_port_is_a_config_error(config: ServerConfig) -> None:
    """Two nodes on one port must not share it silently (SO_REUSEPORT is off)."""
    first, second = PeerTransport(config), PeerTransport(config)
    first.start(RecordingReceiver())

    with pytest.raises(ConfigError, match=f"peer address {config.self_member.address}: the port is in use"):
        second.start(RecordingReceiver())

    first.close()
    second.close()


@dataclass
class Silent:
    """A peer that accepts connections and says nothing, as if it were stopped (SIGSTOP)."""

    listening: socket.socket

    def accept(self, timeout_s: float = 20) -> socket.socket:
        self.listening.settimeout(timeout_s)
        link, _ = self.listening.accept()
        link.settimeout(20)
        return link


@pytest.fixture
def silent(config: ServerConfig) -> Iterator[Silent]:
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # other tests' connections to it may linger
        listening.bind(("127.0.0.1", config.peers[0].port))
        listening.listen()
        yield Silent(listening)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes as long as a busy machine makes it take."""
    monkeypatch.setattr(server, "LOOK_S_MAX", 2.0)


def lose_pushes(peer: Peer) -> None:
    """n0's push connection is made, and breaks."""
    received = len(peer.receiver.received)
    with peer.connected(Purpose.PUSH) as wire:
        wire.send(FrameKind.PUSH, COMMIT)
        wait_until(lambda: len(peer.receiver.received) > received, "the push")


@pytest.mark.usefixtures("patient")
def test_a_leader_whose_address_refuses_connections_is_gone(peer: Peer) -> None:
    """Its kernel has closed its port: design notes F2."""
    peer.receiver.leader = N0, Term(5)

    lose_pushes(peer)

    wait_until(lambda: peer.receiver.leader_losses == [(N0, Term(5), True)], "the leader is known to be gone")


@pytest.mark.usefixtures("patient")
def test_a_leader_whose_address_accepts_connections_is_only_in_doubt(peer: Peer, silent: Silent) -> None:
    """It may be alive, or started again; or something else listens there."""
    peer.receiver.leader = N0, Term(5)

    lose_pushes(peer)

    said = b"?"
    while said:  # links begin with a handshake
        with silent.accept() as link:
            said = link.recv(1)
    assert said == b"", "nothing is said, and it ends soon"
    assert peer.receiver.leader_losses == [(N0, Term(5), False)]


@pytest.mark.usefixtures("patient")
def test_a_leader_that_dies_while_it_is_asked_is_gone(peer: Peer, silent: Silent) -> None:
    """A dying process's port may still have accepted the connection."""
    peer.receiver.leader = N0, Term(5)

    lose_pushes(peer)
    losses = peer.receiver.leader_losses
    while losses[-1:] != [(N0, Term(5), True)]:  # a link may connect as well
        with suppress(TimeoutError), silent.accept(timeout_s=0.1) as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets it

    assert losses[:-1] in ([(N0, Term(5), False)], [])  # in doubt before, unless the reset overtook the connection


@pytest.mark.parametrize("last", [Purpose.CONTROL, Purpose.PUSH])
@pytest.mark.usefixtures("patient")
def test_what_was_on_its_way_when_the_leader_was_killed_is_no_sign_of_life(peer: Peer, last: Purpose) -> None:
    """A heartbeat after the end of pushes, or a push after that of heartbeats, would end the suspicion: both are over
    before the leader is looked for.
    """
    peer.receiver.leader = N0, Term(5)
    heard = peer.receiver.requested if last is Purpose.CONTROL else peer.receiver.received
    with peer.connected(last) as late:
        with peer.connected(Purpose.PUSH if last is Purpose.CONTROL else Purpose.CONTROL):
            pass
        threads = peer.transport._server._threads  # type: ignore[union-attr]  # it is started
        wait_until(lambda: [one.purpose for one, _ in threads.values()] == [last], "the end of one is noticed")
        if last is Purpose.CONTROL:
            late.send(FrameKind.HEARTBEAT, HeartbeatRequest(Term(5)))
        else:
            late.send(FrameKind.PUSH, COMMIT)
        wait_until(lambda: heard != [], "it is heard")
        assert peer.receiver.leader_losses == []

    wait_until(lambda: peer.receiver.leader_losses == [(N0, Term(5), True)], "it is looked for")


def a_watch(receiver: RecordingReceiver, *peers: Member, report: Report = log_failure) -> LeaderWatch:
    return LeaderWatch({peer.node_id: peer for peer in peers}.get, receiver, report)


def test_what_breaks_during_a_look_is_looked_into_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next leader may be killed within the 100 ms that a look takes at most. Each once, and in turn."""
    led = {N0: Term(5)}
    looks: list[NodeId] = []
    receiver = RecordingReceiver()
    monkeypatch.setattr(receiver, "follows", led.get)

    async def run() -> None:
        watch = a_watch(receiver, Member(N0, "127.0.0.1", 1), Member(N1, "127.0.0.1", 2))

        async def dial(leader: Member, _term: Term) -> None:
            looks.append(leader.node_id)
            if len(looks) == 1:
                watch.broke(N0)
                watch.broke(N0)
                led[N1] = Term(6)
                watch.broke(N1)

        monkeypatch.setattr(watch, "_dial", dial)
        watch.broke(N1)
        watch.broke(N0)
        while watch._task is not None:
            await asyncio.sleep(0)
        await watch.close()

    monkeypatch.setattr(server, "PAUSE_S", 0.001)
    loops.run(run())

    assert looks[0] == N0
    assert sorted(looks[1:]) == [N0, N1]


def test_there_are_at_most_ten_looks_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that break again and again must not become a load."""
    looks_s: list[float] = []
    receiver = RecordingReceiver(leader=(N0, Term(5)))

    async def run() -> None:
        watch = a_watch(receiver, Member(N0, "127.0.0.1", 1))
        loop = asyncio.get_running_loop()

        async def dial(_leader: Member, _term: Term) -> None:
            looks_s.append(loop.time())

        monkeypatch.setattr(watch, "_dial", dial)
        while len(looks_s) < 3:
            watch.broke(N0)
            await asyncio.sleep(0)
        await watch.close()
        watch.broke(N0)
        assert watch._task is None, "it is closed"

    loops.run(run())

    assert looks_s[2] - looks_s[0] >= 1.9 * server.PAUSE_S, "but for what the loop's clock leaves out"


def test_who_accepts_a_connection_and_ends_it_properly_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member at the limit of its connections does."""
    receiver = RecordingReceiver(leader=(N0, Term(5)))
    monkeypatch.setattr(server, "LOOK_S_MAX", 20.0)

    async def run() -> None:
        accepting = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
        address = Member(N0, "127.0.0.1", accepting.sockets[0].getsockname()[1])
        watch = a_watch(receiver, address)
        watch.broke(N0)
        while watch._task is not None:
            await asyncio.sleep(0.001)
        accepting.close()

    loops.run(run())

    assert receiver.leader_losses == [(N0, Term(5), False)]


def test_a_look_that_finds_no_thread_to_resolve_the_name_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of a process or container; the next look may find one."""
    receiver = RecordingReceiver(leader=(N0, Term(5)))
    failures: list[BaseException] = []

    async def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        watch = a_watch(receiver, Member(N0, "leader.example", 1), report=failures.append)
        watch.broke(N0)
        while watch._task is not None:
            await asyncio.sleep(0)

    monkeypatch.setattr(loops, "connect", no_thread)
    loops.run(run())

    assert (receiver.leader_losses, failures) == ([], [])


@pytest.mark.usefixtures("patient")
def test_only_the_loss_of_the_leader_is_looked_into(peer: Peer) -> None:
    """Of a member that does not lead, or a connection that a newer one replaced, nothing is to be learned."""
    lose_pushes(peer)
    with peer.connected(Purpose.PUSH) as older:
        older.send(FrameKind.PUSH, COMMIT)
        wait_until(lambda: len(peer.receiver.received) == 2, "the push")
        peer.receiver.leader = N0, Term(5)
        with peer.connected(Purpose.PUSH) as newer:
            assert older.rest() == []
            newer.send(FrameKind.PUSH, COMMIT)
            wait_until(lambda: len(peer.receiver.received) == 3, "the push on the newer connection")
            peer.receiver.leader = N0, Term(6)

    wait_until(lambda: peer.receiver.leader_losses != [], "the leader is looked for")
    assert peer.receiver.leader_losses == [(N0, Term(6), True)]


@pytest.mark.usefixtures("silent")
def test_close_does_not_wait_for_a_dead_peer(config: ServerConfig) -> None:
    """A peer that accepts connections and says nothing (SIGSTOP, a black hole) delays neither send nor close."""
    before = set(threading.enumerate())
    transport = PeerTransport(config)
    transport.start(RecordingReceiver())
    started = time.monotonic()

    for _ in range(100):
        transport.send(envelope(HeartbeatRequest(Term(1)), sender=N1, target=N0))
        transport.send(envelope(PushCommit(Term(1), 0, LogIndex(0)), sender=N1, target=N0))
    transport.close()

    assert time.monotonic() - started < 5
    assert transport.dropped(N0) == 0  # a closed transport has no links
    wait_until(lambda: set(threading.enumerate()) <= before, "all threads joined")


@pytest.mark.usefixtures("silent")
def test_a_full_queue_breaks_the_stream(config: ServerConfig) -> None:
    """What the peer does not take is dropped and reported, never kept without limit."""
    small = replace(config, replication=ReplicationConfig(inflight_pushes_max=1, handler_queue_pushes_max=1))
    receiver = RecordingReceiver()
    with closing(PeerTransport(small)) as transport:
        transport.start(receiver)

        for index in range(100):
            transport.send(envelope(PushCommit(Term(1), 0, LogIndex(index)), sender=N1, target=N0))

        wait_until(lambda: bool(receiver.lost), "connection_lost")
        assert transport.dropped(N0) > 50


@pytest.mark.usefixtures("silent")
def test_control_messages_to_a_silent_peer_are_bounded(config: ServerConfig) -> None:
    """Votes and heartbeats that nobody answers do not pile up."""
    with closing(PeerTransport(config)) as transport:
        transport.start(RecordingReceiver())

        for _ in range(100):
            transport.send(envelope(VoteRequest(Term(1), NO_ENTRY), sender=N1, target=N0))

        assert transport.dropped(N0) >= 100 - OTHERS_MAX - 1


def test_heartbeats_that_nobody_answers_keep_no_vote_from_being_sent(config: ServerConfig, silent: Silent) -> None:
    """Under many read rounds: four heartbeats and a vote are on their way, and after an answer the newest heartbeat."""
    buffer = FrameBuffer(1 << 20)
    with closing(PeerTransport(config)) as transport:
        transport.start(RecordingReceiver())
        transport.send(envelope(HeartbeatRequest(Term(1), 1), sender=N1, target=N0))
        with silent.accept() as link:
            assert _next(link, buffer)[0] is FrameKind.HANDSHAKE
            link.sendall(_verdict())
            for number in range(2, 200):
                transport.send(envelope(HeartbeatRequest(Term(1), number), sender=N1, target=N0))
            transport.send(envelope(VoteRequest(Term(2), NO_ENTRY), sender=N1, target=N0))

            kinds = [_next(link, buffer)[0] for _ in range(HEARTBEATS_MAX + 1)]
            assert sorted(kinds) == [FrameKind.VOTE] + [FrameKind.HEARTBEAT] * HEARTBEATS_MAX
            answer = codec.encode(HeartbeatResponse(Term(1), 1))
            link.sendall(frames.pack(FrameKind.HEARTBEAT_ANSWER, answer))
            _, payload = _next(link, buffer)

    assert codec.decode_heartbeat_request(payload) == HeartbeatRequest(Term(1), 199)


def _verdict() -> bytes:
    verdict = codec.HandshakeAnswer(ResponseCode.SUCCESS)
    return frames.pack(FrameKind.HANDSHAKE_ANSWER, codec.encode_handshake_answer(verdict))


def _next(link: socket.socket, buffer: FrameBuffer) -> frames.Frame:
    while (frame := buffer.take()) is None:
        data = link.recv(1 << 16)
        assert data
        buffer.add(data)
    return frame


def test_a_peer_that_continues_after_a_pause_is_heard_at_once(
    config: ServerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection is the same as before, and of all that was sent meanwhile it finds a handful, then the newest."""
    slow = RecordingReceiver()
    with closing(PeerTransport(config)) as target, closing(PeerTransport(replace(config, node_id=N0))) as transport:
        target.start(slow)
        transport.start(RecordingReceiver())
        transport.send(envelope(HeartbeatRequest(Term(1), 1)))
        wait_until(lambda: len(slow.requested) == 1, "the first heartbeat")
        slow.release.clear()

        for number in range(2, 200):
            transport.send(envelope(HeartbeatRequest(Term(1), number)))
        slow.release.set()

        wait_until(lambda: envelope(HeartbeatRequest(Term(1), 199)) in slow.requested, "the newest heartbeat")
        assert len(slow.requested) <= 1 + HEARTBEATS_MAX + 1
    assert "does not talk" not in caplog.text


def test_a_peer_that_answers_nothing_for_long_is_dialled_again(
    config: ServerConfig, silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a proxy that is alive, its end is noticed by nothing else."""
    monkeypatch.setattr("dledger.rpc.peers.link.ANSWER_TIMEOUT_S", 0.1)
    buffer = FrameBuffer(1 << 20)
    with closing(PeerTransport(config)) as transport:
        transport.start(RecordingReceiver())
        transport.send(envelope(HeartbeatRequest(Term(1), 1), sender=N1, target=N0))
        with silent.accept() as link:
            _next(link, buffer)
            link.sendall(_verdict())
            _next(link, buffer)

            def dialled_again() -> bool:
                transport.send(envelope(HeartbeatRequest(Term(1), 2), sender=N1, target=N0))
                return silent.listening in select.select([silent.listening], [], [], 0)[0]

            wait_until(dialled_again, "a new connection")
            while link.recv(1 << 16):  # heartbeats until its end
                pass


@pytest.mark.parametrize("message", [PushCommit(Term(1), 0, LogIndex(1)), VoteRequest(Term(1), NO_ENTRY)])
def test_a_link_survives_a_machine_without_threads_to_spare(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch, message: Message
) -> None:
    """A failure to connect that nobody thought of is not the last attempt: the peer would never hear of us again.

    Looking up a peer's name needs a thread, which cannot be had at the limit of a process or container.
    """
    told, receiver = RecordingReceiver(), RecordingReceiver()
    failures: list[PeerLink] = []
    connect = PeerLink._connect

    async def fail_twice(link: PeerLink) -> None:
        purpose = Purpose.PUSH if isinstance(message, PushCommit) else Purpose.CONTROL
        if len(failures) < 2 and (link._introduction.identity.node_id, link._queue.purpose) == (N0, purpose):
            failures.append(link)
            raise RuntimeError("can't start new thread")
        await connect(link)

    monkeypatch.setattr(PeerLink, "_connect", fail_twice)
    with closing(PeerTransport(config)) as target, closing(PeerTransport(replace(config, node_id=N0))) as transport:
        target.start(told)
        transport.start(receiver)

        def send_and_look() -> bool:
            transport.send(envelope(message))
            return bool(told.received or told.requested)

        wait_until(send_and_look, "a message")

    assert len(failures) == 2
    assert len(receiver.lost) == (2 if isinstance(message, PushCommit) else 0)  # the dispatcher hears of each


def test_a_peer_that_comes_back_is_reached_at_once(config: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says hello when it starts, which ends the others' pauses: a follower that was restarted is needed soon."""
    monkeypatch.setattr(options, "RECONNECT_MS_MIN", 100_000)
    monkeypatch.setattr(options, "RECONNECT_MS_MAX", 100_000)
    told, receiver = RecordingReceiver(), RecordingReceiver()
    with closing(PeerTransport(config)) as transport, closing(PeerTransport(replace(config, node_id=N0))) as back:
        transport.start(receiver)
        transport.send(envelope(COMMIT, N1, N0))
        wait_until(lambda: receiver.lost == [N0], "a push has failed")
        transport.send(envelope(VoteRequest(Term(1), NO_ENTRY), N1, N0))

        back.start(told)

        def arrive() -> bool:
            transport.send(envelope(COMMIT, N1, N0))
            transport.send(envelope(VoteRequest(Term(1), NO_ENTRY), N1, N0))
            return bool(told.received and told.requested)

        wait_until(arrive, "both arrive")


def test_members_are_connected_before_there_is_a_vote(config: ServerConfig) -> None:
    """Followers have nothing to say to each other until they need an answer soon."""
    with closing(PeerTransport(config)) as early, closing(PeerTransport(replace(config, node_id=N0))) as late:
        early.start(RecordingReceiver())
        wait_until(lambda: not early._links[N0].control._wanted.is_set(), "its attempt has failed")
        late.start(RecordingReceiver())

        wait_until(lambda: early._links[N0].control._connection is not None, "the early one is connected")
        wait_until(lambda: late._links[N1].control._connection is not None, "the late one is connected")
    assert early.dropped(N0) == late.dropped(N1) == 0


@pytest.mark.parametrize("message", [PushCommit(Term(1), 0, LogIndex(1)), VoteRequest(Term(1), NO_ENTRY)])
def test_a_link_that_fails_for_good_is_reported(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch, message: Message
) -> None:
    """A bug must not leave a leader without a way to a peer: whoever can stop the node is told."""
    failures: list[BaseException] = []

    async def broken(_link: PeerLink) -> None:
        raise AttributeError("a bug")

    monkeypatch.setattr(PeerLink, "_connect", broken)
    with closing(PeerTransport(config, report=failures.append)) as transport:
        transport.start(RecordingReceiver())
        transport.send(envelope(message, sender=N1, target=N0))

        wait_until(lambda: bool(failures), "the report")

    assert str(failures[0]) == "a bug"


def test_transport_is_started_once_and_sends_only_messages_of_the_wire(config: ServerConfig) -> None:
    """Misuse is an ``InvariantError``."""
    transport = PeerTransport(config)
    with pytest.raises(InvariantError):
        _ = transport.port
    transport.start(RecordingReceiver())

    assert transport.port == config.self_member.port
    with pytest.raises(InvariantError):
        transport.start(RecordingReceiver())
    transport.close()
