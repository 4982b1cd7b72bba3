"""docs/metrics.md names every series that a node logs, and none that nobody logs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from swarms import hand_over, make_home, open_node, small_config

from sapo.bus.memory import MemoryBus
from sapo.core.figures import FULL, PROBE
from sapo.policy.evaluate import Evaluation

ROOT = Path(__file__).parents[2]
FAMILIES = (
    "reward eval judge pool peers identity sampler share staleness tokens time learn outage owed prefect "
    "trait member adaptive gossip"
)
SERIES = re.compile(rf"(?:{FAMILIES.replace(' ', '|')})/[a-z0-9_*/]+")
READERS = {
    "experiment",
    "evaluate",
    "live_view",
    "report",
    "summary",
    "sites",
    "launch",
    "check",
    "whatif",
    "experiment_text",
    "parent_run",
    "figures",
    "series",
}
"""Modules that read series, or have some of their own that no node logs (docs/experiments.md), or put names
together (`of_evaluations`)."""


def documented() -> set[str]:
    """Names of the tables' first columns; what varies is `*`."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return {re.sub(r"<\w+>", "*", name) for name in names}


def texts(tree: ast.AST) -> Iterator[str]:
    """Texts of a module, with `*` for what is put in while it runs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def of_evaluations() -> set[str]:
    """Series of probes and full evaluations, with `*` for a data set."""
    summary = Evaluation(("gcd",), (1.0,), (1.0,), (1.0,), ("1",)).summary()
    names = {name for under in (PROBE, FULL) for name in summary.series(under)}
    return {name.replace("gcd", "*") for name in names}


def written() -> dict[str, str]:
    """Series by name, and a module that names them."""
    found = dict.fromkeys(of_evaluations(), "evaluate.py")
    for path in [*(ROOT / "sapo").rglob("*.py"), *(ROOT / "flows").glob("*.py")]:
        if not {*path.relative_to(ROOT).with_suffix("").parts} & READERS:
            for text in texts(ast.parse(path.read_text(encoding="utf-8"))):
                if SERIES.fullmatch(text) and not text.endswith("/"):
                    found[text] = path.name
    return found


def meets(one: str, other: str) -> bool:
    """Whether a name may be one of the other's, `*` standing for anything in either."""
    return any(
        re.fullmatch(re.escape(pattern).replace(r"\*", ".+"), name)
        for pattern, name in ((one, other), (other, one))
    )


def test_every_series_in_the_source_is_documented() -> None:
    known = documented()
    assert not {name: path for name, path in written().items() if not any(meets(name, one) for one in known)}


def test_every_documented_series_is_in_the_source() -> None:
    known = set(written())
    # the rewards' names and those by task are put together
    put_together = {f"{name}/*" for name in known if name.startswith("reward/")}
    assert not {name for name in documented() if not any(meets(name, one) for one in known | put_together)}


def test_whatever_two_trading_nodes_log_is_documented(tmp_path: Path) -> None:
    config = small_config(["swarm.rounds=6", "eval.probe_questions=4", "eval.probe_every=2"])
    home, bus = make_home(tmp_path / "home", config), MemoryBus()
    logged: set[str] = set()
    with (
        open_node(config, home, "n0", bus=bus, deliver=False) as one,
        open_node(config, home, "n1", bus=bus, deliver=False) as other,
    ):
        while not one.finished:
            for node in (one, other):
                node.run_round()
                hand_over(node, bus)
        for node in (one, other):
            logged |= {name for result in node.journal.results() for name in result.metrics}
    assert len(logged) > 50
    patterns = [re.escape(one).replace(r"\*", ".+") for one in documented()]
    assert not {name for name in logged if not any(re.fullmatch(one, name) for one in patterns)}
