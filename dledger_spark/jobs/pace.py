"""Rate limiting in tasks: rows pass at most at a given rate, whatever the sizes of batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import Column

BURST_S: Final = 0.1
"""Rows that may pass at once, as time at the given rate. It is also the granularity of the rate."""


@dataclass(slots=True)
class RowPace:
    """Waits so that rows pass at ``rows_per_s``, counted from the first one; lost time is not made up for."""

    rows_per_s: float
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], object] = time.sleep
    _free_at_s: float = field(default=0.0, init=False)

    def take(self, rows: int) -> None:
        """Return when ``rows`` more may pass."""
        now = self.clock()
        self._free_at_s = max(self._free_at_s, now) + rows / self.rows_per_s
        if self._free_at_s > now:
            self.wait(self._free_at_s - now)


def rows_at_once(rows_per_s: float) -> int:
    """How many rows to give to a task at a time, for an even rate."""
    return max(1, min(10_000, round(rows_per_s * BURST_S)))


def paced(body: Column, rows_per_s: float, unpaced: tuple[int, ...]) -> Column:
    """``body`` unchanged, at a limited rate per task; the first ``unpaced`` rows of each task are not delayed."""
    import pyarrow as pa
    from pyspark.sql.pandas.functions import arrow_udf  # which is where the types are

    paces: dict[int, list[object]] = {}

    def flow(bodies: pa.Array) -> pa.Array:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        attempt = context.taskAttemptId()
        if attempt not in paces:
            paces.clear()  # tasks run one after the other
            paces[attempt] = [RowPace(rows_per_s), unpaced[context.partitionId()]]
        pace, free = paces[attempt]
        assert isinstance(pace, RowPace)
        assert isinstance(free, int)
        going_free = min(free, len(bodies))
        paces[attempt][1] = free - going_free
        if len(bodies) > going_free:
            pace.take(len(bodies) - going_free)
        return bodies

    flow.__annotations__.update({"bodies": pa.Array, "return": pa.Array})  # Spark inspects the objects, not names
    make: Callable[..., Any] = arrow_udf  # Any: its types expect a kind of function that it deprecates
    column: Column = make(flow, "binary")(body)
    return column
