"""What a manifest advises: taken by those who join, overruled by them, and never more than what is listed."""

import json
from pathlib import Path
from typing import Any

import pytest

from sapo import cli
from sapo.core.config.foreign import LIMITS, OWN, leaves
from sapo.core.config.load import Config, load, setting_keys
from sapo.core.config.schema import KafkaBus
from sapo.core.errors import UserError
from sapo.core.exam_size import sized
from sapo.ops import sites

BUS = ("bus.type=kafka", "bus.servers=broker:9092")
FLAGS = [word for item in BUS for word in ("--set", item)]
QWEN = "Qwen/Qwen2.5-0.5B-Instruct"


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
    assert config == found.config
    assert sized(config) == found.home.load_config()
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


@pytest.mark.parametrize(
    "text", ['[rules]\nsalt = "mine"\n', '[[tasks]]\ndataset = "gcd"\n', '[swarm]\nname = "mine"\n']
)
def test_rules_in_a_joiners_file_are_refused(elsewhere: Path, text: str) -> None:
    file = elsewhere / "own.toml"
    file.write_text(text)
    with pytest.raises(UserError, match="for the whole swarm to say"):
        joined(begun(), file=file)
    assert [path.name for path in Path("runs").iterdir()] == ["demo-a"], "there is no home of site b"


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
        ({"model": "Downloads/evil.GGUF"}, "model"),
        ({"model": "runs/demo-a"}, "model"),
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
        ({"learn": {"foreign": "f_tis"}}, "learn.foreign"),
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


AS_THEY_ARE = {
    "swarm": "name site seed",
    "": "tasks node device dtype",
    "rules": "held_out salt answer questions entry members authors min_completions max_payload_bytes",
    "prompt": "system examples template",
    "lora": "dropout",
    "starter": "variant bare seed",
    "generate": "engine ahead",
    "adaptive": "eta tau kappa",
    "share": "select fraction token_ids",
    "pool": "max_peer_share newcomer_share",
    "learn": "trusted_peers optimizer activation_checkpointing autocast compile foreign_credit credit_own",
    "guard": "action falling_probes min_entropy max_truncated max_unscorable "
    "min_foreign_logprob max_engine_gap",
    "checkpoint": "every_rounds every_seconds max_share weight_digest_every",
    "bus": "type topic cluster_id compression username",
    "history": "flush_seconds keep_rounds maintain_seconds vacuum_hours",
    "track": "port register_every samples_every keep_rounds traits",
    "flow": "every rounds_per_run keep_days port",
    "deploy": "node_seconds run_seconds archive_seconds evaluate_seconds judge_seconds lost_seconds "
    "stalled_minutes",
    "eval": "probe_every",
    "gossip": "every alpha beta gamma members",
}
"""Settings that a pack may bring, and whose own bounds will do, by section."""


def test_every_setting_may_come_from_elsewhere_or_is_for_each_site_to_say() -> None:
    brought = {f"{section}.{key}".strip(".") for section, keys in AS_THEY_ARE.items() for key in keys.split()}
    assert sorted([*LIMITS, *brought, *OWN]) == sorted(setting_keys())
    schema = Config(bus=KafkaBus(servers="a:1")).model_dump(mode="json")
    silent = {key: value for _, key, value in leaves(schema) if key in OWN and key != "bus.servers"}
    assert silent == {key: OWN[key] for key in silent}


ESCAPES = "\x1b]0;pwned\x07\x1b[2J\x9b1m\u202eall is well"
PIN = {"package": "evil", "version": "1", "sha256": "0" * 64}


@pytest.mark.parametrize(
    "change",
    [
        {"x" + ESCAPES: 1},
        {str(n) + ESCAPES: 1 for n in range(9_999)},
        {"schema_version": ESCAPES},
        {"swarm": ESCAPES},
        {"reasoning_gym": "1" + ESCAPES},
        {"reasoning_gym": "1.0 @ https://evil.example/x.tar.gz"},
        *(
            {"tasks": [{"dataset": name, "config": "{}"}]}
            for name in ("__main__:x", "torch.hub:load", ESCAPES)
        ),
        *({"tasks": [{"dataset": "gcd", "config": text}]} for text in ("{", "[1]", '{"a":NaN}', '{"a": 1}')),
        {"tasks": [{"dataset": "gcd", "config": '{"a":' + "[" * 9_999}]},
        {"tasks": [{"dataset": "gcd", "config": '{"a":' + "9" * 5_000 + "}"}]},
        {"tasks": [{"dataset": "file:" + ESCAPES, "config": '{"rows":3,"sha256":"00"}'}]},
        *(
            {"tasks": [{"dataset": "evil:Task", "config": "{}", "pin": PIN | {"package": package}}]}
            for package in (
                "",
                "evil @ https://evil.example/x #",
                "--find-links=https://evil.example/s",
                ESCAPES,
            )
        ),
        {"tasks": [{"dataset": "evil:Task", "config": "{}", "pin": PIN | {"version": "1 -i https://evil"}}]},
        {"tasks": [{"dataset": "evil:Task", "config": "{}", "pin": PIN}]},
    ],
    ids=lambda change: ascii(change)[:50],
)
def test_a_manifest_is_refused_in_one_line_that_steers_no_terminal_and_installs_nothing(
    change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = begun()
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    assert cli.invoke(["join", str(manifest), "--site", "b", *FLAGS]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.isprintable()
    assert len(line) < 1000
    assert not any(word in line for word in ("https://", "pip install", "Traceback"))
    assert sorted(Path().rglob("*")) == before
