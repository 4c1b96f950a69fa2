"""A member's end of a connection to a peer port, byte by byte: what no link of ours would send, too."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Final, Self

from dledger.config import ServerConfig
from dledger.core.messages import Message
from dledger.rpc.peers import codec, frames
from dledger.rpc.peers.frames import Frame, FrameBuffer, FrameKind, Purpose
from dledger.types import NodeId

_TIMEOUT_S: Final = 60.0


def handshake_frame(
    config: ServerConfig,
    sender: NodeId,
    purpose: int,
    *,
    target: NodeId | None = None,
    version: int | None = None,
    client_address: str = "",
) -> bytes:
    """The frame with which ``sender``, configured like ``config``, begins a connection to the node of ``config``."""
    header = codec.EnvelopeHeader(config.effective_cluster_id, config.group, sender, target or config.node_id)
    store = config.store
    handshake = codec.Handshake(
        header,
        codec.PROTOCOL_VERSION if version is None else version,
        purpose,
        tuple(sorted(member.node_id for member in config.members)),
        store.segment_bytes,
        store.max_entry_bytes,
        client_address,
    )
    return frames.pack(FrameKind.HANDSHAKE, codec.encode_handshake(handshake))


class PeerWire:
    """A connection to ``address``. With ``context``, through TLS."""

    def __init__(self, address: tuple[str, int], context: ssl.SSLContext | None = None) -> None:
        link = socket.create_connection(address, timeout=_TIMEOUT_S)
        self.link = link if context is None else context.wrap_socket(link)
        self._frames = FrameBuffer(1 << 21)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def begin(self, config: ServerConfig, sender: NodeId, purpose: Purpose) -> Self:
        """Shake hands; the answer must be there."""
        self.link.sendall(handshake_frame(config, sender, purpose))
        answer = self.frame()
        assert answer is not None
        assert answer[0] is FrameKind.HANDSHAKE_ANSWER, answer
        return self

    def send(self, kind: FrameKind, message: Message | bytes = b"") -> None:
        """Send one frame."""
        self.link.sendall(frames.pack(kind, message if isinstance(message, bytes) else codec.encode(message)))

    def frame(self) -> Frame | None:
        """The next frame; None at the end. A reset counts as the end: there were bytes of ours unread."""
        while (found := self._frames.take()) is None:
            try:
                data = self.link.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self._frames.add(data)
        return found

    def rest(self) -> Sequence[Frame]:
        """All frames until the end."""
        found = []
        while (frame := self.frame()) is not None:
            found.append(frame)
        return found

    @property
    def has_ended(self) -> bool:
        """Whether the other side has hung up; does not wait."""
        self.link.setblocking(False)
        try:
            return self.link.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.link.settimeout(_TIMEOUT_S)
