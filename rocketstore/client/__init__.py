"""Clients of a broker, of a group of brokers, or of a cluster of groups: producers, consumers and administrators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dledger.late_names import late_names

if TYPE_CHECKING:
    from rocketstore.client.admin import Admin, BrokerStatus, QueueProgress, QueueRange
    from rocketstore.client.aio_cluster_producer import AsyncClusterProducer, AsyncClusterSender
    from rocketstore.client.aio_cluster_transactions import AsyncClusterTransactionalProducer
    from rocketstore.client.aio_group_consumer import AsyncGroupConsumer
    from rocketstore.client.aio_producer import AsyncMessageSender, AsyncProducer
    from rocketstore.client.aio_sends import AsyncSendFuture, AsyncSendManyFuture
    from rocketstore.client.aio_transactional_producer import AsyncTransactionalProducer
    from rocketstore.client.cluster_admin import ClusterAdmin
    from rocketstore.client.cluster_consumer import ClusterConsumer
    from rocketstore.client.cluster_producer import ClusterProducer, ClusterSender
    from rocketstore.client.cluster_transactions import ClusterTransactionalProducer
    from rocketstore.client.consumer import Consumer, ConsumerOptions
    from rocketstore.client.group_consumer import GroupConsumer
    from rocketstore.client.group_options import GroupOptions
    from rocketstore.client.producer import MessageSender, Producer
    from rocketstore.client.receipts import SendReceipt
    from rocketstore.client.received import ReceivedMessage
    from rocketstore.client.sends import SendFuture, SendManyFuture
    from rocketstore.client.shares import GroupDelivery, QueueName
    from rocketstore.client.topics import TopicInfo
    from rocketstore.client.transactional_producer import TransactionalProducer
    from rocketstore.client.transactions import PreparedMessage, TransactionEnd, TransactionReceipt, TransactionState

__all__ = [
    "Admin",
    "AsyncClusterProducer",
    "AsyncClusterSender",
    "AsyncClusterTransactionalProducer",
    "AsyncGroupConsumer",
    "AsyncMessageSender",
    "AsyncProducer",
    "AsyncSendFuture",
    "AsyncSendManyFuture",
    "AsyncTransactionalProducer",
    "BrokerStatus",
    "ClusterAdmin",
    "ClusterConsumer",
    "ClusterProducer",
    "ClusterSender",
    "ClusterTransactionalProducer",
    "Consumer",
    "ConsumerOptions",
    "GroupConsumer",
    "GroupDelivery",
    "GroupOptions",
    "MessageSender",
    "PreparedMessage",
    "Producer",
    "QueueName",
    "QueueProgress",
    "QueueRange",
    "ReceivedMessage",
    "SendFuture",
    "SendManyFuture",
    "SendReceipt",
    "TopicInfo",
    "TransactionEnd",
    "TransactionReceipt",
    "TransactionState",
    "TransactionalProducer",
]

__getattr__ = late_names(
    __name__,
    {
        "Admin": "rocketstore.client.admin",
        "AsyncClusterProducer": "rocketstore.client.aio_cluster_producer",
        "AsyncClusterSender": "rocketstore.client.aio_cluster_producer",
        "AsyncClusterTransactionalProducer": "rocketstore.client.aio_cluster_transactions",
        "AsyncGroupConsumer": "rocketstore.client.aio_group_consumer",
        "AsyncMessageSender": "rocketstore.client.aio_producer",
        "AsyncProducer": "rocketstore.client.aio_producer",
        "AsyncSendFuture": "rocketstore.client.aio_sends",
        "AsyncSendManyFuture": "rocketstore.client.aio_sends",
        "AsyncTransactionalProducer": "rocketstore.client.aio_transactional_producer",
        "BrokerStatus": "rocketstore.client.admin",
        "ClusterAdmin": "rocketstore.client.cluster_admin",
        "ClusterConsumer": "rocketstore.client.cluster_consumer",
        "ClusterProducer": "rocketstore.client.cluster_producer",
        "ClusterSender": "rocketstore.client.cluster_producer",
        "ClusterTransactionalProducer": "rocketstore.client.cluster_transactions",
        "Consumer": "rocketstore.client.consumer",
        "ConsumerOptions": "rocketstore.client.consumer",
        "GroupConsumer": "rocketstore.client.group_consumer",
        "GroupDelivery": "rocketstore.client.shares",
        "GroupOptions": "rocketstore.client.group_options",
        "MessageSender": "rocketstore.client.producer",
        "PreparedMessage": "rocketstore.client.transactions",
        "Producer": "rocketstore.client.producer",
        "QueueName": "rocketstore.client.shares",
        "QueueProgress": "rocketstore.client.admin",
        "QueueRange": "rocketstore.client.admin",
        "ReceivedMessage": "rocketstore.client.received",
        "SendFuture": "rocketstore.client.sends",
        "SendManyFuture": "rocketstore.client.sends",
        "SendReceipt": "rocketstore.client.receipts",
        "TopicInfo": "rocketstore.client.topics",
        "TransactionEnd": "rocketstore.client.transactions",
        "TransactionReceipt": "rocketstore.client.transactions",
        "TransactionState": "rocketstore.client.transactions",
        "TransactionalProducer": "rocketstore.client.transactional_producer",
    },
)
