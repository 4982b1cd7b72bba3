"""docs/extending.md: it shows the package that the tests install, and the places it names are there."""

import re
from pathlib import Path

import pytest
from packages import OWN_PACKAGE

from sapo.core.config.load import load

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = sorted(path for path in OWN_PACKAGE.rglob("*.*") if path.name != "__init__.py")


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
