"""What is counted while half messages are on their way to the store."""

from __future__ import annotations

from typing import cast

from rocketstore.broker.transactions.service import Begun, HalfMessages, TransactionService
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.message import Message
from rocketstore.settings import LiveConfig
from rocketstore.types import PutMessageStatus, PutResult


class Transactions:
    """Records each question, and refuses group ``full``."""

    is_running = True

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    def refusal(self, group: str, coming: int, coming_of_group: int) -> str:
        self.asked.append((group, coming, coming_of_group))
        return "too many" if group == "full" else ""


def prepared(group: str) -> Message:
    """As a producer sends it, with its queue chosen."""
    return Message("T", b"x", 0, {"PGROUP": group, "TRAN_MSG": "true"}, sys_flag=4)


def test_what_is_on_its_way_counts_for_all_and_for_its_group() -> None:
    """All groups together have a limit, and each its share: neither count stands for the other."""
    service = Transactions()
    halves = HalfMessages(LiveConfig(BrokerConfig()), cast("TransactionService", service))
    begun = [halves.begin(prepared(group)) for group in ("a", "a", "a", "b")]
    assert service.asked == [("a", 0, 0), ("a", 1, 1), ("a", 2, 2), ("b", 3, 0)]
    for one in begun[:2]:
        assert isinstance(one, Begun)
        halves.all_stored([one], [PutResult(PutMessageStatus.PUT_OK)])
    halves.begin(prepared("a"))

    assert service.asked[4:] == [("a", 2, 1)]
    refused = halves.begin(prepared("full"))
    assert isinstance(refused, PutResult)
    assert (refused.status, refused.reason) == (PutMessageStatus.FLOW_CONTROL, "too many")
    halves.begin(prepared("b"))
    assert service.asked[6:] == [("b", 3, 1)], "what was refused is not on its way"
