"""Access control at a gRPC server: authentication, the form of refusals, and the end of streams of revoked keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import grpc

from dledger.access import signing
from dledger.access.guard import AccessGuard, Caller, NotAuthenticatedError, OtherAudienceError, SessionsFullError
from dledger.access.quota import Quotas, TooManyWaitsError
from dledger.errors import AccessDeniedError, DLedgerError

Context = grpc.aio.ServicerContext[bytes, bytes]

REFUSALS: Final = (AccessDeniedError, SessionsFullError, TooManyWaitsError)
"""The errors that a guard raises and ``refusal_of`` understands."""


def admit(guard: AccessGuard, quotas: Quotas, method: str, context: Context, peer: str, body: bytes | None) -> Caller:
    """Authenticate and authorize a call; ``body`` None: a stream of requests. Raises ``REFUSALS``."""
    return guard.admit(method, context.invocation_metadata() or (), peer, body, quotas)


def _always() -> bool:
    return True


@contextmanager
def open_stream(guard: AccessGuard, caller: Caller, still_allowed: Callable[[], bool] = _always) -> Iterator[None]:
    """Wraps a stream's handler, on its task: ends it when the key is revoked or ``still_allowed`` returns False."""
    task = asyncio.current_task()
    revoked: list[str] = []

    def end(why: str) -> None:
        revoked.append(why)
        if task is not None:
            task.cancel()

    guard.enter(caller, end, still_allowed)
    try:
        yield
    except asyncio.CancelledError:
        if not revoked or task is None:
            raise
        task.uncancel()
        raise guard.ended(caller, revoked[0]) from None
    finally:
        guard.leave(caller)


def refusal_of(guard: AccessGuard | None, error: DLedgerError) -> tuple[grpc.StatusCode, tuple[tuple[str, str], ...]]:
    """The status and trailing metadata of an error of ``REFUSALS``."""
    match error:
        case OtherAudienceError() if guard is not None:
            told = ((signing.REFUSAL, signing.CHALLENGE), (signing.AUDIENCE, guard.audience))
            return grpc.StatusCode.UNAUTHENTICATED, told
        case NotAuthenticatedError():
            return grpc.StatusCode.UNAUTHENTICATED, ((signing.REFUSAL, signing.DENIED),)
        case AccessDeniedError():
            return grpc.StatusCode.PERMISSION_DENIED, ((signing.REFUSAL, signing.DENIED),)
        case _:
            return grpc.StatusCode.RESOURCE_EXHAUSTED, ((signing.REFUSAL, signing.BUSY),)
