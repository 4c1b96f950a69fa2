"""TLS and plaintext at one port, and access keys, with each official client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from dledger_cli import certs
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from tests.interop.official.clients import ClientError, Fields, Language, OfficialClient, running
from tests.interop.official.test_sending import needs
from tests.support import lacking
from tests.support.certificates import files

pytestmark = pytest.mark.interop

TOPIC: Final = "Guarded"
GROUP: Final = "guarded-consumers"
RULES: Final = """\
accounts:
- accessKey: alice
  secretKey: alice-secret
  topicPerms:
  - Guarded=PUB|SUB
  groupPerms:
  - guarded-consumers=SUB
- accessKey: mallory
  secretKey: mallory-secret
"""


@contextmanager
def broker(directory: Path, settings: Mapping[str, str]) -> Iterator[BrokerServer]:
    """A plain one meanwhile."""
    given = {"storePathRootDir": str(directory / "store"), "listenPort": "0", "mappedFileSizeCommitLog": "8m"}
    server = BrokerServer(load_broker_settings(None, {}, given | dict(settings))[0])
    try:
        server.start()
        yield server
    finally:
        server.stop()


def passes(client: OfficialClient, server: BrokerServer, body: str, **options: object) -> None:
    """Send a message and receive it. Raises ``ClientError``."""
    given: Fields = {"endpoints": f"127.0.0.1:{server.grpc_port}", **options}
    consumer, producer = f"consumes {body}", f"sends {body}"
    client.ask("producer", name=producer, topics=[TOPIC], **given)
    client.ask("send", client=producer, topic=TOPIC, body="before")  # a new group begins at the end
    client.ask("simple", name=consumer, group=GROUP, subscriptions={TOPIC: "*"}, **given)
    waits = client.begin("receive", client=consumer)
    got: list[Fields] = []
    for number in range(20):
        client.ask("send", client=producer, topic=TOPIC, body=f"{body} {number}")
        got += client.answer(waits)["messages"]
        if got:
            break
        waits = client.begin("receive", client=consumer)
    assert got
    for one in got:
        client.ask("ack", client=consumer, message=one["n"])
    for name in (consumer, producer):
        client.ask("close", name=name)


def test_tls_and_plaintext_share_a_port(language: Language, client: OfficialClient, tmp_path: Path) -> None:
    """With certificates that the client verifies, if it verifies any, and shows none itself."""
    needs(client, "tls")
    directory = tmp_path / "certs"
    certs.make_authority(directory)
    certs.make_node(directory, "n0")
    pair = files(directory, "n0")
    settings = {
        "tls_cert_path": str(pair.cert),
        "tls_key_path": str(pair.key),
        "tls_trust_cert_path": str(pair.ca),
        "tls_client_auth": "none",
        "grpc_tls_mode": "permissive",
    }
    trust = {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(pair.ca), "NODE_EXTRA_CA_CERTS": str(pair.ca)}
    with broker(tmp_path, settings) as server, running(language, tmp_path / "home", trust) as started:
        passes(started, server, "sealed", tls=True)
        passes(started, server, "plain", tls=False)


def test_a_certificate_that_nobody_signed_is_enough(language: Language, client: OfficialClient, tmp_path: Path) -> None:
    """For clients that believe any."""
    if not client.language.takes_any_certificate:
        lacking.lacks(f"unverified TLS in the client for {client.language.name}", "it always verifies certificates")
    with broker(tmp_path, {"grpc_self_signed": "true"}) as server, running(language, tmp_path / "home") as started:
        passes(started, server, "sealed", tls=True)


def test_keys_decide_who_may_do_what(language: Language, tmp_path: Path) -> None:
    """A client without a key, with a wrong secret, or without permission is refused, and told why."""
    file = tmp_path / "plain_acl.yml"
    file.write_text(RULES)
    file.chmod(0o600)
    settings = {"acl_enable": "true", "acl_file": str(file)}
    with broker(tmp_path, settings) as server, running(language, tmp_path / "home") as started:
        passes(started, server, "alice", key=["alice", "alice-secret"])
        strangers = [["alice", "another-secret"], ["nobody", "knows"]]
        if language.name != "go":  # it would wait for its settings for ever
            strangers.append(["mallory", "mallory-secret"])
        for key in strangers:
            with pytest.raises(ClientError):
                passes(started, server, key[1], key=key)
        passes(started, server, "again", key=["alice", "alice-secret"])
