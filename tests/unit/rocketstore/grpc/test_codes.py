"""Every refusal has a code, and gRPC's own status is never the answer."""

from __future__ import annotations

import pytest

from dledger.access.guard import NotAuthenticatedError
from dledger.access.quota import TooManyWaitsError
from dledger.errors import AccessDeniedError, InvalidRequestError, PendingFullError
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.grpc.calls import ANSWERED, RejectedError, is_limit, status_of
from rocketstore.pb import definition_pb2 as pb


@pytest.mark.parametrize("kind", RefusalKind)
def test_each_refusal_of_the_broker_has_a_code_and_its_sentence(kind: RefusalKind) -> None:
    """Code 0 is illegal to clients, and OK would be a lie."""
    status = status_of(Refusal(kind, "why"))
    assert status.code >= 40000
    assert status.message == "why"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RejectedError(pb.ILLEGAL_TOPIC, "x"), pb.ILLEGAL_TOPIC),
        (NotAuthenticatedError("x"), pb.UNAUTHORIZED),
        (AccessDeniedError("x"), pb.FORBIDDEN),
        (TooManyWaitsError("x"), pb.TOO_MANY_REQUESTS),
        (PendingFullError("x"), pb.TOO_MANY_REQUESTS),
        (InvalidRequestError("x"), pb.BAD_REQUEST),
        (Refusal(RefusalKind.FAILED, "x", outcome="unknown"), pb.SLAVE_PERSISTENCE_TIMEOUT),
    ],
)
def test_other_errors_likewise(error: Exception, code: pb.Code) -> None:
    """Clients of different languages react to the code; an outcome that is open has the code of a time-out."""
    assert isinstance(error, ANSWERED)
    assert status_of(error).code == code
    assert is_limit(error) == (code == pb.TOO_MANY_REQUESTS)
