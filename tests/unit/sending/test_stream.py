"""One stream of requests: what becomes of what is under way when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from dledger.client.appends import AppendBatch, wire_of
from dledger.errors import DLedgerError, RequestTimeoutError
from dledger.rpc import options
from dledger.sending.batch import Batch
from dledger.sending.stream import Stream
from tests.support.waiting import wait_until


@contextmanager
def refusing_server(code: grpc.StatusCode, *, after: int) -> Iterator[str]:
    """Takes ``after`` requests of each append stream, answers none, and ends it with ``code``."""

    def stream(requests: Iterator[bytes], context: grpc.ServicerContext) -> None:
        context.send_initial_metadata(())
        for _ in range(after):
            next(requests)
        context.abort(code, "the permission was withdrawn")

    service, _, method = options.method(options.LOG_SERVICE, "AppendStream").lstrip("/").partition("/")
    handler = grpc.stream_stream_rpc_method_handler(stream)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def one_entry() -> AppendBatch:
    batch: AppendBatch = Batch(1, 0.0, 10_000.0, 10_000.0)
    batch.payloads = [b"x"]
    batch.complete()
    batch.begin(0.0, is_first=True)
    return batch


@pytest.mark.parametrize("code", [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED])
def test_what_was_sent_on_a_stream_that_is_refused_later_has_an_unknown_outcome(code: grpc.StatusCode) -> None:
    """Whatever the refusal says of a request of its own: what came before it may be stored."""
    outcomes: list[object] = []
    ended: list[object] = []
    with refusing_server(code, after=2) as address, grpc.insecure_channel(address) as channel:
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            options.method(options.LOG_SERVICE, "AppendStream"), request_serializer=None, response_deserializer=None
        )
        stream = Stream(
            method,
            address,
            wire_of("default"),
            lambda _stream, _batch, answer: outcomes.append(answer),
            ended.append,
            10,
        )
        for _ in range(2):
            assert stream.submit(one_entry()) is None
        wait_until(lambda: bool(ended), "it has ended")
        refusal = stream.submit(one_entry())
        stream.close()

    assert [type(one) for one in outcomes] == [RequestTimeoutError] * 2
    assert {one.outcome for one in outcomes if isinstance(one, DLedgerError)} == {"unknown"}
    assert refusal is not None
    assert refusal.outcome == "not_applied"
