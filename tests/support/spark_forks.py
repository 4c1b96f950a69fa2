"""The process that Spark's Python processes are forked from in tests, with what they need loaded before.

Spark starts some for every stream, and a task that fails ends its own: loading pyarrow, gRPC and our packages is nearly
all that they do in a test. Everything else is as with ``python -m``: one process each, which Spark starts (by
``spark_python``), feeds and ends. What runs on Spark clusters or in applications of its own starts them itself.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Final, NoReturn

from tests.support import spark_python

ROOT: Final = Path(__file__).parents[2]
MODULES: Final = (
    "pyarrow",
    "pyspark.worker",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.write_into_data_source",
    "dledger_spark.source.batch",
    "dledger_spark.source.datasource",
    "dledger_spark.source.live",
    "dledger_spark.source.sink",
    "dledger_spark.source.stream",
)
"""None that is run as ``__main__``: Python warns of those."""


@contextmanager
def forking_python(directory: Path) -> Iterator[dict[str, str]]:
    """What to set in the environment of a JVM, so that its Python is forked until the end of the block."""
    address, python = directory / "forks", directory / "python"
    python.write_text(f"#!{sys.executable} -IS\n{Path(spark_python.__file__).read_text()}")
    python.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    words = [sys.executable, "-m", "tests.support.spark_forks", str(address)]
    process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"listening\n"
        try:
            pythons = dict.fromkeys(("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"), str(python))
            yield {**pythons, spark_python.FORKS: str(address)}
        finally:
            process.kill()


def main(address: str) -> None:
    """Fork for whoever asks, until killed or until the one that started this is gone."""
    for name in MODULES:
        import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: they tell their status themselves
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        os.write(1, b"listening\n")
        while select.select([listening, sys.stdin], [], [])[0] == [listening]:
            connection = listening.accept()[0]
            if os.fork() == 0:
                listening.close()
                _serve(connection)
            connection.close()


def _serve(connection: socket.socket) -> NoReturn:
    """Be the process that is wished for; in the fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, files, _, _ = socket.recv_fds(connection, 4, 3)
    wish = b""
    while len(wish) < int.from_bytes(length, "big"):
        wish += connection.recv(1 << 16)
    wanted = json.loads(wish)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["directory"])
    sys.path[:] = [*dict.fromkeys(["", *os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path])]
    connection.sendall(os.getpid().to_bytes(4, "big"))
    sys.argv = wanted["words"]
    status = 1
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        connection.sendall(bytes([status & 0xFF]))
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
