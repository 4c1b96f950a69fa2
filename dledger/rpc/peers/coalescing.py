"""Heartbeats of several groups between two processes, sent together: an idle group costs a wake-up for each of its
messages on either side, ten groups ten.

Each group has a control connection to the peer's member. For other groups, such a connection carries heartbeats that
repeat an answered one (``ControlQueue.next_repetition``), as an idle group's do: the peer has accepted the group's
handshake, and they change nothing, so that they wait for no disk. They are answered with one message at once, in which
a group that is not there, or busy, has no answer: its next heartbeat goes alone, on its own connection. So a group that
is stuck looks stuck, and delays no other one.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

from dledger.core.messages import HeartbeatResponse
from dledger.rpc import tls
from dledger.rpc.peers import codec

PATIENCE_S: Final = 0.02
"""How long the groups of one message may keep it waiting, all together, for their nodes' locks."""

Process = tuple[str, int]
"""Where a peer's process listens: host and port."""
Settle = Callable[[HeartbeatResponse | None], None]
"""Told the answer to a heartbeat that was sent with others; None: there is none."""
AnswerHeartbeat = Callable[[codec.GroupHeartbeat, float], HeartbeatResponse | None]
"""Answers a group's heartbeat, if the node's lock is free within that many seconds."""


class HeartbeatLink(Protocol):
    """A group's control link to a peer, as far as it takes part. On the event loop."""

    @property
    def process(self) -> Process | None:
        """Where it is connected to; None: it is not."""

    @property
    def answers_owed(self) -> int:
        """How many messages with heartbeats of several groups it has carried that are not answered."""

    def beat_alone(self) -> None:
        """Send its heartbeat on its own connection."""

    def take_repetition(self) -> tuple[codec.GroupHeartbeat, Settle] | None:
        """Its heartbeat, to be sent by another one; None: it has none any more."""

    def carry(self, links: Sequence[HeartbeatLink]) -> None:
        """Send the heartbeats of ``links``, its own perhaps among them, as one message."""


class HeartbeatCoalescer:
    """Gathers what the links of one process have to send in one turn of their event loop."""

    def __init__(self) -> None:
        self._waiting: dict[HeartbeatLink, None] = {}

    def add(self, link: HeartbeatLink) -> None:
        """A link has a heartbeat that may be sent with others."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send)
        self._waiting[link] = None

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, {}
        by_process: defaultdict[Process, list[HeartbeatLink]] = defaultdict(list)
        for link in waiting:
            if (process := link.process) is not None:
                by_process[process].append(link)
        for links in by_process.values():
            for first in range(0, len(links), codec.HEARTBEATS_GROUPS_MAX):
                self._send_together(links[first : first + codec.HEARTBEATS_GROUPS_MAX])

    def _send_together(self, links: Sequence[HeartbeatLink]) -> None:
        carrier = min(links, key=_owed)  # so that one silent connection does not silence all
        if len(links) == 1:
            carrier.beat_alone()
        else:
            carrier.carry(links)


def _owed(link: HeartbeatLink) -> int:
    return link.answers_owed


def answer(
    payload: bytes | memoryview, names: Collection[str] | None, groups: Callable[[str], AnswerHeartbeat | None]
) -> bytes:
    """The answer to a message with heartbeats of several groups, that a connection carried.

    ``names``: of the certificate at its other end; None for plaintext. Raises ``InvalidRequestError`` and ``TlsError``.
    """
    heartbeats = codec.decode_heartbeats(payload)
    if names is not None:
        for sender in {one.sender for one in heartbeats}:
            tls.check_name(tuple(names), sender, "behind heartbeats")
    end = time.monotonic() + PATIENCE_S
    answers: list[HeartbeatResponse | None] = []
    for one in heartbeats:
        of_group = groups(one.group)
        patience_s = max(0.0, end - time.monotonic())
        answers.append(None if of_group is None else of_group(one, patience_s))
    return codec.encode_heartbeats_answer(answers)
