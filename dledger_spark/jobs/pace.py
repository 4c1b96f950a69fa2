"""Rows per second, kept to in tasks: rows flow through at most as fast as that, whatever they came in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import Column

BURST_S: Final = 0.1
"""How much may go at once: what the rate makes of this time. It is also how smooth the rate is."""


@dataclass(slots=True)
class RowPace:
    """Waits so that rows go at ``rows_per_s`` from the first one on; what was late is not made up for."""

    rows_per_s: float
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], object] = time.sleep
    _free_at_s: float = field(default=0.0, init=False)

    def take(self, rows: int) -> None:
        """Return when ``rows`` more may go."""
        now = self.clock()
        self._free_at_s = max(self._free_at_s, now) + rows / self.rows_per_s
        if self._free_at_s > now:
            self.wait(self._free_at_s - now)


def rows_at_once(rows_per_s: float) -> int:
    """How many rows a task should be given at a time, for a smooth rate."""
    return max(1, min(10_000, round(rows_per_s * BURST_S)))


def paced(body: Column, rows_per_s: float, unpaced: tuple[int, ...]) -> Column:
    """``body`` as it is, at most so many per second and task; the first ``unpaced`` rows of each task go at once."""
    import pyarrow as pa
    from pyspark.sql.pandas.functions import arrow_udf  # where the types are found

    paces: dict[int, list[object]] = {}

    def flow(bodies: pa.Array) -> pa.Array:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        attempt = context.taskAttemptId()
        if attempt not in paces:
            paces.clear()  # one task after the other
            paces[attempt] = [RowPace(rows_per_s), unpaced[context.partitionId()]]
        pace, free = paces[attempt]
        assert isinstance(pace, RowPace)
        assert isinstance(free, int)
        going_free = min(free, len(bodies))
        paces[attempt][1] = free - going_free
        if len(bodies) > going_free:
            pace.take(len(bodies) - going_free)
        return bodies

    flow.__annotations__.update({"bodies": pa.Array, "return": pa.Array})  # Spark looks at these, not at their names
    make: Callable[..., Any] = arrow_udf  # Any: its types want a kind of function that it deprecates
    column: Column = make(flow, "binary")(body)
    return column
