"""The logs of several groups at one port: each request goes to the handlers of the group that it names.

A request whose group is missing, or none of this process's, goes to any of them, which answer what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from dledger.errors import InvalidRequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from dledger.remoting.log import codec, java
from dledger.remoting.log.codec import JavaCode, LogCode
from dledger.remoting.log.service import LogHandlers
from dledger.remoting.server import Answer, Direct, Handler
from dledger.rpc.clients.codec import group_named


class GroupedHandlers:
    """The handlers of at least one group, by its name. On the loop."""

    def __init__(self, groups: Mapping[str, LogHandlers]) -> None:
        self._groups: Final = groups
        self._any: Final = next(iter(groups.values()))
        self.direct: Final[Mapping[int, Direct]] = {code: partial(self._take, code) for code in self._any.direct}
        self.awaited: Final[Mapping[int, Handler]] = {code: partial(self._handle, code) for code in self._any.awaited}

    def closed(self, connection: RemotingConnection) -> None:
        """A client is gone."""
        for handlers in self._groups.values():
            handlers.closed(connection)

    def _take(self, code: int, connection: RemotingConnection, frame: Frame) -> None:
        self._named(code, frame).direct[code](connection, frame)

    async def _handle(self, code: int, connection: RemotingConnection, frame: Frame) -> Answer:
        return await self._named(code, frame).awaited[code](connection, frame)

    def _named(self, code: int, frame: Frame) -> LogHandlers:
        try:
            name = _NAMED.get(code, _by_field)(frame)
        except InvalidRequestError:  # its handler says so
            return self._any
        return self._groups.get(name, self._any)


def _by_field(frame: Frame) -> str:
    return group_named(frame.body)


def _in_json(frame: Frame) -> str:
    return java.text_of(java.request_of(frame), "group")


_NAMED: Final[Mapping[int, Callable[[Frame], str]]] = {
    LogCode.APPEND: lambda frame: codec.group_of_append(frame.body),
    LogCode.READ: lambda frame: codec.decode_read(frame.body).read.group,
    **dict.fromkeys(JavaCode, _in_json),
}
"""How requests name their group, unless as protobuf messages do."""
