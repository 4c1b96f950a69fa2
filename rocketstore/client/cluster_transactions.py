"""``ClusterTransactionalProducer``: transactions at all the groups of brokers that have their topic."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from dledger.client.channels import Answer
from dledger.client.discovery import Directory
from dledger.client.security import ClientSecurity
from dledger.errors import ConfigError, DLedgerError
from rocketstore.client.checks import WORKERS
from rocketstore.client.cluster_producer import ClusterProducer
from rocketstore.client.producer import BODY_BYTES_MAX, Producer
from rocketstore.client.spread import Route
from rocketstore.client.transactional_producer import TransactionalProducer
from rocketstore.client.transactions import HalfSent, PreparedMessage, TransactionReceipt, TransactionState
from rocketstore.message.message import Message
from rocketstore.nameserver.groups import BrokerGroup

_log = logging.getLogger(__name__)


class ClusterTransactionalProducer(ClusterProducer):
    """A member of a producer group at every group of brokers; asks ``name_servers`` where they are.

    A ``ClusterProducer`` that has a ``TransactionalProducer`` for each group of brokers: those say what is promised. It
    joins at the groups that are registered when it is started, and at those that get the topic of a message later. Up
    to ``check_workers`` checks of each group of brokers are answered at once.
    """

    def __init__(  # noqa: PLR0913  # one parameter per option
        self,
        name_servers: Sequence[str] | str,
        *,
        group: str,
        check: Callable[[PreparedMessage], Answer[TransactionState]],
        check_workers: int = WORKERS,
        timeout_s: float = 5.0,
        body_bytes_max: int = BODY_BYTES_MAX,
        security: ClientSecurity | None = None,
        on_failure: Callable[[str, DLedgerError], object] | None = None,
    ) -> None:
        super().__init__(
            name_servers, timeout_s=timeout_s, body_bytes_max=body_bytes_max, security=security, on_failure=on_failure
        )
        self.group = group
        self._check = check
        self._check_workers = check_workers
        self._timeout_s = timeout_s
        self._body_bytes_max = body_bytes_max
        self._security = security

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def start(self) -> None:
        """Begin to join at all registered groups of brokers; those without a master are joined when they have one.

        Those that must not be connected to (``insecure``) are logged and passed over. Raises ``NameServerError``, and
        ``ConfigError`` if no group may be connected to.
        """
        refused: list[ConfigError] = []
        groups = self._routes.groups()
        for one in groups:
            try:
                self._member(one).begin()
            except ConfigError as error:
                refused.append(error)
                _log.warning("producer group %s: brokers %s are not joined: %s", self.group, one.name, error)
        if refused and len(refused) == len(groups):
            raise refused[0]

    def send_in_transaction(
        self,
        message: Message,
        execute: Callable[[PreparedMessage], Answer[TransactionState]],
        *,
        key: str | None = None,
        queue_id: int | None = None,
        broker_name: str = "",
    ) -> TransactionReceipt:
        """See ``TransactionalProducer.send_in_transaction``, and for the queue ``ClusterProducer.send``.

        A message that certainly was not prepared is offered to another group; ``execute`` is called once, or not.
        """

        def attempt(group: BrokerGroup, queue: int | None) -> tuple[TransactionalProducer, HalfSent]:
            member = self._member(group)
            return member, member.prepare(message, queue_id=queue)

        member, sent = self._deliver(message.topic, key, queue_id, broker_name, attempt)
        return member.conclude(sent, execute)

    def _route(self, topic: str, key: str | None) -> Route:
        route = super()._route(topic, key)
        for one in route.shares:
            with suppress(ConfigError):  # it must not be connected to, which a message that is to go there says
                self._member(one.group).begin()
        return route

    def _open(self, directory: Directory, on_failure: Callable[[str, DLedgerError], object]) -> Producer:
        return TransactionalProducer(
            directory,
            group=self.group,
            check=self._check,
            check_workers=self._check_workers,
            timeout_s=self._timeout_s,
            body_bytes_max=self._body_bytes_max,
            security=self._security,
            on_failure=on_failure,
        )

    def _member(self, group: BrokerGroup) -> TransactionalProducer:
        member = self._producer(group)
        assert isinstance(member, TransactionalProducer)
        return member
