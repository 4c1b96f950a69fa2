"""The client for threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dledger.client.aio.large_reads import ReadFrom
from dledger.client.append_calls import AppendCalls
from dledger.client.bulk import BulkReads, BulkTarget, ClientContext
from dledger.client.security import ClientSecurity
from dledger.rpc.clients.bulk_codec import BlockDigests, FetchLog, Locate, LocatedEntries
from dledger.types import BlockDigest, LogChunk, LogIndex, Position


class DLedgerClient(AppendCalls):
    """Talks to a group. Thread-safe; every call has a deadline (``timeout_s``) and retries until then if that is safe.

    ``addresses``: client addresses of one or more nodes; the others are learnt. Errors are ``DLedgerError`` subclasses;
    their ``outcome`` says whether a failed append may still be in the log (``"unknown"``) or not (``"not_applied"``).
    """

    def __init__(
        self,
        addresses: Sequence[str] | str,
        *,
        group: str = "default",
        timeout_s: float = 5.0,
        security: ClientSecurity | None = None,
        enable_idempotence: bool = True,
    ) -> None:
        super().__init__(
            addresses, group=group, timeout_s=timeout_s, security=security, enable_idempotence=enable_idempotence
        )
        self._bulk = BulkReads(
            ClientContext(group, self._directory, self._channels, self._seeker, self._ask_all, self._maker.diagnose)
        )

    # --- large reads --------------------------------------------------------------------------------------------------

    def fetch_log(
        self,
        first_index: int,
        end_index: int | None = None,
        *,
        max_bytes: int = 0,
        chunk_bytes: int = 0,
        read_from: ReadFrom = ReadFrom.LEADER,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[LogChunk]:
        """Yield committed entries as they are stored, from ``first_index`` to before ``end_index``.

        None: all that the member asked knows to be committed. That may be less than was acknowledged, even at a newly
        elected leader; to get everything, append an entry or read one linearizably, and use its index as the end. The
        entries come in order, each once, in chunks of about ``chunk_bytes`` (0: 1 MiB; one entry may be larger); with
        ``max_bytes`` the last chunk is the one that exceeds it. Continues at another member when one fails, is behind,
        is damaged or keeps less, and raises when nothing new arrives for ``timeout_s``. ``address`` picks one node and
        no other.

        Raises ``IndexBeforeBeginError`` (no member keeps all of it any more), ``IndexOutOfRangeError`` (it begins
        beyond the committed end, even after waiting), ``CorruptLogError`` and ``DiskError`` (naming file and offset),
        ``PendingFullError`` (too many readers).
        """
        end = LogIndex(0 if end_index is None else end_index)
        if end_index is not None and end_index <= first_index:
            return iter(())
        request = FetchLog(self.group, LogIndex(first_index), end, max_bytes, chunk_bytes)
        return self._bulk.fetch(request, self._target(read_from, address, timeout_s))

    def block_digests(
        self,
        from_position: int = 0,
        end_position: int | None = None,
        *,
        block_bytes: int = 0,
        read_from: ReadFrom = ReadFrom.LEADER,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[BlockDigest]:
        """Yield checksums of the blocks of a member's committed log up to ``end_position`` (None: all that it has).

        ``block_bytes`` 0: 4 MiB. The member computes them, at most ``digest_rate_bytes_max`` per second. Starts at the
        log's begin if ``from_position`` is below it. Raises like ``fetch_log``.
        """
        end = Position(0 if end_position is None else end_position)
        if end_position is not None and end_position <= from_position:
            return iter(())
        request = BlockDigests(self.group, Position(from_position), end, block_bytes)
        return self._bulk.digests(request, self._target(read_from, address, timeout_s))

    def locate(
        self,
        *,
        indexes: Sequence[int] = (),
        positions: Sequence[int] = (),
        store_times_ms: Sequence[int] = (),
        read_from: ReadFrom = ReadFrom.LEADER,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> LocatedEntries:
        """Where these entries begin, which entries begin at or after these positions, and which were stored then.

        Returns one place per question, first for ``indexes``, then ``positions``, then ``store_times_ms`` (brokers'
        logs only, ``UntimedLogError`` otherwise), and the range that the member holds. The end of the committed log
        answers whatever lies beyond it.
        """
        request = Locate(self.group, indexes, positions, store_times_ms)
        return self._bulk.locate(request, self._target(read_from, address, timeout_s))

    def index_by_time(
        self, store_time_ms: int, *, read_from: ReadFrom = ReadFrom.LEADER, address: str | None = None
    ) -> LogIndex:
        """The first committed message stored at ``store_time_ms`` (since 1970) or later; the log's end if none was."""
        located = self.locate(store_times_ms=(store_time_ms,), read_from=read_from, address=address)
        return located.places[0].index

    def _target(self, read_from: ReadFrom, address: str | None, timeout_s: float | None) -> BulkTarget:
        return BulkTarget(ReadFrom(read_from), address, self._timeout_s(timeout_s))
