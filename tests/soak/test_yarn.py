"""Spark on YARN: a resource manager and a node manager of Hadoop, whose jars Maven brings, on loopback.

Of Hadoop's version that pyspark has: its own jars are the rest of what they need.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pyspark
import pytest

from dledger_cli.local.group import free_ports
from dledger_spark.packaging import write_zip
from tests.support.lacking import lacks, program
from tests.support.spark import ROOT, need_java
from tests.support.spark_cluster import libraries_only
from tests.support.spark_nodes import BrokerNode, broker_node
from tests.support.waiting import wait_until

JARS: Final = Path(pyspark.__file__).parent / "jars"
BOUNCY_CASTLE: Final = "1.82"
MESSAGES: Final = 300
PATIENCE_S: Final = 800
JOB: Final = """
import json, os, sys
from dledger_spark import spark_session

_, servers, group, *settings = sys.argv
log = {"bootstrap.servers": servers, "group": group, "subscribe": "orders"}
spark = spark_session("yarn", **dict(one.split("=", 1) for one in settings))
frame = spark.read.format("dledger").options(**log).load()
containers = frame.rdd.mapPartitions(lambda rows: [os.environ.get("CONTAINER_ID", "")]).collect()
stream = spark.readStream.format("dledger").options(**log, startingOffsets="earliest").load()
writer = stream.writeStream.format("memory").queryName("streamed").trigger(availableNow=True)
writer.start().awaitTermination()
counts = [frame.count(), spark.table("streamed").count()]
print(json.dumps({"counts": counts, "containers": sorted(set(containers)), "id": spark.sparkContext.applicationId}))
spark.stop()
"""


@pytest.fixture(scope="module")
def hadoop_conf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """``HADOOP_CONF_DIR`` of a running YARN of one node."""
    need_java()
    jars = hadoop_jars()
    directory = tmp_path_factory.mktemp("yarn")
    conf = directory / "conf"
    conf.mkdir()
    web = write_settings(conf, directory)
    path = ":".join(map(str, (conf, *jars, JARS / "*")))
    with ExitStack() as started:
        for name, package in (("ResourceManager", "resourcemanager"), ("NodeManager", "nodemanager")):
            output = started.enter_context((directory / f"{name}.log").open("wb"))
            words = ["java", "-Xmx512m", "-XX:TieredStopAtLevel=1", "-cp", path]
            words.append(f"org.apache.hadoop.yarn.server.{package}.{name}")
            process = subprocess.Popen(words, cwd=directory, stdout=output, stderr=subprocess.STDOUT)
            started.callback(process.wait, PATIENCE_S)
            started.callback(process.terminate)
        wait_until(lambda: node_runs(web), f"the node is up, see the logs in {directory}", PATIENCE_S)
        yield conf


def hadoop_jars() -> list[Path]:
    """Those of the daemons, from Maven's repository; the test is skipped where they cannot be had."""
    (client,) = JARS.glob("hadoop-client-api-*.jar")
    version = client.stem.removeprefix("hadoop-client-api-")
    wanted = [("org.apache.hadoop", "hadoop-client-minicluster", version)]
    wanted += [("org.bouncycastle", f"{name}-jdk18on", BOUNCY_CASTLE) for name in ("bcprov", "bcpkix", "bcutil")]
    repository = Path.home() / ".m2" / "repository"
    found = []
    for group, name, number in wanted:
        jar = repository / group.replace(".", "/") / name / number / f"{name}-{number}.jar"
        if not jar.is_file():
            words = [program("mvn", "maven"), "--batch-mode", "--quiet", "dependency:get", "-Dtransitive=false"]
            words.append(f"-Dartifact={group}:{name}:{number}")
            done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
            if done.returncode:
                lacks("Hadoop's jars", f"mvn dependency:get of {name} {number} failed: {done.stdout[-300:]}")
        found.append(jar)
    return found


def write_settings(conf: Path, directory: Path) -> str:
    """Everything on loopback, one node without limits that the machine may not meet; gives the address of the pages."""
    names = ("address", "scheduler.address", "resource-tracker.address", "admin.address", "webapp.address")
    places = [f"127.0.0.1:{port}" for port in free_ports(len(names))]
    scheduler = "org.apache.hadoop.yarn.server.resourcemanager.scheduler.fifo.FifoScheduler"
    yarn = {f"resourcemanager.{name}": place for name, place in zip(names, places, strict=True)}
    yarn |= {f"nodemanager.{name}": "127.0.0.1:0" for name in ("address", "localizer.address", "webapp.address")}
    yarn |= {
        "resourcemanager.hostname": "127.0.0.1",
        "resourcemanager.scheduler.class": scheduler,
        "nodemanager.hostname": "127.0.0.1",
        "nodemanager.resource.memory-mb": "6144",
        "nodemanager.resource.cpu-vcores": "4",
        "scheduler.minimum-allocation-mb": "128",
        "nodemanager.vmem-check-enabled": "false",
        "nodemanager.disk-health-checker.enable": "false",
        "nodemanager.local-dirs": str(directory / "local"),
        "nodemanager.log-dirs": str(directory / "logs"),
    }
    for file, settings in (
        ("yarn-site.xml", {f"yarn.{name}": value for name, value in yarn.items()}),
        ("core-site.xml", {"fs.defaultFS": "file:///", "hadoop.tmp.dir": str(directory / "tmp")}),
    ):
        properties = (f"<property><name>{n}</name><value>{v}</value></property>" for n, v in settings.items())
        (conf / file).write_text(f"<configuration>{''.join(properties)}</configuration>")
    return yarn["resourcemanager.webapp.address"]


def node_runs(web: str) -> bool:
    """Whether the resource manager knows of a node."""
    try:
        with urllib.request.urlopen(f"http://{web}/ws/v1/cluster/nodes", timeout=10) as answer:
            return b'"RUNNING"' in answer.read()
    except OSError:
        return False


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerNode]:
    with broker_node(tmp_path / "broker") as running:
        running.send("orders", 0, MESSAGES)
        yield running


def test_batches_and_streams_run_in_containers(hadoop_conf: Path, broker: BrokerNode, tmp_path: Path) -> None:
    """Each message once; executors have an environment of libraries only, and the packages that are shipped."""
    archive, script = tmp_path / "dledger.zip", tmp_path / "job.py"
    write_zip(archive)
    script.write_text(JOB)
    settings = {
        "spark.yarn.jars": f"local:{JARS}/*",
        "spark.yarn.stagingDir": f"file://{tmp_path}/staging",
        "spark.submit.pyFiles": str(archive),
        "spark.executor.instances": "1",
        "spark.executor.memory": "512m",
        "spark.yarn.am.memory": "512m",
        "spark.local.dir": str(tmp_path / "spark"),
    }
    options = broker.options
    words = [sys.executable, str(script), options["bootstrap.servers"], options["group"]]
    words += [f"{name}={value}" for name, value in settings.items()]
    environment = os.environ | {
        "HADOOP_CONF_DIR": str(hadoop_conf),
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": str(libraries_only(tmp_path / "libraries")),
    }
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False)

    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["counts"] == [MESSAGES, MESSAGES]
    run = re.escape(found["id"].removeprefix("application_"))
    assert found["containers"], done.stdout
    assert all(re.fullmatch(rf"container_{run}_\d+_\d+", one) for one in found["containers"])
