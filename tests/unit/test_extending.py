"""docs/extending.md: it shows the package that the tests install, and the places it names are there."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from packages import OWN_PACKAGE

from sapo.core.config.load import BUSES, Config, load
from sapo.core.config.schema import LearnConfig
from sapo.learn.loss import LOSSES

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


def test_settings_name_what_the_registries_hold() -> None:
    assert choices(LearnConfig, "loss") == set(LOSSES)
    kinds = {one.model_fields["type"].default for one in get_args(Config.model_fields["bus"].annotation)}
    contract = (ROOT / "tests" / "contract" / "test_bus.py").read_text(encoding="utf-8")
    services = contract.split("\nSERVICES", 1)[1].split("}", 1)[0]
    assert kinds == set(BUSES) == {*re.findall(r'^    "(\w+)"', services, re.MULTILINE), "own"}
