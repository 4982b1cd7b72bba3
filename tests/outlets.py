"""The figures of a finished swarm as each of their outlets has them, read by other means than the program's.

An outlet is a mapping from a figure's name, such as `n0 eval/greedy @12` (node, series, round), to what is
shown there. The same name means the same figure everywhere, so all outlets that have it must agree.
"""

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import duckdb
from deltalake import DeltaTable
from finished import TRAIT, FinishedSwarm
from mlflow import MlflowClient

from sapo.store.journal.journal import Journal


class Shown(NamedTuple):
    """A value, and by how much it may be rounded where it is shown."""

    value: float
    within: float = 1e-9


Outlet = Mapping[str, Shown]
TICK = re.compile(r'<text x="46" y="([\d.]+)" text-anchor="end"[^>]*>([-\d.,e]+)<')
ROUND = re.compile(r'<text x="([\d.]+)" y="276" text-anchor="middle"[^>]*>([\d.,]+)<')
LINE = re.compile(r'<polyline points="([^"]*)"[^>]*><title>(\w+)</title>')


def all_of(swarm: FinishedSwarm) -> dict[str, Outlet]:
    """Every outlet by name."""
    home = swarm.home
    sweep, summary = (json.loads(path.read_text()) for path in (home.evaluation, home.summary))
    status = json.loads(swarm.sapo("status", "--json").stdout)
    windows = {node["name"]: node["window"] for node in status["nodes"]}
    return {
        "MLflow": dict(of_mlflow(f"sqlite:///{home.mlflow_db}", windows)),
        "journal": dict(of_journal(swarm)),
        "history": dict(of_history(swarm)),
        "evaluation.json": dict(of_evaluation(sweep)),
        "summary.json": dict(of_summary(summary)),
        "report.html": dict(of_page(home.report.read_text())),
        "status": dict(of_status(status)),
        "end table": dict(of_table(swarm.output)),
    }


def of_mlflow(uri: str, windows: Mapping[str, int]) -> Iterator[tuple[str, Shown]]:
    client = MlflowClient(uri)
    (experiment,) = [one for one in client.search_experiments() if one.name == "tiny"]
    for run in client.search_runs([experiment.experiment_id]):
        node = run.data.tags.get("sapo.node", "swarm")
        series = {}
        for name in run.data.metrics:
            found = sorted(client.get_metric_history(run.info.run_id, name), key=lambda one: one.timestamp)
            series[name] = {int(one.step): one.value for one in found}
            yield from ((f"{node} {name} @{step}", Shown(v)) for step, v in series[name].items())
        if node != "swarm":
            yield from derived(node, series, windows[node])
    for version in client.search_model_versions():
        if "sapo.eval.pass_at_1" in version.tags:
            node, at = version.tags["sapo.node"], version.tags["sapo.round"]
            yield f"{node} version @{at}", Shown(float(version.tags["sapo.eval.pass_at_1"]))


def derived(node: str, series: Mapping[str, Mapping[int, float]], window: int) -> Iterator[tuple[str, Shown]]:
    """What summaries make of a node's rounds; a journal has at least the last `window`."""
    rounds = len(series["reward/local"])
    yield f"{node} rounds", Shown(rounds)
    yield f"{node} tokens/generated sum", Shown(sum(series["tokens/generated"].values()))
    yield f"{node} tokens/trained sum", Shown(sum(series["learn/tokens"].values()))
    yield f"{node} share/external mean", Shown(statistics.fmean(series["share/external"].values()))
    for name, line in series.items():
        last = [value for at, value in line.items() if rounds - window <= at < rounds]
        if last:
            yield f"{node} {name} lately", Shown(statistics.fmean(last))
        if "/full/" not in name:  # an exam of all questions has no neighbours
            yield from smooth(f"{node} {name}", dict(sorted(line.items())), rounds)


def smooth(name: str, line: Mapping[int, float], rounds: int) -> Iterator[tuple[str, Shown]]:
    """What a summary says of a series' ends, and what a chart of so many rounds draws: means."""
    values, tenth, near = [*line.values()], max(1, len(line) // 10), max(1, rounds // 20)
    yield f"{name} first", Shown(statistics.fmean(values[:tenth]))
    yield f"{name} last", Shown(statistics.fmean(values[-tenth:]))
    for place, at in enumerate(line):
        yield f"{name} drawn @{at}", Shown(statistics.fmean(values[max(0, place + 1 - near) : place + 1]))


def of_journal(swarm: FinishedSwarm) -> Iterator[tuple[str, Shown]]:
    for node in swarm.home.node_names():
        with Journal.read_only(swarm.home.journal(node)) as journal:
            for result in journal.results():
                for name, value in result.metrics.items():
                    yield f"{node} {name} @{result.round}", Shown(value)


ROUNDS = """
WITH answers AS (SELECT DISTINCT node, round, position, k, source, dataset, score FROM data),
     batches AS (SELECT node, round, count(DISTINCT position) AS groups,
                        count(DISTINCT CASE WHEN source = 'external' THEN position END) AS others,
                        avg(score) AS training_set,
                        avg(CASE WHEN source = 'local' THEN score END) AS own,
                        avg(CASE WHEN source = 'external' THEN score END) AS foreign_
                 FROM answers GROUP BY node, round)
SELECT node, round, training_set, foreign_, others / groups, own FROM batches
"""


def of_history(swarm: FinishedSwarm) -> Iterator[tuple[str, Shown]]:
    files = DeltaTable(str(swarm.home.history / "training")).file_uris()
    with duckdb.connect() as database:
        database.execute(
            "CREATE VIEW data AS SELECT * FROM read_parquet("
            f"{files!r}, hive_partitioning = true, union_by_name = true)"
        )
        rows = database.execute(ROUNDS).fetchall()
    over_nodes: dict[str, list[float]] = defaultdict(list)
    for node, round, *values in rows:
        names = ("reward/training_set", "reward/external", "share/external", "reward/local")
        for name, value in zip(names, values, strict=True):
            if value is not None:
                yield f"{node} {name} @{round}", Shown(float(value))
                over_nodes[f"swarm {name} @{round}"].append(float(value))
    for name, values in over_nodes.items():
        if name.startswith(("swarm reward/local", "swarm reward/training_set")):
            yield name, Shown(statistics.fmean(values))


def score(who: str, under: str, found: Mapping[str, Any], at: int) -> Iterator[tuple[str, Shown]]:
    """An exam in evaluation.json."""
    for name in ("pass_at_1", "greedy", "interval", "questions", "effective"):
        yield f"{who} {under}/{name} @{at}", Shown(found[name])
    for task, of_task in found["per_task"].items():
        for name in ("pass_at_1", "greedy"):
            yield f"{who} {under}/{name}/{task} @{at}", Shown(of_task[name])


def of_evaluation(sweep: Mapping[str, Any]) -> Iterator[tuple[str, Shown]]:
    shares: dict[tuple[str, int], list[float]] = defaultdict(list)
    last = max(node["round"] for node in sweep["nodes"].values())
    for name, node in sweep["nodes"].items():
        start = sweep["baselines"][node["baseline"]]
        for key, shown in score(name, "start", start, 0):
            if not key.startswith(
                (f"{name} start/questions", f"{name} start/effective", f"{name} start/greedy/")
            ):
                yield key, shown
        yield from score(name, "eval/full", node, node["round"])
        yield from score(name, "eval", node["probe"], node["round"])
        versions = {**node["earlier"], node["round"]: node["pass_at_1"]}
        yield from ((f"{name} version @{at}", Shown(value)) for at, value in versions.items())
        for kind in ("pass_at_1", "greedy"):
            shares[kind, 0].append(start[kind])
            shares[kind, last].append(node[kind])
    for (kind, at), values in shares.items():
        yield f"swarm eval/full/{kind} @{at}", Shown(statistics.fmean(values))
    yield from gains(sweep, last)
    yield "swarm questions", Shown(sweep["questions"])
    yield "swarm samples", Shown(sweep["samples"])
    yield "swarm questions, effective", Shown(sweep["effective"])


def gains(found: Mapping[str, Any], at: int) -> Iterator[tuple[str, Shown]]:
    for name, key in (("pass_at_1", "gain"), ("greedy", "gain_greedy")):
        for part, end in (("mean", ""), ("low", "/low"), ("high", "/high")):
            yield f"swarm gain/{name}{end} @{at}", Shown(found[key][part])


def of_summary(summary: Mapping[str, Any]) -> Iterator[tuple[str, Shown]]:
    last = max(node["rounds"] for node in summary["nodes"].values())
    for name, node in summary["nodes"].items():
        end = node["rounds"]
        yield f"{name} rounds", Shown(end)
        yield f"{name} rounds of", Shown(node["rounds_total"])
        for series in ("reward/local", "reward/training_set"):
            for side in ("first", "last"):
                yield f"{name} {series} {side}", Shown(node[series][side])
        sampled, greedy, probe = node["eval/pass_at_1"], node["eval/greedy"], node["probe"]
        yield f"{name} start/pass_at_1 @0", Shown(sampled["start"])
        yield f"{name} start/interval @0", Shown(sampled["start_interval"])
        yield f"{name} start/greedy @0", Shown(greedy["start"])
        yield f"{name} eval/full/pass_at_1 @{end}", Shown(sampled["end"])
        yield f"{name} eval/full/interval @{end}", Shown(sampled["end_interval"])
        yield f"{name} eval/full/greedy @{end}", Shown(greedy["end"])
        for task, of_task in sampled["per_task"].items():
            yield f"{name} start/pass_at_1/{task} @0", Shown(of_task["start"])
            yield f"{name} eval/full/pass_at_1/{task} @{end}", Shown(of_task["end"])
        for side in ("best", "end"):
            at = probe[side]["round"]
            for kind in ("pass_at_1", "interval", "greedy"):
                yield f"{name} eval/{kind} @{at}", Shown(probe[side][kind])
        yield f"{name} best probe", Shown(probe["best"]["pass_at_1"])
        yield f"{name} best probe after", Shown(probe["best"]["round"])
        yield f"{name} eval/questions @{end}", Shown(probe["questions"])
        yield f"{name} tokens/generated sum", Shown(node["tokens/generated"])
        yield f"{name} tokens/trained sum", Shown(node["tokens/trained"])
        yield f"{name} share/external mean", Shown(node["share/external"])
    held_out = summary["held_out"]
    yield from gains(held_out, last)
    yield "swarm questions", Shown(held_out["questions"])
    yield "swarm samples", Shown(held_out["samples"])
    yield "swarm questions, effective", Shown(held_out["effective"])
    for name in ("generated", "trained"):
        total = sum(node[f"tokens/{name}"] for node in summary["nodes"].values())
        yield f"swarm tokens/{name} @{last}", Shown(total)


def of_status(status: Mapping[str, Any]) -> Iterator[tuple[str, Shown]]:
    for node in status["nodes"]:
        name, done = node["name"], node["rounds"]
        yield f"{name} rounds", Shown(done)
        yield f"{name} rounds of", Shown(node["rounds_total"])
        probed = (done - 1) // 2 * 2
        for series, value in node["metrics"].items():
            at = probed if series.startswith("eval/") else done - 1
            yield f"{name} {series} @{at}", Shown(value)
        for series, value in node["means"].items():
            yield f"{name} {series} lately", Shown(value)


def percent(text: str) -> Shown:
    return Shown(float(text.removesuffix("%").replace(",", "")) / 100, 0.00051)


def number(text: str) -> Shown:
    """A number that is rounded to the digits that stand there."""
    _, dot, digits = text.partition(".")
    return Shown(float(text.replace(",", "")), 0.51 * 10 ** -len(digits) if dot else 1e-9)


def of_table(output: str) -> Iterator[tuple[str, Shown]]:
    """The rows of the end table, and what is said below it."""
    # A narrow terminal leaves columns out.
    header = output[: re.search(r"^n0 +\d", output, re.MULTILINE).start()].splitlines()[-2:]  # type: ignore[union-attr]
    more = [word for word in re.findall(r"\w+", header[0] + header[1]) if word in ("greedy", TRAIT)]
    row = re.compile(
        r"^(n\d) +(\d+) +([\d.]+) → ([\d.]+) +([\d.]+) → ([\d.]+) ± ([\d.]+) +([\d.]+) → ([\d.]+) +"
        + r"([\d.]+) → ([\d.]+) +" * len(more)
        + r"([\d,]+)$",
        re.MULTILINE,
    )
    last = 0
    for name, rounds, *cells, tokens in row.findall(output):
        last = int(rounds)
        yield f"{name} rounds", number(rounds)
        yield f"{name} reward/local first", number(cells[0])
        yield f"{name} reward/local last", number(cells[1])
        names = [
            "start/pass_at_1 @0",
            f"eval/full/pass_at_1 @{last}",
            f"eval/full/interval @{last}",
            "best probe",
            f"eval/pass_at_1 @{last}",
        ]
        ends = {
            "greedy": ("start/greedy @0", f"eval/full/greedy @{last}"),
            TRAIT: (f"trait/{TRAIT} first", f"trait/{TRAIT} last"),
        }
        names += [key for column in more for key in ends[column]]
        for key, cell in zip(names, cells[2:], strict=True):
            yield f"{name} {key}", percent(cell)
        yield f"{name} tokens/generated sum", number(tokens)
    means = re.search(r"^mean +([\d.]+) → ([\d.]+)", output, re.MULTILINE)
    assert means is not None
    for at, cell in zip((0, last), means.groups(), strict=True):
        yield f"swarm eval/full/pass_at_1 @{at}", percent(cell)
    said = re.findall(
        r"([+-][\d.]+) points \(95 % interval ([+-][\d.]+) to ([+-][\d.]+)\)", " ".join(output.split())
    )
    for kind, found in zip(("pass_at_1", "greedy"), said, strict=True):
        for end, cell in zip(("", "/low", "/high"), found, strict=True):
            yield f"swarm gain/{kind}{end} @{last}", percent(cell)


def of_page(page: str) -> Iterator[tuple[str, Shown]]:
    """Tables and curves of the page."""
    rows = [
        re.findall(r"<td>(.*?)</td>", row)
        for row in re.findall(r"<tr>(<td>n\d</td>.*?)</tr>", page, re.DOTALL)
    ]
    end = 0
    for name, _model, rounds, total, *rewards, tokens, foreign in (row for row in rows if len(row) == 10):
        end = int(rounds)
        yield f"{name} rounds", number(rounds)
        yield f"{name} rounds of", number(total)
        names = (
            f"{series} {side}"
            for series in ("reward/local", "reward/training_set")
            for side in ("first", "last")
        )
        for key, cell in zip(names, rewards, strict=True):
            yield f"{name} {key}", number(cell)
        yield f"{name} tokens/generated sum", number(tokens)
        yield f"{name} share/external mean", percent(foreign)
    for name, *cells in (row for row in rows if len(row) == 11):
        places = {
            0: "start/pass_at_1 @0",
            1: f"eval/full/pass_at_1 @{end}",
            2: f"eval/full/interval @{end}",
            4: "best probe",
            6: f"eval/pass_at_1 @{end}",
            7: "start/greedy @0",
            8: f"eval/full/greedy @{end}",
        }
        for place, key in places.items():
            yield f"{name} {key}", percent(cells[place])
        yield f"{name} best probe after", number(cells[5])
    for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        yield from of_picture(picture, end)


def of_picture(picture: str, end: int) -> Iterator[tuple[str, Shown]]:
    """The points of a chart, by its axes."""
    label = re.search(r'aria-label="[^"]*\(([\w/]+)\)"', picture)
    assert label is not None
    series = label[1]
    for name, value, at in re.findall(r"<title>(n\d): ([\d.]+) at (\d+)</title>", picture):
        yield f"{name} {series} @{at}", number(value)
    for name, value in re.findall(r"<title>(n\d): ([\d.]+), full evaluation</title>", picture):
        yield f"{name} {series.replace('eval/', 'eval/full/')} @{end}", number(value)
    if series.startswith("eval/"):
        return
    ups = [(float(y) - 4, float(text.replace(",", ""))) for y, text in TICK.findall(picture)]
    rounds = [(float(x), float(text)) for x, text in ROUND.findall(picture)]
    for points, name in LINE.findall(picture):
        for point in points.split():
            x, y = map(float, point.split(","))
            pixel = abs((ups[-1][1] - ups[0][1]) / (ups[-1][0] - ups[0][0]))
            yield f"{name} {series} drawn @{round(along(x, rounds))}", Shown(along(y, ups), 0.2 * pixel)


def along(place: float, ticks: list[tuple[float, float]]) -> float:
    """What a place on an axis means."""
    (p, a), (q, b) = ticks[0], ticks[-1]
    return a + (b - a) * (place - p) / (q - p)


def impossible(name: str, value: object) -> str | None:
    """Why a figure can't be true, whatever other outlets say."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "is no finite number"
    figure = name.split()[1]
    low, high = -math.inf, math.inf
    if figure.startswith(("reward", "share", "trait", "eval/", "start/", "version", "best")):
        low, high = 0.0, 1.0
    elif figure.startswith("gain"):
        low, high = -1.0, 1.0
    elif figure.startswith(("tokens", "rounds", "time", "learn/tokens", "pool/size", "questions", "samples")):
        low = 0.0
    if "questions" in name or "effective" in name or "after" in name:
        high = math.inf
    return None if low - 0.001 <= value <= high + 0.001 else f"is outside {low:g} to {high:g}"


def disagreements(outlets: Mapping[str, Outlet], names: set[str] | None = None) -> list[str]:
    """What is wrong with these figures, or with all: one that can't be, or outlets that differ."""
    found = []
    for name in sorted(names or {name for outlet in outlets.values() for name in outlet}):
        shown = {outlet: figures[name] for outlet, figures in outlets.items() if name in figures}
        for outlet, (value, _) in shown.items():
            if (why := impossible(name, value)) is not None:
                found.append(f"{name}: {outlet} has {value!r}, which {why}")
        sound = {k: one for k, one in shown.items() if impossible(name, one.value) is None}
        best = min(sound.values(), key=lambda one: one.within, default=Shown(0.0))
        for outlet, (value, within) in sound.items():
            if abs(Fraction(value) - Fraction(best.value)) > within + best.within:
                found.append(f"{name}: {outlet} has {value!r}, another {best.value!r}")
    return found
