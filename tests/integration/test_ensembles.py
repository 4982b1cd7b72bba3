"""Nodes that answer together: the mixture against its formula, the command, and the model in MLflow."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from shared_workers import shared_workers
from swarms import make_home, open_node, small_config

from sapo import cli
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.types import Completion, Sampling
from sapo.core.user_cache import default_cache
from sapo.experiments.ensembles.evaluate import evaluate_ensemble
from sapo.experiments.ensembles.exam import Expert, examine, prior_of, training_questions
from sapo.experiments.ensembles.mixture import mixed
from sapo.ops.judge import evaluate_swarm, load_newest
from sapo.policy.engines.hf import TransformersEngine
from sapo.policy.initial import load_initial
from sapo.policy.models import LoadedPolicy
from sapo.testing import policies as samples

pytestmark = pytest.mark.usefixtures("sharing")

SETS = (
    "swarm.nodes=4",
    "swarm.rounds=9",
    "checkpoint.every_rounds=2",
    "batch.external=0",
    "learn.lr=2e-3",
    "eval.questions=20",
    "eval.samples=2",
    "node.2.model=starter:bytes",
)
"""n0 and n1 are of one kind, n2 is of another vocabulary, n3 never begins."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config(SETS)
    home = make_home(tmp_path_factory.mktemp("ensembles") / "home", config)
    for name in ("n0", "n1", "n2"):
        with open_node(config, home, name, deliver=False) as node:
            while node.round < 2:
                node.run_round()
    return home.root


@pytest.fixture
def home(template: Path, tmp_path: Path) -> Home:
    shutil.copytree(template, tmp_path / "home")
    return Home(tmp_path / "home")


@pytest.fixture(scope="module")
def policies(template: Path) -> list[LoadedPolicy]:
    """The newest models of n0, n1 and n2."""
    home = Home(template)
    config = home.load_config()
    found = []
    for name in ("n0", "n1", "n2"):
        own = config.for_node(name)
        policy = load_initial(own, shared_workers(own), default_cache())
        load_newest(home, name, policy)
        found.append(policy)
    return found


QUESTIONS = tuple(f"As 2 + 3 = 5, and 40 + 2 = 42, what is {end}" for end in ("1 + 2?", "31 + 4 =", "7"))
"""With a beginning in common that is long enough to be read once."""


def generated(policy: LoadedPolicy, *, greedy: bool = False) -> list[list[Completion]]:
    return TransformersEngine(policy).generate(
        [policy.encode_prompt(question) for question in QUESTIONS],
        completions=3,
        max_new_tokens=6,
        sampling=Sampling(),
        seed=5,
        greedy=greedy,
    )


def told(policy: LoadedPolicy, ids: Sequence[int]) -> torch.Tensor:
    """log p(x_s|x_<s) of every token after the first."""
    with torch.inference_mode():
        logits = policy.model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)


def test_a_mixture_s_tokens_have_the_probabilities_of_the_formula(policies: list[LoadedPolicy]) -> None:
    """The formula by whole forward passes: Σ_j P(D=j) Π_s p_j(x_s), its steps being those probabilities."""
    pair, prior = policies[:2], torch.tensor([0.7, 0.3]).log()
    whole = mixed(pair, prior)
    for question, group in zip(QUESTIONS, generated(whole), strict=True):
        prompt = whole.encode_prompt(question)
        for completion in group:
            assert completion.token_ids is not None
            assert completion.logprobs is not None
            each = torch.stack([told(one, [*prompt, *completion.token_ids]) for one in pair])
            joint = torch.logsumexp(prior[:, None] + each.cumsum(dim=1), dim=0)
            steps = joint.diff()[len(prompt) - 2 :]
            assert list(completion.logprobs) == pytest.approx(steps.tolist(), abs=1e-4)


def test_the_first_does_what_the_evaluation_finds_and_every_way_is_judged(home: Home) -> None:
    config = home.load_config()
    body = evaluate_ensemble(config, home, ["n0", "n1"])
    assert json.loads((home.root / "ensemble.json").read_text()) == body
    alone = evaluate_swarm(config, home, ["n0", "n1"]).nodes
    assert body["experts"]["n0"]["pass_at_1"] == alone["n0"].pass_at_1
    for name, figures in body["experts"].items():
        assert figures["greedy"] == alone[name].greedy
    ways = body["ways"]
    assert ways.keys() == {
        *("mixture", "vote", "route", "uniform_vote", "majority", "average"),
        *("oracle_by_task", "oracle_by_question"),
    }
    best = body["experts"][body["best"]]["pass_at_1"]
    assert ways["oracle_by_question"]["pass_at_1"] >= ways["oracle_by_task"]["pass_at_1"] >= best
    bound = ways["oracle_by_question"]["pass_at_1"]
    assert all(ways[way]["pass_at_1"] <= bound for way in ("vote", "route", "uniform_vote"))
    assert {way: ways[way]["answers"] for way in ("vote", "majority", "mixture", "route")} == {
        "vote": 2,
        "majority": 2,
        "mixture": 2,
        "route": 1,
    }
    assert body["unit"] == "token"
    assert sum(body["prior"].values()) == pytest.approx(1.0)
    assert sum(body["routed"]["chain_sum"].values()) == pytest.approx(1.0)
    assert body["rounds"] == {"n0": 2, "n1": 2}


def asked(home: Home, *words: str, node: str = "n0,n1") -> int:
    return cli.invoke(["evaluate", "--home", str(home.root), "--ensemble", node, *words])


def greedily(config: Config, policy: LoadedPolicy) -> list[str]:
    groups = TransformersEngine(policy).generate(
        [policy.encode_prompt(question) for question in QUESTIONS],
        completions=0,
        max_new_tokens=config.generate.max_new_tokens,
        sampling=Sampling(),
        seed=0,
        greedy=True,
    )
    return [completion.text for (completion,) in groups]


def test_a_question_that_an_expert_has_no_room_for_is_asked_of_the_others() -> None:
    policies = {name: samples.policy("gpt2", context=size) for name, size in (("a", 90), ("b", 256))}
    experts = [Expert(name, one, TransformersEngine(one), 4) for name, one in policies.items()]
    config = small_config(["tasks=[{dataset='chain_sum', config={max_terms=9}}]"])
    workers = shared_workers(config)
    asked = training_questions(workers, config, 6)
    room = [policies["a"].fits(policies["a"].encode_prompt(one.text)) for one in asked]
    assert {*room} == {True, False}
    prior = prior_of(experts, workers, config, 6)
    found = examine(experts, workers, asked, log_prior=prior, form="text", samples=1, seed=0)
    assert all(len(one.sampled) == len(asked) for one in (*found.singles.values(), *found.ways.values()))


@pytest.mark.services
def test_a_logged_ensemble_is_one_model_that_others_load_and_ask(
    home: Home,
    policies: list[LoadedPolicy],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, uri = home.load_config(), f"sqlite:///{home.mlflow_db}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert asked(home, "--log", "mixture") == 0
    shown = capsys.readouterr().out
    assert "logged to MLflow as models:/test.ensemble/1" in shown
    assert "token mixture" in shown
    found = evaluate_ensemble(config, home, ["n0", "n1"], log="mixture")
    assert found["model"] == "models:/test.ensemble/1", "it is the same one"
    assert evaluate_ensemble(config, home, ["n0", "n2"], log="route")["model"] == "models:/test.ensemble/2"
    shutil.rmtree(home.node("n0"))
    unset: Any = None
    mlflow.set_tracking_uri(uri)
    try:
        mixture = mlflow.pyfunc.load_model("models:/test.ensemble/1")
        routed = mlflow.pyfunc.load_model("models:/test.ensemble/2")
    finally:
        mlflow.set_tracking_uri(unset)
    prior = torch.tensor([found["prior"][name] for name in ("n0", "n1")]).log()
    assert mixture.predict(list(QUESTIONS)) == greedily(config, mixed(policies[:2], prior))
    own, other = (greedily(config, policies[place]) for place in (0, 2))
    answers = routed.predict(list(QUESTIONS))
    assert all(answer in pair for answer, *pair in zip(answers, own, other, strict=True))
