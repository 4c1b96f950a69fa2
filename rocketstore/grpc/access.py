"""Access control of RocketMQ 5's clients: ``authorization: MQv2-HMAC-SHA1 Credential=…, SignedHeaders=…, Signature=…``.

Only the date is signed: who reads one call can make others in its name for as long as the date is believed. So accounts
over gRPC are as safe as the connection: use TLS.
"""

from __future__ import annotations

import hmac
import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from dledger.access.addresses import host_of
from dledger.access.guard import Caller, NotAuthenticatedError, quota_at
from dledger.access.quota import Quota
from rocketstore.broker.broker import Broker
from rocketstore.broker.permissions import Need, require
from rocketstore.grpc.calls import CallHeaders
from rocketstore.grpc.codes import RejectedError
from rocketstore.pb import definition_pb2 as pb

WINDOW_S: Final = 15 * 60
"""How far a call's date may be from this server's clock."""
_ALGORITHM: Final = "MQv2-HMAC-SHA1"
_AUTHORIZATION: Final = re.compile(
    rf"{_ALGORITHM} +Credential=(?P<key>[^,/\s]{{1,128}})[^,]*, *SignedHeaders=x-mq-date-time, *"
    r"Signature=(?P<signature>[0-9a-fA-F]{40})"
)
_DATE: Final = "%Y%m%dT%H%M%SZ"


class GatewayAccess:
    """On the loop."""

    def __init__(self, broker: Broker) -> None:
        self._guard = broker.shares.guard
        self._quotas = broker.shares.quotas
        self._clock = broker.loop.clock

    def admit(self, method: str, headers: CallHeaders, peers: tuple[str, ...]) -> tuple[Caller | None, Quota]:
        """The caller (None without access control), and its quota.

        ``peers``: gRPC's names of where the call came from, and of the member that passed it on. Raises
        ``RejectedError``, ``NotAuthenticatedError``.
        """
        if not headers.client_id:
            raise RejectedError(pb.CLIENT_ID_REQUIRED, "the metadata x-mq-client-id is missing: every client has an id")
        if headers.namespace:
            raise RejectedError(pb.NOT_IMPLEMENTED, "x-mq-namespace: this broker has no namespaces, leave it empty")
        guard = self._guard
        if guard is None:
            return None, quota_at(_host_of(peers[0]), peers[0], self._quotas)
        key, signature = "", ""
        if headers.authorization:
            found = _AUTHORIZATION.fullmatch(headers.authorization)
            if found is None:
                raise NotAuthenticatedError(f"the metadata authorization must be of the form {_ALGORITHM}")
            key, signature = found["key"], found["signature"].lower()

        def is_genuine(secret: bytes) -> bool:
            made = hmac.new(secret, headers.date_time.encode(), "sha1").hexdigest()
            return hmac.compare_digest(made, signature)

        caller = guard.admit_signed(method, key, peers, is_genuine, self._quotas)
        if caller.signed:
            self._check_date(headers.date_time)
        return caller, caller.quota

    def require(self, caller: Caller | None, method: str, needs: Iterable[Need]) -> None:
        """Raises ``AccessDeniedError`` unless the caller has these permissions."""
        if self._guard is not None and caller is not None:
            for need in needs:
                require(self._guard, caller, method, need)

    def _check_date(self, text: str) -> None:
        """In ISO 8601, of whose forms most clients take the shortest, and that of Rust RFC 3339."""
        try:
            signed = datetime.fromisoformat(text)
            signed_s = signed.timestamp() if signed.tzinfo is not None else math.nan
        except (ValueError, OverflowError):
            signed_s = math.nan
        if math.isnan(signed_s):
            raise NotAuthenticatedError("invalid x-mq-date-time: use the form 20261130T120000Z")
        now_s = self._clock.wall_ms() / 1000
        if abs(now_s - signed_s) > WINDOW_S:
            now = datetime.fromtimestamp(now_s, UTC).strftime(_DATE)
            raise NotAuthenticatedError(
                f"the call was signed at {text}, but this server's clock reads {now}: more than "
                f"{WINDOW_S // 60} minutes apart; synchronize the clocks"
            )


@lru_cache(maxsize=4096)
def _host_of(peer: str) -> str:
    return host_of(peer)
