"""A Spark cluster's processes: started, told, ended, and never mistaken for others; Spark itself is a stand-in here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools import spark_standalone
from tools.spark_standalone import Options, Process, SparkClusterError, main

STAND_IN = """#!/bin/sh
exec {python} - "$@" <<'PROGRAM'
import http.server, json, pathlib, sys, threading, time
joined = pathlib.Path({joined!r})
if sys.argv[1].endswith("Worker"):
    if pathlib.Path({broken!r}).exists():
        sys.exit("no memory left for a worker")
    with joined.open("a") as out:
        out.write("1")
    time.sleep(600)

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        count = len(joined.read_text()) if joined.exists() else 0
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({{"aliveworkers": count}}).encode())

    def log_message(self, *_words):
        pass

port = int(sys.argv[sys.argv.index("--webui-port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Page).serve_forever()
PROGRAM
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a cluster whose ``spark-class`` is the stand-in; what is left running in it is ended."""
    program = tmp_path / "spark" / "bin" / "spark-class"
    program.parent.mkdir(parents=True)
    program.write_text(
        STAND_IN.format(python=sys.executable, joined=str(tmp_path / "joined"), broken=str(tmp_path / "broken"))
    )
    program.chmod(0o755)
    monkeypatch.setattr(spark_standalone, "_spark_home", lambda: str(tmp_path / "spark"))
    monkeypatch.setattr(spark_standalone, "java_version", lambda _environment: 17)
    yield tmp_path / "cluster"
    spark_standalone.stop(tmp_path / "cluster")


def words(directory: Path, *rest: str) -> list[str]:
    """A command line."""
    return ["-d", str(directory), *rest]


def test_it_starts_tells_and_ends_all_processes(directory: Path) -> None:
    """Also from other processes than the one that started it: all is in the directory."""
    started = CliRunner().invoke(main, words(directory, "start", "--port", "0", "--ui-port", "0"))
    cluster = spark_standalone.load(directory)
    status = CliRunner().invoke(main, words(directory, "status"))
    again = CliRunner().invoke(main, words(directory, "start"))
    ended = CliRunner().invoke(main, words(directory, "stop"))

    assert started.exit_code == 0, started.output
    assert cluster is not None
    assert f"2 workers have joined {cluster.master}" in started.output
    assert [process.name for process in cluster.processes] == ["master", "worker-1", "worker-2"]
    assert (status.exit_code, status.output.count(" runs\n")) == (0, 3)
    assert again.exit_code == 1
    assert f"runs at {cluster.master}: stop it first" in again.output
    assert ended.output == "Ended.\n"
    assert not any(process.alive for process in cluster.processes)
    assert not (directory / "work").exists()
    assert CliRunner().invoke(main, words(directory, "stop")).output.startswith("There is no cluster")
    assert CliRunner().invoke(main, words(directory, "status")).exit_code == 1


def test_a_process_that_ends_at_the_start_is_told_with_its_log(directory: Path) -> None:
    """And what had been started is ended."""
    (directory.parent / "broken").touch()

    with pytest.raises(SparkClusterError, match="no memory left for a worker"):
        spark_standalone.start(Options(directory, port=0, ui_port=0))

    cluster = spark_standalone.load(directory)
    assert cluster is not None
    assert not any(process.alive for process in cluster.processes)


def test_a_number_that_another_process_has_now_is_left_alone(directory: Path) -> None:
    """Ours, here: the file says that it began at another time."""
    directory.mkdir()
    (directory / "cluster.json").write_text(
        f'{{"master": "spark://h:1", "ui": "", "workers": 1,'
        f' "processes": [{{"name": "master", "pid": {os.getpid()}, "began": "1"}}]}}'
    )

    status = CliRunner().invoke(main, words(directory, "status"))

    assert status.exit_code == 1
    assert "is gone" in status.output
    assert spark_standalone.stop(directory)
    assert Process("this", os.getpid(), spark_standalone._began(os.getpid())).alive


def test_a_damaged_file_is_told(directory: Path) -> None:
    """Not guessed at: processes may run."""
    directory.mkdir()
    (directory / "cluster.json").write_text('{"master": ')

    with pytest.raises(SparkClusterError, match="end Spark's processes yourself"):
        spark_standalone.load(directory)
    (directory / "cluster.json").unlink()
