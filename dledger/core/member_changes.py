"""Changes of a group's members, on its leader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from dledger.core.entry_pusher import EntryDispatcher
from dledger.core.member_state import MemberState
from dledger.core.noops import Noops
from dledger.errors import DLedgerError, InvalidRequestError
from dledger.members import Configuration, MemberChange, MemberProgress
from dledger.types import NodeId

ChangeDone = Callable[[Configuration | DLedgerError], None]


class MemberChanges:
    """Takes requests that change the members. Under the node's lock."""

    def __init__(self, state: MemberState, noops: Noops, dispatchers: Mapping[NodeId, EntryDispatcher]) -> None:
        self._state = state
        self._noops = noops
        self._dispatchers = dispatchers

    def submit(self, change: MemberChange, now_ms: int, done: ChangeDone) -> None:  # noqa: ARG002
        """Change the members; ``done`` gets the configuration once it is committed, or why there is none."""
        self._state.outbox.completions.append(partial(done, InvalidRequestError("members cannot be changed yet")))

    def progress(self, now_ms: int) -> tuple[MemberProgress, ...]:  # noqa: ARG002
        """What this member knows, as the leader, of the others; empty if it does not lead."""
        return ()

    def step(self, now_ms: int) -> int | None:  # noqa: ARG002
        """Carry on what has been asked for; returns when to look again."""
        return None
