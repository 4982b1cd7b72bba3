"""Keys, incarnations and signatures: who made a group, and that it is unchanged since."""

import stat
from functools import lru_cache
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from pydantic import ValidationError

from sapo.core.atomic_file import write_first
from sapo.core.errors import Refused, UserError
from sapo.core.types import Group, SignedGroup, canonical, is_sound_key, sha256

MAX_PROBLEMS = 1000
"""Of one group, above which none is named."""
MAX_UNKNOWN = 16_384
"""Bytes of a group in fields that this release does not know."""


class Identity:
    """A node's Ed25519 key. `key` is the raw public key in 64 hex digits: the node's name among peers."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.key = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()

    def __repr__(self) -> str:
        return f"Identity({self.key[:12]}…)"

    @classmethod
    def new(cls) -> "Identity":
        """A fresh key that is written nowhere."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """The key in a PEM file (PKCS #8, mode 600), made there first if the file does not exist. Raises
        `UserError` when the file is damaged, holds another kind of key, or others may read it."""
        try:
            if not path.exists():
                # where another process was first, its key is the node's
                write_first(path, cls.new().to_pem())
        except OSError as error:
            raise _unusable(path, error) from None
        return cls.load(path)

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """The key in a PEM file. Raises `UserError` as `load_or_create` does, and where there is no file."""
        try:
            refuse_readable(path, "key file")
            return cls.from_pem(path.read_bytes(), "key file", str(path))
        except OSError as error:
            raise _unusable(path, error) from None

    @classmethod
    def from_pem(cls, pem: bytes, field: str, value: str, passphrase: str | None = None) -> "Identity":
        """The key in PEM (PKCS #8). Raises `UserError` on `field` = `value` where it holds none, and on the
        passphrase where that does not open it."""
        try:
            private = load_pem_private_key(pem, passphrase.encode() if passphrase else None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            if passphrase and b"ENCRYPTED" in pem:
                remedy = "give the one it was written with; without it nobody can read the file"
                raise UserError("passphrase", "...", f"does not open {value}", remedy) from None
            private = None
        if not isinstance(private, Ed25519PrivateKey):
            raise UserError(
                field,
                value,
                "holds no Ed25519 private key in PEM (PKCS #8)",
                "restore it (`sapo keys restore`), or move it away for a new key: a new author",
            )
        return cls(private)

    def to_pem(self, passphrase: str | None = None) -> bytes:
        """The private key as PEM (PKCS #8), encrypted where there is a passphrase."""
        lock = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
        return self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock)

    def sign(self, data: bytes) -> str:
        """The Ed25519 signature of `data`, 128 hex digits."""
        return self._private.sign(data).hex()

    def secret(self, purpose: str) -> str:
        """64 hex digits that are secret without the private key, the same for equal purposes. Derived from a
        signature (Ed25519 makes one of equal data), which must stay secret."""
        return sha256(self.sign(canonical(["sapo secret", purpose]).encode()))


def refuse_readable(path: Path, field: str) -> None:
    """Raise `UserError` for a file with a secret inside that others may read; `OSError` if there is none."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise UserError(
            field,
            str(path),
            f"others may read it (mode {mode:o})",
            "chmod 600 it, or take a new key if they did",
        )


def _unusable(path: Path, error: OSError) -> UserError:
    problem = error.strerror or str(error)
    return UserError("key file", str(path), problem, "make the folder writable for this user")


def verify(key: str, signature: str, data: bytes) -> bool:
    """Whether `signature` (128 hex digits) is `key`'s (64 hex digits) over `data`; never for a weak key."""
    try:
        _public(key).verify(bytes.fromhex(signature), data)
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=1024)
def _public(key: str) -> Ed25519PublicKey:
    if not is_sound_key(key):
        raise ValueError(f"{key} is a weak key")
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))


def seal(group: Group, identity: Identity) -> SignedGroup:
    """Sign a group's canonical bytes. Raises `ValueError` for a group that names another author's key."""
    if group.key != identity.key:
        raise ValueError("a group is signed by the key it names")
    return sealed(group.canonical().encode(), identity, group.group_id)


def sealed(payload: bytes, identity: Identity, group_id: str) -> SignedGroup:
    """A payload in its envelope, signed."""
    return SignedGroup(
        group_id=group_id,
        content_sha256=sha256(payload),
        key=identity.key,
        signature=identity.sign(payload),
        payload=payload,
    )


def refuse_unsigned(signed: SignedGroup) -> None:
    """Raise `Refused` for a payload that its envelope's key has not signed: `bad_digest`, `bad_signature`."""
    if sha256(signed.payload) != signed.content_sha256:
        raise Refused("bad_digest", "content_sha256 is not the payload's")
    if not verify(signed.key, signed.signature, signed.payload):
        raise Refused("bad_signature", "the signature is not the key's over this payload")


def unseal(signed: SignedGroup) -> Group:
    """The group inside, once everything about the envelope holds. Raises `Refused` otherwise.

    Digest and signature are checked before a byte is parsed. A group of the next schema version is taken with
    the fields it has more. Codes, in the order of the checks: `bad_digest`, `bad_signature`,
    `schema_version`, `malformed`, `not_canonical`, `wrong_key`, `wrong_id`.
    """
    refuse_unsigned(signed)
    group = _canonical(signed.payload)
    if isinstance(group, Refused):
        raise group
    if group.key != signed.key:
        raise Refused("wrong_key", "the payload names another author than the envelope")
    if group.group_id != signed.group_id:
        raise Refused("wrong_id", "group_id is not that of the payload's author, place and recipe")
    return group


def _canonical(payload: bytes) -> Group | Refused:
    """The group, or why there is none. Not raised from here: who kept a refusal whose context is pydantic's
    error would keep all its frames for good, for the collector cannot see what that error holds.

    Fields unknown here are passed over at first: nested ones cost twenty times as much to read.
    """
    group = _parsed(payload, "ignore")
    if isinstance(group, Refused) or (written := _written(group)) == payload:
        return group
    if len(written) < len(payload):
        if any(count(payload) - count(written) > MAX_UNKNOWN for count in (len, _brackets)):
            return Refused("malformed", f"it has more than {MAX_UNKNOWN} bytes in fields unknown here")
        group = _parsed(payload)
        if isinstance(group, Refused) or _written(group) == payload:
            return group
    return Refused("not_canonical", "the payload is not canonical JSON")


def _parsed(payload: bytes, extra: Literal["ignore"] | None = None) -> Group | Refused:
    try:
        return Group.model_validate_json(payload, strict=True, extra=extra)
    except ValidationError as error:
        return _malformed(error)
    except RecursionError:
        # a recipe's parameters are JSON inside JSON; nested deep enough they exhaust the parser
        return Refused("malformed", "nested too deep")


def _written(group: Group) -> bytes:
    try:
        return group.canonical().encode()
    except (ValueError, RecursionError):
        return b""  # fields of a newer version hold any JSON, also what has no canonical form, such as NaN


def _brackets(payload: bytes) -> int:
    """How many lists and objects, and more; short numbers could make up for their length, not for these."""
    return payload.count(b"[") + payload.count(b"{")


def _malformed(error: ValidationError) -> Refused:
    if error.error_count() > MAX_PROBLEMS:  # to list a hundred thousand would take seconds
        return Refused("malformed", f"{error.error_count()} things are wrong with it")
    # inputs are left out: they are a peer's, of any size
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    for problem in problems:
        if problem["loc"][:1] == ("schema_version",):
            return Refused("schema_version", problem["msg"])
    first = problems[0]
    where = ".".join(str(part)[:40] for part in first["loc"][:6])
    return Refused("malformed", f"{where}: {first['msg'][:200]}" if where else first["msg"][:200])
