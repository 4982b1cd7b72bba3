"""Keys, signatures, and what is refused of a group whose envelope does not hold."""

import json
import random
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from makers import make_group, make_identity, make_signed

from sapo.core.errors import Refused, UserError
from sapo.core.types import SCHEMA_VERSION, Group, SignedGroup, canonical, is_sound_key, sha256
from sapo.peers.signing import MAX_UNKNOWN, Identity, seal, sealed, unseal, verify

SMALL_ORDER = (
    "00" * 32,
    "00" * 31 + "80",
    "01" + "00" * 31,
    "01" + "00" * 30 + "80",
    "ec" + "ff" * 30 + "7f",
    "ec" + "ff" * 31,
    "ed" + "ff" * 30 + "7f",
    "ed" + "ff" * 31,
    "ee" + "ff" * 30 + "7f",
    "ee" + "ff" * 31,
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
)
"""All encodings of points whose order divides 8: libsodium's list, with both sign bits."""


def sealed_by(author: str, payload: bytes, group_id: str) -> SignedGroup:
    """An envelope in which everything but the payload's meaning is right."""
    identity = make_identity(author)
    return SignedGroup(
        group_id=group_id,
        content_sha256=sha256(payload),
        key=identity.key,
        signature=identity.sign(payload),
        payload=payload,
    )


def changed(**fields: Any) -> SignedGroup:
    """A properly signed payload with some of its top-level fields replaced."""
    signed = make_signed()
    body = json.loads(signed.payload) | fields
    return sealed_by("peer", canonical(body).encode(), signed.group_id)


def code(signed: SignedGroup) -> str:
    with pytest.raises(Refused) as refused:
        unseal(signed)
    return refused.value.code


def test_a_sealed_group_comes_back_equal() -> None:
    group = make_group(texts=("ünï\n", "\x00 }{"))
    signed = seal(group, make_identity("peer"))
    assert unseal(signed) == group
    assert signed.group_id == group.group_id
    assert signed.payload == group.canonical().encode()


def test_a_key_file_is_private_and_stays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    first = Identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Identity.load_or_create(path).key == first.key
    assert verify(first.key, first.sign(b"x"), b"x")
    assert not verify(first.key, first.sign(b"x"), b"y")
    assert [entry.name for entry in tmp_path.iterdir()] == ["key.pem"]


def test_a_key_is_never_printed(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "key.pem")
    assert repr(identity) == f"Identity({identity.key[:12]}…)"


def test_creators_at_the_same_time_get_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        keys = list(threads.map(lambda _: Identity.load_or_create(tmp_path / "key.pem").key, range(16)))
    assert len(set(keys)) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key.pem"
    Identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(UserError, match="others may read it"):
        Identity.load_or_create(path)


@pytest.mark.parametrize("kind", ["empty", "text", "cut", "other kind of key"])
def test_a_damaged_key_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "key.pem"
    Identity.load_or_create(path)
    other = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    content = {"empty": b"", "text": b"hello", "cut": path.read_bytes()[:60], "other kind of key": other}[
        kind
    ]
    path.write_bytes(content)
    with pytest.raises(UserError, match="holds no Ed25519 private key"):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_a_secret_is_the_keys_own_and_lasts(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "key.pem")
    assert identity.secret("poll") == Identity.load(tmp_path / "key.pem").secret("poll")
    others = {identity.secret("poll"), identity.secret("external"), Identity.new().secret("poll")}
    assert len(others) == 3
    assert identity.key not in others


def test_nobody_signs_for_another_author() -> None:
    with pytest.raises(ValueError, match="signed by the key it names"):
        seal(make_group("peer"), make_identity("other"))


def test_a_changed_byte_is_a_bad_digest() -> None:
    signed = make_signed()
    payload = signed.payload.replace(b'"2"', b'"9"')
    assert payload != signed.payload
    assert code(signed.model_copy(update={"payload": payload})) == "bad_digest"


def test_a_changed_byte_with_a_new_digest_is_a_bad_signature() -> None:
    signed = make_signed()
    payload = signed.payload.replace(b'"2"', b'"9"')
    forged = signed.model_copy(update={"payload": payload, "content_sha256": sha256(payload)})
    assert code(forged) == "bad_signature"


def test_another_key_on_the_envelope_is_a_bad_signature() -> None:
    assert code(make_signed().model_copy(update={"key": make_identity("other").key})) == "bad_signature"


def test_a_key_that_is_no_point_is_a_bad_signature() -> None:
    assert code(make_signed().model_copy(update={"key": "ff" * 32})) == "bad_signature"


@pytest.mark.parametrize("key", SMALL_ORDER)
def test_nobody_signs_under_a_key_of_small_order(key: str) -> None:
    """With S = 0 and R neutral or the key, a signature would hold for one text in eight, or for all."""
    assert not is_sound_key(key)
    for r in ("01" + "00" * 31, key):
        assert not any(verify(key, r + "00" * 32, bytes([n])) for n in range(32))
    group = json.loads(make_signed("peer").payload) | {"key": key}
    payload = canonical(group).encode()
    group_id = Group.model_validate_json(payload).group_id
    signed = sealed_by("peer", payload, group_id).model_copy(
        update={"key": key, "signature": "01" + "00" * 63}
    )
    assert code(signed) == "bad_signature"


@pytest.mark.parametrize("excess", range(19))
def test_a_key_in_a_form_that_is_not_canonical_is_none(excess: int) -> None:
    """The field has 2**255 - 19 elements: the 19 numbers above, with either sign bit, name others again."""
    for sign in (0, 2**255):
        assert not is_sound_key((2**255 - 19 + excess + sign).to_bytes(32, "little").hex())


def test_the_list_of_keys_of_small_order_is_complete() -> None:
    """They name the eight points P with 8 P = 0, as many as the cofactor; keys that are made are sound."""
    p, d = 2**255 - 19, -121665 * pow(121666, -1, 2**255 - 19)

    def x_squared(y: int) -> int:
        return (y * y - 1) * pow(d * y * y + 1, -1, p) % p

    points = 0
    for y in {int.from_bytes(bytes.fromhex(key), "little") % 2**255 % p for key in SMALL_ORDER}:
        points += 1 + pow(x_squared(y), (p - 1) // 2, p)  # one point where x is 0, two where x has a sign
        for _ in range(3):
            y = (y * y + x_squared(y)) * pow(1 - d * x_squared(y) * y * y, -1, p) % p  # twice the point
        assert y == 1
    assert points == 8
    assert all(is_sound_key(Identity.new().key) for _ in range(100))


def test_nothing_is_parsed_before_the_signature_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*_: object, **__: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr("sapo.peers.signing.Group.model_validate_json", parsed)
    assert code(make_signed().model_copy(update={"signature": "00" * 64})) == "bad_signature"
    with pytest.raises(AssertionError, match="parsed"):
        unseal(make_signed())


@pytest.mark.parametrize("version", [0, 5, "1", 1.0, 1.5, None, True])
def test_another_schema_version_is_named_even_when_other_fields_differ(version: object) -> None:
    assert code(changed(schema_version=version, something_new=1)) == "schema_version"


@pytest.mark.parametrize(
    "fields",
    [
        {"extra": 1},
        {"completions": []},
        {"completions": [{"text": "alone", "finish_reason": "stop"}]},
        {"round": -1},
        {"round": "0"},
        {"round": 2**31},
        {"round": 10**5000},
        {"created_at": "now"},
        {"swarm": "../up"},
        {"question": None},
        {"recipe": {"dataset": "chain_sum", "config": "[" * 20_000, "seed": 0, "index": 0}},
        {"recipe": {"dataset": "chain_sum", "config": "{}", "seed": 2**31 - 1, "index": 1}},
        {"recipe": {"dataset": "chain_sum", "config": '{"b":1, "a":2}', "seed": 0, "index": 0}},
    ],
)
def test_a_payload_that_is_no_group_is_malformed(fields: dict[str, Any]) -> None:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)  # for writing the test's huge number, not for reading it
    try:
        signed = changed(**fields)
    finally:
        sys.set_int_max_str_digits(limit)
    assert code(signed) == "malformed"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 5000,
        b'{"question":"\\ud800"}',
        random.Random(5).randbytes(64),
    ],
)
def test_bytes_that_are_no_record_are_malformed(payload: bytes) -> None:
    assert code(sealed_by("peer", payload, "0" * 64)) == "malformed"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_malformed(value: str) -> None:
    signed = make_signed()
    payload = signed.payload.replace(b'"created_at":100.0', f'"created_at":{value}'.encode())
    assert payload != signed.payload
    assert code(sealed_by("peer", payload, signed.group_id)) == "malformed"


def test_the_refusal_does_not_repeat_what_the_peer_sent() -> None:
    with pytest.raises(Refused) as refused:
        unseal(changed(round="secret" * 10_000))
    assert len(str(refused.value)) < 400
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'{"author":', b'{ "author":'),
        (b'"created_at":100.0', b'"created_at":100'),
        (b'"created_at":100.0', b'"created_at":1e2'),
        (b'"node":"peer"', b'"node":"other","node":"peer"'),
        (b'"schema_version":3,', b""),
        (b'"question":"What', b'"question":"\\u0057hat'),
    ],
)
def test_one_group_has_one_form(old: bytes, new: bytes) -> None:
    signed = make_signed()
    payload = signed.payload.replace(old, new)
    assert payload != signed.payload
    assert code(sealed_by("peer", payload, signed.group_id)) == "not_canonical"


def test_an_envelope_of_another_author_is_the_wrong_key() -> None:
    group = make_group("peer")
    assert code(sealed_by("other", group.canonical().encode(), group.group_id)) == "wrong_key"


def test_an_id_of_another_place_is_the_wrong_id() -> None:
    group = make_group("peer")
    other = make_group("peer", position=1).group_id
    assert code(sealed_by("peer", group.canonical().encode(), other)) == "wrong_id"


def test_a_refusal_does_not_hold_what_pydantic_said() -> None:
    """Its error is out of the collector's sight, and would hold the payload and every frame for good."""
    with pytest.raises(Refused, match="malformed") as caught:
        unseal(changed(round=-1))
    assert caught.value.__context__ is None


def test_more_fields_of_a_schema_to_come_than_it_can_have_are_refused_before_they_are_read() -> None:
    fields = {"schema_version": SCHEMA_VERSION + 1, "more": ["x" * 100] * (MAX_UNKNOWN // 110)}
    taken = unseal(seal(make_group().model_copy(update=fields), make_identity("peer")))
    assert taken.model_extra == {"more": fields["more"]}
    fields["more"] = ["x" * 100] * (MAX_UNKNOWN // 100)
    with pytest.raises(Refused, match="fields unknown here"):
        unseal(seal(make_group().model_copy(update=fields), make_identity("peer")))


def test_fields_unknown_here_are_passed_over_until_it_is_known_that_they_are_few() -> None:
    fields = {"schema_version": SCHEMA_VERSION + 1, "more": [[]] * 100_000}
    values = json.loads(make_group().model_copy(update=fields).canonical())
    payloads = [canonical(values).encode()]
    # numbers that are written longer than they came make up for the length of what is unknown
    values["completions"][0] |= {"token_ids": [0] * 21_000, "logprobs": ["short"] * 21_000}
    payloads.append(canonical(values).replace('"short"', "-1e15").encode())
    for payload in payloads:
        signed = sealed(payload, make_identity("peer"), make_group().group_id)
        tracemalloc.start()
        with pytest.raises(Refused, match="fields unknown here"):
            unseal(signed)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 15 * len(payload)
