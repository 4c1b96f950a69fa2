"""A ``Receiver`` that records what arrives and answers requests."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from dledger.core.messages import (
    Envelope,
    HeartbeatRequest,
    HeartbeatResponse,
    Message,
    PushResponse,
    VoteRequest,
    VoteResponse,
)
from dledger.errors import DLedgerError, InvalidRequestError, NodeBusyError
from dledger.types import NodeId, Term


@dataclass
class RecordingReceiver:
    """Grants every vote; ``refusal`` is raised for whatever arrives next."""

    client_address: str = ""
    refusal: DLedgerError | None = None
    requested: list[Envelope] = field(default_factory=list)
    received: list[Envelope] = field(default_factory=list)
    lost: list[NodeId] = field(default_factory=list)
    leader: tuple[NodeId, Term] | None = None
    """The leader that it follows, and in which term."""
    leader_losses: list[tuple[NodeId, Term, bool]] = field(default_factory=list)
    """Leader, term, and whether it is gone."""
    patience: list[float | None] = field(default_factory=list)
    """That of whoever delivered what was received."""
    release: threading.Event = field(default_factory=threading.Event)
    """Requests are answered only while this is set; it is, unless a test clears it."""

    def __post_init__(self) -> None:
        self.release.set()

    def request(self, envelope: Envelope, patience_s: float | None = None) -> Envelope:
        self._refuse()
        self.requested.append(envelope)
        if not self.release.wait(10 if patience_s is None else patience_s):
            raise NodeBusyError("it is busy")
        answer: Message
        match envelope.message:
            case VoteRequest(term=term):
                answer = VoteResponse(term, granted=True)
            case HeartbeatRequest(term=term, read_sequence=read_sequence):
                answer = HeartbeatResponse(term, read_sequence, client_address=self.client_address)
            case _:
                raise InvalidRequestError("no request")
        return replace(envelope, sender=envelope.target, target=envelope.sender, message=answer)

    def receive(self, envelope: Envelope, patience_s: float | None = None) -> None:
        self._refuse()
        self.patience.append(patience_s)
        self.received.append(envelope)

    def connection_lost(self, peer: NodeId) -> None:
        self.lost.append(peer)

    def follows(self, peer: NodeId) -> Term | None:
        return self.leader[1] if self.leader is not None and self.leader[0] == peer else None

    def leader_lost(self, peer: NodeId, term: Term, *, gone: bool) -> None:
        self._refuse()
        self.leader_losses.append((peer, term, gone))

    def messages(self) -> list[Message]:
        """What was received, without the addresses."""
        return [envelope.message for envelope in list(self.received)]

    def push_responses(self) -> list[PushResponse]:
        """The push responses among them."""
        return [message for message in self.messages() if isinstance(message, PushResponse)]

    def _refuse(self) -> None:
        if self.refusal is not None:
            raise self.refusal
