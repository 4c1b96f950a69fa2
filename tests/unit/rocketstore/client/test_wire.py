"""Messages encoded by hand, read by protobuf."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.errors import InvalidRequestError
from rocketstore.client.wire import encode_message
from rocketstore.pb import broker_pb2 as pb

I32 = st.integers(-(1 << 31), (1 << 31) - 1)


@given(
    topic=st.text(st.characters(codec="utf-8"), min_size=1, max_size=200),
    body=st.binary(max_size=300),
    properties=st.binary(max_size=300),
    queue_id=I32,
    born=st.integers(-(1 << 63), (1 << 63) - 1),
    flags=st.tuples(I32, I32, I32),
)
def test_protobuf_reads_what_was_encoded(
    topic: str, body: bytes, properties: bytes, queue_id: int, born: int, flags: tuple[int, int, int]
) -> None:
    """Negative and large numbers, empty and long fields; two of them in one request."""
    flag, sys_flag, times = flags

    encoded = encode_message(
        topic, body, properties, queue_id, born, flag=flag, sys_flag=sys_flag, reconsume_times=times
    )

    one = pb.Message(
        topic=topic,
        body=body,
        property_string=properties,
        queue_id=queue_id,
        born_timestamp_ms=born,
        flag=flag,
        sys_flag=sys_flag,
        reconsume_times=times,
    )
    assert pb.SendRequest.FromString(encoded * 2) == pb.SendRequest(messages=[one, one])


@pytest.mark.parametrize("field", ["queue_id", "flag", "sys_flag", "reconsume_times", "born_timestamp_ms"])
def test_a_number_that_does_not_fit_its_field_is_refused(field: str) -> None:
    """Cut off, it would be another number."""
    numbers = {"queue_id": 0, "born_timestamp_ms": 0, field: 1 << (63 if field == "born_timestamp_ms" else 31)}

    with pytest.raises(InvalidRequestError, match="does not fit"):
        encode_message("T", b"", b"", **numbers)
