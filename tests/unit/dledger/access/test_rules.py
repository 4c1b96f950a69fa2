"""Accounts and permissions as RocketMQ's ``plain_acl.yml`` says them."""

from __future__ import annotations

import ipaddress

import pytest

from dledger.access.addresses import address_of, any_matches, parse_patterns, peer_text
from dledger.access.rules import BOTH, AccessRules, Account, Permission, parse_permission, parse_rules, permission_text
from dledger.errors import ConfigError
from tests.unit.dledger.access.test_plain_yaml import EXAMPLE

PUB, SUB, DENY = Permission.PUB, Permission.SUB, Permission.DENY


def problems_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_rules(text)
    return list(caught.value.problems)


def account_of(lines: str) -> Account:
    text = "accounts:\n- accessKey: somebody\n  secretKey: 12345678\n" + lines
    return parse_rules(text).accounts["somebody"]


def test_rocketmqs_file_gives_its_accounts() -> None:
    """Names, keys (texts, also if they look like numbers), permissions, white addresses."""
    rules = parse_rules(EXAMPLE)

    first, second = rules.accounts["RocketMQ"], rules.accounts["rocketmq2"]
    assert (first.secret, second.secret) == (b"12345678", b"0012 # no comment")
    assert (first.admin, second.admin) == (False, True)
    assert [first.topic(name) for name in ("topicA", "topicB", "other")] == [DENY, BOTH, DENY]
    assert [first.group(name) for name in ("groupA", "other")] == [DENY, SUB]
    assert [one.text for one in rules.trusted] == ["10.10.103.*", "192.168.0.*"]
    assert [one.text for one in second.addresses] == ["192.168.1.*"]


def test_everything_is_denied_that_is_not_named() -> None:
    """RocketMQ's own default."""
    account = account_of("")

    assert (account.topic("x"), account.group("x"), account.admin) == (DENY, DENY, False)


def test_an_administrator_may_everything() -> None:
    """Also what his permissions deny."""
    account = account_of("  admin: true\n  topicPerms:\n  - a=DENY\n")

    assert (account.topic("a"), account.group("g")) == (BOTH, BOTH)


def test_a_retry_topic_is_the_groups() -> None:
    """RocketMQ keeps the permissions of groups as those of their retry topics."""
    account = account_of("  defaultTopicPerm: PUB|SUB\n  groupPerms:\n  - g=SUB\n")

    assert (account.topic("%RETRY%g"), account.topic("%RETRY%other")) == (SUB, DENY)
    assert (account.topic("%DLQ%g"), account.topic("%DLQ%other")) == (SUB, DENY)


def test_a_secret_is_in_no_representation() -> None:
    """Whatever prints an account or the rules."""
    rules = parse_rules("accounts:\n- accessKey: a\n  secretKey: very-secret\n")

    assert "very-secret" not in repr(rules)
    assert "very-secret" not in str(rules.accounts["a"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no account and no white address: nobody would have access"),
        (
            "acounts:\n- accessKey: a",
            "line 1: unknown name 'acounts' in the file: expected one of globalWhiteRemoteAddresses,",
        ),
        ("accounts: all", "line 1: accounts is a list: write each item on its own line, starting with `- `"),
        ("accounts:\n- secretKey: 12345678", "line 2: an account requires an accessKey"),
        ("accounts:\n- accessKey: a", "line 2: account a requires a secretKey (or a whiteRemoteAddress)"),
        (
            "accounts:\n- accessKey: a\n  secretKey: 1234567",
            "line 3: secretKey: a secret key must have at least 8 characters, this one has 7",
        ),
        ("accounts:\n- accessKey: ü", "line 2: accessKey: an access key must be 1 to 128 letters"),
        *(
            (
                f"accounts:\n- accessKey: a\n  admin: {text}",
                f"line 3: admin: invalid boolean '{text}': use true or false",
            )
            for text in ("maybe", "1", "on", "yes")
        ),
        (
            "accounts:\n- accessKey: a\n  defaultTopicPerm: ALL",
            "line 3: defaultTopicPerm: invalid permission 'ALL': use DENY, PUB, SUB or PUB|SUB",
        ),
        (
            "accounts:\n- accessKey: a\n  topicPerms:\n  - t",
            "line 4: topicPerms: invalid permission 't': use NAME=PUB|SUB",
        ),
        (
            "accounts:\n- accessKey: a\n  topicPerms:\n  - t=PUB\n  - t=SUB",
            "line 5: t is given twice, with different permissions",
        ),
        (
            "accounts:\n- accessKey: a\n  groupPerms:\n  - g=PUB|SUB\n  - g=DENY",
            "line 5: g is given twice, with different permissions",
        ),
        ("accounts:\n- accessKey: a\n  Admin: true", "line 3: unknown name 'Admin' in an account"),
        ("accounts:\n- accessKey: a\n  topicPerms: t=PUB", "line 3: topicPerms is a list"),
        (
            "accounts:\n- accessKey: a\n  secretKey: 12345678\n- accessKey: a\n  secretKey: 87654321",
            "line 4: the accessKey a is given twice (first on line 2)",
        ),
        (
            "globalWhiteRemoteAddresses:\n- everywhere",
            "line 2: globalWhiteRemoteAddresses: invalid address 'everywhere'",
        ),
        ("- a\n- b", "line 1: the file must consist of `name: value` lines"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, problem: str) -> None:
    """RocketMQ reads most of this as DENY, without a word."""
    assert any(one.startswith(problem) for one in problems_of(text)), problems_of(text)


def test_all_problems_are_told_at_once() -> None:
    """And none of them quotes a secret."""
    found = problems_of(
        "accounts:\n- accessKey: a\n  secretKey: geheim\n  admin: maybe\n  topicPerms:\n  - t=ALL\n"
        "- accessKey: b\n  secretKey: tooshrt\n"
    )

    assert [one.partition(":")[0] for one in found] == ["line 3", "line 4", "line 6", "line 8"]
    assert not any("geheim" in one or "tooshrt" in one for one in found)


@pytest.mark.parametrize("text", ["DENY", "PUB", "SUB", "PUB|SUB"])
def test_permissions_are_written_as_they_are_read(text: str) -> None:
    """In both orders, with blanks, in any case."""
    assert permission_text(parse_permission(text)) == text
    assert parse_permission(" sub | pub ") is BOTH


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("10.0.0.1", ["10.0.0.1"], ["10.0.0.2", "::1"]),
        ("10.0.0.*", ["10.0.0.1", "10.0.0.255"], ["10.0.1.1"]),
        ("10.0.*.*", ["10.0.7.1"], ["10.1.0.1"]),
        ("10.0.0.5-7", ["10.0.0.5", "10.0.0.7"], ["10.0.0.4", "10.0.0.8"]),
        ("10.0.0.{1,9}", ["10.0.0.1", "10.0.0.9"], ["10.0.0.5"]),
        ("10.0.0.1,10.0.0.{2,3}", ["10.0.0.1", "10.0.0.3"], ["10.0.0.4"]),
        ("10.0.0.0/8", ["10.9.9.9"], ["11.0.0.1", "::1"]),
        ("fd00::/8", ["fd00::1"], ["fe80::1", "10.0.0.1"]),
        ("::1", ["::1"], ["::2"]),
        ("*", ["1.2.3.4", "::1"], []),
    ],
)
def test_white_addresses_mean_what_rocketmq_means(pattern: str, yes: list[str], no: list[str]) -> None:
    """Single ones, segments, ranges, alternatives, several; and networks."""
    patterns = parse_patterns(pattern)

    assert [one for one in yes if not any_matches(patterns, ipaddress.ip_address(one))] == []
    assert [one for one in no if any_matches(patterns, ipaddress.ip_address(one))] == []
    assert not any_matches(patterns, None)


@pytest.mark.parametrize(
    "text", ["10.0.0", "10.0.0.256", "10.0.0.9-1", "a.b.c.d", "10.0.0.{}", "10.0.0.1/40", "10..0.1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    """A pattern that matches nothing, or everything, by mistake."""
    with pytest.raises(ValueError, match="invalid address"):
        parse_patterns(text)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:4711", "10.0.0.1"),
        ("ipv6:%5B::1%5D:4711", "::1"),
        ("ipv6:[::ffff:10.0.0.1]:4711", "10.0.0.1"),
        ("ipv6:[fe80::1%25eth0]:4711", "fe80::1"),
        ("unix:/run/x", None),
        ("ipv4:rubbish", None),
    ],
)
def test_the_address_of_a_peer_is_read_from_grpcs_name(peer: str, address: str | None) -> None:
    """An IPv4 address in an IPv6 one is that IPv4 address; an invalid one matches nothing."""
    assert address_of(peer) == (None if address is None else ipaddress.ip_address(address))
    assert peer_text("ipv4:10.0.0.1:4711") == "10.0.0.1:4711"


def test_rules_may_be_of_addresses_only() -> None:
    """A trusted network needs no accounts."""
    assert parse_rules("globalWhiteRemoteAddresses:\n- 10.0.0.0/8") == AccessRules({}, parse_patterns("10.0.0.0/8"))
