"""Through Spark Connect everything is as with a classic session: batches, streams, the sink, SQL, what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import LocalGroup
from tests.spark.jobs.logs import bodies, write_log
from tests.support.lacking import lacks
from tests.support.spark import need_java
from tests.support.spark_connect import ROWS

ROOT = Path(__file__).parents[2]
NEEDED = ("grpc_status", "google.rpc", "pandas", "zstandard")
ENTRIES = 200
TIMEOUT_S = 400


def skip_loudly() -> None:
    """Say what is missing: pytest shows it at the end of its output."""
    missing = [name for name in NEEDED if not installed(name)]
    if missing:
        lacks("Spark Connect", f"pip install -e '.[dev,spark-connect]': {', '.join(missing)} missing")
    need_java()


def installed(name: str) -> bool:
    """Whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even its package
        return False


def test_spark_connect_gives_what_a_classic_session_gives(tmp_path: Path) -> None:
    """One application does all; it has no other session."""
    skip_loudly()
    log = write_log(tmp_path / "log", 1000)
    with LocalGroup(tmp_path / "entries", size=1) as group, LocalBrokers(tmp_path / "brokers", size=1) as brokers:
        brokers.master()
        with group.client(30) as client:
            client.append_many([b"%d" % number for number in range(ENTRIES)])
        ways = [{"bootstrap.servers": ",".join(one.addresses), "group": one.name} for one in (group, brokers)]
        work = tmp_path / "spark"
        work.mkdir()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.support.spark_connect"),
                *(str(work), str(log.directory), *map(json.dumps, ways)),
            ],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert ".connect." in found["session"]
    assert found["directory"] == sorted(body.decode() for body in bodies(log).elements())
    assert found["live"] == found["copied"] == list(range(ENTRIES))
    assert found["written"] == list(range(ROWS))
    assert found["sql"] == ENTRIES
    assert "did you mean body" in found["refused"]
    assert found["kept"] == "Asia/Tokyo"
    jobs, messages = found["jobs"], sum(bodies(log).values())
    assert jobs["stats"]["summary"]["messages"] == messages
    assert jobs["audit"]["summary"]["verdict"] == "equal"
    assert jobs["replay"]["summary"]["stored_now"] == found["paced"] == messages
    assert "table does not support Spark Connect" in jobs["table"]
