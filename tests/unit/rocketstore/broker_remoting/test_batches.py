"""Batches: bounded before they are expanded, stored wholly or not at all, and always answered."""

from __future__ import annotations

import pytest

from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import FLAG_RESPONSE, Frame, HeaderForm, encode
from rocketstore.broker_remoting.sends import _OTHERS
from rocketstore.message.batch import BATCH_MESSAGES_MAX, encode_batch
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import HostAddress, Message
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import SendAnswer, write_header
from tests.support.remoting import RemotingSocket, send_fields
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness


@pytest.mark.parametrize("form", HeaderForm)
def test_the_largest_batch_is_answered(broker: RemotingHarness, client: RemotingSocket, form: HeaderForm) -> None:
    """With the ids of all its messages: a batch that is stored and answered with an error is sent again."""
    whole = encode_batch([Message("T", b"")] * BATCH_MESSAGES_MAX)
    client.form = form
    answer = client.ask(RequestCode.SEND_BATCH_MESSAGE, send_fields("T"), whole)
    assert (answer.code, len(answer.fields["msgId"].split(","))) == (0, BATCH_MESSAGES_MAX)
    assert len(broker.store.log.records) == BATCH_MESSAGES_MAX


def test_the_ids_of_the_largest_batch_fit_into_an_answer_at_an_ipv6_address() -> None:
    """They are the longest, and nothing may be stored for which there is no answer."""
    ids = ",".join([offset_message_id(HostAddress(bytes(range(16)), 65535), 1 << 62)] * BATCH_MESSAGES_MAX)
    for form in HeaderForm:
        fields = write_header(SendAnswer(ids, 2**31 - 1, 2**63 - 1)) | _OTHERS
        assert encode(Frame(0, 1, fields, flag=FLAG_RESPONSE, form=form))


@pytest.mark.parametrize(
    "items", [BATCH_MESSAGES_MAX + 1, 700_000, "larger than a message may be", {"DELAY": "1"}, {"REAL_TOPIC": "x"}]
)
def test_a_batch_that_cannot_be_stored_or_answered_is_refused(
    broker: RemotingHarness, client: RemotingSocket, items: int | str | dict[str, str]
) -> None:
    """As what the client must not send again, and nothing is stored."""
    if isinstance(items, int):
        batch = encode_batch([Message("T", b"")]) * items
    elif isinstance(items, str):
        batch = encode_batch([Message("T", bytes(broker.config.store.max_message_size // 2))] * 2)
    else:
        batch = encode_batch([Message("T", b"a"), Message("T", b"b", properties=items)])
    answer = client.ask(RequestCode.SEND_BATCH_MESSAGE, send_fields("T"), batch)
    assert answer.code == AnswerCode.MESSAGE_ILLEGAL
    assert "batch" in answer.remark
    assert broker.store.log.records == []
