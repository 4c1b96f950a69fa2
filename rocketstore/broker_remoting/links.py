"""A remoting connection as the broker's groups see it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dledger.remoting.connection import DisconnectedError, RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.broker.clients import ClientLink, HalfCheck
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import CheckTransactionHeader, GroupHeader, write_header

if TYPE_CHECKING:
    from collections.abc import Callable


class RemotingLink(NamedTuple):
    """Made anew for each request: links of one connection are equal."""

    connection: RemotingConnection
    is_sender: Callable[[RemotingConnection, str], bool]
    """Whether an account that uses this connection may send to a topic."""

    @property
    def host(self) -> str:
        """The client's IP address."""
        return self.connection.place.host

    @property
    def address(self) -> str:
        """The client's address."""
        return str(self.connection.place)

    def may_send(self, topic: str) -> bool:
        """Whether an account that uses it may send to a topic."""
        return self.is_sender(self.connection, topic)

    def members_changed(self, group: str) -> bool:
        """NOTIFY_CONSUMER_IDS_CHANGED."""
        return self.connection.tell(_notice(group))

    def check_half(self, check: HalfCheck) -> bool:
        """CHECK_TRANSACTION_STATE."""
        unique = check.unique_id
        header = CheckTransactionHeader(check.queue_offset, check.offset, unique, unique, check.message_id)
        return self.connection.tell(Frame(RequestCode.CHECK_TRANSACTION_STATE, 0, write_header(header), check.record))

    def close(self, reason: str) -> None:
        """Hang up."""
        self.connection.close(reason)


def connection_of(link: ClientLink) -> RemotingConnection:
    """The connection by which a client can be asked anything. Raises ``DisconnectedError`` if it uses gRPC."""
    if isinstance(link, RemotingLink):
        return link.connection
    raise DisconnectedError(f"the client at {link.address} uses gRPC and answers no requests of RocketMQ's brokers")


@lru_cache(maxsize=64)
def _notice(group: str) -> Frame:
    return Frame(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, 0, write_header(GroupHeader(group)))
