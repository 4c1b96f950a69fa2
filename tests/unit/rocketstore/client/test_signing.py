"""Who gets a signature of RocketMQ's kind, which says neither what is asked, nor whom, nor when."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rocketstore
from dledger.client.security import ClientSecurity, TlsFiles
from dledger.remoting.acl import is_signed
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import Frame
from rocketstore.client.runtime import body_of, question, sign

ROOT = Path(rocketstore.__file__).parent.parent
TLS = TlsFiles(Path("ca.crt"))
SECRET = "a-secret"


@pytest.mark.parametrize(
    ("learned", "tls", "trusts", "gets"),
    [
        (False, None, False, True),
        (False, TLS, False, True),
        (True, None, False, False),
        (True, TLS, False, True),
        (True, None, True, True),
    ],
)
def test_an_address_that_a_name_server_told_gets_none_unless_its_name_is_checked(
    learned: bool, tls: TlsFiles | None, trusts: bool, gets: bool
) -> None:
    """Anybody may register there: by TLS, or because the user says so; and a refusal says why it was not signed."""
    security = ClientSecurity(tls, access_key="admin", secret_key=SECRET, trust_name_servers=trusts)
    for frame in (question(security, learned=learned), sign(Frame(1, 1), security, learned=learned)):
        assert is_signed(SECRET, frame.fields, frame.body) == gets
        assert bool(frame.fields) == gets
    with pytest.raises(RequestError, match="no permission") as refused:
        body_of(Frame(16, 1, remark="no permission"), security, learned=learned)
    assert ("--trust-name-servers" in str(refused.value)) == (not gets)


def test_without_an_account_nothing_is_signed() -> None:
    """And nothing is said about it."""
    for learned in (False, True):
        assert question(ClientSecurity(), learned=learned).fields == {}
        with pytest.raises(RequestError) as refused:
            body_of(Frame(16, 1, remark="no"), ClientSecurity(), learned=learned)
        assert str(refused.value) == "no"


def test_one_place_signs_in_this_way() -> None:
    """Which asks how the address is known; the clients over remoting do so when they are made (``Cluster``)."""
    signers = set()
    for package in ("rocketstore", "cluster", "dledger", "dledger_spark"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module == "dledger.remoting.acl":
                    names = {one.name for one in node.names}
                    signers |= {path.relative_to(ROOT).as_posix()} if names & {"signed", "signature"} else set()
    clients = {"dledger/client/aio/connections.py", "rocketstore/client/aio/connections.py"}
    assert signers == {"rocketstore/client/runtime.py"} | clients
