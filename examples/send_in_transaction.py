"""Write orders to a database, and send a message for each that is there, and for no other, whatever fails in between.

``python examples/send_in_transaction.py 127.0.0.1:10911 orders.db`` (``dledger demo --brokers`` starts three). Kill it,
or the master, at any moment: the next member of the producer group is asked, and looks into the database.
"""

import argparse
import sqlite3
from contextlib import closing

from rocketstore.client import Message, PreparedMessage, Producer, TransactionState

parser = argparse.ArgumentParser(description="Send messages in transactions; every seventh order is refused.")
parser.add_argument("addresses", help="of one or more brokers: HOST:PORT,HOST:PORT")
parser.add_argument("database")
parser.add_argument("--count", type=int, default=30)
given = parser.parse_args()


def look(prepared: PreparedMessage) -> TransactionState:
    """Is the order there? If not, it may be about to be written, until the third time of asking. On another thread."""
    with closing(sqlite3.connect(given.database)) as looking:
        if looking.execute("select 1 from orders where id = ?", (prepared.transaction_id,)).fetchone():
            return TransactionState.COMMIT
    return TransactionState.ROLLBACK if prepared.checks >= 3 else TransactionState.UNKNOWN


with closing(sqlite3.connect(given.database)) as database:
    database.execute("create table if not exists orders (id text primary key, number integer)")
    with Producer(given.addresses, group="shop", check=look) as producer:
        for number in range(given.count):
            with producer.transaction(Message("orders", b"order %d" % number)) as transaction, database:
                database.execute("insert into orders values (?, ?)", (transaction.id, number))
                if number % 7 == 6:
                    database.rollback()
                    transaction.rollback()
            print(f"order {number}: {transaction.result.state}")
