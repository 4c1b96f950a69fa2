"""The encoding of the log's ``AppendStream`` of gRPC."""

from __future__ import annotations

import grpc

from dledger.client.appends import AppendBatch, AppendedResults, too_large
from dledger.client.rpc_failures import rpc_failure
from dledger.client.shared import AppendResult, results_of
from dledger.errors import DLedgerError, InvalidRequestError
from dledger.records import record
from dledger.rpc import options
from dledger.rpc.clients import codec
from dledger.sending.batch import AllStored, Answer
from dledger.sending.stream import Wire
from dledger.types import ProducerBatch


@record(frozen=True, slots=True)
class _Words:
    group: str

    def encode(self, batch: AppendBatch, number: int) -> bytes:
        payloads = batch.payloads
        bodies = payloads if len(batch.sent) == len(payloads) else [payloads[place] for place in batch.sent]
        producer = ProducerBatch(batch.producer, batch.sequence, len(bodies)) if batch.producer else None
        # For unnumbered requests, the node itself refuses to store one that follows a refused one.
        return codec.encode_append(codec.Append(self.group, bodies, number, ordered=not producer, producer=producer))

    def decode(self, data: bytes, _address: str) -> tuple[int, Answer[AppendResult]]:
        number, outcome = codec.decode_appended(data)
        if isinstance(outcome, DLedgerError):
            return number, outcome
        return number, AllStored(results_of(outcome) if outcome.duplicates else AppendedResults(outcome))


def wire_of(group: str) -> Wire[None, AppendResult]:
    """The encoding of appends to a group's log."""
    words = _Words(group)
    return Wire(
        words.encode,
        words.decode,
        _failure_of,
        InvalidRequestError,
        too_large,
        request_bytes_max=options.stated_limit,
    )


def _failure_of(error: grpc.RpcError, address: str, sent: bool) -> DLedgerError:
    return rpc_failure(error, address, sent=sent)
