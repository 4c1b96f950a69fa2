"""The way of one message, put together from traces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from ipaddress import ip_address

from rocketstore.client.aio.admin_records import Traced
from rocketstore.client.aio.received import plain_body
from rocketstore.message.message import HostAddress, Message
from rocketstore.message.trace import ConsumedTrace, EndedTrace, ReceivedTrace, SentTrace, decode_traces


def steps_of(message_id: str, messages: Iterable[Message]) -> list[Traced]:
    """The events of it in these messages of traces, by time. A client's address is the one that sent the trace."""
    steps: list[Traced] = []
    begun: dict[str, Traced] = {}
    ended: dict[str, ConsumedTrace] = {}
    for message in messages:
        body, _ = plain_body(message)
        host = _text(message.born_host)
        for one in decode_traces(body):
            if one.message_id != message_id:
                continue
            match one:
                case SentTrace():
                    steps.append(Traced("sent", one.time_ms, one.cost_ms, one.ok, one.group, host, one.store_host))
                case EndedTrace():
                    steps.append(Traced("ended", one.time_ms, -1, True, one.group, host, one.state))
                case ReceivedTrace():
                    begun[one.request_id] = Traced(
                        "consumed", one.time_ms, -1, True, one.group, host, retries=one.retries
                    )
                case ConsumedTrace():
                    ended[one.request_id] = one
                    if one.request_id not in begun:  # as long as its begin is not read, or was never written
                        began_ms = max(one.time_ms - one.cost_ms, 0)
                        begun[one.request_id] = Traced("consumed", began_ms, -1, True, one.group, host)
    for request_id, step in begun.items():
        end = ended.get(request_id)
        steps.append(step if end is None else replace(step, cost_ms=end.cost_ms, ok=end.ok))
    return sorted(steps, key=lambda one: one.time_ms)


def _text(host: HostAddress) -> str:
    return str(ip_address(host.ip))
