"""docs/extending.md: its examples run as they stand, and the places it names are the ones there are."""

import random
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from packages import DOUBLING

from sapo.core.config.load import BUSES, Config
from sapo.core.config.schema import GenerateConfig, LearnConfig, ShareConfig
from sapo.learn import loss as losses
from sapo.learn.loss import LOSSES, LossInputs
from sapo.peers import sampling

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def example(heading: str) -> str:
    """The Python code of a section."""
    section = TEXT.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return section.split("```python\n", 1)[1].split("```", 1)[0]


def choices(section: Any, field: str) -> set[str]:
    return set(get_args(section.model_fields[field].annotation))


def test_the_task_of_the_docs_is_the_one_that_is_tested() -> None:
    assert example("A task").strip() == DOUBLING.strip()


def test_the_loss_of_the_docs_is_the_one_without_a_clip_at_ratio_one() -> None:
    space = dict(vars(losses))
    exec(example("A loss"), space)
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(4, 5, generator=generator)
    logprobs[1, 2] = float("nan")
    mask = torch.rand(4, 5, generator=generator) > 0.3
    mask[1, 2] = True
    found = []
    for loss in (space["reinforce"], losses.dapo):
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
    assert kinds == set(BUSES) == set(re.findall(r'^    "(\w+)"', services, re.MULTILINE))


@pytest.mark.parametrize("select", sorted(choices(ShareConfig, "select")))
def test_every_way_to_select_is_known_to_the_sampler(select: str) -> None:
    share = ShareConfig.model_validate({"select": select})
    places = sampling.select_subset(3, share, random.Random(0), [(1.0, 0.0)] * 3)
    assert places == sorted(places)


def test_every_file_and_name_in_the_docs_exists() -> None:
    for path in re.findall(r"`((?:sapo|tests|benchmarks)/[\w/.]+\.py)`", TEXT):
        assert (ROOT / path).exists(), path
    assert {"transformers", "vllm"} == choices(GenerateConfig, "engine")
    for file, names in {
        "sapo/peers/sampling.py": ("select_subset", "sample_self", "sample_external", "class Draw"),
        "sapo/bus/base.py": (
            "class Bus(",
            "class Reading",
            "def publish",
            "def poll",
            "def end_positions",
            "def close",
        ),
        "sapo/bus/__init__.py": ("def open_bus",),
        "sapo/policy/engines/__init__.py": ("def open_engine",),
        "sapo/learn/loss.py": ("LOSSES", "def normaliser"),
        "sapo/core/determinism.py": ("UPDATE",),
        "sapo/ops/sites.py": ("def _load",),
    }.items():
        source = (ROOT / file).read_text(encoding="utf-8")
        assert all(name in source for name in names), file
