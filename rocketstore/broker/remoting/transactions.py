"""Transactions over remoting: a producer ends what it prepared."""

from __future__ import annotations

import asyncio
from typing import Final

from rocketstore.broker.parts import BrokerParts
from rocketstore.broker.transactions.service import EndRefusedError, NotReadyError
from rocketstore.remoting.codes import AnswerCode
from rocketstore.remoting.connection import RemotingConnection
from rocketstore.remoting.errors import RequestError
from rocketstore.remoting.frame import Frame
from rocketstore.remoting.headers import EndTransactionHeader, read_header
from rocketstore.types import BrokerRole

COMMIT: Final = 8
ROLLBACK: Final = 12
UNKNOWN: Final = 0


class RemotingTransactions:
    """On the loop."""

    def __init__(self, parts: BrokerParts) -> None:
        self._parts = parts

    async def end(self, _: RemotingConnection, frame: Frame) -> Frame:
        """END_TRANSACTION. It is oneway: what a producer does not hear of, a check will ask again."""
        parts, header = self._parts, read_header(EndTransactionHeader, frame.fields)
        if parts.store.role is BrokerRole.SLAVE:
            raise RequestError("this broker is a slave: end transactions at the master", AnswerCode.SLAVE_NOT_AVAILABLE)
        if header.commit_or_rollback == UNKNOWN:
            return frame.answer()
        if header.commit_or_rollback not in (COMMIT, ROLLBACK):
            raise RequestError(f"a transaction cannot end with {header.commit_or_rollback}")
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def done(problem: str) -> None:
            parts.bridge.post(lambda: None if ended.done() else ended.set_result(problem))

        try:
            await parts.readers.run(
                parts.transactions.end,
                header.tran_state_table_offset,
                header.commit_log_offset,
                header.producer_group,
                commit=header.commit_or_rollback == COMMIT,
                done=done,
            )
        except EndRefusedError as error:
            raise RequestError(str(error)) from error
        except NotReadyError as error:
            raise RequestError(str(error), AnswerCode.SERVICE_NOT_AVAILABLE) from error
        problem = await ended
        if problem:
            raise RequestError(problem)
        return frame.answer()
