"""Frames as no member of ours sends them: any kinds, any fields, any bytes, on connections of any purpose."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import Message
from hypothesis import strategies as st

from dledger.config import ServerConfig
from dledger.core.messages import PushKind
from dledger.errors import InvalidRequestError
from dledger.pb import raft_pb2
from dledger.rpc.peers.frames import LAYOUTS, FrameKind, Purpose, pack
from dledger.types import NodeId
from tests.fuzz.shapes import Known, messages, mutilated
from tests.support.peer_wire import PeerWire, handshake_frame

_MESSAGES: Final[dict[FrameKind, type[Message]]] = {
    FrameKind.VOTE: raft_pb2.VoteRequest,
    FrameKind.HEARTBEAT: raft_pb2.HeartbeatRequest,
    FrameKind.HEARTBEATS: raft_pb2.Heartbeats,
    FrameKind.TAKE_LEADERSHIP: raft_pb2.TakeLeadershipRequest,
    FrameKind.READ_LOG: raft_pb2.ReadLogRequest,
    FrameKind.CHAIN_CRCS: raft_pb2.ChainCrcsRequest,
    FrameKind.SNAPSHOT: raft_pb2.FetchSnapshotRequest,
    FrameKind.SNAPSHOT_PIECE: raft_pb2.SnapshotPieceRequest,
}
_OF: Final = {
    Purpose.CONTROL: (FrameKind.VOTE, FrameKind.HEARTBEAT, FrameKind.HEARTBEATS, FrameKind.TAKE_LEADERSHIP),
    Purpose.PUSH: (FrameKind.PUSH,),
    Purpose.LOG: (FrameKind.READ_LOG, FrameKind.CHAIN_CRCS),
    Purpose.SNAPSHOT: (FrameKind.SNAPSHOT, FrameKind.SNAPSHOT_PIECE),
}


@dataclass(frozen=True, slots=True)
class Visit:
    """One connection: its first bytes, and what follows; ``waits`` for the answers, or hangs up at once."""

    first: bytes
    rest: tuple[bytes, ...]
    waits: bool


def visits(config: ServerConfig, known: Known) -> st.SearchStrategy[list[Visit]]:
    """Connections to the node of ``config``. ``known``: what fields mostly hold, so that not all is refused at once."""
    peers = [member.node_id for member in config.peers]

    @st.composite
    def one(draw: st.DrawFn) -> Visit:
        purpose = draw(st.sampled_from(Purpose))
        sound = handshake_frame(config, NodeId(draw(st.sampled_from(peers))), purpose)
        forged = messages(raft_pb2.HandshakeRequest, known).map(lambda payload: pack(FrameKind.HANDSHAKE, payload))
        first = draw(st.just(sound) | st.just(sound) | forged | mutilated(sound) | st.binary(max_size=50))
        rest = draw(st.lists(_frame(purpose, known), max_size=5))
        return Visit(first, tuple(rest), draw(st.booleans()))

    return st.lists(one(), min_size=1, max_size=8)


def _frame(purpose: Purpose, known: Known) -> st.SearchStrategy[bytes]:
    """Mostly of the purpose, sometimes of any kind, sometimes of none."""

    @st.composite
    def build(draw: st.DrawFn) -> bytes:
        kind = draw(st.sampled_from(_OF[purpose] * 4 + tuple(FrameKind)))
        frame = pack(kind, draw(_payload(kind, known)))
        return draw(mutilated(frame)) if draw(st.integers(0, 9)) == 0 else frame

    return build()


def _payload(kind: FrameKind, known: Known) -> st.SearchStrategy[bytes]:
    if kind is FrameKind.PUSH:
        return _push(known) | st.binary(max_size=100)
    return messages(_MESSAGES[kind], known) if kind in _MESSAGES else st.binary(max_size=100)


@st.composite
def _push(draw: st.DrawFn, known: Known) -> bytes:
    """A push of any kind, with any numbers, and sometimes with bytes behind them."""
    kind = draw(st.sampled_from(PushKind))
    data = bytes([kind])
    for name, width in LAYOUTS[kind].fields[1:]:
        bits = 8 * int(width[1:])
        likely, is_likely = known.get(name, ()), draw(st.integers(0, 7)) > 0
        numbers = st.sampled_from(likely) if likely and is_likely else st.integers(-1, 1 << bits - 1)
        number = int(draw(numbers))
        data += (number % (1 << bits)).to_bytes(bits // 8, "big")
    return data + draw(st.binary(max_size=200))


def visit(address: tuple[str, int], sequence: list[Visit]) -> None:
    """Make the connections, one after the other."""
    for one in sequence:
        with PeerWire(address) as wire, suppress(OSError):
            wire.link.settimeout(0.5)
            wire.link.sendall(one.first)
            for data in one.rest:
                wire.link.sendall(data)
            if one.waits:
                with suppress(InvalidRequestError, TimeoutError):
                    for _ in range(1 + len(one.rest)):
                        wire.frame()
