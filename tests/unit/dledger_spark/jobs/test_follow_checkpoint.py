"""Whether the batches in a directory are those of Spark's checkpoint there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dledger_spark.jobs.batches import STATE, open_batches
from dledger_spark.jobs.errors import JobError
from dledger_spark.jobs.follow import check_stream


@pytest.mark.parametrize(
    ("batches", "checkpoint", "fits"),
    [
        ([], None, True),
        ([], "mine", True),
        (["mine"], "mine", True),
        ([None], "mine", True),
        (["mine"], None, False),
        (["mine"], "another", False),
        (["mine", "another"], "mine", False),
    ],
)
def test_batches_of_another_stream_are_told(
    tmp_path: Path, batches: list[str | None], checkpoint: str | None, fits: bool
) -> None:
    """By their query: a new stream would take them for its own and drop what it counts."""
    with open_batches(tmp_path / "out", {"job": "follow"}) as out:
        for number, query in enumerate(batches):
            out.publish(number, out.staging(), {"end": {"index": 7}} | ({} if query is None else {"query": query}))
        if checkpoint is not None:
            metadata = out.path / STATE / "checkpoint" / "metadata"
            metadata.parent.mkdir()
            metadata.write_text(json.dumps({"id": checkpoint}))
        if fits:
            check_stream(out)
        else:
            with pytest.raises(JobError, match="--from-index 7"):
                check_stream(out)
