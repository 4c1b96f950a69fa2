"""What requests leave behind once they are answered: nothing."""

from __future__ import annotations

from rocketstore.remoting.codes import RequestCode
from tests.support.remoting import RemotingSocket, pull_fields, send_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.remoting.harness import RemotingHarness


def test_what_was_answered_no_longer_counts(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Also not less than nothing: a client could then occupy more."""
    client.subscribe("g", "T")
    for _ in range(3):
        assert client.ask(RequestCode.SEND_MESSAGE_V2, send_fields("T"), b"x").code == 0
        assert client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T"), bytes(100)).code == 0
    wait_until(lambda: not broker.remoting.server.requests_under_way, "every request has ended")
    (connection,) = broker.remoting.server._connections
    assert connection._under_way == 0
    assert broker.remoting.server._room.is_empty
