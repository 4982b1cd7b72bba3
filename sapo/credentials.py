"""Secrets are named in a config and fetched only where they are used: they never enter what is logged."""

import os
from pathlib import Path

from sapo.errors import UserError


def fetch(reference: str, field: str) -> str:
    """The secret that `env:NAME`, `file:PATH` or `prefect:BLOCK` names.

    Raises `UserError` naming `field` and the reference, never the secret, where there is none.
    """
    kind, _, name = reference.partition(":")
    readers = {"env": _from_environment, "file": _from_file, "prefect": _from_block}
    secret = readers[kind](name, reference, field)
    if not secret:
        raise UserError(field, reference, "the secret there is empty", "put the secret there")
    return secret


def _from_environment(name: str, reference: str, field: str) -> str:
    if name not in os.environ:
        raise UserError(field, reference, "this environment variable is not set", f"export {name}=...")
    return os.environ[name]


def _from_file(name: str, reference: str, field: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "is not text"
        raise UserError(field, reference, problem, "name a readable file that holds the secret") from None


def _from_block(name: str, reference: str, field: str) -> str:
    from prefect.blocks.system import Secret

    try:
        # mypy cannot see that this is the synchronous half of a method with two
        return str(Secret.load(name, _sync=True).get())  # type: ignore[union-attr,call-arg]
    except ValueError:
        remedy = f'make it: Secret(value=...).save("{name}")'
        raise UserError(field, reference, "Prefect has no Secret block of this name", remedy) from None
