"""Heartbeats of several groups in one message: what goes with others, and that no group keeps another one waiting."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple

import pytest

from dledger.config import Member, ServerConfig
from dledger.core.messages import Envelope, HeartbeatRequest, HeartbeatResponse
from dledger.errors import NodeBusyError, ResponseCode, TlsError
from dledger.rpc.peers import codec, port
from dledger.rpc.peers.codec import HEARTBEATS_GROUPS_MAX, GroupHeartbeat
from dledger.rpc.peers.frames import FrameBuffer, FrameKind, Purpose, pack
from dledger.rpc.peers.link import HEARTBEATS_MAX
from dledger.rpc.peers.port import HeartbeatCoalescer, HeartbeatLink, PeerPort, Process, Settle
from dledger.rpc.peers.transport import PeerTransport
from dledger.types import NodeId, Term
from dledger_cli.local.group import free_ports
from tests.support.peer_wire import PeerWire
from tests.support.receiver import RecordingReceiver
from tests.support.waiting import wait_until

N0, N1 = NodeId("n0"), NodeId("n1")
HERE: Final = ("127.0.0.1", 1)


# --- what is sent -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class FakeLink:
    """A group's link; what it sends is noted in ``sent``: its own name and the groups."""

    name: str
    sent: list[tuple[str, tuple[str, ...]]]
    process: Process | None = HERE
    answers_owed: int = 0
    settled: list[HeartbeatResponse | None] = field(default_factory=list)

    def beat_alone(self) -> None:
        self.sent.append((self.name, ()))

    def take_repetition(self) -> tuple[GroupHeartbeat, Settle] | None:
        return GroupHeartbeat(self.name, N0, 1, 2), self.settled.append

    def carry(self, links: Sequence[HeartbeatLink]) -> None:
        taken = [one for link in links if (one := link.take_repetition()) is not None]
        self.sent.append((self.name, tuple(heartbeat.group for heartbeat, _ in taken)))


def _gathered(links: Sequence[FakeLink]) -> None:
    async def gather() -> None:
        coalescer = HeartbeatCoalescer()
        for link in links:
            coalescer.add(link)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(gather())


def test_links_to_one_process_send_one_message() -> None:
    """Each other process has its own, and a group that is alone sends as it would without the others."""
    sent: list[tuple[str, tuple[str, ...]]] = []
    there, lost = ("127.0.0.1", 2), None
    _gathered([FakeLink("a", sent), FakeLink("b", sent), FakeLink("c", sent, there), FakeLink("d", sent, lost)])

    assert sorted(sent) == [("a", ("a", "b")), ("c", ())]


def test_a_connection_without_an_answer_carries_for_nobody_while_another_one_can() -> None:
    """It may be dead; the groups of the others must not look dead with it."""
    sent: list[tuple[str, tuple[str, ...]]] = []
    _gathered([FakeLink("a", sent, answers_owed=1), FakeLink("b", sent), FakeLink("c", sent, answers_owed=2)])

    assert sent == [("b", ("a", "b", "c"))]


def test_a_message_has_so_many_groups_at_most() -> None:
    """As many as its addressee takes."""
    sent: list[tuple[str, tuple[str, ...]]] = []
    _gathered([FakeLink(str(number), sent) for number in range(HEARTBEATS_GROUPS_MAX + 2)])

    assert [len(groups) for _, groups in sent] == [HEARTBEATS_GROUPS_MAX, 2]


# --- how it is answered -----------------------------------------------------------------------------------------------


def _answers(
    groups: Sequence[str], answers: Callable[[str], port.AnswerHeartbeat | None], names: tuple[str, ...] | None
) -> tuple[HeartbeatResponse | None, ...]:
    payload = codec.encode_heartbeats([GroupHeartbeat(group, N0, 1, 2) for group in groups])
    return codec.decode_heartbeats_answer(port.answer(payload, names, answers))


def test_each_group_answers_for_itself_in_their_order() -> None:
    """One that is not there has no answer, and costs the others nothing."""
    found = _answers(
        "axb", lambda group: None if group == "x" else (lambda beat, _: HeartbeatResponse(Term(ord(beat.group)))), None
    )

    assert found == (HeartbeatResponse(Term(ord("a"))), None, HeartbeatResponse(Term(ord("b"))))


def test_busy_groups_wait_no_longer_together_than_one_may() -> None:
    """However many they are: the others' heartbeats are behind them."""
    waits: list[float] = []

    def busy(_heartbeat: GroupHeartbeat, patience_s: float) -> None:
        waits.append(patience_s)
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            pass

    _answers([str(number) for number in range(20)], lambda _group: busy, None)

    assert waits[0] > 0
    assert waits[1:] == [0.0] * 19


def test_heartbeats_are_taken_from_those_whose_certificate_the_connection_has_shown() -> None:
    """A member of one group must not speak as another group's leader."""
    with pytest.raises(TlsError, match="does not belong to n0"):
        _answers("a", lambda _group: None, ("n2",))
    assert _answers("a", lambda _group: None, ("n0", "n2")) == (None,)


# --- at a port --------------------------------------------------------------------------------------------------------


class Served(NamedTuple):
    """A group's member at the port."""

    config: ServerConfig
    transport: PeerTransport
    receiver: RecordingReceiver


@pytest.fixture
def members() -> tuple[Member, ...]:
    """Of every group: n0 and n1, each at a port."""
    return tuple(Member(NodeId(f"n{i}"), "127.0.0.1", port) for i, port in enumerate(free_ports(2)))


def _serve(stack: ExitStack, node: NodeId, members: tuple[Member, ...]) -> dict[str, Served]:
    configs = {
        group: ServerConfig(node_id=node, group=group, members=members, client_port=0) for group in ("a", "b", "c")
    }
    port = stack.enter_context(closing(PeerPort(configs["a"], set(configs))))
    port.open()
    port.accept()
    served = {}
    for group, config in configs.items():
        transport, receiver = stack.enter_context(closing(PeerTransport(config, port=port))), RecordingReceiver()
        transport.start(receiver)
        served[group] = Served(config, transport, receiver)
    return served


@pytest.fixture
def served(members: tuple[Member, ...]) -> Iterator[dict[str, Served]]:
    """n1 of the groups a, b and c."""
    with ExitStack() as stack:
        yield _serve(stack, N1, members)


def _wire(served: Served) -> PeerWire:
    address = served.config.self_member.host, served.config.self_member.port
    return PeerWire(address).begin(served.config, N0, Purpose.CONTROL)


def _beat(wire: PeerWire, number: int) -> None:
    """A heartbeat on a group's own connection, and its answer."""
    wire.send(FrameKind.HEARTBEAT, HeartbeatRequest(Term(1), number))
    answer = wire.frame()
    assert answer is not None
    assert answer[0] is FrameKind.HEARTBEAT_ANSWER


def _together(wire: PeerWire, *heartbeats: GroupHeartbeat) -> tuple[HeartbeatResponse | None, ...]:
    wire.send(FrameKind.HEARTBEATS, codec.encode_heartbeats(heartbeats))
    answer = wire.frame()
    assert answer is not None
    assert answer[0] is FrameKind.HEARTBEATS_ANSWER, answer
    return codec.decode_heartbeats_answer(answer[1])


def test_a_repetition_reaches_its_group_as_the_heartbeat_that_it_repeats(served: dict[str, Served]) -> None:
    """With its own number, on the connection of another group."""
    with _wire(served["a"]) as a, _wire(served["b"]) as b:
        for wire in (a, b):
            _beat(wire, 5)
        found = _together(a, GroupHeartbeat("a", N0, 5, 6), GroupHeartbeat("b", N0, 5, 7))

    assert found == (HeartbeatResponse(Term(1), 6), HeartbeatResponse(Term(1), 7))
    for group, number in (("a", 6), ("b", 7)):
        said = served[group].receiver.requested
        assert [one.message for one in said] == [HeartbeatRequest(Term(1), 5), HeartbeatRequest(Term(1), number)]
        assert {(one.group, one.sender, one.target) for one in said} == {(group, N0, N1)}


@pytest.mark.parametrize(
    "heartbeat",
    [
        GroupHeartbeat("b", N0, 4, 6),  # not the last one
        GroupHeartbeat("b", NodeId("n7"), 5, 6),  # has no connection
        GroupHeartbeat("c", N0, 5, 6),  # the sender has no connection in that group
        GroupHeartbeat("../b", N0, 5, 6),
    ],
)
def test_a_heartbeat_that_repeats_nothing_is_not_heard(served: dict[str, Served], heartbeat: GroupHeartbeat) -> None:
    """Whose it is, and that the settings agree, only the handshake of the group's own connection has said."""
    with _wire(served["a"]) as a, _wire(served["b"]) as b:
        for wire in (a, b):
            _beat(wire, 5)
        found = _together(a, GroupHeartbeat("a", N0, 5, 6), heartbeat)

    assert found == (HeartbeatResponse(Term(1), 6), None)
    assert len(served["b"].receiver.requested) == 1
    assert served["c"].receiver.requested == []


def test_a_new_connection_repeats_nothing_of_an_older_one(served: dict[str, Served]) -> None:
    """Its sender may be another process by now, with rounds of its own."""
    with _wire(served["a"]) as a, _wire(served["b"]) as b:
        _beat(b, 5)
        with _wire(served["b"]):
            assert b.rest() == []  # the newer one is in use
            assert _together(a, GroupHeartbeat("b", N0, 5, 6)) == (None,)


def test_a_group_that_is_stuck_has_no_answer_and_the_others_have_theirs(served: dict[str, Served]) -> None:
    """That its process is alive says nothing of a group: its leader must lose touch with it (N1)."""
    with _wire(served["a"]) as a, _wire(served["b"]) as b, _wire(served["c"]) as c:
        for wire in (a, b, c):
            _beat(wire, 5)
        served["b"].receiver.release.clear()
        found = [_together(a, *(GroupHeartbeat(group, N0, 5, 6) for group in "bca"))]
        served["b"].receiver.release.set()
        served["b"].transport.close()
        found.append(_together(a, *(GroupHeartbeat(group, N0, 5, 7) for group in "bca")))

    assert found == [(None, *[HeartbeatResponse(Term(1), number)] * 2) for number in (6, 7)]


def test_garbage_among_heartbeats_ends_the_connection(served: dict[str, Served]) -> None:
    """No member sends it."""
    for payload in (b"\xff\xff", codec.encode_heartbeats([GroupHeartbeat("a", N0, -1, 0)])):
        with _wire(served["a"]) as a:
            a.send(FrameKind.HEARTBEATS, payload)
            ((kind, _),) = a.rest()
        assert kind is FrameKind.REFUSAL


# --- from port to port ------------------------------------------------------------------------------------------------


def _lead(leaders: dict[str, Served], number: int) -> None:
    for one in leaders.values():
        message = HeartbeatRequest(Term(1), number)
        one.transport.send(Envelope(one.config.effective_cluster_id, one.config.group, N0, N1, message))


def _answered(leaders: dict[str, Served], groups: str, number: int) -> bool:
    return all(
        any(isinstance(said, HeartbeatResponse) and said.read_sequence == number for said in one.receiver.messages())
        for group, one in leaders.items()
        if group in groups
    )


def test_idle_groups_beat_together_and_one_that_stops_does_not_stop_the_others(
    served: dict[str, Served], members: tuple[Member, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first heartbeat goes alone; the further ones together, whoever carries them, until a group has no answer."""
    carried: list[tuple[str, ...]] = []

    def noted(heartbeats: Sequence[GroupHeartbeat]) -> bytes:
        carried.append(tuple(sorted(one.group for one in heartbeats)))
        return encode(heartbeats)

    encode = codec.encode_heartbeats
    monkeypatch.setattr(codec, "encode_heartbeats", noted)
    with ExitStack() as stack:
        leaders = _serve(stack, N0, members)
        for number in range(1, 5):
            _lead(leaders, number)
            wait_until(lambda number=number: _answered(leaders, "abc", number), "all are answered")  # type: ignore[misc]  # the default argument
        assert any(len(groups) > 1 for groups in carried)
        _lead(leaders, 5)
        _lead(leaders, 6)  # as for a read, before the other one is answered
        wait_until(lambda: _answered(leaders, "abc", 6), "the one that waited is answered")

        served["a"].transport.close()
        _lead(leaders, 7)  # which is lost if the connection that is closing carries it
        for number in range(8, 11):
            _lead(leaders, number)
            wait_until(lambda number=number: _answered(leaders, "bc", number), "the others are answered")  # type: ignore[misc]  # the default argument
        assert not _answered(leaders, "a", 10)
        assert not _answered(leaders, "a", 8)


class Forgetful:
    """A peer's process that answers heartbeats but those of several groups, at which it hangs up."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.swallowed = 0
        self.newest: dict[str, int] = {}
        """The number of each group's last heartbeat on its own connection."""
        self._listening = socket.create_server(address)
        self._thread = threading.Thread(target=self._accept, name="forgetful")
        self._serving: list[tuple[socket.socket, threading.Thread]] = []
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()
        for link, thread in self._serving:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                link, _ = self._listening.accept()
                thread = threading.Thread(target=self._serve, args=(link,), name="forgetful")
                self._serving.append((link, thread))
                thread.start()

    def _serve(self, link: socket.socket) -> None:
        frames, group = FrameBuffer(), ""
        with link, suppress(OSError):
            while data := link.recv(1 << 16):
                for kind, payload in frames.feed(data):
                    match kind:
                        case FrameKind.HANDSHAKE:
                            group = codec.decode_handshake(payload).header.group
                            answer = codec.encode_handshake_answer(codec.HandshakeAnswer(ResponseCode.SUCCESS))
                            link.sendall(pack(FrameKind.HANDSHAKE_ANSWER, answer))
                        case FrameKind.HEARTBEAT:
                            self.newest[group] = codec.decode_heartbeat_request(payload).read_sequence
                            link.sendall(pack(FrameKind.HEARTBEAT_ANSWER, codec.encode(HeartbeatResponse(Term(1)))))
                        case FrameKind.HEARTBEATS:
                            self.swallowed += 1
                            return


def test_what_a_broken_connection_carried_is_owed_by_nobody(members: tuple[Member, ...]) -> None:
    """Each group's next heartbeat goes on its own connection, however often that happens."""
    numbers = itertools.count(1)
    with ExitStack() as stack:
        peer = stack.enter_context(closing(Forgetful((members[1].host, members[1].port))))
        leaders = _serve(stack, N0, members)

        def all_are_heard(first: int, swallowed: int) -> bool:
            _lead(leaders, next(numbers))
            return peer.swallowed >= swallowed and all(peer.newest.get(group, 0) >= first for group in leaders)

        for swallowed in range(2 * HEARTBEATS_MAX):
            heard = partial(all_are_heard, next(numbers), swallowed)
            # Slower than answers come: a heartbeat that waits for one goes with it, and so alone.
            wait_until(heard, "all groups are heard", poll_s=0.1)


def test_a_link_that_lost_its_answers_beats_alone(served: dict[str, Served]) -> None:
    """See ``ControlQueue.repetition_answered``; here only that a busy group is asked again on its own connection."""
    with _wire(served["a"]) as a, _wire(served["b"]) as b:
        for wire in (a, b):
            _beat(wire, 1)
        served["b"].receiver.release.clear()
        assert _together(a, GroupHeartbeat("b", N0, 1, 2)) == (None,)
        b.send(FrameKind.HEARTBEAT, replace(HeartbeatRequest(Term(1)), read_sequence=3))
        served["b"].receiver.release.set()
        answer = b.frame()

    assert answer is not None
    assert codec.decode_heartbeat_response(answer[1]) == HeartbeatResponse(Term(1), 3)


def test_a_busy_leader_misses_an_answer_and_keeps_its_connection(
    served: dict[str, Served], members: tuple[Member, ...]
) -> None:
    """Its next heartbeats are answered, too; the loop that takes the answers is every group's."""
    numbers = itertools.count(1)
    with ExitStack() as stack:
        leaders = _serve(stack, N0, members)

        def are_answered(groups: str, first: int) -> bool:
            _lead(leaders, next(numbers))
            return all(_newest_answer(leaders[group]) >= first for group in groups)

        wait_until(lambda: are_answered("abc", 1), "all are answered")
        busy = leaders["a"].receiver
        before, busy.refusal = _newest_answer(leaders["a"]), NodeBusyError("its lock is not free")
        first = next(numbers)
        wait_until(lambda: are_answered("bc", first), "the others are answered")
        heard = _newest_answer(leaders["a"])
        busy.refusal = None
        again = next(numbers)
        wait_until(lambda: are_answered("a", again), "it is answered")

    assert heard <= before + HEARTBEATS_MAX
    assert len({one for one in busy.patience if one is not None}) == 1


def _newest_answer(leader: Served) -> int:
    said = leader.receiver.messages()
    return max((one.read_sequence for one in said if isinstance(one, HeartbeatResponse)), default=0)
