"""Hostile peers that play with envelopes: bytes, sizes, signatures, ids and time."""

import json

from animals.peer import Peer, Sight, mixed
from sapo.records import Completion, SignedGroup, canonical, sha256

OTHERS = "0" * 64
BURST = 4
"""Records a round, half of what an honest node of preset `tiny` publishes."""


def garbage(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Noise under good and bad signatures, wrong digests, JSON that is no group, is nested too deep, is not
    canonical, or of an unknown schema version."""
    noise = peer.rng.randbytes(400)
    (item,) = peer.grounds.items(1)
    honest = peer.publish(item, mixed(item))
    values = json.loads(honest.payload)
    loose = json.dumps(values, indent=1).encode()
    deep = b'{"recipe":' * 5_000 + b"1" + b"}" * 5_000
    return [
        peer.envelope(noise),
        peer.envelope(noise, signature=OTHERS * 2),
        peer.envelope(noise, content_sha256=OTHERS),
        peer.envelope(b"\xff\xfe{}"),
        peer.envelope(deep),
        peer.envelope(loose, group_id=honest.group_id),
        peer.envelope(canonical(values | {"schema_version": 99}).encode()),
        peer.envelope(canonical(values | {"created_at": "soon"}).encode()),
    ]


def giant(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Payloads and texts larger than the manifest allows, and groups of more completions."""
    rules = peer.grounds.manifest
    long, many = peer.grounds.items(2)
    third = rules.max_payload_bytes // 3 + 1
    return [
        peer.publish(long, ["1" * third] * 3),
        peer.publish(long, ["1" * (rules.max_text_chars + 1), "2"]),
        peer.publish(many, ["1"] * (rules.max_completions + 1)),
    ]


def forge(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Groups in a victim's name: its key in the payload, its key on the envelope, its node name, its groups
    with another answer."""
    if not sight.seen:
        return []
    victim = peer.rng.choice(sight.seen)
    values = json.loads(victim.payload)
    (item,) = peer.grounds.items(1)
    theirs = peer.group(item, mixed(item), node=values["node"], key=victim.key, round=values["round"] + 1)
    payload = theirs.canonical().encode()
    values["completions"][0]["text"] = "0"
    changed = canonical(values).encode()
    return [
        peer.envelope(payload, group_id=theirs.group_id),
        peer.envelope(payload, group_id=theirs.group_id, key=victim.key),
        peer.envelope(changed, group_id=victim.group_id, key=victim.key, signature=victim.signature),
        victim.model_copy(update={"signature": "ab" * 64}),
        victim.model_copy(update={"key": peer.key}),
        peer.publish(item, mixed(item), node=values["node"]),
    ]


def squat(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Takes the ids of groups that victims are about to publish, with its own content under them; and sends
    their groups under wrong ids."""
    (item,) = peer.grounds.items(1)
    payload = peer.group(item, mixed(item)).canonical().encode()
    found = []
    for coming in sight.coming[:BURST]:
        found.append(peer.envelope(payload, group_id=coming.group_id))
        found.append(peer.envelope(payload, group_id=coming.group_id, key=coming.key))
        found.append(coming.model_copy(update={"content_sha256": sha256(payload)}))
        found.append(coming.model_copy(update={"group_id": sha256(coming.payload)}))
    return found


def replay(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Sends old groups of others again, as they were signed; the oldest first."""
    old = sight.seen[: max(0, len(sight.seen) - 64)] or sight.seen
    return peer.rng.sample(list(old), min(BURST, len(old)))


def equivocate(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Two contents under one id of its own, both signed: who reads the second first holds another group."""
    found = []
    for item in peer.grounds.items(BURST // 2):
        group = peer.group(item, mixed(item))
        turned = tuple(reversed(group.completions))
        other = (*turned[:-1], Completion(text="5", finish_reason="stop"))
        found += [peer.sign(group), peer.sign(group.model_copy(update={"completions": other}))]
    return found


def travel(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Says that its groups come from the far future or past, are of rounds nobody reached, or are not a
    number of seconds old."""
    items = peer.grounds.items(4)
    late, early, far, never = items
    group = peer.group(never, mixed(never))
    nan = group.canonical().replace(f'"created_at":{group.created_at}', '"created_at":NaN').encode()
    return [
        peer.publish(late, mixed(late), created_at=peer.clock() + 1e9),
        peer.publish(early, mixed(early), created_at=-1e300),
        peer.publish(far, mixed(far), round=2**31 - 1, policy_version=2**31 - 1),
        peer.envelope(nan, group_id=group.group_id),
    ]
