"""A node's model as a folder for others, and that folder on the Hugging Face hub."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sapo.core.atomic_file import refuse_filled, whole_folder
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.errors import Unavailable, UserError
from sapo.core.user_cache import default_cache
from sapo.policy import checkpoint, models, release
from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import JournalError
from sapo.store.tracking import model_registry
from sapo.store.tracking.model_registry import Version
from sapo.store.tracking.tracker import CHAIN, CHAMPION, ROUND
from sapo.store.tracking.uri import tracking_uri


@dataclass(frozen=True, slots=True)
class Exported:
    """A model that was written: how many rounds its weights have seen, and as which version it is known."""

    rounds: int
    version: Version | None


def export_model(
    home: Home,
    node: str,
    target: Path,
    *,
    round: int | None = None,
    version: str | None = None,
    adapter: bool = False,
) -> Exported:
    """Write a node's model to `target`: of a version, the champion where none is named, or of the checkpoint
    after `round` rounds.

    The folder appears whole or not at all. Raises `UserError` where there is no such model or the folder
    holds something, `Unavailable` when MLflow is away.
    """
    refuse_filled(target)
    config = home.load_config().for_node(node)
    if adapter and config.lora is None:
        raise UserError("--adapter", node, "was trained whole: it has no adapter", "leave it out")
    if round is not None and version is not None:
        raise UserError("--round", round, f"--version {version} names a model, too", "leave one out")
    if round is None:
        found = _find(home, node, config, version or CHAMPION)
        made = Exported(int(found.tags[ROUND]), found)
    else:
        made = Exported(round, None)
    with whole_folder(target) as folder:
        with _model(home, node, config, made, adapter) as source:
            for path in source.iterdir():
                (shutil.copytree if path.is_dir() else shutil.copyfile)(path, folder / path.name)
        card = folder / release.CARD
        card.write_text(card.read_text(encoding="utf-8") + _what_came(home, node, made), encoding="utf-8")
    return made


def _find(home: Home, node: str, config: Config, which: str) -> Version:
    try:
        return model_registry.find(tracking_uri(home, config), f"{config.swarm.name}.{node}", which)
    except UserError as error:
        there = f"name one with --version, or a checkpoint with --round ({_rounds(home, node)})"
        if which == CHAMPION:
            raise UserError("NODE", node, "no version of it is champion yet", there) from None
        raise UserError("--version", which, error.problem, there) from None


def _rounds(home: Home, node: str) -> str:
    kept = checkpoint.paths(home.checkpoints(node))
    return ", ".join(str(checkpoint.round_of(path)) for path in kept) or "there is none yet"


@contextmanager
def _model(home: Home, node: str, config: Config, made: Exported, adapter: bool) -> Iterator[Path]:
    """A folder with the model: made of the node's checkpoint, or of the version's files where it is gone."""

    def whole(source: Path, directory: Path) -> None:
        models.export(source, directory, config=config, cache=default_cache(), adapter=adapter)

    kept = home.checkpoints(node) / f"round-{made.rounds:06d}"
    if _is(kept, made.version):
        with model_registry.model_directory(kept, whole) as directory:
            yield directory
        return
    if made.version is None:
        remedy = f"name another: {_rounds(home, node)}"
        raise UserError("--round", made.rounds, f"{node} keeps no whole checkpoint of it", remedy)
    if adapter:
        problem = f"of version {made.version.number} only the merged model is kept"
        raise UserError("--adapter", node, problem, "leave it out, or name a checkpoint with --round")
    with tempfile.TemporaryDirectory(prefix="sapo-version-") as scratch:
        files = model_registry.download(made.version, tracking_uri(home, config), Path(scratch))
        if (files / release.CARD).exists():
            yield files
        else:  # an earlier release registered it
            with model_registry.model_directory(files, whole) as directory:
                yield directory


def _is(kept: Path, version: Version | None) -> bool:
    try:
        found = checkpoint.verify(kept)
    except checkpoint.BrokenCheckpoint:
        return False
    return version is None or version.tags.get("sapo.weights_sha256") == found.weights_sha256


def _what_came(home: Home, node: str, made: Exported) -> str:
    facts = {"node": node, "rounds": str(made.rounds)}
    if made.version is not None:
        facts["version"] = f"models:/{made.version.name}/{made.version.number}"
    facts |= _digests(home, node, made)
    lines = "".join(f"- {name}: {value}\n" for name, value in facts.items())
    return f"\n## Held-out questions\n\n{_exams(home, node, made)}\n## Lineage\n\n{lines}"


def _digests(home: Home, node: str, made: Exported) -> dict[str, str]:
    if made.version is not None:
        tags = made.version.tags
        named = {"weights_sha256": tags.get("sapo.weights_sha256"), "chain": tags.get(CHAIN)}
        return {name: value for name, value in named.items() if value}
    found = checkpoint.verify(home.checkpoints(node) / f"round-{made.rounds:06d}")
    facts = {"weights_sha256": found.weights_sha256}
    try:
        with Journal.read_only(home.journal(node)) as journal:
            chain = journal.link(made.rounds - 1).chain
    except JournalError:
        return facts  # the journal has dropped this round, or there was none
    return facts if chain is None else facts | {"chain": chain}


def _exams(home: Home, node: str, made: Exported) -> str:
    sweep = home.load_evaluation()
    exam = None if sweep is None else sweep.nodes.get(node)
    if sweep is None or exam is None:
        return "No policy of this node was asked any.\n"
    start = sweep.start(node, exam.model or "")
    rows = [] if start is None else [("before", start.pass_at_1, start.interval, start.greedy)]
    label = f"after {made.rounds} rounds"
    if exam.round == made.rounds:
        rows.append((label, exam.pass_at_1, exam.interval, exam.greedy))
    elif made.rounds in exam.earlier:
        rows.append((label, exam.earlier[made.rounds], None, None))
    lines = "".join(f"| {name} | {_share(p, half)} | {_share(greedy)} |\n" for name, p, half, greedy in rows)
    head = "| | right, sampled once at temperature 1 | right, most probable answer |\n|---|---|---|\n"
    return f"{sweep.questions} questions that nobody trains on, with 95 % intervals:\n\n{head}{lines}"


def _share(value: float | None, half: float | None = None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" + (f" ± {100 * half:.1f}" if half else "")


def check_push(repository: str) -> None:
    """Raise `UserError` for a repository that none can have, or where there is no token."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        reason = " ".join(str(error).split())
        raise UserError("--push", repository, reason, "name it OWNER/NAME") from None
    if get_token() is None:
        problem = "there is no token for the Hugging Face hub"
        raise UserError("--push", repository, problem, "log in with `hf auth login`, or set HF_TOKEN")


def push(folder: Path, repository: str) -> str:
    """Upload a folder to the Hugging Face hub, into a repository that is made, private, if need be.
    Returns its address. Raises `UserError` where the hub refuses, `Unavailable` where it is away."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export from sapo")
    except HfHubHTTPError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError("--push", repository, reason, "name one that the token may write to") from None
    except Exception as error:  # of the HTTP library, which the hub's does not wrap
        raise Unavailable(f"the Hugging Face hub: {' '.join(str(error).split())[:300]}") from None
    return str(address)
