"""Clients of RocketMQ's brokers, ours and Apache's: ``Producer``, ``Consumer``, ``SimpleConsumer`` and ``Admin``.

These block; ``rocketstore.client.aio`` has the same classes for asyncio. Everything else that an application needs is
imported from here for both. A name's module is loaded when the name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dledger.late_names import late_names

if TYPE_CHECKING:
    from dledger.client.shared import ClientSecurity, TlsFiles
    from dledger.errors import ConfigError, DLedgerError, TlsError
    from rocketstore.client.aio.admin_requests import (
        BrokerStatus,
        ConsumeMode,
        GroupInfo,
        QueueProgress,
        QueueRange,
        TopicInfo,
    )
    from rocketstore.client.aio.consumer_options import ConsumerOptions, Sql
    from rocketstore.client.aio.errors import (
        BadAnswerError,
        BrokerBusyError,
        BrokerFailedError,
        BrokerUnreachableError,
        ClientClosedError,
        ClientError,
        ConnectionEndedError,
        ForbiddenError,
        MessageRefusedError,
        NoQueueError,
        NotFoundError,
        NotMasterError,
        NumberOutOfOrderError,
        OffsetOutOfRangeError,
        PartlySentError,
        PreparedMessage,
        ProducerForgottenError,
        RefusedError,
        RequestNotKnownError,
        SendQueueFullError,
        SendResult,
        SendStatus,
        TimedOutError,
        TransactionResult,
        TransactionState,
        UnreadableBodyError,
    )
    from rocketstore.client.aio.outgoing import PipelineLimits
    from rocketstore.client.aio.producer import ProducerOptions
    from rocketstore.client.aio.received import ConsumedMessage, PoppedMessage
    from rocketstore.client.aio.simple_consumer import SimpleOptions
    from rocketstore.client.blocking import Admin, NumberedProducer, Producer, Transaction
    from rocketstore.client.blocking_consumer import Consumer, SimpleConsumer
    from rocketstore.message.message import Message
    from rocketstore.remoting.topics import MessageQueue

__all__ = [
    "Admin",
    "BadAnswerError",
    "BrokerBusyError",
    "BrokerFailedError",
    "BrokerStatus",
    "BrokerUnreachableError",
    "ClientClosedError",
    "ClientError",
    "ClientSecurity",
    "ConfigError",
    "ConnectionEndedError",
    "ConsumeMode",
    "ConsumedMessage",
    "Consumer",
    "ConsumerOptions",
    "DLedgerError",
    "ExponentialRetryDelays",
    "FixedRetryDelays",
    "ForbiddenError",
    "GroupInfo",
    "Message",
    "MessageQueue",
    "MessageRefusedError",
    "NoQueueError",
    "NotFoundError",
    "NotMasterError",
    "NumberOutOfOrderError",
    "NumberedProducer",
    "OffsetOutOfRangeError",
    "PartlySentError",
    "PipelineLimits",
    "PoppedMessage",
    "PreparedMessage",
    "Producer",
    "ProducerForgottenError",
    "ProducerOptions",
    "QueueProgress",
    "QueueRange",
    "RefusedError",
    "RequestMode",
    "RequestNotKnownError",
    "SendQueueFullError",
    "SendResult",
    "SendStatus",
    "SimpleConsumer",
    "SimpleOptions",
    "Sql",
    "TimedOutError",
    "TlsError",
    "TlsFiles",
    "TopicInfo",
    "Transaction",
    "TransactionResult",
    "TransactionState",
    "UnreadableBodyError",
]

__getattr__ = late_names(
    __name__,
    {
        "Admin": "rocketstore.client.blocking",
        "BadAnswerError": "rocketstore.client.aio.errors",
        "BrokerBusyError": "rocketstore.client.aio.errors",
        "BrokerFailedError": "rocketstore.client.aio.errors",
        "BrokerStatus": "rocketstore.client.aio.admin_requests",
        "BrokerUnreachableError": "rocketstore.client.aio.errors",
        "ClientClosedError": "rocketstore.client.aio.errors",
        "ClientError": "rocketstore.client.aio.errors",
        "ClientSecurity": "dledger.client.shared",
        "ConfigError": "dledger.errors",
        "ConnectionEndedError": "rocketstore.client.aio.errors",
        "ConsumeMode": "rocketstore.client.aio.admin_requests",
        "ConsumedMessage": "rocketstore.client.aio.received",
        "Consumer": "rocketstore.client.blocking_consumer",
        "ConsumerOptions": "rocketstore.client.aio.consumer_options",
        "DLedgerError": "dledger.errors",
        "ExponentialRetryDelays": "rocketstore.state.attributes",
        "FixedRetryDelays": "rocketstore.state.attributes",
        "ForbiddenError": "rocketstore.client.aio.errors",
        "GroupInfo": "rocketstore.client.aio.admin_requests",
        "Message": "rocketstore.message.message",
        "MessageQueue": "rocketstore.remoting.topics",
        "MessageRefusedError": "rocketstore.client.aio.errors",
        "NoQueueError": "rocketstore.client.aio.errors",
        "NotFoundError": "rocketstore.client.aio.errors",
        "NotMasterError": "rocketstore.client.aio.errors",
        "NumberOutOfOrderError": "rocketstore.client.aio.errors",
        "NumberedProducer": "rocketstore.client.blocking",
        "OffsetOutOfRangeError": "rocketstore.client.aio.errors",
        "PartlySentError": "rocketstore.client.aio.errors",
        "PipelineLimits": "rocketstore.client.aio.outgoing",
        "PoppedMessage": "rocketstore.client.aio.received",
        "PreparedMessage": "rocketstore.client.aio.errors",
        "Producer": "rocketstore.client.blocking",
        "ProducerForgottenError": "rocketstore.client.aio.errors",
        "ProducerOptions": "rocketstore.client.aio.producer",
        "QueueProgress": "rocketstore.client.aio.admin_requests",
        "QueueRange": "rocketstore.client.aio.admin_requests",
        "RefusedError": "rocketstore.client.aio.errors",
        "RequestMode": "rocketstore.types",
        "RequestNotKnownError": "rocketstore.client.aio.errors",
        "SendQueueFullError": "rocketstore.client.aio.errors",
        "SendResult": "rocketstore.client.aio.errors",
        "SendStatus": "rocketstore.client.aio.errors",
        "SimpleConsumer": "rocketstore.client.blocking_consumer",
        "SimpleOptions": "rocketstore.client.aio.simple_consumer",
        "Sql": "rocketstore.client.aio.consumer_options",
        "TimedOutError": "rocketstore.client.aio.errors",
        "TlsError": "dledger.errors",
        "TlsFiles": "dledger.client.shared",
        "TopicInfo": "rocketstore.client.aio.admin_requests",
        "Transaction": "rocketstore.client.blocking",
        "TransactionResult": "rocketstore.client.aio.errors",
        "TransactionState": "rocketstore.client.aio.errors",
        "UnreadableBodyError": "rocketstore.client.aio.errors",
    },
)
