"""The gateway's program: built once from its pinned source (`infra.gotools`)."""

from pathlib import Path

from infra import gotools

VERSION = "v1.8.0"
NAME = "versitygw"
MODULE = "github.com/versity/versitygw"


def install(cache: Path | None = None) -> Path:
    """The program, built now if it is not there yet. Raises as `gotools.install` does."""
    return gotools.install(NAME, f"{MODULE}/cmd/{NAME}", VERSION, cache)
