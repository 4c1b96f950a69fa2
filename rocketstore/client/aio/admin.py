"""``Admin``: topics, groups, offsets, brokers and single messages, for tools and operators."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from dledger.remoting.codes import RequestError
from dledger.remoting.frame import Frame
from rocketstore.client.aio.admin_answers import body_of, settings_of
from rocketstore.client.aio.admin_groups import GroupAdmin
from rocketstore.client.aio.admin_messages import MessageAdmin
from rocketstore.client.aio.admin_records import BrokerStatus
from rocketstore.client.aio.admin_topics import TopicAdmin
from rocketstore.client.aio.cluster import Cluster
from rocketstore.client.aio.connections import Deadline
from rocketstore.client.aio.errors import BadAnswerError, ClientError
from rocketstore.client.aio.routes import RoutedBroker
from rocketstore.remoting.bodies.routes import KVTable
from rocketstore.remoting.bodies.runtime import RuntimeInfo
from rocketstore.remoting.bodies.topics import TopicConfigTable
from rocketstore.remoting.codes import RequestCode as Code
from rocketstore.remoting.headers import BrokerNameHeader

if TYPE_CHECKING:
    from dledger.client.shared import ClientSecurity

TIMEOUT_S: Final = 5.0


class Admin(TopicAdmin, GroupAdmin, MessageAdmin):
    """Administers a group of brokers, or all brokers that name servers know.

    Give either ``addresses`` of brokers of this project, or ``name_servers``, which works with Apache RocketMQ's
    brokers, too. Every call has ``timeout_s``, and is repeated until then as long as that may help; changes go to
    masters, and reads to a copy while there is none. Where a method takes ``broker`` (a name), an empty one means all
    of them.
    """

    def __init__(
        self,
        addresses: Sequence[str] | str | None = None,
        *,
        name_servers: Sequence[str] | str | None = None,
        timeout_s: float = TIMEOUT_S,
        security: ClientSecurity | None = None,
    ) -> None:
        super().__init__(Cluster(addresses, name_servers, timeout_s=timeout_s, security=security))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        await self._cluster.close()

    async def brokers(self) -> tuple[RoutedBroker, ...]:
        """All brokers, by name: their cluster, and their addresses by broker id (0 is the master)."""
        return await self._named("", self._deadline())

    async def status(self, address: str) -> BrokerStatus:
        """The runtime information of one broker (GET_BROKER_RUNTIME_INFO)."""
        return await self._status(address, self._deadline())

    async def statuses(self) -> dict[str, BrokerStatus | ClientError]:
        """Every broker's status by address, or why it does not tell. Raises ``ClientError`` if there are no brokers."""
        deadline = self._deadline()
        addresses = [address for one in await self._named("", deadline) for address in one.readable]
        found = await asyncio.gather(*(self._status(one, deadline) for one in addresses), return_exceptions=True)
        statuses: dict[str, BrokerStatus | ClientError] = {}
        for address, one in zip(addresses, found, strict=True):
            if not isinstance(one, BrokerStatus | ClientError):
                raise one
            statuses[address] = one
        return statuses

    async def topics_at(self, address: str) -> list[str]:
        """The topics that one broker knows, whatever its role."""
        deadline = self._deadline()

        async def attempt() -> Frame:
            return await self._ask(address, Code.GET_ALL_TOPIC_CONFIG, deadline)

        answer = await self._cluster.repeat(attempt, deadline, harmless=True)
        return sorted(body_of(TopicConfigTable, answer, address).topic_config_table)

    async def broker_config(self, address: str) -> dict[str, str]:
        """One broker's settings by RocketMQ's names."""
        return settings_of(await self._ask(address, Code.GET_BROKER_CONFIG, self._deadline()), address)

    async def set_broker_config(self, address: str, settings: Mapping[str, str]) -> None:
        """Change settings of a running broker; brokers of this project forget them at their next start."""
        body = "".join(f"{name}={value}\n" for name, value in settings.items()).encode()
        await self._ask(address, Code.UPDATE_BROKER_CONFIG, self._deadline(), None, body)

    async def set_write_permission(self, broker: str, *, allowed: bool) -> None:
        """Take the topics of a broker out of producers' routes at every name server, or put them back."""
        code = Code.ADD_WRITE_PERM_OF_BROKER if allowed else Code.WIPE_WRITE_PERM_OF_BROKER
        await self._at_name_servers(code, BrokerNameHeader(broker))

    async def _status(self, address: str, deadline: Deadline) -> BrokerStatus:
        answer = await self._ask(address, Code.GET_BROKER_RUNTIME_INFO, deadline)
        try:
            return BrokerStatus(address, RuntimeInfo.decode(answer.body), KVTable.decode(answer.body).table)
        except RequestError as error:
            raise BadAnswerError(f"{address} answered with a status that cannot be read: {error}") from error
