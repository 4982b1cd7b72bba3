"""What a task worker loads with ReasoningGYM, and what it plays all the same."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from sapo.tasks.gym_import import DRAWING, empty

ROOT = Path(__file__).parents[2]
PLAYED = """
import sys
import sapo.tasks.gym, sapo.tasks.worker_main
from sapo.tasks.gym_import import reasoning_gym

for name in ("game_of_life", "game_of_life_halting"):
    data = reasoning_gym.create_dataset(name, seed=1, size=1)
    assert data.score_answer(data[0]["answer"], data[0]) == 1.0
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_a_worker_plays_the_game_of_life_without_what_draws_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAYED], capture_output=True, text=True, cwd=ROOT, check=True
    )
    loaded = set(done.stdout.split())
    assert "cellpylib" in loaded
    assert not loaded & {"matplotlib", "mpl_toolkits", "torch", "transformers"}


def test_all_that_is_drawn_with_can_be_imported_for_real() -> None:
    for name, attributes in DRAWING.items():
        module = importlib.import_module(name)
        assert module.__spec__ is not None
        assert all(getattr(module, attribute) is not None for attribute in attributes)


def test_an_empty_module_has_its_names_and_its_submodules_and_goes() -> None:
    with empty({"drawn": (), "drawn.fine": ("Line",)}):
        drawn = importlib.import_module("drawn")
        assert drawn.fine is importlib.import_module("drawn.fine")
        assert drawn.fine.Line is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("drawn")


def test_a_module_that_is_loaded_stays() -> None:
    with empty({"pytest": ("raises",)}):
        assert importlib.import_module("pytest") is pytest
    assert importlib.import_module("pytest").raises is not None
