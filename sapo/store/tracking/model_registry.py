"""Model versions: as files in the form that `mlflow.transformers.load_model` reads, and read back with tags.

Of a checkpoint only what a model needs is kept (no optimiser state), nothing is fetched from a network, and
the files name the swarm and not a folder of the machine they were made on. MLflow and transformers are
imported when needed; that takes seconds.
"""

import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from sapo.core.errors import Unavailable, UserError, library_errors
from sapo.policy.checkpoint import verify

SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
LATEST = "latest"
MOST_VERSIONS = 100_000
"""Of one model, in one request: MLflow gives 200,000 at most."""
REQUIREMENTS = ("torch", "transformers", "tokenizers", "safetensors")


@dataclass(frozen=True, slots=True)
class Version:
    """A registered model version; `created_at` is in seconds."""

    name: str
    number: int
    aliases: tuple[str, ...]
    tags: Mapping[str, str]
    created_at: float


def find(uri: str, name: str, which: str) -> Version:
    """The version of a registered model that `which` names: a number, an alias, or `latest`. Raises
    `UserError` where there is none, `Unavailable` when MLflow is away."""
    known = versions_of(uri, name)
    field, value = "MODEL", f"models:/{name}{'/' if which.isdecimal() else '@'}{which}"
    if not known:
        remedy = "name it <swarm>.<node>, or choose the --home of the swarm that made it"
        raise UserError(field, value, f"MLflow at {uri} has no version of {name}", remedy)
    for version in known:
        if which in (str(version.number), *version.aliases):
            return version
    if which == LATEST:
        return known[-1]
    aliases = [f"@{alias}" for version in known for alias in version.aliases]
    there = ", ".join([f"versions {known[0].number} to {known[-1].number}", *aliases])
    raise UserError(field, value, f"there is no such version of {name}", f"name one of its {there}")


def versions_of(uri: str, name: str) -> list[Version]:
    """All versions of a registered model, oldest first; none of a store that was not made yet. Raises
    `Unavailable` when MLflow is away."""
    kind, sign, file = uri.partition(":///")
    # SQLAlchemy takes the path as it is, without any quoting, up to a question mark
    if sign and kind == "sqlite" and not Path(file.partition("?")[0]).exists():
        return []
    with reaching(uri):
        client = load_mlflow().MlflowClient(uri, uri)
        found = client.search_model_versions(f"name = '{name}'", max_results=MOST_VERSIONS)
        held = client.get_registered_model(name).aliases if found else {}
    return sorted(
        (
            Version(
                name=name,
                number=int(one.version),
                aliases=tuple(sorted(alias for alias, n in held.items() if int(n) == int(one.version))),
                tags=dict(one.tags),
                created_at=one.creation_timestamp / 1000,
            )
            for one in found
        ),
        key=lambda version: version.number,
    )


def download(version: Version, uri: str, place: Path) -> Path:
    """A version's model directory, fetched from MLflow to below `place`. Raises `Unavailable`."""
    place.mkdir(exist_ok=True)
    with reaching(uri):
        load_mlflow().artifacts.download_artifacts(
            f"models:/{version.name}/{version.number}",
            dst_path=str(place),
            tracking_uri=uri,
            registry_uri=uri,
        )
    return next(place.rglob("*.safetensors")).parent


@contextmanager
def reaching(uri: str) -> Iterator[None]:
    """Turn whatever is raised in the block into `Unavailable`: what MLflow does not document, too."""
    from requests import RequestException

    failures = (load_mlflow().MlflowException, RequestException, OSError)
    with library_errors(f"MLflow at {uri}"):
        try:
            yield
        except failures as error:
            raise Unavailable(f"MLflow at {uri}: {' '.join(str(error).split())[:500]}") from error


def load_mlflow() -> Any:
    """MLflow with short time-outs: the journal retries, and better than an HTTP client does."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    import mlflow

    return mlflow


@contextmanager
def model_directory(checkpoint: Path, whole: Callable[[Path, Path], object]) -> Iterator[Path]:
    """A whole Hugging Face directory, there until the block ends: `whole(checkpoint, directory)` fills it."""
    with tempfile.TemporaryDirectory(prefix="sapo-version-") as folder:
        whole(checkpoint, Path(folder))
        yield Path(folder)


def lineage(checkpoint: Path) -> dict[str, str]:
    """A version's tags about its checkpoint. Raises `BrokenCheckpoint` where that is not whole."""
    found = verify(checkpoint)
    return {
        "sapo.weights_sha256": found.weights_sha256,
        "sapo.config_digest": found.config_digest,
        "sapo.checkpoint": checkpoint.name,
    }


@contextmanager
def stored(client: Any, logged: Any) -> Iterator[Path]:
    """A folder, not made yet, whose files are the logged model's when the block ends."""
    place = _local(logged.artifact_location)
    if place is not None:
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="sapo-version-") as folder:
        place = Path(folder) / "model"
        yield place
        client.log_model_artifacts(logged.model_id, str(place))


def create_model(client: Any, name: str, tags: Mapping[str, str], about: str) -> None:
    """Make the registered model of this name where there is none yet."""
    try:
        client.create_registered_model(name, tags=dict(tags), description=about)
    except load_mlflow().MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def create_version(client: Any, name: str, logged: Any, run: str, tags: Mapping[str, str]) -> int:
    """Make the logged model of a run the next version of a registered one; returns its number."""
    version = client.create_model_version(
        name,
        # not `models:/...`: MLflow would look that up in the process-wide default store
        source=logged.artifact_location,
        run_id=run,
        tags=dict(tags),
        model_id=logged.model_id,
    )
    return int(version.version)


def store(client: Any, logged: Any, directory: Path, name: str, tags: Mapping[str, str]) -> None:
    """Write the model in `directory` to the place MLflow has for the logged model."""
    import mlflow.transformers
    from huggingface_hub import ModelCard
    from mlflow.models import Model
    from transformers import GenerationConfig

    # where the history lies is the machine's, not the model's
    said = {key: value for key, value in sorted(tags.items()) if not key.startswith("sapo.history")}
    facts = "".join(f"- {key}: {value}\n" for key, value in said.items())
    card = (directory / "README.md").read_text(encoding="utf-8")
    with stored(client, logged) as place:
        mlflow.transformers.save_model(
            str(directory),
            str(place),
            task="llm/v1/chat",
            # chat templates write the start token themselves
            model_config={
                "max_new_tokens": GenerationConfig.from_pretrained(directory).max_new_tokens,
                "add_special_tokens": False,
            },
            # a card and requirements are given because MLflow would look for both on the network
            model_card=ModelCard(f"{card}\n## Lineage\n\n{facts}"),
            pip_requirements=requirements(REQUIREMENTS),
            mlflow_model=Model(model_id=logged.model_id, run_id=logged.source_run_id),
        )
        (place / "LICENSE.txt").unlink(missing_ok=True)
        written = Model.load(str(place / "MLmodel"))
        written.flavors["transformers"]["source_model_name"] = name
        written.save(str(place / "MLmodel"))


def requirements(packages: Sequence[str]) -> list[str]:
    """These packages, each as it is installed here."""
    return [f"{one}=={importlib.metadata.version(one).split('+')[0]}" for one in packages]


def _local(location: str) -> Path | None:
    parsed = urlparse(location)
    if parsed.scheme == "file":
        return Path(unquote(parsed.path))
    return Path(location) if not parsed.scheme else None
