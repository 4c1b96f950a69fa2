"""``dledger kv``: a replicated map on a group of its own, as a demonstration of state machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from dledger.command_line.flag_values import Seconds
from dledger.errors import DLedgerError
from dledger.rpc.clients.codec import ReadMode
from dledger_cli import process
from dledger_cli.targets import GroupTarget, group_options
from dledger_cli.terminal import ErrorReportingGroup

if TYPE_CHECKING:
    from dledger.client import DLedgerClient
    from dledger.server import DLedgerServer

TICK_S: Final = 1.0
WATCH_WAIT_S: Final = 10.0
STOP_S: Final = 5.0
"""For a command that is told to end, because its lock ends."""
Revision: Final = click.IntRange(min=0)
_Json = dict[str, Any]  # Any: an answer of the map
_TICK: Final = json.dumps({"op": "tick"}).encode()


@click.group(
    cls=ErrorReportingGroup,
    writing=frozenset({"put", "del", "lock"}),
    short_help="A replicated map: put, get, del, watch, lock.",
    epilog="""\b
Examples:
  dledger kv serve -s /tmp/kv --set segment_bytes=64m --set index_segment_bytes=5m
  dledger kv put colour blue
  dledger kv put colour red --if-revision 3     compare and swap
  dledger kv put session x --ttl 30             deleted in 30 seconds, unless it is put again
  dledger kv get --prefix '' --json
  dledger kv watch --prefix config/
  dledger kv lock nightly -- ./run.sh           one at a time, in the whole group

It shows what a state machine on the log can do, in the words of etcd: see docs/guarantees.md for your own.""",
)
def kv() -> None:
    """A linearizable map with compare-and-swap, leases and watches, kept by a group of nodes of its own."""


@kv.command(
    short_help="Run a node of the map, or one of each of several.",
    epilog="""\b
Examples:
  dledger kv serve -s /tmp/kv
  dledger kv serve -i n1 -s /data -p 'n0-a:20911;n1-b:20911;n2-c:20911'
  dledger kv serve -c eu.conf -c us.conf        two maps in one process: dledger kv put -g eu …""",
)
@process.conf_files_option("Properties file with a node's settings. Several: one map for each group.")
@click.option("-g", "--group", help="Name of the group.")
@click.option("-i", "--id", "node_id", help="This node's id; one of the members.")
@click.option("-p", "--peers", "members", metavar="ID-HOST:PORT;…", help="All members, including this one.")
@click.option("-s", "--store", "base_dir", metavar="DIR", help="Directory that holds dledger-ID/.")
@click.option("--client-port", metavar="PORT", help="Port for clients; default: peer port + 10000; 0 picks a free one.")
@process.server_options(
    repair="Move a damaged or fenced log aside (to damaged-N) and fetch it again from the other members."
)
def serve(
    config_files: Sequence[Path],
    assignments: Sequence[str],
    insecure: bool,
    repair: bool,
    log_level: str,
    log_format: str,
    until_stdin_closes: bool,
    **named: str | None,
) -> None:
    """Run one node of the map until SIGTERM or SIGINT."""
    from dledger_cli.commands.serve import load_nodes, run_nodes
    from dledger_cli.kv import KeyValueMap

    flags = process.begin(named, assignments, insecure=insecure, log_level=log_level, log_format=log_format)
    configs = load_nodes(config_files, named, flags)
    machines = {config.group: KeyValueMap() for config in configs}

    def started(server: DLedgerServer) -> None:
        machine = machines[server.config.group]
        threading.Thread(target=_tick, args=(server, machine), name="dledger-kv-ticks", daemon=True).start()

    how = {"repair": repair, "until_stdin_closes": until_stdin_closes}
    sys.exit(run_nodes(config_files, configs, **how, machine=machines.__getitem__, started=started))


def _tick(server: DLedgerServer, machine: Any) -> None:  # noqa: ANN401 - a KeyValueMap, loaded on demand
    """While there are leases, let the log's time pass; a follower is refused, and tries again."""
    while server.wait(TICK_S) is None:
        if machine.has_leases:
            answered = threading.Event()
            server.submit_commands([_TICK], lambda _result, done=answered: done.set())  # type: ignore[misc]
            answered.wait(10 * TICK_S)


@kv.command(
    epilog="""\b
Examples:
  dledger kv put colour blue
  dledger kv put colour red --if-revision 3
  dledger kv put colour red --if-revision 0     only if there is none"""
)
@click.argument("key")
@click.argument("value")
@click.option("--ttl", type=Seconds(min=0, min_open=True), metavar="SECONDS", help="Delete it when they are over.")
@click.option(
    "--if-revision", type=Revision, metavar="N", help="Only if this is the key's revision; 0: if it has none."
)
@group_options
def put(key: str, value: str, ttl: float | None, if_revision: int | None, target: GroupTarget) -> None:
    """Set KEY to VALUE; prints its revision."""
    with closing(target.client()) as client:
        result = _change(client, "put", key, if_revision, value=value, ttl_ms=0 if ttl is None else ceil(ttl * 1000))
    click.echo(result["revision"])


@kv.command(
    "del",
    epilog="""\b
Examples:
  dledger kv del colour
  dledger kv del colour --if-revision 3""",
)
@click.argument("key")
@click.option("--if-revision", type=Revision, metavar="N", help="Only if this is the key's revision.")
@group_options
def delete(key: str, if_revision: int | None, target: GroupTarget) -> None:
    """Delete KEY."""
    with closing(target.client()) as client:
        _change(client, "delete", key, if_revision)


@kv.command(
    epilog="""\b
Examples:
  dledger kv get colour
  dledger kv get --prefix config/
  dledger kv get --prefix '' --json"""
)
@click.argument("key")
@click.option("--prefix", is_flag=True, help="All keys that begin with KEY, with their names: at most 1,000, or 2 MiB.")
@click.option("--local", is_flag=True, help="From any node, perhaps old; otherwise linearizable, from the leader.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with revisions.")
@group_options
def get(key: str, prefix: bool, local: bool, as_json: bool, target: GroupTarget) -> None:
    """Print the value of KEY; exit code 1 if there is none."""
    with closing(target.client()) as client:
        mode = ReadMode.COMMITTED if local else ReadMode.LINEARIZABLE
        answer, _ = _ask(client, {"op": "get", "key": key, "prefix": prefix}, mode=mode)
    items = answer["items"]
    if as_json:
        click.echo(json.dumps(answer))
    else:
        for one in items:
            click.echo(f"{one['key']}={one['value']}" if prefix else one["value"])
    if answer["more"]:
        click.echo("there are more keys: ask for longer prefixes", err=True)
    if not items:
        sys.exit(1)


@kv.command(
    short_help="Print changes as they come, as JSON.",
    epilog="""\b
Examples:
  dledger kv watch colour
  dledger kv watch --prefix config/ --after 120     what came after revision 120, and what comes""",
)
@click.argument("key")
@click.option("--prefix", is_flag=True, help="All keys that begin with KEY.")
@click.option("--after", type=int, metavar="REVISION", help="Begin after this revision; default: now.")
@group_options
def watch(key: str, prefix: bool, after: int | None, target: GroupTarget) -> None:
    """Print changes as they come, one JSON object each, until Ctrl-C; a value of null is a deletion."""
    with closing(target.client()) as client:
        _watch(client, key, after, prefix=prefix, show=lambda event: click.echo(json.dumps(event)))


@kv.command(
    short_help="Hold a lock, perhaps while a command runs.",
    context_settings={"ignore_unknown_options": True},
    epilog="""\b
Examples:
  dledger kv lock nightly                   prints the revision and holds the lock until Ctrl-C
  dledger kv lock nightly -- ./run.sh       holds it while the command runs, and exits with its code

It is lost if it cannot be prolonged for --ttl seconds; the command is then ended. Use the revision that DLEDGER_LOCK
holds as a fencing token: the next holder has a higher one.""",
)
@click.argument("name")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--ttl", type=Seconds(min=1), default=10.0, show_default=True, metavar="SECONDS", help="Of its lease.")
@group_options
def lock(name: str, command: tuple[str, ...], ttl: float, target: GroupTarget) -> None:
    """Wait for the lock NAME, and hold it: one holder at a time in the whole group."""
    key, ttl_ms = f"lock/{name}", round(ttl * 1000)
    signal.signal(signal.SIGTERM, _end)  # or the command would go on without the lock
    with closing(target.client()) as client:
        revision, began_s = _acquire(client, key, ttl_ms)
        if not command:
            click.echo(revision)
        code, held = _hold(client, key, ttl_ms, revision, began_s, command)
        if not held:
            raise click.ClickException(f"the lock {name} was lost: its lease ended")
        sys.exit(code)


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """SIGTERM waits until the block has ended: a command that is just being started would survive it."""
    signals: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if signals:
            signal.raise_signal(signal.SIGTERM)


def _stop(running: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL if that does not help."""
    if running.poll() is None:
        running.terminate()
        try:
            running.wait(STOP_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def _acquire(client: DLedgerClient, key: str, ttl_ms: int) -> tuple[int, float]:
    """The revision, and when the lease began at the earliest (monotonic s)."""
    owner = f"{os.uname().nodename}:{os.getpid()}"
    while True:
        began_s = time.monotonic()
        result = _command(client, {"op": "put", "key": key, "value": owner, "ttl_ms": ttl_ms, "if_revision": 0})
        if result["ok"]:
            return int(result["revision"]), began_s
        with suppress(click.ClickException):  # what changed is not kept any more: look again
            _watch(client, key, int(result["revision"]), prefix=False, show=lambda _event: None, once=True)


def _hold(
    client: DLedgerClient,
    key: str,
    ttl_ms: int,
    revision: int,
    began_s: float,
    command: Sequence[str],
) -> tuple[int, bool]:
    """Run the command and prolong the lease until it has ended; without a command, until this is interrupted.

    Returns its exit code, and whether the lock was kept.

    An answer that has not come when the lease ends by this clock comes too late: somebody else may hold the lock.
    """
    owner = f"{os.uname().nodename}:{os.getpid()}"
    current = revision
    running = None
    try:
        if command:
            with _uninterrupted():
                running = subprocess.Popen(command, env={**os.environ, "DLEDGER_LOCK": str(revision)})
        while True:
            try:
                if running is None:
                    time.sleep(ttl_ms / 3000)
                else:
                    return running.wait(ttl_ms / 3000), True
            except subprocess.TimeoutExpired:
                pass
            wanted = {"op": "put", "key": key, "value": owner, "ttl_ms": ttl_ms, "if_revision": current}
            left_s, began_s = began_s + ttl_ms / 1000 - time.monotonic(), time.monotonic()
            try:
                result = _command(client, wanted, timeout_s=left_s) if left_s > 0 else {"ok": False}
            except DLedgerError:
                return 1, False
            if not result["ok"]:
                return 1, False
            current = int(result["revision"])
    finally:
        if running is not None:
            _stop(running)  # before somebody else may begin
        with suppress(DLedgerError):  # then its lease ends by itself
            _command(client, {"op": "delete", "key": key, "if_revision": current}, timeout_s=ttl_ms / 1000)


def _change(client: DLedgerClient, operation: str, key: str, if_revision: int | None, **fields: object) -> _Json:
    wanted: _Json = {"op": operation, "key": key, **fields}
    if if_revision is not None:
        wanted["if_revision"] = if_revision
    result = _command(client, wanted)
    if not result["ok"]:
        what = f"its revision is {result['revision']}" if result["revision"] else "there is none"
        raise click.ClickException(f"nothing was changed: {key}: {what}")
    return result


def _command(client: DLedgerClient, wanted: _Json, *, timeout_s: float | None = None) -> _Json:
    return _raised(json.loads(client.command(json.dumps(wanted).encode(), timeout_s=timeout_s)))


def _ask(client: DLedgerClient, wanted: _Json, **how: Any) -> tuple[_Json, int]:  # noqa: ANN401 - options of ``query``
    answer = client.query(json.dumps(wanted).encode(), **how)
    return _raised(json.loads(answer.result)), answer.applied_index


def _raised(answer: _Json) -> _Json:
    if "error" in answer:
        raise click.ClickException(answer["error"])
    return answer


def _watch(
    client: DLedgerClient,
    key: str,
    after: int | None,
    *,
    prefix: bool,
    show: Callable[[_Json], object],
    once: bool = False,
) -> None:
    """Show what changes after a revision (None: from now on), for ever, or (``once``) up to the first."""
    if after is None:
        after = _ask(client, {"op": "get", "key": key})[1]
    seen = after
    while True:
        wanted = {"op": "watch", "key": key, "prefix": prefix, "after": after}
        answer, applied = _ask(client, wanted, mode=ReadMode.COMMITTED, after=seen, wait_s=WATCH_WAIT_S)
        for event in answer["events"]:
            show(event)
            after = int(event["revision"])
        if once and answer["events"]:
            return
        seen = max(after, applied) if not answer["events"] else after
