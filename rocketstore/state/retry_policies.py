"""A group's retry delays as the bodies of remoting have them."""

from __future__ import annotations

from dledger.errors import InvalidRequestError
from rocketstore.remoting.bodies.groups import CustomizedRetryPolicy, ExponentialRetryPolicy, GroupRetryPolicy
from rocketstore.state.attributes import ExponentialRetryDelays, FixedRetryDelays, RetryPolicy


def policy_of_body(body: GroupRetryPolicy | None) -> RetryPolicy | None:
    """The delays; None: the broker's delay levels. Raises ``InvalidRequestError``."""
    if body is None:
        return None
    if body.type == "EXPONENTIAL":
        found = body.exponential_retry_policy
        return None if found is None else ExponentialRetryDelays(found.initial, found.max, found.multiplier)
    if body.type != "CUSTOMIZED":
        raise InvalidRequestError(f"groupRetryPolicy: type {body.type[:64]!r}: use CUSTOMIZED or EXPONENTIAL")
    return None if body.customized_retry_policy is None else FixedRetryDelays(body.customized_retry_policy.next)


def body_of_policy(policy: RetryPolicy | None) -> GroupRetryPolicy | None:
    """The same the other way round."""
    if policy is None:
        return None
    if isinstance(policy, FixedRetryDelays):
        return GroupRetryPolicy(customized_retry_policy=CustomizedRetryPolicy(policy.delays_ms))
    delays = ExponentialRetryPolicy(policy.initial_ms, policy.max_ms, policy.multiplier)
    return GroupRetryPolicy("EXPONENTIAL", exponential_retry_policy=delays)
