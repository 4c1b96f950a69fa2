"""The wires: two per ordered pair of members, one for calls and one that keeps the order of pushes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from dledger.core.messages import (
    HeartbeatRequest,
    HeartbeatResponse,
    Message,
    PushAppend,
    PushCommit,
    PushCompare,
    PushInstall,
    PushResponse,
    PushTruncate,
    TakeLeadership,
    VoteRequest,
    VoteResponse,
)
from dledger.types import NodeId
from tests.sim.options import Options
from tests.sim.scheduler import Scheduler

Deliver = Callable[[NodeId, NodeId, Message], None]
Broken = Callable[[NodeId, NodeId], None]

CALLS = (VoteRequest, VoteResponse, HeartbeatRequest, HeartbeatResponse, TakeLeadership)
"""What travels outside the push stream, and so in any order."""
PUSHES = (PushCompare, PushTruncate, PushAppend, PushCommit, PushInstall, PushResponse)
"""What travels in it."""


class Network:
    """Loses, delays, doubles and reorders what is sent; ``blocked`` holds the directions that are cut."""

    def __init__(
        self, options: Options, scheduler: Scheduler, random: Random, deliver: Deliver, broken: Broken
    ) -> None:
        self._options = options
        self._scheduler = scheduler
        self._random = random
        self._deliver = deliver
        self._broken = broken
        self._last_us: dict[tuple[NodeId, NodeId], int] = {}
        self._life: dict[NodeId, int] = dict.fromkeys(options.names, 0)
        self.blocked: dict[tuple[NodeId, NodeId], bool] = {}
        self.lost_kinds: dict[tuple[NodeId, NodeId], tuple[type, ...]] = {}
        """What does not get through in a direction although everything else does."""
        self.faulty = True
        self.hits: Counter[str] = Counter()

    def forget(self, node: NodeId) -> None:
        """Lose everything under way to or from ``node``: its disk is being replaced, which takes longer."""
        self._life[node] += 1

    def heal(self) -> None:
        """From now on everything arrives, in order and soon; what is late already stays late."""
        self.faulty = False
        self.blocked.clear()
        self.lost_kinds.clear()
        self._last_us.clear()

    def send(self, sender: NodeId, target: NodeId, message: Message) -> None:
        """Put a message on its wire."""
        pushes = not isinstance(message, CALLS)
        if self.blocked.get((sender, target)):
            self.hits["blocked"] += 1
            self._lose(sender, target, pushes=pushes)
            return
        if self.lost_kinds and isinstance(message, self.lost_kinds.get((sender, target), ())):
            self.hits["lost_of_kind"] += 1
            return  # nobody notices: what else is under way arrives
        if not self.faulty:
            self._carry(sender, target, message, 300 + int(self._random.random() * 700), pushes=pushes)
            return
        options, random = self._options, self._random
        if options.drop and random.random() < options.drop:
            self.hits["drop"] += 1
            self._lose(sender, target, pushes=pushes)
            return
        delay_us = 200 + int(random.random() * 2_000)
        if options.spike and random.random() < options.spike:
            self.hits["spike"] += 1
            delay_us += int(random.random() * random.choice((50_000, 500_000, 5_000_000)))
        self._carry(sender, target, message, delay_us, pushes=pushes)
        if options.duplicate and random.random() < options.duplicate:
            self.hits["duplicate"] += 1
            late_us = int(random.random() * random.choice((1_000, 100_000, 3_000_000)))
            self._carry(sender, target, message, delay_us + late_us, pushes=False)

    def _lose(self, sender: NodeId, target: NodeId, *, pushes: bool) -> None:
        """A broken stream is noticed, sometimes at once, sometimes late, sometimes only by silence."""
        if pushes and self._random.random() < 0.6:
            self._scheduler.after(int(self._random.random() * 50_000), self._broken, sender, target)

    def _carry(self, sender: NodeId, target: NodeId, message: Message, delay_us: int, *, pushes: bool) -> None:
        time_us = self._scheduler.now_us + delay_us
        if pushes:
            reorder = self._options.reorder
            if self.faulty and reorder and self._random.random() < reorder:
                self.hits["reorder"] += 1
            else:
                time_us = max(time_us, self._last_us.get((sender, target), 0) + 1)
                self._last_us[sender, target] = time_us
        life = self._life[sender] + self._life[target]
        self._scheduler.at(time_us, self._arrive, sender, target, message, life)

    def _arrive(self, sender: NodeId, target: NodeId, message: Message, life: int) -> None:
        if life == self._life[sender] + self._life[target]:
            self._deliver(sender, target, message)
