"""The wires: two per ordered pair of members, one for calls and one that keeps the order of pushes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

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
KEPT_MAX: Final = 48
"""Copies of messages to one member, of any age, that may still come one day."""


class Network:
    """Loses, delays, doubles and reorders what is sent; ``blocked`` holds the directions that are cut."""

    def __init__(
        self,
        options: Options,
        scheduler: Scheduler,
        random: Random,
        deliver: Deliver,
        broken: Broken,
        hit: Callable[[str, NodeId], None],
    ) -> None:
        self._options = options
        self._scheduler = scheduler
        self._random = random
        self._deliver = deliver
        self._broken = broken
        self._hit = hit
        self._last_us: dict[tuple[NodeId, NodeId], int] = {}
        self._life: dict[NodeId, int] = dict.fromkeys(options.everybody, 0)
        self.blocked: dict[tuple[NodeId, NodeId], bool] = {}
        self.lost_kinds: dict[tuple[NodeId, NodeId], tuple[type, ...]] = {}
        """What does not get through in a direction although everything else does."""
        self.refuses_calls: dict[NodeId, bool] = {}
        self.refuses_pushes: dict[NodeId, bool] = {}
        """Who has no thread left for what comes: callers hear nothing, and streams are hung up on."""
        self.deaf: dict[NodeId, bool] = {}
        """Machines that stand still: what is sent to them is lost, and nobody hears of it."""
        self._kept: dict[NodeId, list[tuple[NodeId, Message, int]]] = {name: [] for name in options.everybody}
        self._keeps = Random(f"kept/{options.seed}") if options.has("stale") else None
        self._keep_share = 0.0 if self._keeps is None else self._keeps.choice((0.02, 0.05, 0.2))
        self._is_new = options.is_new
        self._turns = options.noise_us > 0 or options.has("siege")
        self.silent = False
        self.faulty = True

    def _is_refused(self, sender: NodeId, target: NodeId, *, pushes: bool) -> bool:
        """Whether nobody is there to take it."""
        if self.deaf and target in self.deaf:
            self._hit("deaf", target)
            return True
        if target not in (self.refuses_pushes if pushes else self.refuses_calls):
            return False
        self._hit("refused", target)
        if pushes:
            self._scheduler.after(int(self._random.random() * 5_000), self._broken, sender, target)
        return True

    def quieten(self) -> None:
        """No link is cut any more, nor does anything of its own."""
        self.mend_all()
        self.silent = True

    def mend_all(self) -> None:
        """Everything gets through again, as well as before."""
        self.silent = False
        for broken in (self.blocked, self.lost_kinds, self.deaf, self.refuses_calls, self.refuses_pushes):
            broken.clear()
        self._last_us.clear()

    def forget(self, node: NodeId) -> None:
        """Lose everything under way to or from ``node``: its disk is being replaced, which takes longer."""
        self._life[node] += 1

    def heal(self) -> None:
        """From now on everything arrives, in order and soon; what is late already stays late."""
        self.faulty = False
        self.mend_all()

    def send(self, sender: NodeId, target: NodeId, message: Message) -> None:
        """Put a message on its wire."""
        pushes = not isinstance(message, CALLS)
        if self.blocked.get((sender, target)):
            self._hit("blocked", target)
            self._lose(sender, target, pushes=pushes)
            return
        if self.lost_kinds and isinstance(message, self.lost_kinds.get((sender, target), ())):
            self._hit("lost_of_kind", target)
            return  # nobody notices: what else is under way arrives
        if self._is_new:
            if self._is_refused(sender, target, pushes=pushes):
                return
            if self._keeps is not None and self.faulty:
                self._keep(self._keeps, sender, target, message)
        if not self.faulty or (self._turns and self.is_calm):
            self._carry(sender, target, message, 300 + int(self._random.random() * 700), pushes=pushes)
            return
        options, random = self._options, self._random
        if options.drop and random.random() < options.drop:
            self._hit("drop", target)
            self._lose(sender, target, pushes=pushes)
            return
        delay_us = 200 + int(random.random() * 2_000)
        if options.spike and random.random() < options.spike:
            self._hit("spike", target)
            delay_us += int(random.random() * random.choice((50_000, 500_000, 5_000_000)))
        self._carry(sender, target, message, delay_us, pushes=pushes)
        if options.duplicate and random.random() < options.duplicate:
            self._hit("duplicate", target)
            late_us = int(random.random() * random.choice((1_000, 100_000, 3_000_000)))
            self._carry(sender, target, message, delay_us + late_us, pushes=False)

    @property
    def is_calm(self) -> bool:
        """Whether the links do nothing of their own at the moment."""
        period_us = self._options.noise_us
        return self.silent or (period_us > 0 and self._scheduler.now_us // period_us % 2 == 1)

    def is_heard(self, sender: NodeId, target: NodeId) -> bool:
        """Whether anything at all of what ``sender`` says arrives."""
        return not self.blocked.get((sender, target)) and target not in self.deaf

    def is_open(self, sender: NodeId, target: NodeId) -> bool:
        """Whether all of it does, and soon; a push that waits for an earlier one does not."""
        refused = self.refuses_calls.get(target) or self.refuses_pushes.get(target)
        late = self._last_us.get((sender, target), 0) > self._scheduler.now_us + 10_000
        return self.is_heard(sender, target) and not refused and not late and not self.lost_kinds.get((sender, target))

    def arrived_us(self, sender: NodeId, target: NodeId) -> int:
        """When everything will have arrived that is under way in the stream."""
        return self._last_us.get((sender, target), 0) + 1

    def _keep(self, random: Random, sender: NodeId, target: NodeId, message: Message) -> None:
        """Keep a copy of some messages, in place of any other, so that of every time some are left."""
        share = 4 * self._keep_share if isinstance(message, PushResponse) else self._keep_share
        if random.random() < share:
            kept = self._kept[target]
            one = sender, message, self._life[sender] + self._life[target]
            if len(kept) < KEPT_MAX:
                kept.append(one)
            else:
                kept[int(random.random() * KEPT_MAX)] = one

    def replay(self, target: NodeId, *, leads: bool) -> None:
        """Some of what was on its way to ``target``, for however long, comes now: its role or its term has changed."""
        random = self._keeps
        if random is None or not self.faulty or random.random() < (0.2 if leads else 0.7):
            return
        for sender, message, life in (*self._kept[target], *self._kept[target]):
            if random.random() < 0.4:
                self._hit("stale", target)
                delay_us = int(random.random() * random.choice((3_000, 10_000, 50_000, 300_000, 1_000_000)))
                self._scheduler.after(delay_us, self._arrive, sender, target, message, life)

    def _lose(self, sender: NodeId, target: NodeId, *, pushes: bool) -> None:
        """A broken stream is noticed, sometimes at once, sometimes late, sometimes only by silence."""
        if pushes and self._random.random() < 0.6:
            self._scheduler.after(int(self._random.random() * 50_000), self._broken, sender, target)

    def _carry(self, sender: NodeId, target: NodeId, message: Message, delay_us: int, *, pushes: bool) -> None:
        time_us = self._scheduler.now_us + delay_us
        if pushes:
            reorder = self._options.reorder
            if self.faulty and reorder and self._random.random() < reorder:
                self._hit("reorder", target)
            else:
                time_us = max(time_us, self._last_us.get((sender, target), 0) + 1)
                self._last_us[sender, target] = time_us
        life = self._life[sender] + self._life[target]
        self._scheduler.at(time_us, self._arrive, sender, target, message, life)

    def _arrive(self, sender: NodeId, target: NodeId, message: Message, life: int) -> None:
        if life == self._life[sender] + self._life[target]:
            self._deliver(sender, target, message)
