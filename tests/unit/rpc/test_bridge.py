"""What reaches the client service's loop from other threads: the commit index as followers of the log see it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from dledger.rpc.bridge import EventHub, LoopBridge
from dledger.rpc.ports import CommitEvent
from dledger.types import LogIndex
from tests.support.fake_node import FakeNode


class _Overtaken(int):
    """An index that another thread tries to overtake at the very moment it is compared."""

    meanwhile: Callable[[], None]

    def __gt__(self, other: int) -> bool:
        self.meanwhile()
        return super().__gt__(other)


def test_a_commit_event_that_is_overtaken_does_not_take_the_commit_index_back() -> None:
    """The driver's threads tell commit indexes as they come; in an idle group nothing would correct a lower one."""

    async def overtake() -> LogIndex:
        node = FakeNode()
        hub = EventHub(node, LoopBridge())
        overtaking = threading.Thread(target=lambda: node.tell(CommitEvent(LogIndex(12))))

        def start_and_wait_a_little() -> None:
            overtaking.start()
            overtaking.join(0.2)  # it ends at once, unless it must wait for us

        slow = _Overtaken(10)
        slow.meanwhile = start_and_wait_a_little
        node.tell(CommitEvent(LogIndex(slow)))
        overtaking.join()
        return hub.committed_index

    assert asyncio.run(overtake()) == 12
