"""Keys, incarnations and signatures: who made a group, and that nobody changed it since (DESIGN 1)."""

import os
import secrets
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from pydantic import ValidationError

from sapo.errors import Refused, UserError
from sapo.records import Group, SignedGroup, sha256

__all__ = ["Identity", "Refused", "new_incarnation", "seal", "unseal", "verify"]


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
        """The key in a PEM file (PKCS #8, mode 600), made there first if the file does not exist.

        Raises `UserError` when the file is damaged, holds another kind of key, or others may read it.
        """
        try:
            if not path.exists():
                _create(path)
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                raise UserError(
                    "key file",
                    str(path),
                    f"others may read it (mode {mode:o})",
                    "chmod 600 it, or delete it for a new key if they did",
                )
            return cls(_parse(path, path.read_bytes()))
        except OSError as error:
            problem = error.strerror or str(error)
            raise UserError(
                "key file", str(path), problem, "make the folder writable for this user"
            ) from None

    def sign(self, data: bytes) -> str:
        """The Ed25519 signature of `data`, 128 hex digits."""
        return self._private.sign(data).hex()


def _create(path: Path) -> None:
    """Write a new key so that other processes see the whole file or none, and the first writer wins."""
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return  # another process was first; its key is the node's
    finally:
        temporary.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _parse(path: Path, pem: bytes) -> Ed25519PrivateKey:
    try:
        private = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        private = None
    if not isinstance(private, Ed25519PrivateKey):
        raise UserError(
            "key file",
            str(path),
            "holds no Ed25519 private key in PEM (PKCS #8)",
            "restore it, or delete it for a new key (the node is then a new author)",
        )
    return private


def new_incarnation() -> str:
    """16 random hex digits, minted with each new journal: names of a lost journal can't come back."""
    return os.urandom(8).hex()


def verify(key: str, signature: str, data: bytes) -> bool:
    """Whether `signature` (128 hex digits) is `key`'s (64 hex digits) over exactly `data`."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(signature), data)
    except (InvalidSignature, ValueError):
        return False
    return True


def seal(group: Group, identity: Identity) -> SignedGroup:
    """Sign a group's canonical bytes. Raises `ValueError` for a group that names another author's key."""
    if group.key != identity.key:
        raise ValueError("a group is signed by the key it names")
    payload = group.canonical().encode()
    return SignedGroup(
        group_id=group.group_id,
        content_sha256=sha256(payload),
        key=identity.key,
        signature=identity.sign(payload),
        payload=payload,
    )


def unseal(signed: SignedGroup) -> Group:
    """The group inside, once everything about the envelope holds. Raises `Refused` otherwise.

    Digest and signature are checked before a byte is parsed. A group of the next schema version is taken with
    the fields it has more. Codes, in the order of the checks: `bad_digest`, `bad_signature`,
    `schema_version`, `malformed`, `not_canonical`, `wrong_key`, `wrong_id`.
    """
    if sha256(signed.payload) != signed.content_sha256:
        raise Refused("bad_digest", "content_sha256 is not the payload's")
    if not verify(signed.key, signed.signature, signed.payload):
        raise Refused("bad_signature", "the signature is not the key's over this payload")
    try:
        group = Group.model_validate_json(signed.payload, strict=True)
    except ValidationError as error:
        raise _malformed(error) from None
    except RecursionError:
        # a recipe's parameters are JSON inside JSON; nested deep enough they exhaust the parser
        raise Refused("malformed", "nested too deep") from None
    try:
        same = group.canonical().encode() == signed.payload
    except (ValueError, RecursionError):
        # fields of a newer version hold any JSON, also what has no canonical form, such as NaN
        same = False
    if not same:
        raise Refused("not_canonical", "the payload is not canonical JSON")
    if group.key != signed.key:
        raise Refused("wrong_key", "the payload names another author than the envelope")
    if group.group_id != signed.group_id:
        raise Refused("wrong_id", "group_id is not that of the payload's author, place and recipe")
    return group


def _malformed(error: ValidationError) -> Refused:
    # inputs are left out: they are a peer's, of any size
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    for problem in problems:
        if problem["loc"][:1] == ("schema_version",):
            return Refused("schema_version", problem["msg"])
    first = problems[0]
    where = ".".join(str(part)[:40] for part in first["loc"][:6])
    return Refused("malformed", f"{where}: {first['msg'][:200]}" if where else first["msg"][:200])
