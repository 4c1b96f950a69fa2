"""A member as ``rocketstore.broker_ports`` makes it, without ports: its clients call the broker's rules on its loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from dledger.config import ServerConfig
from dledger.errors import DLedgerError
from dledger.rpc.loops import LoopBridge, LoopThread
from rocketstore.broker.broker import Broker, ClientQuotas, LoopTools, Storage
from rocketstore.broker.mastership import Mastership, group_view
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.refusal import Refusal
from rocketstore.broker.timed.service import TimedService
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.message import LOOPBACK
from rocketstore.pop.operations import PopCopy
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore
from tests.sim_store.broker import MemberBroker
from tests.sim_store.model import Model
from tests.sim_store.threads import EPOCH_MS, Clock, running

REFUSED: Final = (Refusal, DLedgerError)
"""What a client's call may end with."""
_T = TypeVar("_T")


def wall_ms() -> int:
    """What every member's clock says."""
    return EPOCH_MS + running().now_ms


class WatchedTimed(TimedService):
    """Notes when a master begins to deliver: only then may what was delivered come again."""

    def __init__(
        self, config: BrokerConfig, store: MessageStore, state: BrokerState, clock: Clock, model: Model
    ) -> None:
        super().__init__(config, store, state, clock)
        self.config = config
        self.clock = clock
        self.model = model

    def start(self) -> None:
        """As it is, and noted."""
        self.model.timed_starts.append(wall_ms())
        super().start()


class ServedRole:
    """Tells the rules that the role has changed, as the server's listener does."""

    bridge: LoopBridge | None = None
    rules: Broker | None = None

    def start(self) -> None:
        """A master now."""
        if self.bridge is not None and self.rules is not None:
            self.bridge.post(self.rules.popping.role_changed)

    def stop(self) -> None:
        """None any more."""
        self.start()


@dataclass(eq=False)
class ServingBroker(MemberBroker):
    """A member whose clients pop, and send and recall timed messages."""

    timed: WatchedTimed | None = None
    served: ServedRole | None = None
    copying: Callable[[], None] = lambda: None
    """Called when a message is to be stored again."""

    @classmethod
    def further_services(
        cls, node: ServerConfig, store: MessageStore, state: BrokerState, clock: Clock, model: Model
    ) -> dict[str, Any]:  # Any: of fields
        """See ``MemberBroker``."""
        config = BrokerConfig(store=store.config, dledger=node)
        return {"timed": WatchedTimed(config, store, state, clock, model), "served": ServedRole()}

    def start(self) -> None:
        """Take part, and serve."""
        super().start()
        assert self.served is not None
        self.served.bridge = bridge = LoopThread("rocketstore-rpc", self._report).start()
        self.served.rules = bridge.run(self._made(bridge))

    def stop(self) -> None:
        """In the server's order; the loop ends with the process."""
        assert self.timed is not None
        self.timed.stop()
        self.rules.stop_waiting()
        self.run(self.rules.close())
        super().stop()

    @property
    def rules(self) -> Broker:
        """What adapters call."""
        assert self.served is not None
        assert self.served.rules is not None
        return self.served.rules

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """On its loop."""
        assert self.served is not None
        assert self.served.bridge is not None
        return self.served.bridge.run(work)

    @property
    def failure(self) -> BaseException | None:
        """What its process ends for."""
        return super().failure or (None if self.timed is None else self.timed.fatal)

    async def _made(self, bridge: LoopBridge) -> Broker:
        node, store = self.node, self.store
        assert self.timed is not None
        config, clock = self.timed.config, self.timed.clock
        storage = Storage(store, self.state, self.transactions, self.schedule, self.timed)
        mastership = Mastership(store, lambda: group_view(node.status(), node.removed), lambda: self.serves)
        tools = LoopTools(bridge, clock, ReadThreads(config.read_threads), node.conditions)
        made = Broker(config, storage, mastership, tools, ClientQuotas(config, None), LOOPBACK)
        copies = made.popping._driver.copies
        make = copies.make

        def watched(copy: PopCopy, reason: str = "") -> None:
            make(copy, reason)
            self.copying()

        setattr(copies, "make", watched)  # noqa: B010  # a method
        return made

    def _report(self, error: BaseException) -> None:
        if not self.group.dead:
            self.group.failure = self.group.failure or error
