"""Hostile peers that play with envelopes: bytes, sizes, signatures, ids and time."""

import json

from animals.peer import Peer, Sight, mixed
from sapo.core.types import SCHEMA_VERSION, Completion, SignedGroup, canonical, sha256
from sapo.peers.group_rules import MAX_QUESTION

OTHERS = "0" * 64
WEAK_KEY = "01" + "00" * 31
"""The neutral element of edwards25519."""
LIGATURE = "\ufdfa"
"""One letter, eighteen in its compatibility form."""
BURST = 4
"""Records a round, half of what an honest node of preset `starter` publishes."""


def garbage(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Noise under good and bad signatures, wrong digests, JSON that is no group, is nested too deep, is not
    canonical, or of an unknown schema version."""
    noise = peer.rng.randbytes(400)
    (item,) = peer.items(1)
    honest = peer.publish(item, mixed(item))
    values = json.loads(honest.payload)
    loose = json.dumps(values, indent=1).encode()
    deep = b'{"recipe":' * 5_000 + b"1" + b"}" * 5_000
    return [
        peer.envelope(noise),
        peer.envelope(noise[::-1], signature=OTHERS * 2),
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
    long, many = peer.items(2)
    third = rules.max_payload_bytes // 3 + 1
    return [
        peer.publish(long, ["1" * third] * 3),
        peer.publish(long, ["1" * (rules.max_text_chars + 1), "2"]),
        peer.publish(many, ["1"] * (rules.max_completions + 1)),
    ]


def burn(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """What takes longest to look at, though the rules allow it: letters that stand for phrases, deep fields
    of a schema to come."""
    rules = peer.grounds.manifest
    phrase, nested = peer.items(2)
    room = min(rules.max_text_chars, rules.max_payload_bytes // (3 * rules.max_completions + 3) - 40)
    deep: list[object] = []
    for _ in range(20):
        deep = [deep, 0]
    fields = {"schema_version": SCHEMA_VERSION + 1, "more": [deep] * (rules.max_payload_bytes // 150)}
    answers = [f"{k}{LIGATURE * (room - 2)}" for k in range(rules.max_completions)]
    return [peer.publish(phrase, answers), peer.publish(nested, mixed(nested), **fields)]


def hog(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Groups of as many bytes as the rules allow, in token ids of another vocabulary."""
    rules = peer.grounds.manifest
    room = min(rules.max_text_chars, rules.max_payload_bytes // 14)
    sent = []
    for item in peer.items(BURST):
        long = Completion(text="1" * room, finish_reason="length", token_ids=(999_999,) * room)
        sent.append(peer.publish(item, [], completions=(long, Completion(text="2", finish_reason="stop"))))
    return sent


def amplify(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Long questions with as many short answers as there may be: an archive has the question with each."""
    rules = peer.grounds.manifest
    items = peer.items(3)
    lengths = (MAX_QUESTION + 1, min(MAX_QUESTION, rules.max_payload_bytes // 2), 1000)
    answers = [f"{k}" for k in range(rules.max_completions)]
    return [
        peer.publish(item, answers, question=item.question.ljust(length, "?"))
        for item, length in zip(items, lengths, strict=True)
    ]


def sign_weakly(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Groups under a key of small order, for which one constant signature holds whatever the payload says."""
    sent = []
    for item in peer.items(BURST):
        payload = peer.group(item, mixed(item), key=WEAK_KEY).canonical().encode()
        sent.append(peer.envelope(payload, key=WEAK_KEY, signature="01" + "00" * 63))
    return sent


def forge(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Groups in a victim's name: its key in the payload, its key on the envelope, its node name, its groups
    with another answer."""
    if not sight.seen:
        return []
    victim = peer.rng.choice(sight.seen)
    values = json.loads(victim.payload)
    (item,) = peer.items(1)
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
    (item,) = peer.items(1)
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
    for item in peer.items(BURST // 2):
        group = peer.group(item, mixed(item))
        turned = tuple(reversed(group.completions))
        other = (*turned[:-1], Completion(text="5", finish_reason="stop"))
        found += [peer.sign(group), peer.sign(group.model_copy(update={"completions": other}))]
    return found


def travel(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Says that its groups come from the far future or past, are of rounds nobody reached, or are not a
    number of seconds old."""
    items = peer.items(4)
    late, early, far, never = items
    group = peer.group(never, mixed(never))
    nan = group.canonical().replace(f'"created_at":{group.created_at}', '"created_at":NaN').encode()
    return [
        peer.publish(late, mixed(late), created_at=peer.clock() + 1e9),
        peer.publish(early, mixed(early), created_at=-1e300),
        peer.publish(far, mixed(far), round=2**31 - 1, policy_version=2**31 - 1),
        peer.envelope(nan, group_id=group.group_id),
    ]
