"""Links to peers: how soon they try again, and what becomes of messages when a connection has just ended."""

from __future__ import annotations

import asyncio
import logging
from unittest.mock import Mock

import pytest

from dledger.config import Member, ServerConfig
from dledger.core.messages import Envelope, HeartbeatRequest, HeartbeatResponse, PushKind, PushResponse
from dledger.errors import InvalidRequestError, ResponseCode
from dledger.rpc import loops, options
from dledger.rpc.loops import LoopBridge
from dledger.rpc.peers import codec
from dledger.rpc.peers.frames import FrameKind
from dledger.rpc.peers.identity import DialledConnection, Introduction, PeerIdentity, Reasons
from dledger.rpc.peers.link import PAUSE_S_MIN, ControlQueue, Outgoing, PeerLink, PushQueue
from dledger.types import NO_ENTRY, LogIndex, NodeId, Term
from tests.support.receiver import RecordingReceiver

N0, N1 = NodeId("n0"), NodeId("n1")
FIRST_S, LONGEST_S = options.RECONNECT_MS_MIN / 1000, options.RECONNECT_MS_MAX / 1000


async def a_bridge() -> LoopBridge:
    """To a loop that is over: nothing is posted."""
    return LoopBridge()


def a_link(queue: Outgoing | None = None) -> PeerLink:
    """From n0 to n1, for pushes, one of which may wait, unless it has another queue."""
    members = (Member(N0, "127.0.0.1", 1), Member(N1, "127.0.0.1", 2))
    config = ServerConfig(node_id=N0, members=members, client_port=0, cluster_id="c")
    introduction = Introduction(PeerIdentity.of(config), "", lambda _peer, _address: None)
    bridge, reasons = loops.run(a_bridge()), Reasons(logging.ERROR)
    return PeerLink(
        introduction, members[1:], queue or PushQueue(1), RecordingReceiver(), bridge, reasons, lambda: None
    )


def answer(link: PeerLink) -> None:
    """n1 answers a push."""
    at = LogIndex(1)
    response = PushResponse(Term(1), 0, PushKind.APPEND, ResponseCode.SUCCESS, at, at, at, NO_ENTRY, 7)
    link.on_frame(FrameKind.PUSH_ANSWER, codec.encode(response))


def consent(link: PeerLink) -> None:
    """n1 agrees to talk."""
    said = codec.encode_handshake_answer(codec.HandshakeAnswer(ResponseCode.SUCCESS))
    assert link.on_frame(FrameKind.HANDSHAKE_ANSWER, said)


def pauses(link: PeerLink, count: int) -> list[float]:
    """How long it waits after so many further broken connections."""
    return [link._backoff.pause() for _ in range(count)]


def test_a_peer_that_has_answered_is_called_again_soon() -> None:
    """However often its connection broke before: followers restart, and the group waits for them."""
    link = a_link()
    assert pauses(link, 3) == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]

    answer(link)

    assert pauses(link, 1) == [FIRST_S]


def test_a_peer_that_agrees_to_talk_and_answers_nothing_is_called_less_and_less_often() -> None:
    """It may hang up on every push: only an answer shows that it takes them."""
    link = a_link()
    pauses(link, 2)

    consent(link)

    assert pauses(link, 1) == [4 * FIRST_S]


def test_a_peer_that_refuses_is_called_seldom_until_it_answers() -> None:
    """Another configuration, cluster or certificate needs a person, who is told; the peer need not hear it often."""
    link = a_link()

    link.on_refusal(InvalidRequestError("another cluster"))
    refused = pauses(link, 2)
    consent(link)
    agreed = pauses(link, 1)
    answer(link)

    assert (refused, agreed) == ([LONGEST_S, LONGEST_S], [LONGEST_S])
    assert pauses(link, 1) == [FIRST_S]


def test_an_answer_for_a_former_connection_is_none_of_the_next_one() -> None:
    """Another link has carried the heartbeat, and is answered late; what is owed since is another one's answer."""
    queue = ControlQueue(sets_apart=True)
    link = a_link(queue)
    link._connection = Mock(DialledConnection)

    def beat(number: int) -> None:
        queue.add(Envelope("c", "default", N0, N1, HeartbeatRequest(Term(1), number)))

    beat(1)
    assert queue.next() is not None
    first = codec.encode(HeartbeatResponse(Term(1), 1))
    assert queue.take_answer(FrameKind.HEARTBEAT_ANSWER, first) is not None
    beat(2)
    carried = link.take_repetition()
    assert carried is not None
    queue.clear()
    link._connection = Mock(DialledConnection)
    beat(3)
    assert queue.next() is not None

    _, settle = carried
    settle(HeartbeatResponse(Term(1), 2))

    third = HeartbeatResponse(Term(1), 3)
    assert queue.take_answer(FrameKind.HEARTBEAT_ANSWER, codec.encode(third)) == third


def test_peers_that_make_each_other_hurry_are_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends their connections: between two attempts there is a pause all the same."""
    monkeypatch.setattr(options, "RECONNECT_MS_MIN", 100_000)
    monkeypatch.setattr(options, "RECONNECT_MS_MAX", 100_000)
    attempts = 0
    link = a_link()

    async def fail(_link: PeerLink) -> None:
        nonlocal attempts
        attempts += 1
        link._hurry()
        link._wanted.set()

    async def run() -> float:
        link._wanted.set()
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        task = asyncio.create_task(link._run())
        while attempts < 10:
            await asyncio.sleep(0)
            link._wanted.set()
        task.cancel()
        return loop.time() - begun_s

    monkeypatch.setattr(PeerLink, "_connect", fail)
    took_s = loops.run(run())

    assert took_s >= 9 * PAUSE_S_MIN - 1e-6  # a loop may be early by its clock's resolution


class _Wire(asyncio.Transport):
    """Once it has ended, the protocol has not been told yet, and uvloop refuses to write."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = self.aborted = False
        self.written = b""

    def get_extra_info(self, name: str, default: object = None) -> object:
        return _Untuned() if name == "socket" else default

    def is_closing(self) -> bool:
        return self.ended

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.ended:
            raise RuntimeError("the handler is closed")
        self.written += data

    def abort(self) -> None:
        self.aborted = True


class _Untuned:
    def setsockopt(self, *_: int) -> None:
        """Not a real socket."""


def test_pushes_for_a_peer_that_does_not_read_wait_and_then_end_its_connection() -> None:
    """They have a limit, and what follows a dropped one must not be sent as if nothing were missing."""
    link, transport, at = a_link(), _Wire(), LogIndex(1)
    response = PushResponse(Term(1), 0, PushKind.APPEND, ResponseCode.SUCCESS, at, at, at, NO_ENTRY, 7)
    push = Envelope("c", "default", N0, N1, response)

    async def pausing() -> None:
        connection = link._connection = DialledConnection(link, None)
        connection.connection_made(transport)
        introduced = transport.written
        connection.pause_writing()

        link.send(push)
        assert (transport.written, transport.aborted) == (introduced, False)
        link.send(push)
        assert (transport.written, transport.aborted, link.dropped) == (introduced, True, 1)

    loops.run(pausing())


def test_pushes_for_a_connection_that_has_just_ended_are_dropped() -> None:
    """What else waits for that turn of the loop, such as other peers' pushes and clients' answers, must go on."""
    link, transport = a_link(), _Wire()

    async def ending() -> None:
        connection = DialledConnection(link, None)
        connection.connection_made(transport)
        transport.ended = True

        connection.write(FrameKind.PUSH, b"head", b"body")

    loops.run(ending())
