"""Who may publish in a swarm: anybody, its members, or those whom a member has invited."""

import base64
import time

from sapo.core.config.manifest import Manifest
from sapo.core.errors import Refused, UserError
from sapo.core.types import AuthorKind, Group, Invitation, Name, PublicKey, Record, canonical
from sapo.peers.signing import Identity, verify

PREFIX = "sapo-invitation-"


class Token(Record):
    """An invitation as one line of text, with the swarm and the key it is for."""

    swarm: Name
    key: PublicKey
    invitation: Invitation

    def text(self) -> str:
        """The line: letters, digits, dashes and underscores."""
        return PREFIX + base64.urlsafe_b64encode(self.canonical().encode()).decode().rstrip("=")

    @classmethod
    def read(cls, text: str) -> "Token":
        """The token in a line. Raises `UserError` where there is none."""
        body = text.strip().removeprefix(PREFIX)
        try:
            return cls.model_validate_json(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        except ValueError:
            shown = text if len(text) < 40 else f"{text[:30]}..."
            remedy = "give the whole line that `sapo keys invite` printed"
            raise UserError("TOKEN", shown, "is no invitation", remedy) from None

    def refuse_unfit(self, manifest: Manifest, key: str, now: float) -> None:
        """Raise `UserError` where it does not let `key` into the swarm at a time in unix seconds."""
        flaw = None if key in manifest.member_keys else _flaw(key, self.invitation, manifest, now)
        if self.swarm != manifest.swarm:
            problem = f"is for swarm {self.swarm!r}, this is {manifest.swarm!r}"
        elif self.key != key:
            problem = f"is for the key {self.key}, this node's is {key}"
        elif flaw is not None:
            problem = flaw[1]
        else:
            return
        raise UserError("TOKEN", "...", problem, f"ask a member for `sapo keys invite {key}`")


def closed_to(key: str, manifest: Manifest) -> bool:
    """Whether whatever names this key as its author can be refused unseen, before a signature is checked."""
    return manifest.entry == "allow-list" and key not in manifest.member_keys


def check(group: Group, manifest: Manifest, now: float) -> None:
    """Raise `Refused` for a group whose author may not publish in the swarm.

    `now` is the bus's time stamp of the group, in unix seconds, so that all nodes decide alike. Codes:
    `not_member`, `bad_invitation` (forged, for another key or swarm, or not by a current member),
    `invitation_expired`.
    """
    flaw = _flaw(group.key, group.invitation, manifest, now)
    if flaw is not None:
        raise Refused(*flaw, group)


def refuse_outsider(
    node: str, key: str, invitation: Invitation | None, manifest: Manifest, now: float
) -> None:
    """Raise `UserError` for an own node whose groups its peers would refuse at a time in unix seconds."""
    flaw = _flaw(key, invitation, manifest, now)
    if flaw is None:
        return
    remedy = "have this key put into rules.members at every site"
    if manifest.entry == "invite":
        remedy = f"ask a member for `sapo keys invite {key}`, then `sapo keys accept TOKEN --node {node}`"
    raise UserError("rules.members", key, f"{node} may not publish: {flaw[1]}", remedy)


def refuse_kind(kind: AuthorKind, manifest: Manifest) -> None:
    """Raise `UserError` for an own author of a kind whose groups its peers would refuse."""
    if kind not in manifest.authors:
        problem = f"the swarm takes no groups of this kind, only of {', '.join(manifest.authors)}"
        raise UserError("rules.authors", kind, problem, "join a swarm that takes it")


def invite(inviter: Identity, swarm: str, key: str, until: int) -> Invitation:
    """A signed invitation of `key` into a swarm, good until a moment in unix seconds."""
    return Invitation(inviter=inviter.key, until=until, signature=inviter.sign(_statement(swarm, key, until)))


def day(moment: float) -> str:
    """A moment in unix seconds, as people write it, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment))


def _flaw(key: str, invitation: Invitation | None, manifest: Manifest, now: float) -> tuple[str, str] | None:
    if manifest.entry == "open" or key in manifest.member_keys:
        return None
    if manifest.entry == "allow-list":
        return "not_member", f"{key[:12]} is not on the allow-list"
    if invitation is None:
        return "not_member", f"{key[:12]} is no member and has no invitation"
    if invitation.inviter not in manifest.member_keys:
        return "bad_invitation", f"{invitation.inviter[:12]}, who invited, is no member"
    said = _statement(manifest.swarm, key, invitation.until)
    if not verify(invitation.inviter, invitation.signature, said):
        return "bad_invitation", "the signature is not the inviter's over this swarm, key and time"
    if now > invitation.until:
        return "invitation_expired", f"the invitation was good until {day(invitation.until)}"
    return None


def _statement(swarm: str, key: str, until: int) -> bytes:
    """What is signed; a group's payload is a JSON object, so neither can be taken for the other."""
    return canonical([swarm, "invitation", key, until]).encode()
