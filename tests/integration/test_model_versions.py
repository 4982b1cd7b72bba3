"""Model versions against a real MLflow server and store: once each, whole, loadable, with their lineage."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
import torch
from history_samples import INCARNATION, due
from mlflow import MlflowClient
from mlflow_runs import experiment
from prefect_server import mlflow_server

from sapo.core.config.load import Config, GenerateConfig
from sapo.core.config.prompt import Prompt
from sapo.core.errors import Unavailable
from sapo.policy import checkpoint, models
from sapo.store.journal.rows import ChainLink, JournalError
from sapo.store.tracking.sinks import VersionSink
from sapo.store.tracking.tracker import Tracker
from sapo.testing import policies as samples

pytestmark = pytest.mark.services
CHAIN, BATCH = "c1" * 32, "b1" * 32
JOURNAL = SimpleNamespace(
    link=lambda round: ChainLink(round - 1, f"{round:04d}{CHAIN[4:]}"),
    batch_digest=lambda round: f"{round:04d}{BATCH[4:]}",
)
"""What a version asks of a journal: the link and the digest of its last round."""


def saved(directory: Path, round: int) -> tuple[Path, Any]:
    """A real checkpoint of a tiny policy, optimiser state and all."""
    policy = samples.policy("llama", seed=round)

    made = checkpoint.save(
        directory,
        round=round,
        incarnation=INCARNATION,
        weights_sha256="ab" * 32,
        config_digest="cd" * 32,
        threads=1,
        save_model=partial(models.save, policy),
        optimizer={"state": torch.zeros(3)},
        keep=10,
    )
    return made.path, policy.model


@dataclass(frozen=True)
class Server:
    """The MLflow server as `sapo swarm` runs it, and the folder of its store."""

    home: Path
    url: str


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("server")
    with mlflow_server(home) as url:
        yield Server(home, url)


def plain(found: Path, place: Path) -> None:
    models.export(found, place, config=Config(), cache=found)


def tracker(server: Server, node: str) -> Tracker:
    return Tracker(server.url, "tiny", node, INCARNATION, artifacts=server.home / "artifacts")


def test_a_version_is_registered_once_and_loads_by_latest_without_a_server(
    server: Server, tmp_path: Path
) -> None:
    first, _ = saved(tmp_path, 100)
    last, model = saved(tmp_path, 200)
    sink = VersionSink(tracker(server, "n0"), plain)
    sink.deliver([due(100, str(first))], JOURNAL)
    sink.deliver([due(100, str(first)), due(200, str(last))], JOURNAL)
    VersionSink(tracker(server, "n0"), plain).deliver([due(200, str(last))], JOURNAL)
    shutil.rmtree(tmp_path)

    store = f"sqlite:///{server.home}/mlflow.db"
    found = MlflowClient(store).search_model_versions("name = 'tiny.n0'")
    assert sorted(version.tags["sapo.round"] for version in found) == ["100", "200"]
    newest = max(found, key=lambda version: int(version.version))
    assert "`sapo lineage models:/tiny.n0/2`" in str(newest.description)
    assert newest.tags["sapo.rounds"] == "0-199"
    assert newest.tags["sapo.weights_sha256"] == "ab" * 32
    assert newest.tags["sapo.incarnation"] == INCARNATION
    assert newest.tags["sapo.chain"] == f"0199{CHAIN[4:]}"
    assert newest.tags["sapo.batches"] == f"0199{BATCH[4:]}"

    unset: Any = None
    mlflow.set_tracking_uri(store)
    try:
        pipeline = mlflow.transformers.load_model("models:/tiny.n0@latest")
    finally:
        mlflow.set_tracking_uri(unset)  # MLflow put it into the environment, for every process that follows
    assert all(
        torch.equal(a, b)
        for a, b in zip(pipeline.model.state_dict().values(), model.state_dict().values(), strict=True)
    )
    answer = pipeline("12 + 30 =", max_new_tokens=3)
    assert answer[0]["generated_text"].startswith("12 + 30 =")


def test_a_version_answers_messages_under_its_prompt_which_its_tag_and_card_say(
    server: Server, tmp_path: Path
) -> None:
    path, model = saved(tmp_path, 1)
    config = Config(
        prompt=Prompt(system="add.", examples=(("1 + 2", "3"),)), generate=GenerateConfig(max_new_tokens=5)
    )
    whole = partial(models.export, config=config, cache=tmp_path)
    VersionSink(tracker(server, "n11"), whole, about={"sapo.prompt": config.prompt_text()}).deliver(
        [due(1, str(path))], JOURNAL
    )
    (version,) = MlflowClient(server.url).search_model_versions("name = 'tiny.n11'")
    told = {"system": "add.", "examples": [["1 + 2", "3"]], "template": {}}
    assert json.loads(version.tags["sapo.prompt"]) == told
    stored = Path(str(version.source).removeprefix("file://"))
    assert "<|system|>add.<|end|><|user|>1 + 2" in (stored / "model_card.md").read_text()
    policy = models.wrap("m", model, samples.tokenizer(), prompt=config.prompt)
    asked = torch.tensor([policy.encode_prompt("2 + 2")])
    wanted = model.generate(
        asked, max_new_tokens=5, do_sample=False, eos_token_id=list(policy.stop_ids), pad_token_id=0
    )[0]
    (answer,) = mlflow.pyfunc.load_model(str(stored)).predict(
        {"messages": [{"role": "user", "content": "2 + 2"}]}
    )
    text = policy.tokenizer.decode(wanted[asked.shape[1] :], skip_special_tokens=True)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text.lstrip()}
    assert answer["usage"]["total_tokens"] == len(wanted)


def test_a_version_says_where_the_history_lay_and_the_files_do_not(server: Server, tmp_path: Path) -> None:
    path, _ = saved(tmp_path, 1)
    sink = VersionSink(tracker(server, "n8"), plain, "s3://swarms/tiny")
    sink.history_version = lambda: 41
    sink.deliver([due(1, str(path))], JOURNAL)
    (version,) = MlflowClient(server.url).search_model_versions("name = 'tiny.n8'")
    assert version.tags["sapo.history"] == "s3://swarms/tiny"
    assert version.tags["sapo.history_version"] == "41"
    stored = Path(str(version.source).removeprefix("file://"))
    assert "s3://swarms" not in "".join(file.read_text() for file in stored.rglob("*.md"))


def test_a_version_whose_last_round_the_journal_has_dropped_is_registered_without_links(
    server: Server, tmp_path: Path
) -> None:
    def gone(round: int) -> ChainLink:
        raise JournalError(f"the journal does not hold round {round}")

    path, _ = saved(tmp_path, 1)
    journal = SimpleNamespace(link=gone, batch_digest=gone)
    VersionSink(tracker(server, "n9"), plain).deliver([due(1, str(path))], journal)
    (version,) = MlflowClient(server.url).search_model_versions("name = 'tiny.n9'")
    assert not {"sapo.chain", "sapo.batches", "sapo.history", "sapo.history_version"} & version.tags.keys()
    assert version.tags["sapo.rounds"] == "0-0"


def test_the_stored_model_keeps_its_tokenizer_and_holds_nothing_else(server: Server, tmp_path: Path) -> None:
    path, _ = saved(tmp_path, 1)
    VersionSink(tracker(server, "n1"), plain).deliver([due(1, str(path))], JOURNAL)
    (version,) = MlflowClient(server.url).search_model_versions("name = 'tiny.n1'")
    stored = Path(str(version.source).removeprefix("file://"))
    names = {file.name for file in stored.rglob("*")}
    assert {"MLmodel", "model.safetensors", "tokenizer.json", "requirements.txt"} <= names
    assert not names & {"optimizer.pt", "checkpoint.json", "LICENSE.txt"}
    assert str(tmp_path) not in (stored / "MLmodel").read_text()
    assert "torch==" in (stored / "requirements.txt").read_text()
    weights = stored / "model" / "model.safetensors"
    assert weights.stat().st_mode == weights.with_name("config.json").stat().st_mode
    loaded = mlflow.transformers.load_model(str(stored))
    text = "what is 12 + 1200?"
    assert loaded.tokenizer(text)["input_ids"] == samples.tokenizer()(text)["input_ids"]


def test_an_interrupted_registration_is_finished_with_the_files_already_stored(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved(tmp_path, 5)
    first = tracker(server, "n2")

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    first.start()
    monkeypatch.setattr(first._client(), "create_model_version", die)
    with pytest.raises(KeyboardInterrupt):
        VersionSink(first, plain).deliver([due(5, str(path))], JOURNAL)
    VersionSink(tracker(server, "n2"), plain).deliver([due(5, str(path))], JOURNAL)
    client = MlflowClient(server.url)
    stored = client.search_logged_models(
        [experiment(client, "tiny").experiment_id], "tags.`sapo.node` = 'n2'"
    )
    assert len(stored) == 1
    assert len(client.search_model_versions("name = 'tiny.n2'")) == 1


def test_a_version_that_a_hung_server_made_beside_its_retry_is_dropped(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = saved(tmp_path, 100)
    create = MlflowClient.create_model_version
    kept: list[tuple[Any, Any]] = []

    def slow(self: MlflowClient, *args: Any, **named: Any) -> Any:
        """The first request waits in the server until its retry comes."""
        if not kept:
            kept.append((args, named))
            raise mlflow.MlflowException("timed out")
        create(self, *kept[0][0], **kept[0][1])
        return create(self, *args, **named)

    monkeypatch.setattr(MlflowClient, "create_model_version", slow)
    sink = VersionSink(tracker(server, "hung"), plain)
    with pytest.raises(Unavailable):
        sink.deliver([due(100, str(found))], JOURNAL)
    sink.deliver([due(100, str(found))], JOURNAL)
    (version,) = MlflowClient(server.url).search_model_versions("name = 'tiny.hung'")
    assert (version.version, version.tags["sapo.round"]) == ("1", "100")


def test_the_champion_is_the_best_on_held_out_questions(server: Server, tmp_path: Path) -> None:
    own = tracker(server, "n3")
    paths = {round: saved(tmp_path, round)[0] for round in (1, 2, 3)}
    VersionSink(own, plain).deliver([due(r, str(path)) for r, path in paths.items()], JOURNAL)
    assert own.set_champion({1: 0.90}, "others") == 1
    assert own.set_champion({1: 0.30, 2: 0.40}, "these") == 2
    assert own.set_champion({3: 0.35}, "these") == 2
    assert own.set_champion({2: 0.20, 9: 0.99}, "these") == 3, "there is no version of round 9"
    assert own.set_champion({2: 0.20, 3: 0.10}, "these") == 1, "asked these before: 0.30"
    assert own.set_champion({2: 0.35}, "these") == 2
    champion = MlflowClient(server.url).get_model_version_by_alias("tiny.n3", "champion")
    assert champion.tags["sapo.round"] == "2"
    assert champion.tags["sapo.eval.pass_at_1"] == "0.35"


def test_a_checkpoint_that_is_gone_raises_an_alarm_and_blocks_nothing(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    VersionSink(tracker(server, "n6"), plain).deliver([due(1, str(tmp_path / "gone"))], JOURNAL)
    assert "ALARM: no model version can be made" in caplog.text
