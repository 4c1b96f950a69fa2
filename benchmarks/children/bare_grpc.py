"""What gRPC for Python costs by itself: a server that answers each call at once, and clients that do nothing else.

``python -m benchmarks.children.bare_grpc serve`` writes its port; ``call ADDRESS SECONDS WINDOW BYTES`` calls it and
writes how many calls were answered, and the processor time of them. ``serve`` answers ``cpu`` by its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Final

import grpc
from grpc import aio

METHOD: Final = "/apache.rocketmq.v2.MessagingService/SendMessage"
ANSWER_BYTES: Final = 100
"""As long as the gateway's answer to a message."""


class _Answering(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # it takes none when it runs
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        del handler_call_details
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, request: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        del request, context
        return bytes(ANSWER_BYTES)


async def serve() -> None:
    """Until the input ends."""
    server = aio.server()
    server.add_generic_rpc_handlers((_Answering(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say({"port": port})
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        say({"cpu_s": time.process_time()})
    await server.stop(0)


async def call(address: str, seconds: float, window: int, size: int) -> None:
    """So many at a time."""
    request, answered = bytes(size), 0
    async with aio.insecure_channel(address) as channel:
        ask = channel.unary_unary(METHOD, None, None)
        await ask(request)
        end = time.monotonic() + seconds
        began, cpu_s = time.time(), time.process_time()

        async def one_after_the_other() -> None:
            nonlocal answered
            while time.monotonic() < end:
                await ask(request)
                answered += 1

        async with asyncio.TaskGroup() as tasks:
            for _ in range(window):
                tasks.create_task(one_after_the_other())
    say({"began": began, "ended": time.time(), "count": answered, "cpu_s": time.process_time() - cpu_s})


def say(found: dict[str, float]) -> None:
    """A line."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def main() -> None:
    """See the module."""
    if sys.argv[1] == "serve":
        asyncio.run(serve())
    else:
        address, seconds, window, size = sys.argv[2:]
        asyncio.run(call(address, float(seconds), int(window), int(size)))


if __name__ == "__main__":
    main()
