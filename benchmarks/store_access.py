"""Opens stores for the benchmarks; the only place that knows their identity."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dledger.clock import Clock
from dledger.config import StoreConfig
from dledger.records import ENTRY_HEADER_BYTES
from dledger.store.file_store import FileStore
from dledger.types import NodeId, Term
from dledger.values import MIB

BODY_BYTES: Final = 1024
RECORD_BYTES: Final = BODY_BYTES + ENTRY_HEADER_BYTES
GROUP: Final = "bench"
CLUSTER_ID: Final = GROUP
NODE_ID: Final = NodeId("n0")
TERM: Final = Term(1)


def open_store(directory: Path, segment_bytes: int = 1024 * MIB) -> FileStore:
    """A store in ``directory`` with default settings except the segment size."""
    config = StoreConfig(base_dir=directory, segment_bytes=segment_bytes)
    return FileStore.open(config, cluster_id=CLUSTER_ID, group=GROUP, node_id=NODE_ID, clock=Clock())
