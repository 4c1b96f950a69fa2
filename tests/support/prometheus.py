"""The real Prometheus server (Debian's package) beside a test, and questions to it."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from dledger_cli.local.group import free_ports
from tests.support.lacking import lacks
from tests.support.waiting import wait_until

DEPLOY = Path(__file__).parents[2] / "cluster" / "deploy"


def require(tool: str) -> str:
    """The path of a program of Debian's prometheus package; the test is skipped where that is not installed."""
    if shutil.which(tool) is None:
        lacks("Prometheus", "apt-get install prometheus")
    return tool


def shortened(rules: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The same rules, none of which waits longer than so."""
    groups = [
        {**group, "rules": [{**rule, "for": f"{int(seconds * 1000)}ms"} for rule in group["rules"]]}
        for group in rules["groups"]
    ]
    return {"groups": groups}


class PrometheusServer:
    """Scrapes ``targets`` twice a second with our configuration, and evaluates our rules, impatiently."""

    def __init__(self, directory: Path, targets: Sequence[str], *, alert_after_s: float) -> None:
        self._program = require("prometheus")
        self._directory = directory
        directory.mkdir()
        deployed = DEPLOY / "prometheus"
        config = yaml.safe_load((deployed / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms", "scrape_timeout": "500ms"}
        scrape, *_ = config["scrape_configs"]
        config["scrape_configs"] = [scrape]  # nobody is listening for the name servers
        scrape["static_configs"] = [{"targets": list(targets)}]
        rules = yaml.safe_load((deployed / "alerts.yml").read_text())
        (directory / "alerts.yml").write_text(yaml.safe_dump(shortened(rules, alert_after_s)))
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        (port,) = free_ports(1)
        self._address = f"127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"--config.file={self._directory / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._directory / 'data'}",
                    f"--web.listen-address={self._address}",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            wait_until(self._is_ready, "Prometheus is ready")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, path: str, **parameters: str) -> Any:  # noqa: ANN401  # the API's JSON
        """The ``data`` of an answer of the HTTP API. Raises ``HTTPError`` for a query that does not parse."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"http://{self._address}/api/v1/{path}?{query}", timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values now."""
        result = self.ask("query", query=expression)["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]

    def names(self) -> set[str]:
        """All metric names that it has series of."""
        return set(self.ask("label/__name__/values"))

    def alerts(self) -> dict[str, str]:
        """Each alert that is pending or firing, with its state (firing, if it is so for any labels)."""
        found: dict[str, str] = {}
        for alert in self.ask("alerts")["alerts"]:
            name = alert["labels"]["alertname"]
            found[name] = "firing" if "firing" in (alert["state"], found.get(name)) else alert["state"]
        return found
