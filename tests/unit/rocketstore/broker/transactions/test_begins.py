"""What is counted while half messages are on their way to the store."""

from __future__ import annotations

from typing import cast

import pytest

from rocketstore.broker.live_config import LiveConfig
from rocketstore.broker.transactions.begins import HalfMessages, HalfRefusedError
from rocketstore.broker.transactions.service import TransactionService
from rocketstore.broker_config import BrokerConfig
from rocketstore.types import PutMessageStatus
from tests.unit.rocketstore.broker.transactions.bench import half


class Transactions:
    """Tells what it is asked, and refuses group ``full``."""

    is_running = True

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    def refusal(self, group: str, coming: int, coming_of_group: int) -> str:
        self.asked.append((group, coming, coming_of_group))
        return "too many" if group == "full" else ""


def test_what_is_on_its_way_counts_for_all_and_for_its_group() -> None:
    """All groups together have a limit, and each its share: neither count stands for the other."""
    service = Transactions()
    halves = HalfMessages(LiveConfig(BrokerConfig()), cast("TransactionService", service))
    begun = [halves.begin(half(b"x"), group) for group in ("a", "a", "a", "b")]
    for group in ("a", "b", "c"):
        halves.check_begin(group, is_plain=True)
    for one in begun[:2]:
        halves.stored(one)
    halves.check_begin("a", is_plain=True)

    assert service.asked == [("a", 4, 3), ("b", 4, 1), ("c", 4, 0), ("a", 2, 1)]
    with pytest.raises(HalfRefusedError, match="too many") as caught:
        halves.check_begin("full", is_plain=True)
    assert caught.value.status is PutMessageStatus.OS_PAGECACHE_BUSY
