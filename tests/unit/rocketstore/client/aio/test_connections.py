"""Connections of the clients: answers or errors, signatures, and what may leave this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dledger.client.shared import ClientSecurity
from dledger.errors import ConfigError, DLedgerError
from dledger.remoting import client as remoting_client
from dledger.remoting.codes import OUTCOME_FIELD, TLS_REQUIRED, AnswerCode
from dledger.remoting.frame import Frame, is_signed
from dledger.rpc import tls
from dledger_cli.certs import make_authority, make_node
from rocketstore.client.aio import errors
from rocketstore.client.aio.connections import BrokerConnections
from rocketstore.client.aio.producer import Producer
from rocketstore.message.message import Message
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import QueueHeader
from tests.support import certificates
from tests.support.on_loop import on_loop, until
from tests.support.scripted_server import Topics, scripted_server, silence

CODE = RequestCode.GET_MAX_OFFSET


@on_loop
async def test_a_successful_answer_is_returned_and_any_other_one_raised() -> None:
    async with scripted_server() as server:
        connections = BrokerConnections([server.address])
        server.scripts[CODE] = lambda frame: frame.answer(fields={"offset": frame.fields["queueId"]})
        answer = await connections.ask(server.address, CODE, QueueHeader("T", 7), timeout_s=60)
        assert answer.fields["offset"] == "7"
        server.scripts[CODE] = lambda frame: frame.answer(AnswerCode.TOPIC_NOT_EXIST, "no topic T")
        with pytest.raises(errors.NotFoundError, match=f"{server.address}: TOPIC_NOT_EXIST: no topic T") as caught:
            await connections.ask(server.address, CODE, QueueHeader("T", 7), timeout_s=60)
        assert caught.value.answer_code == AnswerCode.TOPIC_NOT_EXIST
        await connections.close()


@pytest.mark.parametrize(
    ("code", "kind", "outcome"),
    [
        (AnswerCode.SYSTEM_ERROR, errors.BrokerFailedError, "unknown"),
        (AnswerCode.SYSTEM_BUSY, errors.BrokerBusyError, "not_applied"),
        (AnswerCode.FLOW_CONTROL, errors.BrokerBusyError, "not_applied"),
        (AnswerCode.SERVICE_NOT_AVAILABLE, errors.NotMasterError, "not_applied"),
        (AnswerCode.NO_PERMISSION, errors.ForbiddenError, "not_applied"),
        (AnswerCode.MESSAGE_ILLEGAL, errors.MessageRefusedError, "not_applied"),
        (AnswerCode.REQUEST_CODE_NOT_SUPPORTED, errors.RequestNotKnownError, "not_applied"),
        (AnswerCode.SUBSCRIPTION_GROUP_NOT_EXIST, errors.NotFoundError, "not_applied"),
        (AnswerCode.INVALID_PARAMETER, errors.RefusedError, "not_applied"),
        (4711, errors.BrokerFailedError, "unknown"),
    ],
)
def test_each_code_has_a_class_and_an_outcome(code: int, kind: type[errors.RefusedError], outcome: str) -> None:
    """Nobody may take a message for not stored that perhaps is: a code that is not known leaves that open."""
    found = errors.refusal_of(Frame(0, 1).answer(code, " x" * 1000), "b:1")
    assert type(found) is kind
    assert (found.outcome, found.answer_code, found.address) == (outcome, code, "b:1")
    assert len(str(found)) < 600
    assert isinstance(found, DLedgerError)


@pytest.mark.parametrize("code", [AnswerCode.SYSTEM_ERROR, AnswerCode.SERVICE_NOT_AVAILABLE])
@pytest.mark.parametrize(
    ("told", "outcome"), [("not_applied", "not_applied"), ("unknown", "unknown"), ("?", "unknown")]
)
def test_a_broker_that_tells_the_outcome_is_believed(code: int, told: str, outcome: str) -> None:
    """Ours do, because the code leaves it open; a word that is not known is no promise."""
    assert errors.refusal_of(Frame(0, 1).answer(code, "", {OUTCOME_FIELD: told}), "b:1").outcome == outcome


def test_a_broker_that_knows_who_asks_and_refuses_is_understood_without_a_code_for_it() -> None:
    """RocketMQ 4.9 answers SYSTEM_ERROR with the exception's name."""
    remark = "AclException: No default permission for T, org.apache.rocketmq.acl.plain"
    found = errors.refusal_of(Frame(0, 1).answer(AnswerCode.SYSTEM_ERROR, remark), "b:1")
    assert type(found) is errors.ForbiddenError
    assert found.outcome == "not_applied"


@on_loop
async def test_a_server_that_is_not_there_has_certainly_not_done_it() -> None:
    async with scripted_server() as server:
        address = server.address
    connections = BrokerConnections([address])
    with pytest.raises(errors.BrokerUnreachableError, match=address) as caught:
        await connections.ask(address, CODE, timeout_s=60)
    assert caught.value.outcome == "not_applied"
    await connections.close()


@on_loop
async def test_a_connection_that_ends_leaves_open_whether_it_was_done() -> None:
    async with scripted_server() as server:
        connections = BrokerConnections([server.address])
        server.scripts[CODE] = silence
        asked = asyncio.create_task(connections.ask(server.address, CODE, timeout_s=60))
        await until(lambda: server.requests, "it has arrived")
        server.hang_up()
        with pytest.raises(errors.ConnectionEndedError) as caught:
            await asked
        assert caught.value.outcome == "unknown"
        assert "requires TLS" in str(caught.value)  # nothing has ever come from there
        assert "is it a listenPort? gRPC and peers have other ports" in str(caught.value)
        await connections.close()


@on_loop
async def test_without_an_answer_the_outcome_is_unknown() -> None:
    async with scripted_server() as server:
        connections = BrokerConnections([server.address])
        server.scripts[CODE] = lambda frame: frame.answer()
        await connections.ask(server.address, CODE, timeout_s=60)  # else connecting may take all of the time below
        server.scripts[CODE] = silence
        with pytest.raises(errors.TimedOutError, match=f"{server.address} did not answer within") as caught:
            await connections.ask(server.address, CODE, timeout_s=0.05)
        assert caught.value.outcome == "unknown"
        await connections.close()


@on_loop
async def test_every_request_of_an_account_is_signed() -> None:
    async with scripted_server() as server:
        connections = BrokerConnections([server.address], ClientSecurity(access_key="alice", secret_key="s3cret"))
        server.scripts[CODE] = lambda frame: frame.answer()
        await connections.ask(server.address, CODE, QueueHeader("T", 1), b"body", timeout_s=60)
        await connections.tell(server.address, Frame(CODE, 0, {"topic": "T"}))
        await until(lambda: len(server.requests) == 2, "both have arrived")
        assert all(is_signed("s3cret", one.fields, one.body) for one in server.requests)
        assert {one.fields["AccessKey"] for one in server.requests} == {"alice"}
        await connections.close()


@on_loop
async def test_plaintext_stays_on_this_machine() -> None:
    """Also towards addresses that a server tells; only who says insecure=True wants it otherwise."""
    with pytest.raises(ConfigError, match="plaintext is for loopback addresses only"):
        BrokerConnections(["192.0.2.1:10911"])
    connections = BrokerConnections(["127.0.0.1:1"])
    with pytest.raises(errors.BrokerUnreachableError, match=r"a server named 192.0.2.1:10911 as another server"):
        await connections.ask("192.0.2.1:10911", CODE, timeout_s=60)
    await connections.close()
    await BrokerConnections(["192.0.2.1:10911"], ClientSecurity(insecure=True)).close()


@on_loop
async def test_servers_are_known_by_their_certificates(tmp_path: Path) -> None:
    """One of another CA gets nothing, which is certain: another broker may be asked."""
    for name in ("mine", "other"):
        make_authority(tmp_path / name)
        make_node(tmp_path / name, "n0")
    async with scripted_server(tls.server_context(tls.read(certificates.files(tmp_path / "mine", "n0")))) as server:
        server.scripts[CODE] = lambda frame: frame.answer()
        mine = ClientSecurity(tls=certificates.files(tmp_path / "mine", "n0"))
        connections = BrokerConnections([server.address], mine)
        await connections.ask(server.address, CODE, timeout_s=60)
        await connections.close()
        other = ClientSecurity(tls=certificates.files(tmp_path / "other", "n0"))
        connections = BrokerConnections([server.address], other)
        with pytest.raises(errors.BrokerUnreachableError, match=r"certificate .* is not trusted") as caught:
            await connections.ask(server.address, CODE, timeout_s=60)
        assert caught.value.outcome == "not_applied"
        await connections.close()


@on_loop
async def test_a_reset_during_the_handshake_is_told_with_what_may_be_missing(tmp_path: Path) -> None:
    """A server that requires certificates closes while the client still writes."""
    make_authority(tmp_path)
    security = ClientSecurity(tls=tls.TlsFiles(tmp_path / "ca.crt"))
    async with certificates.resetting_server() as address:
        connections = BrokerConnections([address], security)
        with pytest.raises(errors.BrokerUnreachableError, match="requires certificates of its clients") as caught:
            await connections.ask(address, CODE, timeout_s=60)
        assert caught.value.outcome == "not_applied"
        await connections.close()


@on_loop
@pytest.mark.parametrize("routes", [True, False])
async def test_whose_server_accepts_only_tls_is_told_at_once_what_to_give(*, routes: bool) -> None:
    """Long before its time is up, by the first server it asks or by one whose address it was told."""

    def refuses(frame: Frame) -> Frame:
        return frame.answer(AnswerCode.NO_PERMISSION, "only TLS", TLS_REQUIRED)

    async with scripted_server() as server, scripted_server() as broker:
        Topics({"a": {0: broker.address}}, {"T": {"a": 4}}).serve(server)
        broker.scripts[RequestCode.GET_ROUTEINFO_BY_TOPIC] = refuses
        if not routes:
            server.scripts[RequestCode.GET_ROUTEINFO_BY_TOPIC] = refuses
        async with Producer(name_servers=server.address, timeout_s=300) as producer:
            with pytest.raises(errors.ForbiddenError, match=r"accepts only TLS: give the CA .*--tls-ca"):
                await producer.send(Message("T", b"x"))


@on_loop
async def test_a_new_certificate_is_used_for_the_next_connection(tmp_path: Path) -> None:
    """The files are replaced while the client runs; half-written ones are passed over."""
    make_authority(tmp_path)
    make_node(tmp_path, "n0")
    files = certificates.files(tmp_path, "n0")
    contexts = tls.ContextSource(files)
    before = contexts()
    assert contexts() is before
    files.ca.write_bytes(files.ca.read_bytes()[:100])
    assert contexts() is before
    make_authority(tmp_path, force=True)
    make_node(tmp_path, "n0", force=True)
    assert contexts() is not before


@on_loop
async def test_a_server_that_announces_its_own_requests_is_known_by_its_first_answer() -> None:
    """Until its connection ends: another program may listen there then."""
    async with scripted_server() as server:
        connections = BrokerConnections([server.address])
        server.scripts[CODE] = lambda frame: frame.answer(fields={"dledger": "1"})
        assert connections.protocol_version(server.address) == 0
        await connections.ask(server.address, CODE, timeout_s=60)
        server.scripts[CODE] = lambda frame: frame.answer()
        await connections.ask(server.address, CODE, timeout_s=60)
        assert connections.protocol_version(server.address) == 1
        server.hang_up()
        await until(lambda: connections.protocol_version(server.address) == 0, "the connection has ended")
        await connections.ask(server.address, CODE, timeout_s=60)
        assert connections.protocol_version(server.address) == 0
        await connections.close()


@on_loop
async def test_a_server_whose_first_answer_nobody_waits_for_is_known_all_the_same() -> None:
    """It announces its requests once on a connection. Else a broker that was frozen for three seconds would get
    messages without numbers from then on, without a word, and consumers commit at it as at Apache's.
    """
    async with scripted_server() as server:
        connections, held = BrokerConnections([server.address]), asyncio.Event()
        answers = iter([{"dledger": "1"}, {}])

        async def late(frame: Frame) -> Frame:
            fields = next(answers)
            await held.wait()
            return frame.answer(fields=fields)

        server.scripts[CODE] = late
        first, second = [asyncio.ensure_future(connections.ask(server.address, CODE, timeout_s=30)) for _ in range(2)]
        await until(lambda: len(server.requests) == 2, "both have arrived")
        first.cancel()
        await asyncio.sleep(0)
        held.set()
        await second
        assert connections.protocol_version(server.address) == 1
        await connections.close()


@on_loop
async def test_too_many_requests_without_an_answer_are_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dledger.remoting.connection.CALLS_MAX", 3)
    async with scripted_server() as server:
        connections = BrokerConnections([server.address])
        server.scripts[CODE] = silence
        asked = [asyncio.create_task(connections.ask(server.address, CODE, timeout_s=60)) for _ in range(3)]
        await until(lambda: len(server.requests) == 3, "they have arrived")
        with pytest.raises(errors.BrokerBusyError) as caught:
            await connections.ask(server.address, CODE, timeout_s=60)
        assert caught.value.outcome == "not_applied"
        await connections.close(at_once=True)
        await asyncio.gather(*asked, return_exceptions=True)


@on_loop
async def test_a_closed_client_says_so() -> None:
    async with scripted_server() as server:
        connections = BrokerConnections([server.address])
        server.scripts[CODE] = silence
        asked = asyncio.create_task(connections.ask(server.address, CODE, timeout_s=60))
        await until(lambda: server.requests, "it has arrived")
        await connections.close()
        with pytest.raises(errors.ConnectionEndedError):
            await asked
        with pytest.raises(errors.ClientClosedError):
            await connections.ask(server.address, CODE, timeout_s=60)
        with pytest.raises(errors.ClientClosedError):
            await connections.tell(server.address, Frame(CODE, 0))


def test_what_may_be_repeated_depends_on_the_outcome_and_the_request() -> None:
    unknown = errors.TimedOutError("?")
    surely_not = errors.BrokerUnreachableError("?")
    assert errors.may_repeat(surely_not)
    assert not errors.may_repeat(unknown)
    assert errors.may_repeat(unknown, harmless=True)
    assert errors.may_repeat(errors.TimedOutError("?", outcome="not_applied"))
    for error in (
        errors.ForbiddenError("?"),
        errors.MessageRefusedError("?"),
        errors.ClientClosedError("?"),
        OSError(),
    ):
        assert not errors.may_repeat(error, harmless=True)
    assert errors.may_send_elsewhere(errors.ForbiddenError("?"))  # the permission of one broker was wiped
    assert errors.may_send_elsewhere(errors.NotFoundError("?"))
    assert not errors.may_send_elsewhere(unknown)
    assert not errors.may_send_elsewhere(errors.MessageRefusedError("?"))


@pytest.mark.parametrize(("trusts", "gets"), [(False, False), (True, True)])
@on_loop
async def test_without_tls_nothing_signed_goes_to_an_address_that_was_only_learnt(trusts: bool, gets: bool) -> None:
    """Nobody connects to it even; one that was given, and any without an account, is asked as always."""
    async with scripted_server() as given, scripted_server() as learnt:
        for one in (given, learnt):
            one.scripts[CODE] = lambda frame: frame.answer(fields={"offset": "7"})
        security = ClientSecurity(access_key="a", secret_key="s", insecure=True, trust_name_servers=trusts)
        connections = BrokerConnections([given.address], security)
        await connections.ask(given.address, CODE, QueueHeader("T", 7), timeout_s=60)
        if gets:
            await connections.ask(learnt.address, CODE, QueueHeader("T", 7), timeout_s=60)
        else:
            with pytest.raises(errors.ForbiddenError, match="was not given to this client") as caught:
                await connections.ask(learnt.address, CODE, QueueHeader("T", 7), timeout_s=60)
            assert caught.value.outcome == "not_applied"
            with pytest.raises(errors.ForbiddenError, match="give this address, too, or use TLS"):
                await connections.tell(learnt.address, Frame(CODE, 0))
        assert [is_signed("s", one.fields, one.body) for one in given.requests] == [True]
        assert (learnt.accepted > 0) == gets
        await connections.close()
        nobody = BrokerConnections([given.address])
        await nobody.ask(learnt.address, CODE, QueueHeader("T", 7), timeout_s=60)
        await nobody.close()


@on_loop
async def test_with_tls_a_learnt_address_needs_a_certificate_that_names_it(tmp_path: Path) -> None:
    """Then it gets signatures, as brokers of a group do that one given address leads to."""
    make_authority(tmp_path)
    make_node(tmp_path, "n0", ["localhost"])
    files = certificates.files(tmp_path, "n0")
    security = ClientSecurity(files, access_key="a", secret_key="s")
    async with scripted_server(tls.server_context(tls.read(files))) as learnt:
        learnt.scripts[CODE] = lambda frame: frame.answer(fields={"offset": "7"})
        connections = BrokerConnections(["n9:1"], security)
        port = learnt.address.rpartition(":")[2]
        await connections.ask(f"localhost:{port}", CODE, QueueHeader("T", 7), timeout_s=60)
        assert is_signed("s", learnt.requests[0].fields, b"")
        with pytest.raises(errors.BrokerUnreachableError, match="certificate"):
            await connections.ask(learnt.address, CODE, QueueHeader("T", 7), timeout_s=60)
        assert len(learnt.requests) == 1
        await connections.close()


@pytest.mark.parametrize("reads", [True, False], ids=["the server reads", "the server is frozen"])
@on_loop
async def test_a_closed_client_leaves_nothing_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, reads: bool
) -> None:
    """A program may close its loop then; over TLS the other side takes part, but is not waited for without end."""
    if not reads:
        monkeypatch.setattr(remoting_client, "CLOSE_S_MAX", 0.05)
    make_authority(tmp_path)
    make_node(tmp_path, "n0", ["localhost"])
    files = certificates.files(tmp_path, "n0")
    async with scripted_server(tls.server_context(tls.read(files))) as server:
        server.scripts[CODE] = lambda frame: frame.answer(fields={"offset": "7"})
        connections = BrokerConnections(["n9:1"], ClientSecurity(files))
        port = server.address.rpartition(":")[2]
        await connections.ask(f"localhost:{port}", CODE, QueueHeader("T", 7), timeout_s=60)
        opened = tuple(connections._client._open.values())
        for one in server.connections if not reads else ():
            assert one._transport is not None
            one._transport.pause_reading()
        await connections.close()
        assert [one._transport for one in opened] == [None]


@on_loop
async def test_one_wrong_answer_collects_no_signatures_elsewhere() -> None:
    """Whoever has a broker's port for a moment names another address as the master, and as the one to ask next."""
    async with scripted_server() as given, scripted_server() as evil:
        Topics({"a": {0: evil.address, 1: given.address}}, {"T": {"a": 4}}).serve(given)
        Topics({"a": {0: evil.address, 1: evil.address}}, {"T": {"a": 4}}).serve(evil)
        security = ClientSecurity(access_key="a", secret_key="s")
        async with Producer(given.address, timeout_s=1, security=security) as producer:
            for _ in range(3):
                with pytest.raises(errors.ForbiddenError, match="was not given"):
                    await producer.send(Message("T", b"x"))
            await given.stop()
            with pytest.raises(errors.ClientError):
                await producer.send(Message("U", b"x"))
        assert evil.accepted == 0
