"""Layouts in the sources: what is stored is laid out in one place, from which all structs and tables are made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
PACKAGES: Final = ("dledger", "rocketstore", "dledger_spark", "benchmarks", "dledger_cli", "cluster")
HOMES: Final = {
    "dledger/records.py": "makes structs and tables of layouts; the log's own are here",
    "dledger/core/membership.py": "bodies of NOOPs that tell of members",
    "dledger/core/noop_payload.py": "the head of what NOOPs tell, and bodies that tell the time or of producers",
    "dledger/rpc/peers/frames.py": "frames between members, pushes among them; nothing stored",
    "dledger/statemachine/commands.py": "results of commands, a part of snapshots",
    "dledger/store/durable_state.py": "hard state and checkpoint, and the slots around them",
    "dledger_spark/decode/layout.py": "Arrow's views; nothing stored",
    "rocketstore/grpc/relay.py": "requests between members; nothing stored",
    "rocketstore/ha/protocol.py": "numbers and frames between masters and slaves; nothing stored",
    "rocketstore/index/format.py": "index files: header, entry, slot, keys on their way there; the sums beside",
    "rocketstore/message/record.py": "two numbers of a record, changed for its reader; nothing stored",
    "rocketstore/message/batch.py": "batches, as clients send them",
    "rocketstore/message/ids.py": "message ids",
    "rocketstore/pop/operations.py": "handles, which clients send back",
    "rocketstore/queue_numbers.py": "bodies of sets of queue numbers",
    "rocketstore/remoting/topics.py": "RocketMQ's compressed registrations; nothing stored",
    "dledger/remoting/log_codec.py": "requests of ours to a log, over remoting; nothing stored",
    "rocketstore/remoting/extensions.py": "requests of ours: numbered messages, a group's offsets; nothing stored",
    "dledger/remoting/frame.py": "frames of RocketMQ's remoting protocol; nothing stored",
    "rocketstore/state/files.py": "RocketMQ's timer files, which are read once",
    "rocketstore/store/directory.py": "the store's checkpoint",
    "rocketstore/timer/hours.py": "an hour's entries as a table, files of them, and the list of these",
}
"""Each module that may write a struct's or a table's fields down, and of what."""
_WRITTEN_DOWN: Final = re.compile(r"\bStruct\(|\bstruct\.(?:un)?pack(?:_from|_into)?\(|\bnp\.dtype\(")


def test_what_is_stored_is_laid_out_in_one_place() -> None:
    """A field is added, widened or moved where it is laid out, and nowhere else."""
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "pb" not in path.parts and _WRITTEN_DOWN.search(path.read_text(encoding="utf-8"))
    }

    assert found == HOMES.keys()
