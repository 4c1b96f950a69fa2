"""Clients of brokers on asyncio, over RocketMQ's remoting protocol: they work with Apache RocketMQ's brokers as well.

Names, methods and arguments are those of the blocking clients in ``rocketstore.client``, where everything else is
imported from: messages, options, results, errors.

The parts, from the bottom up; each is made by the one above it, and used on one event loop:

- ``connections.BrokerConnections``: one connection per address; signs requests, and turns answers into errors.
- ``routes.RouteServers``: asks name servers, or the brokers of a group, where topics are. ``routes.RouteCache``: the
  ``TopicRoute`` of each topic and the ``RoutedBroker`` of each broker name, kept up to date.
- ``cluster.Cluster``: the above together, with the rules by which a request is repeated (``ask_master``,
  ``ask_reader``, ``repeat``). Each client has one, and gives it ``requests`` (brokers ask clients, too) and ``lost``.
- ``cluster.Heartbeats``: how brokers know a client's groups: ``make`` returns what the client belongs to now.
- ``errors``: every error, with its ``outcome``; ``may_repeat`` and ``may_send_elsewhere`` are the rules of retries.
- ``outgoing``, ``pipeline.SendPipeline``: a producer's messages, in blocks, and where they go: ``numbered`` (to brokers
  of this project, also under numbers of the application's), ``queue_sends`` (by RocketMQ's own requests).
- ``transactions``: half messages, their ends, and the checks of brokers.
- ``producer.Producer``; ``admin.Admin``, with ``admin_messages`` and ``admin_requests`` (how it asks, and what it
  takes and returns).

A client checks ``Cluster.check`` at the beginning of each call: it says that the client is closed, or is used in a
forked child or on another loop. Deadlines are passed down as ``connections.Deadline``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dledger.late_names import late_names

if TYPE_CHECKING:
    from rocketstore.client.aio.admin import Admin
    from rocketstore.client.aio.consumer import Consumer
    from rocketstore.client.aio.producer import NumberedProducer, Producer
    from rocketstore.client.aio.simple_consumer import SimpleConsumer
    from rocketstore.client.aio.transactions import Transaction

__all__ = ["Admin", "Consumer", "NumberedProducer", "Producer", "SimpleConsumer", "Transaction"]

__getattr__ = late_names(
    __name__,
    {
        "Admin": "rocketstore.client.aio.admin",
        "Consumer": "rocketstore.client.aio.consumer",
        "NumberedProducer": "rocketstore.client.aio.producer",
        "Producer": "rocketstore.client.aio.producer",
        "SimpleConsumer": "rocketstore.client.aio.simple_consumer",
        "Transaction": "rocketstore.client.aio.transactions",
    },
)
