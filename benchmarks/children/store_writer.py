"""Fills a stopped node's log: ``python -m benchmarks.children.store_writer DIRECTORY``, commands as JSON on stdin.

``fill`` appends and flushes; ``leave_tail`` appends without flushing, after which the harness kills this process;
``close`` is a clean stop.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.store_access import BODY_BYTES, RECORD_BYTES, open_store
from dledger.store.file_store import FileStore
from dledger.types import Term

BATCH_ENTRIES = 1000
FLUSH_EVERY_BYTES = 256 << 20


def append(store: FileStore, total_bytes: int, *, flush: bool) -> None:
    """Append at least ``total_bytes`` of log in the log's last term."""
    term = max(store.last.term, Term(1))
    bodies = [os.urandom(BODY_BYTES) for _ in range(BATCH_ENTRIES)]
    unflushed = 0
    for _ in range(-(-total_bytes // (BATCH_ENTRIES * RECORD_BYTES))):
        store.append_as_leader(term, bodies)
        unflushed += BATCH_ENTRIES * RECORD_BYTES
        if flush and unflushed >= FLUSH_EVERY_BYTES:
            store.flush()
            unflushed = 0
    if flush:
        store.flush()


def main() -> None:
    """Serve until stdin closes."""
    store = open_store(Path(sys.argv[1]))
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "fill":
                append(store, command["bytes"], flush=True)
            case "leave_tail":
                append(store, command["bytes"], flush=False)
            case "close":
                store.close()
        sys.stdout.write(json.dumps({"end_position": store.end_position}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
