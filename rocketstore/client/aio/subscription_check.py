"""Looks, before a consumer joins, whether its group subscribes to something else: then messages would be missed.

Members of a group divide its queues whatever they subscribe to, so all must subscribe to the same. A broker of RocketMQ
or of this project tells what its group subscribes to (GET_CONSUMER_CONNECTION_LIST): what the last heartbeat said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Final

from dledger.access.permissions import RETRY_PREFIX
from dledger.errors import ConfigError
from dledger.remoting.errors import RequestError
from rocketstore.client.aio.broker_session import Subscriptions
from rocketstore.client.aio.cluster import Cluster
from rocketstore.client.aio.errors import ClientError
from rocketstore.client.aio.received import tags_of_expression
from rocketstore.remoting.bodies.clients import ConsumerConnectionList, SubscriptionData
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import GroupHeader
from rocketstore.types import MessageModel

_log = logging.getLogger(__name__)
ASK_S_MAX: Final = 1.0
"""How long one broker may take: the start waits for it."""
_ADVICE: Final = "Give each subscription a group of its own"


async def warn_of_others(cluster: Cluster, subscriptions: Subscriptions, names: Iterable[str]) -> None:
    """Log how this consumer differs from its group, asking the masters of these brokers; best effort."""
    for found in await asyncio.gather(*(_asked(cluster, subscriptions.group, one) for one in names)):
        if found is None or found.message_model is MessageModel.BROADCASTING:
            continue
        if problem := difference(subscriptions, found.subscription_table):
            _log.warning("%s", problem)
            return


def difference(subscriptions: Subscriptions, table: Mapping[str, SubscriptionData]) -> str:
    """How a consumer's subscriptions differ from its group's, for people; empty if they do not."""
    group, mine = subscriptions.group, subscriptions.expressions
    others = {topic: one for topic, one in table.items() if not topic.startswith(RETRY_PREFIX)}
    for topic in mine.keys() & others.keys():
        if tags_of_expression(mine[topic]) != _tags(others[topic]):
            return (
                f"other consumers of group {group} subscribe to topic {topic} with {others[topic].sub_string!r}, and "
                f"this one with {mine[topic]!r}: each misses the messages in the other's queues. {_ADVICE}"
            )
    if not others or mine.keys() == others.keys():
        return ""
    only_mine, only_others = (", ".join(sorted(one)) for one in (mine.keys() - others.keys(), others.keys() - mine))
    if only_mine:
        who = f"this one to {only_mine}, and others do not"
    else:
        who = f"others to {only_others}, and this one does not"
    return (
        f"consumers of group {group} subscribe to different topics: {who}, so nobody reads the queues of that topic "
        f"that are their share. {_ADVICE}"
    )


def _tags(one: SubscriptionData) -> frozenset[str] | str | None:
    """The wanted tags; None for all; the whole filter if it is another than tags, which this client never has."""
    if one.expression_type not in ("", "TAG"):
        return f"{one.expression_type} {one.sub_string}"
    try:
        return frozenset(one.tags_set) or tags_of_expression(one.sub_string or "*")
    except ConfigError:
        return one.sub_string


async def _asked(cluster: Cluster, group: str, name: str) -> ConsumerConnectionList | None:
    try:
        answer = await cluster.ask_master(
            name,
            RequestCode.GET_CONSUMER_CONNECTION_LIST,
            GroupHeader(group),
            deadline=cluster.deadline(ASK_S_MAX),
        )
        return ConsumerConnectionList.decode(answer.body or b"{}")
    except (ClientError, RequestError) as error:  # nobody of the group is connected there, or the broker is away
        _log.debug("group %s: its subscriptions at %s are unknown: %s", group, name, error)
        return None
