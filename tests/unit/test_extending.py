"""docs/extending.md: it shows the package that the tests install, and the places it names are there."""

import random
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from packages import OWN_PACKAGE, installed

from sapo.core import own_code
from sapo.core.config.load import BUSES, Config, load
from sapo.core.config.schema import LearnConfig, ShareConfig
from sapo.learn import loss as losses
from sapo.learn.loss import LOSSES, LossInputs
from sapo.peers import sampling

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = sorted(path for path in OWN_PACKAGE.rglob("*.*") if path.name != "__init__.py")


def choices(section: Any, field: str) -> set[str]:
    """The values of a setting that ship with sapo."""
    annotation = section.model_fields[field].annotation
    inner = [one for part in get_args(annotation) for one in (get_args(part) or (part,))]
    return {one for one in inner if isinstance(one, str)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_package_of_the_docs_is_the_one_that_is_tested(path: Path) -> None:
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", TEXT, re.DOTALL)
    assert path.read_text(encoding="utf-8") in blocks


def test_the_config_of_the_docs_names_all_that_the_package_has() -> None:
    config = load(file=OWN_PACKAGE / "swarm.toml", env={})
    assert [task.dataset for task in config.tasks] == ["doubling"]
    assert (config.batch.sampler, config.learn.loss) == (
        "sapo_demo.samplers:newest_first",
        "sapo_demo.losses:reinforce",
    )


def test_the_loss_of_the_docs_is_the_one_without_a_clip_at_ratio_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed(tmp_path, monkeypatch, (OWN_PACKAGE / "sapo_demo" / "losses.py").read_text()):
        reinforce = own_code.load("learn.loss", "sapo_demo:reinforce")
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(4, 5, generator=generator)
    logprobs[1, 2] = float("nan")
    mask = torch.rand(4, 5, generator=generator) > 0.3
    mask[1, 2] = True
    found = []
    for loss in (reinforce, losses.dapo):
        own = logprobs.clone().requires_grad_()
        made = loss(LossInputs(own, logprobs, torch.tensor([1.0, -1.0, 0.5, 2.0]), mask, 3.0))
        made.loss.backward()
        assert own.grad is not None
        assert made.metrics["nonfinite"] == 1
        assert made.metrics["clipped"] == 0
        found.append(own.grad)
    torch.testing.assert_close(found[0], found[1])


def test_settings_name_what_the_registries_hold() -> None:
    assert choices(LearnConfig, "loss") == set(LOSSES)
    kinds = {one.model_fields["type"].default for one in get_args(Config.model_fields["bus"].annotation)}
    contract = (ROOT / "tests" / "contract" / "test_bus.py").read_text(encoding="utf-8")
    services = contract.split("\nSERVICES", 1)[1].split("}", 1)[0]
    assert kinds == set(BUSES) == {*re.findall(r'^    "(\w+)"', services, re.MULTILINE), "own"}


@pytest.mark.parametrize("select", ["all", "fraction", "top"])
def test_every_way_to_select_is_known_to_the_sampler(select: str) -> None:
    assert select in get_args(ShareConfig.model_fields["select"].annotation)
    share = ShareConfig.model_validate({"select": select})
    places = sampling.select_subset(3, share, random.Random(0), [(1.0, 0.0)] * 3)
    assert places == sorted(places)
