"""What gRPC says of a call that failed, as an error of this project."""

from __future__ import annotations

from typing import Final

import grpc

from dledger.client.signing import is_challenge
from dledger.errors import (
    AccessDeniedError,
    DLedgerError,
    InvalidRequestError,
    PendingFullError,
    RequestTimeoutError,
    RequestTooLargeError,
    TlsError,
    UnavailableError,
)
from dledger.rpc import tls
from dledger.values import CLIENT_PORT_OFFSET


def rpc_failure(error: grpc.RpcError, address: str, *, sent: bool) -> DLedgerError:
    """Translate a gRPC failure. ``sent``: the request may have changed something."""
    code, details = error.code(), error.details() or ""
    failure: DLedgerError
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            failure = RequestTimeoutError(f"no answer from {address} in time")
        case _ if code is grpc.StatusCode.UNIMPLEMENTED or _FROM_PEER_PORT in details:
            return InvalidRequestError(
                f"{address} does not serve clients ({details}): is this a peer port? Clients connect to the client "
                f"port, by default the peer port + {CLIENT_PORT_OFFSET}"
            )
        case grpc.StatusCode.UNAUTHENTICATED if is_challenge(error):
            failure = UnavailableError(f"{address} refused the host name it was addressed by: {details}")
            sent = False
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return AccessDeniedError(f"{address}: {details}")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequestError(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
            return RequestTooLargeError(f"the request is too large for {address}: {details}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            failure = PendingFullError(f"{address} has reached a limit: {details}")
        case _ if problem := tls.explain_channel(details, address):
            failure = TlsError(problem)
        case _ if sent:
            failure = RequestTimeoutError(
                f"the connection to {address} broke before the answer arrived: {reason_of(details)}"
            )
        case _:
            failure = UnavailableError(f"{address} is unreachable: {reason_of(details)}")
    if not sent:
        failure.outcome = "not_applied"
    return failure


_FROM_PEER_PORT: Final = "Expected SETTINGS frame as the first frame, got frame type 0"
"""What gRPC makes of the refusal of a peer port."""
_REASONS: Final = (
    ("Connection refused", "connection refused"),
    ("No route to host", "no route to host"),
    ("Network is unreachable", "the network is unreachable"),
    ("Host is down", "its machine is down"),
    ("DNS resolution failed", "its name cannot be resolved"),
    ("Failed parsing HTTP/2", "something other than a node or a broker listens there"),
    ("http1.x server", "something other than a node or a broker listens there"),
    ("Stream removed", "the connection broke"),
)
"""Parts of gRPC's messages, which name every address tried and every layer, and what they come to."""


def reason_of(details: str) -> str:
    """Why a connection failed, in few words; gRPC's own where there are none, or where TLS may be the reason."""
    if tls.is_silent_refusal(details):  # looked into by ``ChannelMaker.diagnose``
        return details
    return next((reason for part, reason in _REASONS if part in details), details)
