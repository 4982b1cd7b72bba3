"""Certificates of a secured cluster: one authority, one certificate for clients to see, one among brokers.

They are separate so that a certificate which has expired for clients leaves the brokers' own talk alone.
"""

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from sapo.core.atomic_file import whole_file
from sapo.core.errors import UserError
from sapo.core.install import install_command

if TYPE_CHECKING:
    import trustme

DAYS = 3650
OUTER, INNER = "clients.pem", "brokers.pem"
ORGANIZATION = "sapo"


def prepare(folder: Path, *, host: str, days: int) -> None:
    """Make what is missing: `ca.pem`, `ca.key`, and a key with its certificate for clients and for brokers.

    The one for clients ends `days` from now; a negative number makes one that has expired.
    To renew it, delete its file and start the brokers again: clients trust the authority, which stays.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = _authority(folder)
    if not (folder / INNER).exists():
        _issue(authority, folder / INNER, ("127.0.0.1",), "brokers", DAYS)
    if not (folder / OUTER).exists():
        names = tuple(dict.fromkeys((host, "127.0.0.1", "localhost")))
        _issue(authority, folder / OUTER, names, host, days)


def inner_principal(folder: Path) -> str:
    """How Kafka calls whoever shows the brokers' certificate."""
    certificate = x509.load_pem_x509_certificates((folder / INNER).read_bytes())[0]
    return certificate.subject.rfc4514_string()


def _authority(folder: Path) -> "trustme.CA":
    try:
        import trustme
    except ModuleNotFoundError:
        raise UserError("secured", True, "trustme is not installed", install_command("broker")) from None
    certificate, key = folder / "ca.pem", folder / "ca.key"
    if certificate.exists():
        return trustme.CA.from_pem(certificate.read_bytes(), key.read_bytes())
    made = trustme.CA(organization_name=ORGANIZATION, organization_unit_name="authority")
    write_private(key, made.private_key_pem.bytes())
    certificate.write_bytes(made.cert_pem.bytes())
    return made


def _issue(authority: "trustme.CA", file: Path, names: tuple[str, ...], common_name: str, days: int) -> None:
    now = datetime.datetime.now(datetime.UTC)
    ends = now + datetime.timedelta(days=days)
    begins = min(now, ends) - datetime.timedelta(days=1)
    made = authority.issue_cert(
        *names,
        common_name=common_name,
        organization_name=ORGANIZATION,
        organization_unit_name="kafka",
        not_before=begins,
        not_after=ends,
    )
    # Java reads private keys as PKCS#8 only
    key = load_pem_private_key(made.private_key_pem.bytes(), None)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(file, pem + b"".join(blob.bytes() for blob in made.cert_chain_pems))


def write_private(file: Path, content: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    with whole_file(file, mode=0o600) as new:
        new.write_bytes(content)
