"""Consumers' subscriptions as filters, and which of them this broker serves."""

from __future__ import annotations

from dledger.errors import InvalidRequestError
from rocketstore.broker.live_config import LiveConfig
from rocketstore.broker.readers import ReadThreads
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.filter.filters import SQL92, TAG, Filters, MessageFilter

ALL = frozenset({"", "*"})
"""Expressions of tags that mean every message."""


class SubscriptionFilters:
    """On the loop."""

    def __init__(self, live: LiveConfig, readers: ReadThreads) -> None:
        self._live = live
        self._readers = readers
        self._filters = Filters()

    @property
    def errors(self) -> int:
        """How often a message was not delivered because its filter had no result; may be read on any thread."""
        return self._filters.errors

    async def of(self, kind: str, expression: str) -> MessageFilter | None:
        """The filter of a subscription of this kind; None: all messages.

        A condition that is new is parsed on a read thread. Raises ``Refusal``.
        """
        if kind in ("", TAG) and expression in ALL:
            return None
        self.require_kind(kind)
        try:
            if kind != SQL92 or self._filters.is_known(kind, expression):
                return self._filters.of(kind, expression)
            return await self._readers.run(self._filters.of, kind, expression)
        except InvalidRequestError as error:
            raise Refusal(RefusalKind.WRONG_FILTER, str(error)) from error

    def require_kind(self, kind: str) -> None:
        """Raises ``Refusal``, in RocketMQ's words, for filters that this broker does not have."""
        if kind not in ("", TAG, SQL92) or (kind == SQL92 and not self._live.now.enable_property_filter):
            reason = f"The broker does not support consumer to filter message by {kind[:64]}"
            if kind == SQL92:
                reason += " (enablePropertyFilter)"
            raise Refusal(RefusalKind.INVALID, reason)
