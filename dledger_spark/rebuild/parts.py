"""The names of the two derived parts."""

from __future__ import annotations

from typing import Final

QUEUES: Final = "queues"
INDEX: Final = "index"
PARTS: Final = (QUEUES, INDEX)
QUEUES_DIR: Final = "consumequeue"
INDEX_DIR: Final = "index"
DIRECTORIES: Final = {QUEUES: QUEUES_DIR, INDEX: INDEX_DIR}
"""Their directories below a broker's root."""
