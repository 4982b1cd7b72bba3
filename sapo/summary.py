"""A run in figures: read from the journals and the held-out evaluation of a home, written to summary.json.

The three rewards of a run stay apart throughout: `reward/local` (a node's own completions),
`reward/training_set` (everything in its batches, filtered foreign groups included) and the held-out
`eval/pass_at_1` with `eval/greedy` beside it.
"""

import json
import sqlite3
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from sapo.charts import Point
from sapo.home import Home, write_atomically
from sapo.track import NODE

SERIES = ("reward/local", "reward/training_set")
TENTH = 10
"""First and last are means over the first and last tenth of a node's rounds: one round is mostly noise."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a home holds: every node's metric series, and the held-out evaluation if there is one.

    `curves[node][metric]` is a list of (round, value) in order of rounds.
    """

    home: Home
    swarm: str
    rounds: int
    models: dict[str, str]
    curves: dict[str, dict[str, list[Point]]]
    evaluation: dict[str, Any] | None = None

    def curve(self, node: str, name: str) -> list[Point]:
        """One metric of a node where it was measured; empty where it never was."""
        return self.curves[node].get(name, [])


def read_run(home: Home) -> Run:
    """Read a home without touching it. Raises `UserError` where it holds no swarm.

    A journal is pruned once its rounds are delivered, so older rounds come from MLflow: one of the two
    always has a round.
    """
    from sapo.journal import Journal

    config = home.load_config()
    merged: dict[str, dict[str, dict[float, float]]] = {node: {} for node in home.node_names()}
    for node, name, step, value in tracked(home, config.track.uri, config.swarm.name):
        if node in merged:
            merged[node].setdefault(name, {})[step] = value
    for node, metrics in merged.items():
        with Journal.read_only(home.journal(node)) as journal:
            for result in journal.results():
                for name, value in result.metrics.items():
                    metrics.setdefault(name, {})[float(result.round)] = value
    curves = {
        node: {name: sorted(points.items()) for name, points in metrics.items()}
        for node, metrics in merged.items()
    }
    evaluation = None
    if home.evaluation.exists():
        evaluation = json.loads(home.evaluation.read_text(encoding="utf-8"))
    models = {node: config.for_node(node).model for node in curves}
    return Run(home, config.swarm.name, config.swarm.rounds, models, curves, evaluation)


def tracked(home: Home, uri: str | None, swarm: str) -> Iterator[tuple[str, str, float, float]]:
    """(node, metric, round, value) of the nodes' own runs in MLflow, told by their tag: what-ifs lack it."""
    if uri is not None:
        yield from _tracked_by_server(uri, swarm)
    elif home.mlflow_db.exists():
        # the server's own file, opened so that it can neither be written nor locked
        with closing(sqlite3.connect(f"{home.mlflow_db.as_uri()}?mode=ro", uri=True)) as database:
            yield from database.execute(_TRACKED, (NODE, swarm))


_TRACKED = """
SELECT tags.value, metrics.key, metrics.step, metrics.value
FROM metrics JOIN runs USING (run_uuid) JOIN experiments USING (experiment_id)
     JOIN tags ON tags.run_uuid = runs.run_uuid AND tags.key = ?
WHERE experiments.name = ? AND NOT metrics.is_nan ORDER BY metrics.timestamp
"""


def _tracked_by_server(uri: str, swarm: str) -> Iterator[tuple[str, str, float, float]]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(swarm)
    own = f"tags.`{NODE}` != ''"
    for run in client.search_runs([experiment.experiment_id], own) if experiment else []:
        for name in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                yield run.data.tags[NODE], name, metric.step, metric.value


def first_and_last(values: Sequence[float]) -> dict[str, float | None]:
    """Means of the first and the last tenth of a series (at least one value each)."""
    if not values:
        return {"first": None, "last": None}
    window = max(1, len(values) // TENTH)
    return {"first": statistics.fmean(values[:window]), "last": statistics.fmean(values[-window:])}


def rounds_done(curves: Mapping[str, Sequence[Point]]) -> int:
    """How many rounds a node has finished: they count from 0 without a gap.

    What is asked of a checkpoint does not count: it is filed under the round that would come next.
    """
    own = [points for name, points in curves.items() if points and not name.startswith(("eval/", "judge/"))]
    return max((int(points[-1][0]) + 1 for points in own), default=0)


def baseline(evaluation: dict[str, Any], node: str) -> dict[str, Any]:
    """The held-out figures of the policy a node started from."""
    found = evaluation.get("nodes", {}).get(node, {})
    # an earlier release had one baseline per model
    label = found.get("baseline", found.get("model"))
    own: dict[str, Any] | None = evaluation.get("baselines", {}).get(label)
    return own or evaluation.get("starter") or {}


def summarise(run: Run) -> dict[str, Any]:
    """The figures of a run as plain JSON values; what was not measured is null."""
    evaluation = run.evaluation or {}
    nodes: dict[str, Any] = {}
    for node in run.curves:
        end, start = evaluation.get("nodes", {}).get(node, {}), baseline(evaluation, node)
        figures: dict[str, Any] = {
            "model": run.models[node],
            "rounds": rounds_done(run.curves[node]),
            "rounds_total": run.rounds,
        }
        for name in SERIES:
            figures[name] = first_and_last([value for _, value in run.curve(node, name)])
        figures["eval/pass_at_1"] = {
            "start": start.get("pass_at_1"),
            "start_interval": start.get("interval"),
            "end": end.get("pass_at_1"),
            "end_interval": end.get("interval"),
            "per_task": {
                task: {"start": _task(start, task, "pass_at_1"), "end": _task(end, task, "pass_at_1")}
                for task in sorted(end.get("per_task", {}))
            },
        }
        figures["eval/greedy"] = {"start": start.get("greedy"), "end": end.get("greedy")}
        for name, series in (("tokens/generated", "tokens/generated"), ("tokens/trained", "learn/tokens")):
            figures[name] = sum(value for _, value in run.curve(node, series))
        external = [value for _, value in run.curve(node, "share/external")]
        figures["share/external"] = statistics.fmean(external) if external else None
        nodes[node] = figures
    return {
        "swarm": run.swarm,
        "home": str(run.home.root),
        "nodes": nodes,
        "held_out": {
            "questions": evaluation.get("questions"),
            "samples": evaluation.get("samples"),
            "gain": evaluation.get("gain"),
            "gain_greedy": evaluation.get("gain_greedy"),
        },
    }


def _task(evaluation: dict[str, Any], task: str, name: str) -> float | None:
    value: float | None = evaluation.get("per_task", {}).get(task, {}).get(name)
    return value


def write_summary(run: Run) -> dict[str, Any]:
    """Write summary.json whole or not at all, and return what it says."""
    figures = summarise(run)
    write_atomically(
        run.home.summary, json.dumps(figures, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    )
    return figures


def gain_sentence(figures: dict[str, Any]) -> str:
    """What the held-out evaluation says of learning: the paired gains with their 95 % intervals."""
    held_out = figures["held_out"]
    gain, greedy = held_out["gain"], held_out["gain_greedy"]
    if gain is None:
        return "There is no held-out evaluation yet, so whether anything was learned is not known."
    points = f"mean pass@1 is {_points(gain)} against the policy each node started from"
    on = f"on {held_out['questions']:,} held-out questions, paired, sampled at temperature 1"
    beside = "" if greedy is None else f" Greedy: {_points(greedy)}."
    if gain["low"] > 0:
        return f"The nodes learned: {points}, {on}.{beside}"
    if gain["high"] < 0:
        return f"The nodes got worse: {points}, {on}.{beside}"
    return f"No gain can be told from chance: {points}, {on}.{beside}"


def _points(gain: dict[str, float]) -> str:
    low, high, mean = gain["low"] * 100, gain["high"] * 100, gain["mean"] * 100
    return f"{mean:+.1f} points (95 % interval {low:+.1f} to {high:+.1f})"
