"""The options of a member of a consumer group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

from dledger.errors import ConfigError
from dledger.limits import AboveZero, Bytes, Positive, Range, Unit, out_of_range
from dledger.values import MIB
from rocketstore.client.group_offsets import Start


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How a member consumes; all members of a group should have the same. Keyword arguments of ``GroupConsumer``.

    ``ordered``: the messages of a queue one after the other; a failing one is tried again in place. ``broadcast``: this
    member gets all queues and keeps its offsets itself, in ``offsets_file`` (None: only until it ends). ``start``:
    where a group begins in a topic that is new to it. ``retries_max``: how often a message is delivered again before it
    goes to the group's dead letters; None: as the group's settings say (16), and in order without end. ``commit_s``:
    how often offsets are committed. ``pending_messages_max`` and ``pending_bytes_max`` limit what is in use of each
    queue, ``stock_bytes_max`` what is pulled ahead of it. ``pending_span_max``: how far a queue goes on behind a
    message that is not done, because all of that comes again if this member is killed. ``consume_timeout_s``: a message
    that is not done after this time is sent back as if it had failed, except in order.
    """

    ordered: bool = False
    broadcast: bool = False
    offsets_file: Path | None = None
    start: Start = "last"
    retries_max: Annotated[int, Range(0)] | None = None
    commit_s: AboveZero = 5.0
    timeout_s: AboveZero = 5.0
    pending_messages_max: Positive = 1000
    pending_bytes_max: Bytes = 16 * MIB
    pending_span_max: Positive = 2000
    consume_timeout_s: AboveZero = 900.0
    pull_messages: Positive = 256
    pull_bytes: Bytes = MIB
    pull_wait_ms: Annotated[int, Range(0), Unit.MS] = 5000
    stock_bytes_max: Bytes = 4 * MIB

    def __post_init__(self) -> None:
        problems = out_of_range(self)
        if self.offsets_file is not None and not self.broadcast:
            problems.append("offsets_file is for broadcast: otherwise the brokers keep the group's offsets")
        if isinstance(self.start, str) and self.start not in ("first", "last"):
            problems.append(f"start must be 'first', 'last' or a time, not {self.start!r}")
        if problems:
            raise ConfigError(problems)


class GroupSettings(TypedDict, total=False):
    """The fields of ``GroupOptions``, for type checkers."""

    ordered: bool
    broadcast: bool
    offsets_file: Path | None
    start: Start
    retries_max: int | None
    commit_s: float
    timeout_s: float
    pending_messages_max: int
    pending_bytes_max: int
    pending_span_max: int
    consume_timeout_s: float
    pull_messages: int
    pull_bytes: int
    pull_wait_ms: int
    stock_bytes_max: int
