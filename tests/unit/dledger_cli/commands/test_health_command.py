"""``dledger health``: what a container's engine hears of a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dledger.config import SecurityConfig
from dledger_cli.certs import make_authority, make_node
from dledger_cli.cli import main
from dledger_cli.commands.health import own_servers
from dledger_cli.local.group import free_ports
from rocketstore.nameserver.settings import NameServerConfig
from rocketstore.remoting.codes import RequestCode
from tests.support.fake_group import fake_group
from tests.support.scripted_server import silence
from tests.unit.dledger_cli.commands.brokers_here import one_broker, scripted
from tests.unit.rocketstore.nameserver.wire import running
from tests.unit.rocketstore.test_server import plain
from tests.unit.rocketstore.test_server import running as running_broker

INSECURE = {"DLEDGER_INSECURE": "true"}
MEMBERS = "n0-n0:20911;n1-n1:20911;n2-n2:20911"


def test_a_server_that_serves_is_healthy(tmp_path: Path) -> None:
    """A node, a broker, a name server: all answer at their ports for clients."""
    kept = tmp_path / "kv.json"
    with (
        fake_group(1) as group,
        one_broker(tmp_path) as here,
        running(NameServerConfig(listen_port=0, kv_config_path=kept)) as names,
    ):
        addresses = [group.addresses[0], here.environment["DLEDGER_BROKER"], names.address]
        result = CliRunner().invoke(main, ["health", ",".join(addresses)])

    assert result.output == "".join(f"{one}: serving\n" for one in addresses)
    assert result.exit_code == 0


def test_a_server_that_does_not_answer_is_not_healthy() -> None:
    """Its port may be open all the same; and one that says it is not available is not healthy either."""
    code = RequestCode.GET_BROKER_CLUSTER_INFO
    with scripted() as server:
        server.scripts[code] = silence
        late = CliRunner().invoke(main, ["health", server.address, "--timeout", "2"])
        server.scripts[code] = lambda frame: frame.answer(14, "it is being stopped")
        stopping = CliRunner().invoke(main, ["health", server.address])

    assert (late.exit_code, late.output) == (1, f"error: {server.address}: no answer within 2 s\n")
    assert (stopping.exit_code, stopping.output) == (1, f"error: {server.address}: it is being stopped\n")


def test_access_keys_do_no_harm() -> None:
    """A server answers this without a key, and the environment may hold one for other commands."""
    keys = {"DLEDGER_ACCESS_KEY": "alice", "DLEDGER_SECRET_KEY": "alice-secret"}
    with fake_group(1) as group:
        result = CliRunner().invoke(main, ["health", group.addresses[0]], env=keys)

    assert (result.exit_code, result.output) == (0, f"{group.addresses[0]}: serving\n")


def test_the_answer_of_each_server_is_also_json() -> None:
    """One object per line, on standard output whatever it says."""
    gone = f"127.0.0.1:{free_ports(1)[0]}"
    with fake_group(1) as group:
        result = CliRunner().invoke(main, ["health", f"{gone},{group.addresses[0]}", "--json"])

    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"address": gone, "serving": False, "problem": "Connection refused"},
        {"address": group.addresses[0], "serving": True, "problem": ""},
    ]
    assert (result.exit_code, result.stderr) == (1, "")


def test_nobody_is_not_healthy() -> None:
    """Refused, with the reason."""
    address = f"127.0.0.1:{free_ports(1)[0]}"

    result = CliRunner().invoke(main, ["health", address])

    assert result.exit_code == 1
    assert address in result.output


def test_several_servers_are_asked_and_one_that_is_not_healthy_decides() -> None:
    """The addresses of ``dledger status`` do; every server has its line."""
    gone = f"127.0.0.1:{free_ports(1)[0]}"
    with fake_group(1) as group:
        good = CliRunner().invoke(main, ["health", ",".join(group.addresses * 2)])
        result = CliRunner().invoke(main, ["health", f"{gone},{group.addresses[0]}"])

    assert (good.exit_code, good.output) == (0, f"{group.addresses[0]}: serving\n" * 2)
    assert result.exit_code == 1
    assert result.stdout == f"{group.addresses[0]}: serving\n"
    assert result.stderr == f"error: {gone}: Connection refused\n"


def test_a_group_is_named_as_for_other_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``-b`` or by a context; twice is once too often."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with fake_group(1) as group:
        address = group.addresses[0]
        by_option = CliRunner().invoke(main, ["health", "-b", address])
        twice = CliRunner().invoke(main, ["health", address, "-b", address])
        CliRunner().invoke(main, ["context", "add", "here", "-b", address])
        by_context = CliRunner().invoke(main, ["health"])
        other = CliRunner().invoke(main, ["health", "127.0.0.1:1"])

    assert (by_option.exit_code, by_option.output) == (0, f"{address}: serving\n")
    assert twice.exit_code == 2
    assert "given twice" in twice.output
    assert (by_context.exit_code, by_context.output) == (0, f"{address}: serving\n")
    assert (other.exit_code, other.output.startswith("error: 127.0.0.1:1: ")) == (1, True)


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({}, "127.0.0.1:10911"),
        ({"DLEDGER_LISTEN_PORT": "10921", "DLEDGER_BROKER_IP1": "10.0.0.7"}, "127.0.0.1:10921"),
        ({"DLEDGER_LISTEN_HOST": "::", "DLEDGER_LISTEN_PORT": "10921"}, "[::1]:10921"),
        ({"DLEDGER_MEMBERS": MEMBERS, "DLEDGER_NODE_ID": "n1", "DLEDGER_BIND_HOST": "0.0.0.0"}, "127.0.0.1:30911"),
        ({"DLEDGER_MEMBERS": MEMBERS, "DLEDGER_NODE_ID": "n1", "DLEDGER_CLIENT_PORT": "1234"}, "n1:1234"),
    ],
)
def test_a_container_asks_its_own_server(environ: dict[str, str], address: str) -> None:
    """By the same variables that the server was started with."""
    assert [one.address for one in own_servers(environ | {"DLEDGER_INSECURE": "true"})] == [address]


def test_a_replicated_broker_is_asked_where_it_listens() -> None:
    """Not at the port of its log."""
    environ = {
        "DLEDGER_ENABLEDLEGERCOMMITLOG": "true",
        "DLEDGER_GROUP": "orders",
        "DLEDGER_MEMBERS": MEMBERS,
        "DLEDGER_NODE_ID": "n2",
        "DLEDGER_LISTEN_PORT": "10931",
        "DLEDGER_INSECURE": "true",
    }

    assert [one.address for one in own_servers(environ)] == ["n2:10931"]
    assert own_servers(environ | {"DLEDGER_BIND_HOST": "0.0.0.0"})[0].address == "127.0.0.1:10931"


@pytest.mark.parametrize(
    ("kind", "told"),
    [("broker", ["127.0.0.1:10911", "127.0.0.1:10921"]), ("node", ["127.0.0.1:30911"])],
)
def test_each_server_of_several_conf_files_is_asked(tmp_path: Path, kind: str, told: list[str]) -> None:
    """One whose health is not looked at could be down for ever; nodes of several groups have one port."""
    files = []
    for group, port in (("a", 10911), ("b", 10921)):
        lines = {"dLegerGroup": group, "dLegerSelfId": "n0", "dLegerPeers": "n0-127.0.0.1:20911"}
        if kind == "broker":
            lines |= {"enableDLegerCommitLog": "true", "listenPort": str(port), "storePathRootDir": str(tmp_path)}
        file = tmp_path / f"{group}.conf"
        file.write_text("".join(f"{name}={text}\n" for name, text in lines.items()))
        files.append(str(file))

    assert [one.address for one in own_servers({"DLEDGER_CONFIG": ":".join(files)})] == told


def test_a_server_with_tls_is_asked_with_its_own_certificate(tmp_path: Path) -> None:
    """Which names the node, and need not name the address that is dialled inside a container."""
    make_authority(tmp_path)
    node = make_node(tmp_path, "n1", ["n1.example"])
    files = {
        "tls_cert_path": str(node.cert),
        "tls_key_path": str(node.key),
        "tls_trust_cert_path": str(tmp_path / "ca.crt"),
    }
    with running_broker(plain(tmp_path / "store", **files)) as broker:
        address = broker.address
        environ = {f"DLEDGER_{name.upper()}": value for name, value in files.items()}
        result = CliRunner().invoke(main, ["health"], env=environ | {"DLEDGER_LISTEN_PORT": address.rpartition(":")[2]})
        refused = CliRunner().invoke(main, ["health", address])

    assert result.output == f"{address}: serving\n"
    assert refused.exit_code == 1, "it shows no certificate"
    assert "this broker accepts only TLS (tls.server.mode=enforcing): give --tls-ca" in refused.output


def test_wrong_settings_are_told() -> None:
    """With exit code 2, as by the server itself."""
    result = CliRunner().invoke(main, ["health"], env={"DLEDGER_MEMBERS": "nonsense"})

    assert result.exit_code == 2
    assert "DLEDGER_MEMBERS" in result.output


def test_asking_loads_no_other_command() -> None:
    """It is done every few seconds in every container: what it need not load must not cost anything."""
    with fake_group(1) as group:
        script = (
            "import atexit, sys; from dledger_cli.entry import main;"
            "others = {'rich', 'numpy', 'grpc', 'dledger_cli.commands.serve'};"
            "atexit.register(lambda: print(sorted(others & set(sys.modules))));"
            f"sys.argv = ['dledger', 'health', {group.addresses[0]!r}]; main()"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.splitlines() == [f"{group.addresses[0]}: serving", "[]"]


def test_a_name_server_that_serves_is_healthy(tmp_path: Path) -> None:
    """Without an address, the environment that started it says where it is."""
    environ = {"DLEDGER_LISTEN_PORT": "0", "DLEDGER_KV_CONFIG_PATH": str(tmp_path / "kv.json")}
    with running(NameServerConfig(listen_port=0, kv_config_path=tmp_path / "kv.json")) as server:
        asked = CliRunner().invoke(main, ["health", "--nameserver", server.address])
        environ["DLEDGER_LISTEN_PORT"] = server.address.rpartition(":")[2]
        own = CliRunner().invoke(main, ["health", "--nameserver"], env=environ)
    gone = CliRunner().invoke(main, ["health", "--nameserver"], env=environ)

    assert (asked.output, asked.exit_code) == (f"{server.address}: serving\n", 0)
    assert (own.output, own.exit_code) == (f"{server.address}: serving\n", 0)
    assert gone.exit_code == 1
    assert server.address in gone.output


def test_a_name_server_with_tls_is_asked_with_its_own_certificate(tmp_path: Path) -> None:
    """Which names the machine, not the loopback address that is dialled."""
    make_authority(tmp_path)
    node = make_node(tmp_path, "namesrv", ["namesrv.example"])
    ca = tmp_path / "ca.crt"
    security = SecurityConfig(node.cert, node.key, ca)
    environ = {
        "DLEDGER_KV_CONFIG_PATH": str(tmp_path / "kv.json"),
        "DLEDGER_TLS_CERT_PATH": str(node.cert),
        "DLEDGER_TLS_KEY_PATH": str(node.key),
        "DLEDGER_TLS_TRUST_CERT_PATH": str(ca),
    }
    with running(NameServerConfig(listen_port=0, kv_config_path=tmp_path / "kv.json", security=security)) as server:
        environ["DLEDGER_LISTEN_PORT"] = server.address.rpartition(":")[2]
        own = CliRunner().invoke(main, ["health", "--nameserver"], env=environ)
        plain = CliRunner().invoke(main, ["health", "--nameserver", server.address])

    assert (own.output, own.exit_code) == (f"{server.address}: serving\n", 0)
    assert plain.exit_code == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("status",), "answers, but is not a node of this project"),
        (("append", "x"), "answers, but is not a node of this project"),
        (("topic", "list"), "is a name server"),
        (("message", "print", "-t", "orders"), "is a name server"),
    ],
)
def test_a_name_server_given_as_a_node_or_broker_is_recognized(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    """The error says where its address belongs."""
    with running(NameServerConfig(listen_port=0, kv_config_path=tmp_path / "kv.json")) as server:
        result = CliRunner().invoke(main, [*words, "-b", server.address, "--timeout", "5"])

    assert result.exit_code == 1
    assert f"{server.address} {sentence}" in result.stderr
    assert "--namesrv" in result.stderr
    assert "TLS" not in result.stderr
