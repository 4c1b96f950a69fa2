"""The log services of several groups at one port of gRPC: each call goes to that of the group that it names.

A call whose group is missing, or none of this process's, goes to any of them, which answers what is wrong with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping
from typing import Any, Final

import grpc

from dledger.errors import InvalidRequestError
from dledger.rpc.clients.aio_server import Methods
from dledger.rpc.clients.codec import group_named

GROUP_METADATA: Final = "dledger-group"
"""Names the group of a stream of requests, which is admitted before the first of them arrives."""

_Context = grpc.aio.ServicerContext[bytes, bytes]
_Handler = Any  # grpc.RpcMethodHandler, whose stubs lack the functions that it holds


def grouped(services: Mapping[str, Methods]) -> Methods:
    """The methods of at least one group's log service, by the group's name, as those of one service."""
    some = next(iter(services.values()))
    return {name: _grouped({group: methods[name] for group, methods in services.items()}) for name in some}


def _grouped(groups: Mapping[str, _Handler]) -> _Handler:
    some = next(iter(groups.values()))

    def named(data: bytes) -> _Handler:
        try:
            return groups.get(group_named(data), some)
        except InvalidRequestError:  # its handler says so
            return some

    async def call(data: bytes, context: _Context) -> bytes:
        answer: bytes = await named(data).unary_unary(data, context)
        return answer

    async def stream(data: bytes, context: _Context) -> None:
        await named(data).unary_stream(data, context)

    async def streams(requests: AsyncIterable[bytes], context: _Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        name = str(metadata.get(GROUP_METADATA, ""))
        if not name and len(groups) > 1:
            told = f"this node serves the groups {', '.join(sorted(groups))}: name one in the metadata {GROUP_METADATA}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, told)
        await groups.get(name, some).stream_stream(requests, context)

    if some.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(call)
    if some.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(stream)
    return grpc.stream_stream_rpc_method_handler(streams)
