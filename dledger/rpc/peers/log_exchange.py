"""Access to peers' logs apart from replication: bytes to repair a damaged log, chain CRCs to compare histories.

It is served at the peer port on the threads that votes need, so only one such call at a time is accepted; others are
refused and must retry. Requests use their own connection, so that a megabyte of log never delays a vote.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import grpc

from dledger.config import Member, ServerConfig
from dledger.errors import CorruptLogError, DLedgerError, IndexBeforeBeginError, IndexOutOfRangeError, UnavailableError
from dledger.rpc import options
from dledger.rpc.peers import codec
from dledger.rpc.peers.control_link import peer_channel
from dledger.rpc.peers.identity import PeerIdentity
from dledger.rpc.ports import PeerLog
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.types import LogIndex, NodeId

TIMEOUT_S: Final = 10.0
READ_LOG_BYTES_MAX: Final = codec.READ_LOG_BYTES_MAX

CheckSender = Callable[[NodeId], None]
"""Raises unless the caller's certificate belongs to the sender it claims to be."""


class PeerBusyError(DLedgerError):
    """Raised while another such call is in progress: retry later."""


class PeerLogService:
    """Answers peers. Thread-safe."""

    def __init__(self, identity: PeerIdentity, log: PeerLog) -> None:
        self._identity = identity
        self._log = log
        self._turn = threading.Semaphore()

    def read_log(self, data: bytes, check_sender: CheckSender) -> bytes:
        """``ReadLog``."""
        header, position, length = codec.decode_read_log(data)
        self._check(header, check_sender)
        with self._only():
            return codec.encode_log_bytes(self._log.copy_committed(position, length))

    def chain_crcs(self, data: bytes, check_sender: CheckSender) -> bytes:
        """``ChainCrcs``."""
        header, indexes = codec.decode_chain_crcs_request(data)
        self._check(header, check_sender)
        with self._only():
            return codec.encode_chain_crcs(committed_crcs(self._log, indexes))

    def _check(self, header: codec.EnvelopeHeader, check_sender: CheckSender) -> None:
        self._identity.check(header)
        check_sender(header.sender)

    @contextmanager
    def _only(self) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            raise PeerBusyError("another member is already reading the log here: retry later")
        try:
            yield
        finally:
            self._turn.release()


def committed_crcs(log: PeerLog, indexes: Sequence[LogIndex]) -> dict[LogIndex, int]:
    """The chain CRCs of those indexes that are committed, kept and intact here."""
    found: dict[LogIndex, int] = {}
    for index in indexes:
        if log.begin.index <= index <= log.committed_index:
            try:
                found[index] = log.chain_crc_at(index)
            except (CorruptLogError, IndexBeforeBeginError, IndexOutOfRangeError):  # damage is reported by reads
                continue
    return found


class PeerLogClient:
    """Calls the other members. For one thread; ``close`` may come from another."""

    def __init__(self, config: ServerConfig, tls_keeper: TlsKeeper | None) -> None:
        self._identity = PeerIdentity.of(config)
        self._members = {member.node_id: member for member in config.peers}
        self._tls = tls_keeper
        self._lock = threading.Lock()  # guards _channels and _closed
        self._channels: dict[NodeId, tuple[int, grpc.Channel]] = {}
        self._closed = False

    @property
    def peers(self) -> tuple[NodeId, ...]:
        """The members it can ask."""
        return tuple(self._members)

    def read_log(self, peer: NodeId, position: int, length: int) -> bytes | None:
        """Committed bytes of one segment, at most ``READ_LOG_BYTES_MAX``; None if ``peer`` does not hold all of them.

        Raises ``UnavailableError``.
        """
        request = codec.encode_read_log(self._header(peer), position, length)
        return codec.decode_log_bytes(self._call(peer, "ReadLog", request))

    def chain_crcs(self, peer: NodeId, indexes: Sequence[LogIndex]) -> dict[LogIndex, int]:
        """The chain CRCs of those indexes that ``peer`` holds as committed. Raises ``UnavailableError``."""
        request = codec.encode_chain_crcs_request(self._header(peer), indexes)
        return codec.decode_chain_crcs(self._call(peer, "ChainCrcs", request))

    def close(self) -> None:
        """Close every channel; calls in progress fail. Idempotent."""
        with self._lock:
            self._closed = True
            channels, self._channels = self._channels, {}
        for _, channel in channels.values():
            channel.close()

    def _header(self, peer: NodeId) -> codec.EnvelopeHeader:
        identity = self._identity
        return codec.EnvelopeHeader(identity.cluster_id, identity.group, identity.node_id, peer)

    def _call(self, peer: NodeId, method: str, request: bytes) -> bytes:
        channel = self._channel(self._members[peer])
        call = channel.unary_unary(
            options.method(options.RAFT_SERVICE, method), request_serializer=None, response_deserializer=None
        )
        try:
            answer: bytes = call(request, timeout=TIMEOUT_S)
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was just closed
            said = error.details() if isinstance(error, grpc.Call) else str(error)
            raise UnavailableError(f"{peer} does not answer {method}: {said}") from error
        return answer

    def _channel(self, member: Member) -> grpc.Channel:
        """The channel to a peer, replaced once there are newer certificates."""
        wanted = 0 if self._tls is None else self._tls.version
        with self._lock:
            if self._closed:
                raise UnavailableError("this node is stopping")
            known = self._channels.get(member.node_id)
            if known is not None and known[0] == wanted:
                return known[1]
            made = self._channels[member.node_id] = peer_channel(member.node_id, member.address, self._tls)
        if known is not None:
            known[1].close()
        return made[1]
