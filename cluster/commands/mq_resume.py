"""``dledger message resume``: asks the producers of a transaction that was given up once more."""

from __future__ import annotations

from contextlib import closing

import click

from cluster.broker_target import BrokerTarget, broker_options
from cluster.commands.mq_query import check_offset_id
from dledger.errors import AccessDeniedError, InvalidRequestError, UnavailableError


@click.command(
    "resume",
    short_help="Check a transaction that was given up again.",
    epilog="""\b
Examples:
  dledger message print -t TRANS_CHECK_MAX_TIME_TOPIC           those that were given up
  dledger message resume 7F00000100002A9F0000000000000400""",
)
@click.argument("message_id")
@broker_options
def resume(message_id: str, target: BrokerTarget) -> None:
    """Begin a transaction again that was given up: its producers are asked what became of it.

    The message id is that of its message in the topic TRANS_CHECK_MAX_TIME_TOPIC.
    """
    from dledger.remoting.client import UnreachableError
    from dledger.remoting.codes import AnswerCode
    from dledger.remoting.connection import DisconnectedError
    from dledger.remoting.errors import FrameError, RequestError
    from dledger.remoting.frame import Frame
    from rocketstore.client.frames import open_frames  # here, so that --help does not load gRPC
    from rocketstore.client.name_server_tls import check_plaintext
    from rocketstore.client.runtime import body_of, sign
    from rocketstore.remoting.codes import RequestCode
    from rocketstore.remoting.headers import ResumeCheckHeader, write_header

    check_offset_id(message_id)
    with target.groups() as groups:
        address = groups.storing(message_id).status().address
    security, learned = target.security.for_client(), bool(target.name_servers)
    asked = Frame(RequestCode.RESUME_CHECK_HALF_MESSAGE, 0, write_header(ResumeCheckHeader(message_id)))
    with closing(open_frames([address], security)) as frames:
        try:
            check_plaintext([address], security)
            answer = frames.call(address, sign(asked, security, learned=learned), target.timeout_s)
        except TimeoutError:
            raise UnavailableError(f"{address} did not answer within {target.timeout_s:g} s") from None
        except (UnreachableError, DisconnectedError, FrameError) as error:
            raise UnavailableError(str(error)) from error
    try:
        body_of(answer, security, learned=learned)
    except RequestError as error:
        kind = AccessDeniedError if answer.code == AnswerCode.NO_PERMISSION else InvalidRequestError
        raise kind(f"{address}: {error}") from None
    click.echo(f"{message_id} is a transaction again: its producers are asked in the next round of checks")
