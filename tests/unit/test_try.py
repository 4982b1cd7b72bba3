"""`sapo try`: what a policy answers, what a node takes, what does not fit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from sapo import cli
from sapo.core.config.home import Home
from sapo.core.config.load import Config, load
from sapo.core.config.manifest import Manifest
from sapo.core.errors import UserError
from sapo.core.exam_size import exam_size, foretold
from sapo.core.user_cache import default_cache
from sapo.ops.needs import PROCESS, kept_checkpoints, least_memory, run_disk
from sapo.ops.plan import NodePlan, Plan, make_plan, refuse_too_many
from sapo.ops.plan_probe import Probed, probe
from sapo.policy.model_shape import ModelShape, shape_of
from sapo.policy.models import load_policy

PROBED = Probed(
    *(10.0, 0.0, 0.0), *(1_000_000, 0, 0, 0), whole=True, checkpoint=0, history=0.0, series=0, question_s=0.2
)
SHAPE = ModelShape(parameters=1_000_000, trained=1_000_000)


def tiny(*sets: str) -> Config:
    return load("tiny", None, sets, env={})


def shape(config: Config, cache: Path) -> ModelShape:
    found = shape_of(config, cache)
    assert found is not None
    return found


@pytest.mark.parametrize("sets", [(), ("lora={rank=4}",)], ids=["whole", "lora"])
def test_the_shape_has_the_model_s_very_parameters(sets: tuple[str, ...]) -> None:
    config, cache = tiny(*sets), default_cache()
    model = load_policy(config.model, config=config, cache=cache).model
    found = shape(config, cache)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_a_starter_that_is_not_made_has_a_shape_that_says_so(tmp_path: Path) -> None:
    found = shape(tiny("model=starter:bytes"), tmp_path)
    assert not found.known
    assert 0 < found.trained == found.parameters


@pytest.mark.parametrize(("share", "said"), [(2.0, 0), (0.9, 1), (0.5, None)])
def test_nodes_that_surely_do_not_fit_are_refused_before_they_start(
    share: float, said: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, home, cache = tiny("swarm.nodes=8"), Home(tmp_path), default_cache()
    (memory, *_) = make_plan(config, home, cache, questions=0, progress=lambda *_: None).needs
    monkeypatch.setattr("sapo.ops.plan.memory_of", lambda place: int(share * memory.need))
    if said is None:
        with pytest.raises(UserError, match=r"swarm\.nodes = 8: memory: .* are needed, there are .*--nodes"):
            refuse_too_many(config, home, cache)
    else:
        assert len(refuse_too_many(config, home, cache)) == said


def test_settings_that_save_memory_do() -> None:
    assert least_memory(tiny(), SHAPE) == (PROCESS, 16_000_000)
    for setting, held in {
        "dtype=bfloat16": 18_000_000,
        "learn.optimizer=adamw8bit": 10_000_000,
        "generate.ahead=1": 20_000_000,
    }.items():
        assert least_memory(tiny(setting), SHAPE) == (PROCESS, held), setting
    host, device = least_memory(tiny("generate.engine=vllm", "generate.vllm_cache_gb=2"), SHAPE)
    assert (host - PROCESS, device) == ((770 << 20) + 4_000_000, 20_000_000 + 2 * 2**30)
    gossiping = tiny("gossip.every=10", 'gossip.members=["n0"]')
    assert least_memory(gossiping, SHAPE) == (PROCESS + 8_000_000, 16_000_000)


def test_disk_follows_from_rounds_and_from_what_is_kept() -> None:
    config = tiny("swarm.rounds=200", "track.register_every=100", "checkpoint.keep=2", "flow.every=10")
    found = run_disk(config, SHAPE, history=1000.0, series=10, checkpoint=12_000_000)
    assert found == 200 * (1000 + 3000 + 40_000 + 9000) + 4 * 12_000_000
    assert kept_checkpoints(tiny("swarm.rounds=12")) == 2, "of its start and its end"


def test_the_evaluation_at_the_end_is_foretold_by_what_a_question_takes() -> None:
    """Two nodes and their start, 100 questions of three samples and a greedy answer, two versions of each."""
    config = tiny("eval.questions=100", "eval.samples=3", "swarm.rounds=25", "track.register_every=10")
    node = NodePlan(("n0", "n1"), config, "cpu", probed=PROBED, round_s=4.0)
    plan = Plan((node,), (), ())
    assert plan.exam_s == pytest.approx(0.1 * 100 * (3 * 4 + 2 * 2 * 3))
    assert plan.rounds_s == 100
    assert Plan((node, NodePlan(("n2",), config, "cpu")), (), ()).exam_s is None


@pytest.mark.parametrize(
    ("times", "parameters", "said"), [(1.8, 135, True), (0.9, 135, False), (1.8, 1, False)]
)
def test_bfloat16_is_proposed_where_it_is_faster(times: float, parameters: int, said: bool) -> None:
    probed = replace(PROBED, parameters=parameters * 10**6, half_speed=times)
    node = NodePlan(("n0",), tiny(), "cpu", probed=probed)
    assert node.faster.startswith('dtype = "bfloat16": its layers compute 1.8 times') == said


@pytest.mark.parametrize(
    ("sets", "questions"),
    [
        (
            ("swarm.rounds=12", "eval.probe_questions=20"),
            50,
        ),  # 4 x 12 x 32 answers, a fifth of them 30 questions
        (("swarm.rounds=400", "eval.probe_questions=20"), 731),
        (("swarm.rounds=12", "eval.probe_questions=200"), 200),
        (("swarm.rounds=20000", "eval.probe_questions=20"), 2000),
        (("swarm.rounds=12", "eval.questions=7"), 7),
    ],
)
def test_an_exam_that_names_no_number_suits_the_run_which_keeps_it(
    sets: tuple[str, ...], questions: int, tmp_path: Path
) -> None:
    config = load(None, None, ["model=thinker", "swarm.nodes=4", "track.register_every=200", *sets], env={})
    assert exam_size(config) == questions
    home = Home(tmp_path / "home")
    home.prepare(config, Manifest.of(config))
    more = load(None, None, ["swarm.rounds=1000000"], base=home.load_config(), env={})
    assert exam_size(more) == questions
    assert f"{questions:,} questions" in foretold(config)


def test_a_probe_takes_what_a_node_takes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    config, seen = tiny("eval.probe_questions=20", "learn.lr=1e-4"), set()
    found = probe(config, lambda what, *done: seen.add((what, *done)), questions=2)
    known = shape(config, default_cache())
    assert {total for what, _, total in seen if what == "trying: answers"} <= {54}
    assert ("trying: loading the model", 0, 1) in seen
    assert [(one.task, one.questions) for one in found.answers] == [
        *((task.dataset, 2) for task in config.tasks),
        ("all", 6),
    ]
    assert all(one.form is not None and one.form > 0.8 for one in found.answers), "the thinker uses the tags"
    assert found.examples[0].score == 1 != found.examples[1].score
    assert found.question_s > 0
    assert found.parameters == known.parameters
    assert min(found.peak, found.bare) > sum(least_memory(config, known)) - PROCESS
    assert (found.device_peak, found.whole) == (0, True)
    assert found.round_s > 0
    assert found.learned > 0
    assert 0 < found.generated <= config.batch.b * config.batch.completions * 64
    assert found.history > 0
    assert found.checkpoint == pytest.approx(12 * known.parameters, rel=0.1)
    assert list(tmp_path.iterdir()) == []


def tried(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any], str]:
    code = cli.invoke(["try", "--json", *args])
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ("generate.max_new_tokens=1", "100 % of the answers are cut off; raise generate.max_new_tokens"),
        (
            "tasks=[{dataset='chain_sum', config={min_terms=6, max_terms=6, min_digits=5, max_digits=5}}]",
            "of the answers are wrong",
        ),
    ],
)
@pytest.mark.full
def test_what_would_teach_nothing_is_said_with_its_remedy(
    sets: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found, said = tried(capsys, "--home", str(tmp_path / "home"), "--set", sets, "--questions", "3")
    assert code == 1
    assert "n0 to n3 would learn nothing: " in said
    assert words in said
    assert found["nodes"][0]["probed"]["answers"][-1]["teaching"] == 0
    assert not (tmp_path / "home").exists()


def test_a_model_of_which_nothing_is_known_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = tiny("model=nobody/nothing-of-the-kind")
    found = make_plan(config, Home(tmp_path / "home"), tmp_path, questions=0, progress=lambda *_: None)
    assert found.nodes[0].memory is None
    assert "nobody/nothing-of-the-kind has no config here" in found.missing[0]
    assert found.needs == (), "a sum of what is known would look as if it were all"


def test_a_model_that_does_not_fit_is_not_tried(tmp_path: Path) -> None:
    size: dict[str, Any] = {"hidden_size": 32_768, "num_hidden_layers": 100, "num_attention_heads": 128}
    Qwen2Config(**size, intermediate_size=131_072).save_pretrained(tmp_path / "giant")
    config = tiny(f"model={tmp_path / 'giant'}")
    made = make_plan(config, Home(tmp_path / "home"), tmp_path, questions=1, progress=lambda *_: None)
    assert made.nodes[0].probed is None
    assert "one node alone does not fit, so it was not tried" in made.missing[0]
    assert made.warnings[0].startswith("memory: ")
