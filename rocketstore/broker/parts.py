"""The parts shared by a broker's protocols: gRPC and remoting serve the same log, topics, offsets and limits."""

from __future__ import annotations

from collections.abc import Callable

from dledger.access.guard import AccessGuard
from dledger.access.quota import Quotas
from dledger.clock import Clock
from dledger.conditions import Conditions
from dledger.records import record
from dledger.rpc.bridge import LoopBridge
from dledger.rpc.clients.answers import AnswerRoom
from rocketstore.broker.groups import Groups
from rocketstore.broker.live_config import LiveConfig
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.pull import PullService
from rocketstore.broker.readers import ReadThreads, RecordReader
from rocketstore.broker.sending import Sending
from rocketstore.broker.state_changes import StateChanges
from rocketstore.broker.topics import Topics
from rocketstore.broker.transactions.ends import TransactionEnds
from rocketstore.broker.transactions.service import TransactionService
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.message import HostAddress
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore


@record(frozen=True, slots=True)
class BrokerParts:
    """Everything runs on the loop's thread, unless stated otherwise."""

    live: LiveConfig
    store: MessageStore
    state: BrokerState
    topics: Topics
    changes: StateChanges
    sending: Sending
    pulls: PullService
    readers: ReadThreads
    records: RecordReader
    bridge: LoopBridge
    clock: Clock
    quotas: Quotas
    room: AnswerRoom
    transactions: TransactionService
    """For any thread."""
    ends: TransactionEnds
    mastership: Mastership
    groups: Groups
    store_host: HostAddress
    guard: AccessGuard | None
    """None: everybody may do everything."""
    conditions: Conditions
    """For any thread."""
    replication: Callable[[], dict[str, str]]
    """What is told of classic replication; empty in a group. For any thread."""

    @property
    def config(self) -> BrokerConfig:
        """The configuration as it is now; may be read on any thread."""
        return self.live.now
