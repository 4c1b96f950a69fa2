"""gRPC settings in one place: names of methods and services, and options of channels and servers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import grpc

from dledger.errors import ConfigError
from dledger.rpc.listening import GRPC_ADVICE, bind_problem
from dledger.values import MIB, address_text

if TYPE_CHECKING:  # clients, which start often, need no server's settings
    from dledger.config import ConnectionLimits, ServerConfig

LOG_SERVICE: Final = "dledger.v1.LogService"

Options = list[tuple[str, str | int]]

FRAMING_BYTES: Final = 64 * 1024
"""Room for the part of a message that is not log bytes."""
REQUEST_BYTES_MAX: Final = 8 * MIB
"""The largest client request, unless a single entry may be larger."""
_REQUEST_BYTES_KEY: Final = "request-bytes-max"
"""In the initial metadata of a stream of requests: the server's limit of a request's bytes."""
_STREAM_KINDS: Final = 4
"""Append, follow, watch, and health and reflection: ``client_streams_max`` applies to each; large reads are few."""
RECONNECT_MS_MIN: Final = 50
RECONNECT_MS_MAX: Final = 1000
"""Also the limit of one connection attempt: after a partition heals, the next attempt starts within that time."""


def method(service: str, name: str) -> str:
    """A method's path for gRPC."""
    return f"/{service}/{name}"


def push_bytes_limit(config: ServerConfig) -> int:
    """The largest push accepted: a full run and one more entry of the largest size."""
    return config.replication.push_bytes_max + config.store.max_entry_bytes + FRAMING_BYTES


def request_bytes_max(config: ServerConfig) -> int:
    """The largest client request: several entries, or one of the largest allowed size."""
    return request_bytes_for(config.store.entry_bytes_limit)


def request_bytes_for(item_bytes_max: int) -> int:
    """``request_bytes_max`` for a given size of the largest entry or message."""
    return max(REQUEST_BYTES_MAX, item_bytes_max) + FRAMING_BYTES


def limit_metadata(bytes_max: int) -> tuple[tuple[str, str], ...]:
    """States the limit of a stream's requests to the client, because gRPC would end the stream at a larger one."""
    return ((_REQUEST_BYTES_KEY, str(bytes_max)),)


def _limit_options(limits: ConnectionLimits) -> Options:
    """Options of every server for clients."""
    return [
        # Twice as many: ``connections`` decides which to close, and newcomers need room until then.
        ("grpc.max_allowed_incoming_connections", 2 * limits.connections_max),
        ("grpc.max_concurrent_streams", limits.connection_calls_max),
        ("grpc.max_connection_idle_ms", limits.connection_idle_ms_max),
        ("grpc.server_handshake_timeout_ms", limits.handshake_ms_max),
        # Between its two limits of a header's size gRPC refuses some calls, above the second one all.
        ("grpc.max_metadata_size", limits.header_bytes_max),
        ("grpc.absolute_max_metadata_size", limits.header_bytes_max),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", limits.ping_interval_ms_min),
        ("grpc.http2.max_ping_strikes", 3),
    ]


def too_long(limits: ConnectionLimits) -> str:
    """The message for an expired call."""
    return f"the call exceeded {limits.call_ms_max} ms (call_ms_max)"


def calls_max(config: ServerConfig) -> int:
    """The limit of concurrent calls of all clients of a node."""
    return 2 * config.replication.pending_entries_max + _STREAM_KINDS * config.client_streams_max


def client_server_options(config: ServerConfig, connection_calls_max: int) -> Options:
    """For a server of a node's log."""
    waiting_max = config.replication.pending_entries_max + config.client_streams_max
    limits = replace(config.limits, connection_calls_max=connection_calls_max)
    return server_options(limits, request_bytes_max(config), waiting_max)


def server_options(limits: ConnectionLimits, request_bytes_max: int, waiting_max: int) -> Options:
    """For any server."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", request_bytes_max),
        ("grpc.max_send_message_length", -1),
        # Calls that have arrived and wait for the event loop: a burst of appends must not cancel some of them.
        ("grpc.server.max_pending_requests", waiting_max),
        ("grpc.server.max_pending_requests_hard_limit", 2 * waiting_max),
        *_limit_options(limits),
    ]


def bind(
    server: grpc.Server | grpc.aio.Server,
    host: str,
    port: int,
    whose: str,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """Listen on ``host:port`` and return the port. Raises ``ConfigError`` if that fails."""
    address = address_text(host, port)
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError([bind_problem(host, port, whose, GRPC_ADVICE)]) from error
    if not bound:
        raise ConfigError([bind_problem(host, port, whose, GRPC_ADVICE)])
    return bound
