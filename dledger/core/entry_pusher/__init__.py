"""The entry pusher: one dispatcher per peer, the handler on the follower's side, and the quorum-ack checker."""

from __future__ import annotations

from dledger.core.entry_pusher.dispatcher import DispatcherState, EntryDispatcher
from dledger.core.entry_pusher.handler import EntryHandler
from dledger.core.entry_pusher.quorum_ack import AppendDone, QuorumAckChecker, SequenceDone

__all__ = ["AppendDone", "DispatcherState", "EntryDispatcher", "EntryHandler", "QuorumAckChecker", "SequenceDone"]
