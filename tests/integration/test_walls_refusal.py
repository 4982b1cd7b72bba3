"""A node on a machine whose kernel puts up too few walls: it takes no foreign text, unless it is told to."""

import sys
from pathlib import Path

import pytest
from walled import ROOT, here, run

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel walls are Linux's")

NODE = """
sys.path.insert(0, {tests!r})
from pathlib import Path
from swarms import make_home, open_node, small_config
from sapo.core.errors import UserError
from sapo.node.parts import refuse_unwalled
from sapo.tasks.workers import open_workers
found = {{}}
config = small_config()
try:
    open_node(config, make_home(Path({home!r}), config)).close()
except UserError as error:
    found["opened"] = [error.field, error.problem]
with open_workers(config) as workers:
    found["walls"] = workers.walls
    refuse_unwalled(small_config(["batch.external=0"]), workers)
    refuse_unwalled(small_config(["workers.unwalled=true"]), workers)
say(found)
"""
SWARM = """
import contextlib, io
from sapo import cli
with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
    code = cli.invoke(["swarm", "--preset", "tiny", "--home", {home!r}])
say([code, errors.getvalue(), os.path.exists({home!r})])
"""
VERIFY = """
import contextlib, io
from sapo import cli
with contextlib.redirect_stdout(io.StringIO()) as out:
    cli.invoke(["verify", "--dataset", "chain_sum", "--seed", "1", "--text", "nothing"])
say(json.loads(out.getvalue()))
"""


def test_a_node_behind_too_few_walls_refuses_foreign_text_unless_it_is_told_to(tmp_path: Path) -> None:
    code = NODE.format(tests=str(ROOT / "tests"), home=str(tmp_path / "home"))
    found = run(code, refused=["seccomp"])
    left = [name for name in here() if name != "seccomp"]
    assert found["walls"] == left
    field, problem = found["opened"]
    assert field == "workers.unwalled"
    assert f"behind {', '.join(left)} alone" in problem
    assert "not up:" in problem
    assert "seccomp" in problem


def test_a_swarm_behind_too_few_walls_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    code, error, written = run(SWARM.format(home=str(tmp_path / "home")), refused=["seccomp"])
    assert code == 2
    assert error.startswith("error: workers.unwalled")
    assert not written


def test_own_text_is_scored_behind_whatever_walls_there_are() -> None:
    found = run(VERIFY, refused=["seccomp", "unshare", "landlock_create_ruleset"])
    assert found == {"outcome": "score", "score": 0.0, "reason": None}
