"""What a manifest advises: taken by those who join, overruled by them, and never more than what is listed."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sapo import cli
from sapo.cli.commands import launch
from sapo.cli.report.live_view import PlainView
from sapo.core.config.advice import LIMITS, OWN, SECTIONS, advise, describe, take
from sapo.core.config.home import Home, read_manifest
from sapo.core.config.load import Config, load, parse, presets
from sapo.core.config.manifest import Manifest
from sapo.core.errors import UserError
from sapo.ops import sites

BUS = ("bus.type=kafka", "bus.servers=broker:9092")
FLAGS = [word for item in BUS for word in ("--set", item)]
QWEN = "Qwen/Qwen2.5-0.5B-Instruct"
RULES = Manifest.of(load("tiny", env={}))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for every test, without settings from outside; tasks are checked in test_sites."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sites, "check_tasks", lambda config: None)
    monkeypatch.delenv("SAPO_HOME", raising=False)
    return tmp_path


def begun(*sets: str, preset: str | None = None) -> Path:
    """The manifest of a swarm that site a has begun."""
    return sites.found_swarm("demo", "a", preset, [*BUS, *sets], Path()).manifest


def joined(manifest: Path, *sets: str, preset: str | None = None, file: Path | None = None) -> Config:
    """The config of site b, as `sapo swarm` reads it back."""
    found = sites.join_swarm(manifest, "b", preset, [*BUS, *sets], Path(), None, file)
    config = load(None, found.file, env={})
    assert config == found.config == found.home.load_config()
    return config


def advised(manifest: Path, advice: object) -> Path:
    """The same manifest with other advice."""
    body = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**body, "advice": advice}))
    return manifest


def test_a_joiner_gets_what_the_swarm_runs() -> None:
    manifest = begun("learn.lr=2e-6", "generate.temperature=0.8", "lora.rank=4", preset="paper")
    config = joined(manifest)
    assert (config.model, config.learn.lr, config.generate.max_new_tokens) == (QWEN, 2e-6, 256)
    assert (config.batch.local, config.batch.external, config.batch.completions) == (4, 4, 8)
    assert (config.generate.temperature, config.learn.advantage) == (0.8, "mean_std")
    assert config.lora is not None
    assert (config.lora.rank, config.swarm.rounds, config.swarm.nodes) == (4, 2000, 1)


def test_a_config_file_is_a_swarms_beginning_as_well(elsewhere: Path) -> None:
    mine = elsewhere / "mine.toml"
    mine.write_text('preset = "paper"\n[swarm]\nnodes = 2\n[learn]\nlr = 3e-6\n')
    made = sites.found_swarm("demo", "a", None, BUS, elsewhere, mine)
    assert made.config.swarm.nodes == 2
    assert made.config == load(None, made.file, env={})
    config = joined(made.manifest)
    assert (config.model, config.learn.lr) == (QWEN, 3e-6)


@pytest.mark.parametrize("preset", presets())
def test_a_site_of_the_same_preset_is_the_founders_but_for_its_name(preset: str) -> None:
    made = sites.found_swarm("demo", "a", preset, BUS, Path())
    config = joined(made.manifest)
    tasks = sorted(made.config.tasks, key=lambda task: task.dataset)  # as a manifest has them
    theirs = made.config.model_dump(mode="json") | {"node": {}}  # which GPUs are another's is no matter here
    theirs["swarm"] |= {"nodes": 1, "site": "b"}
    assert config == parse(theirs).model_copy(update={"tasks": tasks})


def test_advice_is_overruled_by_set_file_and_preset(elsewhere: Path) -> None:
    manifest = begun("learn.lr=2e-6", preset="paper")
    file = elsewhere / "own.toml"
    file.write_text("[learn]\nlr = 5e-6\n[batch]\nlocal = 2\n")
    config = sites.join_swarm(manifest, "c", None, [*BUS, "batch.local=3"], elsewhere, None, file).config
    assert (config.model, config.learn.lr, config.batch.local) == (QWEN, 5e-6, 3)
    config = joined(manifest, preset="tiny")
    assert (config.model, config.learn.lr, config.batch.external) == ("thinker", 2e-4, 12)
    assert config.learn.advantage == "mean_std", "what the preset does not name is still the advice's"


@pytest.mark.parametrize(
    "text", ['[rules]\nsalt = "mine"\n', '[[tasks]]\ndataset = "gcd"\n', '[swarm]\nname = "mine"\n']
)
def test_rules_in_a_joiners_file_are_refused(elsewhere: Path, text: str) -> None:
    file = elsewhere / "own.toml"
    file.write_text(text)
    with pytest.raises(UserError, match="for the whole swarm to say"):
        joined(begun(), file=file)
    assert [path.name for path in Path("runs").iterdir()] == ["demo-a"], "there is no home of site b"


def test_a_manifest_without_advice_is_joined_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = begun(preset="paper")
    body = json.loads(manifest.read_text())
    del body["advice"]
    manifest.write_text(json.dumps(body))
    assert cli.invoke(["join", str(manifest), "--site", "b", *FLAGS]) == 0
    shown = capsys.readouterr()
    assert "warning: the manifest does not say what the swarm runs" in shown.err
    assert "b0: thinker, lr 2e-4, 4+12 x 8" in shown.out


def test_advice_is_no_part_of_what_two_manifests_differ_in() -> None:
    manifest = begun(preset="paper")
    one = read_manifest(manifest, "MANIFEST", "")
    other = read_manifest(advised(manifest, {"model": "starter"}), "MANIFEST", "")
    assert one == other
    assert one.digest() == other.digest()
    config = joined(manifest, "learn.lr=1e-3", "model=starter", "batch.local=1")
    home = Home.of(None, config)
    home.check(one)
    home.prepare(config, Manifest.of(config))
    assert "advice" not in json.loads(home.manifest.read_text()), (
        "a release before this refuses a home with it"
    )


def test_a_bus_on_one_machine_is_named_by_its_whole_path(elsewhere: Path) -> None:
    made = sites.found_swarm("demo", "a", None, ["bus.path=bus.sqlite"], elsewhere)
    assert made.join == (f"bus.path={elsewhere}/bus.sqlite",)


@pytest.mark.parametrize(
    ("advice", "names"),
    [
        ({"bus": {"type": "kafka", "servers": "evil:9092"}}, "bus.servers"),
        ({"track": {"uri": "http://evil"}}, "track.uri"),
        ({"history": {"uri": "s3://evil"}, "device": "cuda"}, "history.uri"),
        ({"workers": {"unwalled": True}}, "workers.unwalled"),
        ({"node": {"0": {"model": "evil/model"}}}, "node.0"),
        ({"rules": {"salt": "other"}, "tasks": []}, "rules.salt"),
        ({"learn": {"trusted_peers": ["evil"], "foreign": "behaviour"}}, "learn.trusted_peers"),
        ({"generate": {"engine": "vllm", "vllm_cache_gb": 900}}, "generate.engine"),
        ({"swarm": {"nodes": 10_000, "name": "mine", "site": "z"}}, "swarm.nodes"),
        ({"starter": {"steps": 10**9}}, "starter.steps"),
        ({"lora": {"dropout": 0.5}}, "lora.dropout"),
        ({"model": "/data/alice/model"}, "model"),
        ({"model": "../../etc"}, "model"),
        ({"model": "~/model"}, "model"),
        ({"model": "a/b/c"}, "model"),
        ({"model": "org/..model"}, "model"),
        ({"model": "https://evil/model"}, "model"),
        ({"model": "starter:\x1b[2J"}, "model"),
        ({"model": ["starter"]}, "model"),
        ({"generate": {"max_new_tokens": 10**9}}, "generate.max_new_tokens"),
        ({"generate": {"max_new_tokens": 129}}, "generate.max_new_tokens"),
        ({"generate": {"max_new_tokens": True}}, "generate.max_new_tokens"),
        ({"batch": {"completions": 10**6}}, "batch.completions"),
        ({"batch": {"local": "4"}}, "batch.local"),
        ({"learn": {"lr": 1e3}}, "learn.lr"),
        ({"learn": {"lr": float("nan")}}, "learn.lr"),
        ({"learn": {"lr": {"lr": 1}}}, "learn.lr"),
        ({"learn": {"loss": "__import__('os')"}}, "learn.loss"),
        ({"learn": 5}, "learn"),
        ({"preset": "../../etc/passwd"}, "preset"),
        ({"preset": ["tiny"]}, "preset"),
        ({"shiny": {"new": 1}, "a\x1b[2J\nb": 2}, "shiny.new"),
        ({"batch": {"completions": 65}}, "completions"),
        ({"learn": {"foreign": "behaviour"}}, "learn.foreign"),
        ({"lora": {"target_modules": ["q_proj", ".*\n"]}}, "lora.target_modules"),
        ([], "advice"),
        ("x" * 30_000, "advice"),
        ({"learn": {"loss": "x" * 30_000}}, "advice"),
        ({"deep": json.loads("[" * 500 + "]" * 500)}, "deep"),
    ],
)
def test_advice_sets_nothing_but_what_is_listed_and_never_hinders(
    advice: Any, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = begun("rules.max_text_chars=128")
    plain = sites.join_swarm(advised(manifest, {}), "b", None, BUS, Path("p"), Path("ph")).config
    advised(manifest, advice)
    assert cli.invoke(["join", str(manifest), "--site", "b", *FLAGS]) == 0
    shown = capsys.readouterr()
    assert load(None, Path("site-b.toml"), env={}) == plain
    warnings = [line for line in shown.err.splitlines() if "advice" in line]
    assert any(names in line for line in warnings), shown.err
    assert all(len(line) < 400 for line in warnings)
    assert "\x1b" not in shown.out + shown.err


def test_what_is_understood_is_taken_beside_what_is_not() -> None:
    found = take({"model": QWEN, "learn": {"lr": 1e-6, "shiny": 2}, "preset": "paper"}, RULES)
    assert found is not None
    assert (found.preset, found.settings) == ("paper", {"model": QWEN, "learn": {"lr": 1e-6}})
    assert len(found.passed_over) == 1


def test_a_folder_of_ones_own_is_not_advised(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "models" / "mine").mkdir(parents=True)
    for number, model in enumerate((f"{elsewhere}/models/mine", "models/mine", "~/absent")):
        folder = str(number)
        words = ["--dir", folder, *FLAGS, "--set", f"model={model}"]
        assert cli.invoke(["init", "--swarm", "demo", "--site", "a", *words]) == 0
        assert f"model = '{model}' is" in capsys.readouterr().out
        manifest = Path(folder) / "demo.manifest.json"
        assert "model" not in json.loads(manifest.read_text())["advice"]
        assert model not in manifest.read_text()
    assert cli.invoke(["join", str(manifest), "--site", "b", *FLAGS]) == 0
    assert "warning: the manifest names no model: this site takes thinker" in capsys.readouterr().err


def test_every_setting_of_these_sections_is_advised_or_left_to_each_site() -> None:
    keys = {f"{name}.{key}" for name, model in SECTIONS.items() for key in model.model_fields}
    others = {f"swarm.{key}" for key in ("name", "site", "nodes", "seed")}
    assert {*LIMITS} | OWN | others == keys | {"model"}
    assert not {*LIMITS} & OWN


@pytest.mark.parametrize("preset", presets())
def test_presets_are_within_the_bounds_of_advice(preset: str) -> None:
    config = load(preset, env={})
    advice, left = advise(config, preset)
    assert left == []
    found = take(json.loads(json.dumps(advice)), Manifest.of(config))
    assert found is not None
    assert found.passed_over == ()
    assert found.settings == {name: value for name, value in advice.items() if name != "preset"}


def test_a_start_shows_what_its_nodes_run_before_anything_is_loaded(elsewhere: Path) -> None:
    class Loading(Exception):
        """Raised where the first step begins."""

    class Notes(PlainView):
        def note(self, text: str) -> None:
            shown.append(text)

        def step(self, label: str, done: int, total: int) -> None:
            raise Loading(label)

    shown: list[str] = []
    config = load("tiny", sets=["swarm.nodes=2"], env={})
    with pytest.raises(Loading, match="loading torch"):
        launch.prepare(
            config, Home(elsewhere / "new"), Notes("tiny", Console(quiet=True), time.monotonic), ["n1"]
        )
    assert shown == describe(config, ["n1"])
    assert shown[0].startswith("n1: thinker, lr 2e-4, ")


def test_a_prompt_of_its_own_is_described_and_one_that_is_not_set_changes_no_digest() -> None:
    config = load("tiny", sets=["node.1.prompt.examples=[['1 + 2', '3']]"])
    told = describe(config, config.nodes)
    assert [("1 example in the prompt" in line) for line in told] == [False, True]
    assert "prompt" not in load("tiny").model_dump(mode="json")
    assert "prompt" not in load("tiny").policy()
    assert config.for_node("n1").policy()["prompt"]["examples"] == [["1 + 2", "3"]]
