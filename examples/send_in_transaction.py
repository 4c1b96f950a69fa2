"""Write orders to a database, and send a message for each that is there, and for no other, whatever fails in between.

With brokers running (``dledger demo --brokers`` starts three and prints their addresses)::

    python examples/send_in_transaction.py 127.0.0.1:10911 --topic orders --database orders.db --count 30

The message is prepared first; then the order is written together with the transaction's id; then the message is
committed. Kill the program, or the master, at any moment: whoever is in the producer group next is asked what became of
the order, and looks into the database. Every seventh order is refused, so nobody sees its message.
"""

from __future__ import annotations

import argparse
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rocketstore.client import Message, PreparedMessage, TransactionalProducer, TransactionEnd, TransactionState

PATIENCE = 3
"""How many checks may find nothing before the order counts as never written."""


class Orders:
    """The application's own database."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with closing(self._open()) as database:
            database.execute("create table if not exists orders (transaction_id text primary key, number integer)")

    def write(self, prepared: PreparedMessage) -> TransactionState:
        """The local transaction: write the order that the message is about, or refuse it."""
        number = int(prepared.message.body.decode().removeprefix("order "))
        if number % 7 == 6:
            return TransactionState.ROLLBACK
        with closing(self._open()) as database, database:  # commits
            database.execute("insert into orders values (?, ?)", (prepared.transaction_id, number))
        return TransactionState.COMMIT

    def look(self, prepared: PreparedMessage) -> TransactionState:
        """The check: is the order there? If not, it may be about to be written, by another program of the group."""
        with closing(self._open()) as database:
            found = database.execute(
                "select 1 from orders where transaction_id = ?", (prepared.transaction_id,)
            ).fetchone()
        if found:
            return TransactionState.COMMIT
        return TransactionState.ROLLBACK if prepared.checks >= PATIENCE else TransactionState.UNKNOWN

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path)  # checks are called on another thread, and each needs its own connection


def main(words: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Send messages in transactions.")
    parser.add_argument("addresses", help="of one or more brokers: HOST:PORT,HOST:PORT")
    parser.add_argument("--topic", default="orders")
    parser.add_argument("--group", default="shop")
    parser.add_argument("--database", type=Path, default=Path("orders.db"))
    parser.add_argument("--count", type=int, default=30)
    arguments = parser.parse_args(words)
    orders = Orders(arguments.database)
    ends: Counter[str] = Counter()
    with TransactionalProducer(arguments.addresses.split(","), group=arguments.group, check=orders.look) as producer:
        for number in range(arguments.count):
            receipt = producer.send_in_transaction(Message(arguments.topic, b"order %d" % number), orders.write)
            ends[receipt.state if receipt.end is not TransactionEnd.OPEN else "left to a check"] += 1
    print(", ".join(f"{count} {end}" for end, count in sorted(ends.items())))


if __name__ == "__main__":
    main()
