"""Transactions over remoting: END_TRANSACTION and RESUME_CHECK_HALF_MESSAGE."""

from __future__ import annotations

from typing import Final

from dledger.remoting.connection import RemotingConnection
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker.resumptions import Resumptions
from rocketstore.remoting.headers import EndTransactionHeader, ResumeCheckHeader, read_header

COMMIT: Final = 8
ROLLBACK: Final = 12
UNKNOWN: Final = 0


class RemotingTransactions:
    """On the loop."""

    def __init__(self, broker: Broker) -> None:
        self._ends = broker.ends
        self._mastership = broker.mastership
        self._resumptions = Resumptions(
            broker.store, broker.state, broker.loop.bridge, broker.loop.readers, broker.mastership, broker.store_host
        )

    async def end(self, _: RemotingConnection, frame: Frame) -> Frame:
        """END_TRANSACTION. It is oneway: what a producer does not hear of, a check will ask again."""
        header = read_header(EndTransactionHeader, frame.fields)
        if header.commit_or_rollback not in (COMMIT, ROLLBACK, UNKNOWN):
            raise RequestError(f"a transaction cannot end with {header.commit_or_rollback}")
        if header.commit_or_rollback == UNKNOWN:
            self._mastership.require()
        else:
            await self._ends.end(
                header.tran_state_table_offset,
                header.commit_log_offset,
                header.producer_group,
                commit=header.commit_or_rollback == COMMIT,
            )
        return frame.answer()

    async def resume(self, _: RemotingConnection, frame: Frame) -> Frame:
        """RESUME_CHECK_HALF_MESSAGE: begin a transaction again that was given up, once for each master."""
        await self._resumptions.resume(read_header(ResumeCheckHeader, frame.fields).msg_id)
        return frame.answer()
