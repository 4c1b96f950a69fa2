"""Derives consume queues and the key index from a log, as a broker does. Independent of Spark.

The rules are those of ``rocketstore.consume_queue`` and ``rocketstore.index``, with which tests compare every byte;
here they are applied to many thousand records at a time.

The names of the two derived parts are here.
"""

from __future__ import annotations

from typing import Final

QUEUES: Final = "queues"
INDEX: Final = "index"
PARTS: Final = (QUEUES, INDEX)
QUEUES_DIR: Final = "consumequeue"
INDEX_DIR: Final = "index"
DIRECTORIES: Final = {QUEUES: QUEUES_DIR, INDEX: INDEX_DIR}
"""Their directories below a broker's root."""
