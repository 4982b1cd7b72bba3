"""Who may publish in a swarm: anybody, its members, or those whom a member has invited."""

from sapo.errors import Refused
from sapo.identity import Identity, verify
from sapo.manifest import Manifest
from sapo.records import Group, Invitation, canonical

__all__ = ["Refused", "check", "closed_to", "invite", "trusted"]


def trusted(manifest: Manifest) -> frozenset[str]:
    """The keys that are known from the start: the members."""
    return frozenset(manifest.members)


def closed_to(key: str, manifest: Manifest) -> bool:
    """Whether whatever names this key as its author can be refused unseen, before a signature is checked."""
    return manifest.entry == "allow-list" and key not in manifest.members


def check(group: Group, manifest: Manifest, now: float) -> None:
    """Raise `Refused` for a group whose author may not publish in the swarm.

    `now` is the bus's time stamp of the group, in unix seconds, so that all nodes decide alike. Codes:
    `not_member`, `bad_invitation` (forged, for another key or swarm, or by nobody who is a member now),
    `invitation_expired`.
    """
    if manifest.entry == "open" or group.key in manifest.members:
        return
    if manifest.entry == "allow-list" or group.invitation is None:
        raise Refused("not_member", f"{group.key} is on no list", group)
    problem = _problem(group.invitation, manifest, group.key)
    if problem is not None:
        raise Refused("bad_invitation", problem, group)
    if now > group.invitation.until:
        raise Refused("invitation_expired", f"{now - group.invitation.until:.0f} s ago", group)


def _problem(invitation: Invitation, manifest: Manifest, key: str) -> str | None:
    """Why an invitation does not hold for a key, if it does not."""
    if invitation.inviter not in manifest.members:
        return f"{invitation.inviter} is no member"
    statement = _statement(manifest.swarm, key, invitation.until)
    if not verify(invitation.inviter, invitation.signature, statement):
        return "the signature is not the inviter's over this swarm, key and time"
    return None


def invite(inviter: Identity, swarm: str, key: str, until: int) -> Invitation:
    """A signed invitation of `key` into a swarm, good until a moment in unix seconds."""
    return Invitation(inviter=inviter.key, until=until, signature=inviter.sign(_statement(swarm, key, until)))


def _statement(swarm: str, key: str, until: int) -> bytes:
    """What is signed; a group's payload is a JSON object, so neither can be taken for the other."""
    return canonical([swarm, "invitation", key, until]).encode()
