"""Puts the parts of pop together."""

from __future__ import annotations

from functools import partial

from dledger.clock import Clock
from dledger.rpc.bridge import LoopBridge
from rocketstore.broker.groups import Groups
from rocketstore.broker.live_config import LiveConfig
from rocketstore.broker.long_polling import WaitingPulls
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.offsets import Offsets
from rocketstore.broker.popping.copies import Copies
from rocketstore.broker.popping.driver import EngineDriver
from rocketstore.broker.popping.loading import TopicLoader
from rocketstore.broker.popping.receiving import Receiving
from rocketstore.broker.popping.service import Popping
from rocketstore.broker.popping.use import GroupUse
from rocketstore.broker.popping.waiting import WaitingReceives
from rocketstore.broker.reading import QueueReading, SubscriptionFilters
from rocketstore.broker.sending import Sending
from rocketstore.broker.topics import Topics
from rocketstore.message.message import HostAddress
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore


def make_popping(  # noqa: PLR0913  # one parameter per neighbour
    live: LiveConfig,
    store: MessageStore,
    state: BrokerState,
    mastership: Mastership,
    bridge: LoopBridge,
    clock: Clock,
    pulls: WaitingPulls,
    reading: QueueReading,
    filters: SubscriptionFilters,
    topics: Topics,
    groups: Groups,
    offsets: Offsets,
    sending: Sending,
    store_host: HostAddress,
) -> Popping:
    """On the loop's thread."""
    waiting = WaitingReceives(pulls, live.now.pulls_waiting_max)
    owners: dict[str, str] = {}
    copies = partial(Copies, store, reading, sending, groups.retries, store_host, lambda group: owners.get(group, ""))
    driver = EngineDriver(store, state, mastership, bridge, clock, waiting, copies)
    loader = TopicLoader(store, topics, reading)
    receiving = Receiving(
        live, topics, reading, filters, loader, driver, waiting, state.pop, offsets.take_group, owners
    )

    def clients_of(group: str) -> tuple[str, ...]:
        consumers = groups.clients.consumers(group)
        return () if consumers is None else consumers.ids

    use = GroupUse(clients_of, lambda group: state.pop.parked_of(group))
    return Popping(topics, groups, driver, receiving, use)
