"""Clients of a broker, of a group of brokers, or of a cluster of groups: producers, consumers and administrators."""

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
