"""Model versions as files: a checkpoint in the form that `mlflow.transformers.load_model` reads.

Only what a model needs is kept (no optimiser state), nothing is fetched from a network, and the files name
the swarm and not a folder of the machine they were made on. MLflow and transformers are imported when needed.
"""

import importlib.metadata
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from sapo.checkpoint import verify

NOT_THE_MODEL = frozenset({"optimizer.pt", "checkpoint.json"})
ADAPTER = "adapter_config.json"
REQUIREMENTS = ("torch", "transformers", "tokenizers", "safetensors")


@contextmanager
def model_directory(checkpoint: Path, whole: Callable[[Path, Path], None]) -> Iterator[Path]:
    """A whole Hugging Face directory made of a checkpoint, there until the block ends.

    A checkpoint of weights lends its files by links; of an adapter, `whole(checkpoint, destination)` makes
    the model it belongs to.
    """
    with tempfile.TemporaryDirectory(prefix="sapo-version-") as folder:
        directory = Path(folder)
        if (checkpoint / ADAPTER).exists():
            whole(checkpoint, directory)
        else:
            for path in checkpoint.iterdir():
                if path.name not in NOT_THE_MODEL:
                    (directory / path.name).symlink_to(path.absolute())
        yield directory


def lineage(checkpoint: Path) -> dict[str, str]:
    """What a version says of its checkpoint. Raises `BrokenCheckpoint` where that is not whole."""
    found = verify(checkpoint)
    return {
        "sapo.weights_sha256": found.weights_sha256,
        "sapo.config_digest": found.config_digest,
        "sapo.checkpoint": checkpoint.name,
    }


def store(client: Any, logged: Any, directory: Path, name: str, tags: Mapping[str, str]) -> None:
    """Write the model in `directory` to the place MLflow has for the logged model."""
    place = _local(logged.artifact_location)
    if place is not None:
        _save(directory, place, logged, name, tags)
        return
    with tempfile.TemporaryDirectory(prefix="sapo-version-") as folder:
        place = Path(folder) / "model"
        _save(directory, place, logged, name, tags)
        client.log_model_artifacts(logged.model_id, str(place))


def _save(directory: Path, place: Path, logged: Any, name: str, tags: Mapping[str, str]) -> None:
    import mlflow.transformers
    from huggingface_hub import ModelCard
    from mlflow.models import Model

    facts = "".join(f"- {key}: {value}\n" for key, value in sorted(tags.items()))
    mlflow.transformers.save_model(
        str(directory),
        str(place),
        task="text-generation",
        # a card and requirements are given because MLflow would look for both on the network
        model_card=ModelCard(f"---\nlicense: unknown\n---\n\n# {name}\n\nTrained by a swarm.\n\n{facts}"),
        pip_requirements=[f"{package}=={_version(package)}" for package in REQUIREMENTS],
        mlflow_model=Model(model_id=logged.model_id, run_id=logged.source_run_id),
    )
    (place / "LICENSE.txt").unlink(missing_ok=True)
    written = Model.load(str(place / "MLmodel"))
    written.flavors["transformers"]["source_model_name"] = name
    written.save(str(place / "MLmodel"))


def _version(package: str) -> str:
    return importlib.metadata.version(package).split("+")[0]


def _local(location: str) -> Path | None:
    parsed = urlparse(location)
    if parsed.scheme == "file":
        return Path(unquote(parsed.path))
    return Path(location) if not parsed.scheme else None
