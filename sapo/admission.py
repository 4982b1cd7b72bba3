"""What must hold before a peer's group may enter the pool (DESIGN 2, 4; TRAPS 13, 35)."""

from collections import OrderedDict
from collections.abc import Callable

from sapo.errors import Refused
from sapo.identity import unseal
from sapo.manifest import Manifest
from sapo.records import Group, Received, canonical, sha256
from sapo.tasks import bucket

__all__ = ["Refused", "Seen", "admit", "fingerprint"]


class Seen:
    """A bounded memory of groups met before: their digests by id, and what would be a copy of them.

    It outlives a group's stay in the pool, because the bus may deliver a group again after it was used.
    """

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._digests: OrderedDict[str, str] = OrderedDict()
        self._contents: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, group: Group, content_sha256: str) -> None:
        """Remember a group; own groups belong in here too, or a peer's copy of them is not noticed."""
        self.note(group.group_id, content_sha256, fingerprint(group))

    def note(self, group_id: str, content_sha256: str, mark: str) -> None:
        """Remember a group by its id, digest and fingerprint."""
        self._digests[group_id] = content_sha256
        self._contents[mark] = group_id
        for memory in (self._digests, self._contents):
            while len(memory) > self._limit:
                memory.popitem(last=False)

    def digest(self, group_id: str) -> str | None:
        """`content_sha256` of the group with this id, if it is remembered."""
        return self._digests.get(group_id)

    def original(self, group: Group) -> str | None:
        """The id of another group with the same recipe and the same texts, if one is remembered."""
        found = self._contents.get(fingerprint(group))
        return None if found == group.group_id else found


def fingerprint(group: Group) -> str:
    """Hash of what a group says, whoever signed it: its recipe and its texts, in any order."""
    texts = sorted(completion.text for completion in group.completions)
    return sha256(canonical([group.recipe.model_dump(mode="json"), texts]))


def admit(
    received: Received,
    *,
    manifest: Manifest,
    own_key: str,
    own_node: str,
    now: float,
    max_age_s: float,
    seen: Seen,
    has_control_tokens: Callable[[str], bool],
) -> Group:
    """The group inside, if it may enter the pool. Raises `Refused` otherwise; changes nothing.

    `now` is compared with the bus's time stamp, never with the producer's clock. Codes: `payload_too_large`,
    `own_echo`, `duplicate`, those of `sapo.identity.unseal`, `equivocation` (a known id with another
    content), `wrong_swarm`, `own_name` (our name under another key), `recipe` (not in the manifest),
    `group_size`, `text_too_long`, `control_tokens`, `held_out`, `copy` (another author's texts), `stale`.
    """
    signed = received.signed
    if len(signed.payload) > manifest.max_payload_bytes:
        raise Refused("payload_too_large", f"{len(signed.payload)} bytes")
    if signed.key == own_key:
        raise Refused("own_echo")
    known = seen.digest(signed.group_id)
    if known == signed.content_sha256:
        raise Refused("duplicate")
    group = unseal(signed)
    if known is not None:
        raise Refused("equivocation", f"{signed.group_id} was {known} before", group)
    _check_place(group, manifest, own_node)
    _check_texts(group, manifest, has_control_tokens)
    original = seen.original(group)
    if original is not None:
        raise Refused("copy", f"says what {original} says", group)
    age = now - received.timestamp
    if age > max_age_s:
        raise Refused("stale", f"{age:.0f} s old", group)
    return group


def _check_place(group: Group, manifest: Manifest, own_node: str) -> None:
    if group.swarm != manifest.swarm:
        raise Refused("wrong_swarm", group.swarm, group)
    if group.node == own_node:
        raise Refused("own_name", f"{group.key} calls itself {group.node}", group)
    if not manifest.allows(group.recipe):
        raise Refused("recipe", f"{group.recipe.dataset} with these parameters is not in the manifest", group)
    size = len(group.completions)
    if not manifest.min_completions <= size <= manifest.max_completions:
        raise Refused("group_size", f"{size} completions", group)


def _check_texts(group: Group, manifest: Manifest, has_control_tokens: Callable[[str], bool]) -> None:
    longest = max(len(completion.text) for completion in group.completions)
    if longest > manifest.max_text_chars:
        raise Refused("text_too_long", f"{longest} characters", group)
    if any(has_control_tokens(completion.text) for completion in group.completions):
        raise Refused("control_tokens", "a completion spells one of our control tokens", group)
    # the claimed question is compared with the regenerated one before use, so its bucket is the true one
    if bucket(group.question, manifest.salt) < manifest.held_out:
        raise Refused("held_out", "nobody may train on this question", group)
