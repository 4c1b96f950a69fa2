"""Messages with a time of their own, as applications make them, and their recall handles."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from rocketstore.client.aio.admin_requests import handle_of
from rocketstore.client.aio.errors import MessageRefusedError
from rocketstore.client.aio.outgoing import outgoing
from rocketstore.message.message import Message
from rocketstore.message.timed import RecallHandle, decode_handle

AT = datetime(2030, 1, 2, 3, 4, 5, 678_000, UTC)
AT_MS = 1_893_553_445_678


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Message("T", b"", deliver_at=AT), {"TIMER_DELIVER_MS": str(AT_MS)}),
        (Message("T", b"", deliver_at=AT_MS), {"TIMER_DELIVER_MS": str(AT_MS)}),
        (Message("T", b"", delay=1.5), {"TIMER_DELAY_MS": "1500"}),
        (Message("T", b"", delay=timedelta(hours=1), tags="a"), {"TIMER_DELAY_MS": "3600000", "TAGS": "a"}),
        (Message("T", b"", delay=0), {"TIMER_DELAY_MS": "0"}),
    ],
)
def test_a_time_or_a_delay_becomes_rocketmqs_property(message: Message, expected: dict[str, str]) -> None:
    assert message.properties == expected
    assert outgoing(message, body_bytes_max=9).alone


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"deliver_at": AT, "delay": 1}, ValueError),
        ({"delay": 1, "delay_level": 1}, ValueError),
        ({"delay": -1}, ValueError),
        ({"deliver_at": -5}, ValueError),
        ({"deliver_at": "noon"}, TypeError),
        ({"deliver_at": True}, TypeError),
        ({"delay": "1s"}, TypeError),
    ],
)
def test_what_is_no_time_is_refused_at_once(arguments: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        Message("T", b"", **arguments)  # type: ignore[arg-type]  # that is the test


@pytest.mark.parametrize("name", ["TIMER_DELIVER_MS", "TIMER_DELAY_MS", "TIMER_DELAY_SEC"])
def test_the_properties_are_not_for_applications(name: str) -> None:
    with pytest.raises(MessageRefusedError, match="pass de"):
        outgoing(Message("T", b"", properties={name: "5"}), body_bytes_max=9)


def test_a_handle_is_made_of_the_place_where_the_message_waits() -> None:
    """The same as the broker's; of a delay, when the message was sent says about when it is due."""
    message = outgoing(Message("T", b"", deliver_at=AT), body_bytes_max=9)
    message.unique_key, message.born_ms = "0A", AT_MS - 1000
    assert decode_handle(handle_of(message, "b", 7)) == RecallHandle("T", "b", AT_MS, "0A", 7)
    delayed = outgoing(Message("T", b"", delay=2), body_bytes_max=9)
    delayed.unique_key, delayed.born_ms = "0A", 1000
    assert decode_handle(handle_of(delayed, "b", 7)).due_ms == 3000
    message.born_ms = AT_MS + 1
    assert handle_of(message, "b", 7) == ""  # it was delivered at once
    assert handle_of(delayed, "b", -1) == ""  # nobody remembers where it is
