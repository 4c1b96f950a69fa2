"""EndTransaction, and the question about transactions whose end was not heard of."""

from __future__ import annotations

from functools import partial

from dledger.errors import CorruptLogError, InvalidRequestError, ShutdownError
from rocketstore.broker.broker import Broker
from rocketstore.broker.clients import HalfCheck
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.transactions.run import EndedBeforeError, EndingError, EndRefusedError
from rocketstore.grpc.calls import GatewayCall, name_of
from rocketstore.grpc.checks import check_topic_name
from rocketstore.grpc.codes import OK, RejectedError
from rocketstore.grpc.messages import to_client
from rocketstore.grpc.sends import parse_transaction_id
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs


class TransactionCalls:
    """On the loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def end(self, _: GatewayCall, request: pbs.EndTransactionRequest) -> pbs.EndTransactionResponse:
        """EndTransaction. A resolution that is not known yet keeps the message, and its producer is asked again."""
        topic = check_topic_name(name_of(request.topic))
        queue_offset, offset = parse_transaction_id(request.transaction_id)
        is_commit = request.resolution == pb.COMMIT
        if request.resolution not in (pb.COMMIT, pb.ROLLBACK):
            self._broker.mastership.require()
            return pbs.EndTransactionResponse(status=OK)
        try:
            await self._broker.ends.end(queue_offset, offset, topic, commit=is_commit)
        except EndingError as error:  # who passes on calls asks again, until that is done
            raise Refusal(RefusalKind.UNAVAILABLE, str(error)) from None
        except EndedBeforeError as error:
            await self._check_same_end(topic, request.message_id, is_commit=is_commit, reason=str(error))
        except EndRefusedError as error:
            raise RejectedError(pb.INVALID_TRANSACTION_ID, str(error)) from None
        return pbs.EndTransactionResponse(status=OK)

    async def _check_same_end(self, topic: str, message_id: str, *, is_commit: bool, reason: str) -> None:
        """A producer that repeats how a transaction ends has been heard. Raises ``RejectedError`` if it ended in the
        other way: nobody can take that back.
        """
        store = self._broker.store
        find = partial(store.query, topic, message_id, 1, 0, 1 << 62, unique=True)
        try:
            is_committed = bool(await self._broker.loop.readers.run(find))
        except (CorruptLogError, InvalidRequestError, ShutdownError):
            is_committed = False
        if is_committed != is_commit:
            how = "committed" if is_committed else "rolled back, or never was"
            raise RejectedError(pb.INVALID_TRANSACTION_ID, f"{reason}; it was {how}")

    def question(self, check: HalfCheck) -> bytes:
        """The command that asks a producer what became of a transaction. Raises ``CorruptRecordError``."""
        message = to_client(check.record, self._broker.config.store.max_message_size)
        message.system_properties.message_type = pb.TRANSACTION
        command = pbs.RecoverOrphanedTransactionCommand(
            message=message, transaction_id=f"{check.queue_offset:x}-{check.offset:x}"
        )
        return pbs.TelemetryCommand(recover_orphaned_transaction_command=command).SerializeToString()
