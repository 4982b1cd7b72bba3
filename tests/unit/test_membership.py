"""Who may publish: open swarms, allow-lists, invitations, and what a peer may try with them."""

import pytest
from makers import make_group, make_identity

from sapo.core.config.load import load
from sapo.core.config.manifest import Manifest
from sapo.core.errors import Refused, UserError
from sapo.core.types import Group, Invitation
from sapo.peers.membership import Token, check, closed_to, invite, refuse_outsider

MEMBER, PEER, STRANGER = make_identity("member"), make_identity("peer"), make_identity("stranger")
NOW = 1_000_000.0
SOON = int(NOW) + 10


def manifest(entry: str = "invite", *members: str) -> Manifest:
    listed = list(members) if entry == "open" else list(members or (MEMBER.key,))
    sets = ["swarm.name=s", f'rules.entry="{entry}"', f"rules.members={listed}"]
    return Manifest.of(load(sets=sets, env={}))


def invited(**changes: object) -> Group:
    """A group of `peer`, whom a member has invited until `SOON`."""
    good = invite(MEMBER, "s", PEER.key, SOON)
    return make_group("peer", invitation=good.model_copy(update=changes))


def code(group: Group, agreed: Manifest, now: float = NOW) -> str | None:
    try:
        check(group, agreed, now)
    except Refused as refused:
        return refused.code
    return None


def test_a_weak_key_is_no_member_invites_nobody_and_is_not_invited() -> None:
    weak = "01" + "00" * 31
    with pytest.raises(UserError, match=rf"rules.members.0 = .*{weak} is a weak key"):
        load(sets=['rules.entry="invite"', f'rules.members=["{weak}"]'], env={})
    agreed = manifest().model_copy(update={"members": (weak,)})
    assert code(invited(inviter=weak, signature="01" + "00" * 63), agreed) == "bad_invitation"
    with pytest.raises(ValueError, match="is a weak key"):
        Token(swarm="s", key=weak, invitation=invite(MEMBER, "s", weak, SOON))


def test_an_open_swarm_takes_anybody() -> None:
    assert code(make_group("peer"), manifest("open")) is None
    assert not closed_to(PEER.key, manifest("open"))
    assert manifest("open").member_keys == frozenset()


@pytest.mark.parametrize("entry", ["allow-list", "invite"])
def test_a_member_may_publish_and_nobody_else(entry: str) -> None:
    agreed = manifest(entry, PEER.key)
    assert code(make_group("peer"), agreed) is None
    assert code(make_group("stranger"), agreed) == "not_member"
    assert agreed.member_keys == {PEER.key}
    assert agreed == manifest(entry, PEER.key)
    assert agreed.model_copy(update={"members": ()}).member_keys == frozenset()


def test_only_an_allow_list_is_closed_before_a_signature_is_checked() -> None:
    assert closed_to(PEER.key, manifest("allow-list"))
    assert not closed_to(MEMBER.key, manifest("allow-list"))
    assert not closed_to(PEER.key, manifest("invite"))


def test_an_invitation_lets_its_holder_in_until_the_bus_says_it_is_over() -> None:
    assert code(invited(), manifest()) is None
    assert code(invited(), manifest(), now=SOON) is None
    assert code(invited(), manifest(), now=SOON + 0.001) == "invitation_expired"


def test_an_invitation_is_nothing_to_an_allow_list() -> None:
    assert code(invited(), manifest("allow-list")) == "not_member"


@pytest.mark.parametrize(
    "invitation",
    [
        invite(MEMBER, "s", PEER.key, SOON).model_copy(update={"until": SOON + 1}),
        invite(MEMBER, "s", PEER.key, SOON).model_copy(update={"signature": "00" * 64}),
        invite(MEMBER, "s", STRANGER.key, SOON),
        invite(MEMBER, "other", PEER.key, SOON),
        invite(STRANGER, "s", PEER.key, SOON),
        invite(PEER, "s", PEER.key, SOON),
        invite(STRANGER, "s", PEER.key, SOON).model_copy(update={"inviter": MEMBER.key}),
        invite(MEMBER, "s", PEER.key, SOON).model_copy(update={"inviter": "ff" * 32}),
    ],
    ids=["prolonged", "unsigned", "another's", "elsewhere", "stranger's", "own", "forged", "no key"],
)
def test_an_invitation_that_no_member_gave_to_this_key_for_this_swarm_is_refused(
    invitation: Invitation,
) -> None:
    assert code(make_group("peer", invitation=invitation), manifest()) == "bad_invitation"


def test_an_invitation_ends_with_its_inviters_membership() -> None:
    assert code(invited(), manifest("invite", STRANGER.key)) == "bad_invitation"


def test_an_invited_node_does_not_invite() -> None:
    chained = invite(PEER, "s", STRANGER.key, SOON)
    assert code(make_group("stranger", invitation=chained), manifest()) == "bad_invitation"


def test_a_token_is_one_line_and_reads_back() -> None:
    token = Token(swarm="s", key=PEER.key, invitation=invite(MEMBER, "s", PEER.key, SOON))
    assert token.text().isascii()
    assert len(token.text().split()) == 1
    assert Token.read(f"  {token.text()}\n") == token
    token.refuse_unfit(manifest(), PEER.key, NOW)


@pytest.mark.parametrize(
    "text", ["", "hello", "sapo-invitation-", "sapo-invitation-e30", "ü" * 9, "\x00", "A" * 5000, "[" * 5000]
)
def test_what_is_no_token_is_the_users_error(text: str) -> None:
    with pytest.raises(UserError, match="is no invitation") as error:
        Token.read(text)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("token", "says"),
    [
        (("other", PEER.key, MEMBER, SOON), "is for swarm 'other'"),
        (("s", STRANGER.key, MEMBER, SOON), "is for the key"),
        (("s", PEER.key, STRANGER, SOON), "is no member"),
        (("s", PEER.key, MEMBER, 5), "good until 1970-01-01 00:00 UTC"),
    ],
)
def test_a_token_that_peers_would_refuse_is_refused_when_it_is_accepted(
    token: tuple[str, str, object, int], says: str
) -> None:
    swarm, key, inviter, until = token
    found = Token(swarm=swarm, key=key, invitation=invite(inviter, swarm, key, until))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=says) as error:
        found.refuse_unfit(manifest(), PEER.key, NOW)
    assert f"sapo keys invite {PEER.key}" in error.value.remedy


def test_an_own_node_that_may_not_publish_is_told_its_key_and_what_to_do() -> None:
    with pytest.raises(UserError) as error:
        refuse_outsider("n0", PEER.key, None, manifest("allow-list"), NOW)
    assert (error.value.field, error.value.value) == ("rules.members", PEER.key)
    with pytest.raises(UserError, match="sapo keys accept TOKEN --node n0"):
        refuse_outsider("n0", PEER.key, None, manifest("invite"), NOW)
    good = invite(MEMBER, "s", PEER.key, SOON)
    refuse_outsider("n0", PEER.key, good, manifest("invite"), NOW)
    refuse_outsider("n0", MEMBER.key, None, manifest("invite"), NOW)
    refuse_outsider("n0", PEER.key, None, manifest("open"), NOW)
    with pytest.raises(UserError, match="good until"):
        refuse_outsider("n0", PEER.key, good, manifest("invite"), SOON + 1.0)
