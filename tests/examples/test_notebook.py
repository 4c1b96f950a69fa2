"""examples/topic_to_dashboard.ipynb: its cells run in order, and print the output that is kept in it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from rocketstore.client import Message, Producer
from tests.support import lacking
from tests.support.memory_factory import tmp_path_factory as tmp_path_factory
from tests.support.spark import ROOT
from tests.support.spark import spark as spark
from tests.support.spark import spark_sockets as spark_sockets
from tests.support.spark_nodes import broker_node

pytestmark = [
    pytest.mark.spark,
    pytest.mark.lane("spark"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

NOTEBOOK: Final = ROOT / "examples" / "topic_to_dashboard.ipynb"
ADDRESS: Final = "127.0.0.1:30911"
GROUP: Final = "RaftNode00"
ORDERS: Final = 500
LINES_MAX: Final = 10


def orders() -> Iterator[bytes]:
    """The same in each run; every hundredth is damaged."""
    chance = random.Random(7)
    for number in range(ORDERS):
        item = chance.choice(("chair", "desk", "lamp"))
        body = json.dumps({"id": number, "item": item, "total": chance.randrange(500, 9000) / 100})
        yield (body[:10] if number % 100 == 50 else body).encode()


def send_orders(address: str) -> None:
    """Fill the notebook's topic."""
    with Producer(address) as producer:
        producer.send_many([Message("orders", body) for body in orders()])


def cells() -> list[tuple[str, str]]:
    """Each code cell of the notebook, with the text that is kept as its output."""
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))  # Any: a JSON document
    assert notebook["nbformat"] == 4
    return [
        (
            "".join(one["source"]),
            "".join("".join(out["text"]) for out in one["outputs"] if out["output_type"] == "stream"),
        )
        for one in notebook["cells"]
        if one["cell_type"] == "code"
    ]


def test_it_is_ten_lines() -> None:
    """From a topic to a dashboard."""
    assert 0 < sum(1 for source, _ in cells() for line in source.splitlines() if line) <= LINES_MAX


@pytest.mark.usefixtures("spark")
def test_its_cells_print_what_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a broker of one's own in place of the address, and the same orders."""
    lacking.module("matplotlib", "bench").use("agg")
    names: dict[str, Any] = {}  # Any: variables of a notebook
    with broker_node(tmp_path / "broker") as broker:
        send_orders(broker.server.address)
        for source, kept in cells():
            capsys.readouterr()
            exec(source.replace(ADDRESS, broker.server.address).replace(GROUP, broker.options["group"]), names)
            assert capsys.readouterr().out.strip() == kept.strip()

    bars = [[bar.get_height() for bar in axes.patches] for axes in names["figure"].axes]
    names["plt"].close(names["figure"])
    assert [len(heights) for heights in bars] == [3, 4]
    assert sum(bars[1]) == ORDERS
