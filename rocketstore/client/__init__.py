"""Clients of a broker, of a group of brokers, or of a cluster of groups: producers, consumers and administrators.

Everything that an application needs is imported from here, messages and errors included; a name's module is loaded
when the name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dledger.late_names import late_names

if TYPE_CHECKING:
    from dledger.client.security import ClientSecurity, TlsFiles
    from dledger.errors import (
        AccessDeniedError,
        ConfigError,
        DLedgerError,
        InvalidRequestError,
        OutOfOrderSequenceError,
        PendingFullError,
        RequestTimeoutError,
        TlsError,
        TooManyProducersError,
        UnavailableError,
        UnknownProducerError,
    )
    from rocketstore.client.admin import Admin, BrokerStatus, QueueProgress, QueueRange
    from rocketstore.client.aio.errors import BadAnswerError
    from rocketstore.client.aio.received import ReceivedMessage
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
    from rocketstore.client.errors import (
        BrokerBusyError,
        MessageRefusedError,
        NotFoundError,
        NotMasterError,
        OffsetOutOfRangeError,
        PartlySentError,
        SendOutcomeUnknownError,
        StoreFailedError,
    )
    from rocketstore.client.group_consumer import GroupConsumer
    from rocketstore.client.group_options import GroupOptions
    from rocketstore.client.producer import MessageSender, Producer
    from rocketstore.client.receipts import SendReceipt
    from rocketstore.client.sends import SendFuture, SendManyFuture
    from rocketstore.client.shares import GroupDelivery, QueueName
    from rocketstore.client.topics import TopicInfo
    from rocketstore.client.transactional_producer import TransactionalProducer
    from rocketstore.client.transactions import PreparedMessage, TransactionEnd, TransactionReceipt, TransactionState
    from rocketstore.message.message import Message
    from rocketstore.types import PutMessageStatus

__all__ = [
    "AccessDeniedError",
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
    "BadAnswerError",
    "BrokerBusyError",
    "BrokerStatus",
    "ClientSecurity",
    "ClusterAdmin",
    "ClusterConsumer",
    "ClusterProducer",
    "ClusterSender",
    "ClusterTransactionalProducer",
    "ConfigError",
    "Consumer",
    "ConsumerOptions",
    "DLedgerError",
    "GroupConsumer",
    "GroupDelivery",
    "GroupOptions",
    "InvalidRequestError",
    "Message",
    "MessageRefusedError",
    "MessageSender",
    "NotFoundError",
    "NotMasterError",
    "OffsetOutOfRangeError",
    "OutOfOrderSequenceError",
    "PartlySentError",
    "PendingFullError",
    "PreparedMessage",
    "Producer",
    "PutMessageStatus",
    "QueueName",
    "QueueProgress",
    "QueueRange",
    "ReceivedMessage",
    "RequestTimeoutError",
    "SendFuture",
    "SendManyFuture",
    "SendOutcomeUnknownError",
    "SendReceipt",
    "StoreFailedError",
    "TlsError",
    "TlsFiles",
    "TooManyProducersError",
    "TopicInfo",
    "TransactionEnd",
    "TransactionReceipt",
    "TransactionState",
    "TransactionalProducer",
    "UnavailableError",
    "UnknownProducerError",
]

__getattr__ = late_names(
    __name__,
    {
        "AccessDeniedError": "dledger.errors",
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
        "BadAnswerError": "rocketstore.client.aio.errors",
        "BrokerBusyError": "rocketstore.client.errors",
        "BrokerStatus": "rocketstore.client.admin",
        "ClientSecurity": "dledger.client.security",
        "ClusterAdmin": "rocketstore.client.cluster_admin",
        "ClusterConsumer": "rocketstore.client.cluster_consumer",
        "ClusterProducer": "rocketstore.client.cluster_producer",
        "ClusterSender": "rocketstore.client.cluster_producer",
        "ClusterTransactionalProducer": "rocketstore.client.cluster_transactions",
        "ConfigError": "dledger.errors",
        "Consumer": "rocketstore.client.consumer",
        "ConsumerOptions": "rocketstore.client.consumer",
        "DLedgerError": "dledger.errors",
        "GroupConsumer": "rocketstore.client.group_consumer",
        "GroupDelivery": "rocketstore.client.shares",
        "GroupOptions": "rocketstore.client.group_options",
        "InvalidRequestError": "dledger.errors",
        "Message": "rocketstore.message.message",
        "MessageRefusedError": "rocketstore.client.errors",
        "MessageSender": "rocketstore.client.producer",
        "NotFoundError": "rocketstore.client.errors",
        "NotMasterError": "rocketstore.client.errors",
        "OffsetOutOfRangeError": "rocketstore.client.errors",
        "OutOfOrderSequenceError": "dledger.errors",
        "PartlySentError": "rocketstore.client.errors",
        "PendingFullError": "dledger.errors",
        "PreparedMessage": "rocketstore.client.transactions",
        "Producer": "rocketstore.client.producer",
        "PutMessageStatus": "rocketstore.types",
        "QueueName": "rocketstore.client.shares",
        "QueueProgress": "rocketstore.client.admin",
        "QueueRange": "rocketstore.client.admin",
        "ReceivedMessage": "rocketstore.client.aio.received",
        "RequestTimeoutError": "dledger.errors",
        "SendFuture": "rocketstore.client.sends",
        "SendManyFuture": "rocketstore.client.sends",
        "SendOutcomeUnknownError": "rocketstore.client.errors",
        "SendReceipt": "rocketstore.client.receipts",
        "StoreFailedError": "rocketstore.client.errors",
        "TlsError": "dledger.errors",
        "TlsFiles": "dledger.client.security",
        "TooManyProducersError": "dledger.errors",
        "TopicInfo": "rocketstore.client.topics",
        "TransactionEnd": "rocketstore.client.transactions",
        "TransactionReceipt": "rocketstore.client.transactions",
        "TransactionState": "rocketstore.client.transactions",
        "TransactionalProducer": "rocketstore.client.transactional_producer",
        "UnavailableError": "dledger.errors",
        "UnknownProducerError": "dledger.errors",
    },
)
