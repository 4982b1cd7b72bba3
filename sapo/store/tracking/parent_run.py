"""A swarm's own MLflow run: the runs of its nodes lie below it, and its description leads to them.

MLflow refuses no second run with the same tags. So it is made by whoever made the experiment, of whose name
MLflow does refuse a second; where that one died in between, by anybody, and the oldest counts. Every start
of a node looks again, so that all come to the same one in the end.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any
from urllib.parse import quote

KIND, SWARM, NODE = "sapo.kind", "sapo.swarm", "sapo.node"
WHOLE, ONE = "swarm", "node"
"""Values of `sapo.kind`: the swarm's own run, and a node's."""
OPEN = {"mlflow.runType": "evaluation"}
"""Of a node's run: MLflow's page then shows it at once, in its table and its charts, though it lies below
another. Without, it hides what lies below until someone opens each run there is."""
PARENT, NOTE = "mlflow.parentRunId", "mlflow.note.content"
CURVES = ("reward/local", "reward/training_set")
"""What is compared at first."""
_LISTED, _COMPARED = 8, 30
"""Nodes that the description names, and that it compares, the first ones of a larger swarm: what a start
costs does not grow with the swarm, and MLflow takes 8000 characters, before 3.0 5000."""
_WORKFLOW = "workflowType=machine_learning"
"""In a page's address: MLflow's menu for models, not the one for agents."""
LIST_LINK = f"#/experiments?{_WORKFLOW}"
"""Of the list of experiments, likewise."""
_LEGEND = (
    "Curves are grouped by name: `reward/` and `eval/` say how well, `pool/` and `sampler/` what came from "
    "others, `tokens/` and `time/` what it cost."
)


def create(client: Any, experiment: str, swarm: str) -> None:
    client.create_run(experiment, run_name=swarm, tags={KIND: WHOLE, SWARM: swarm})


def whole(client: Any, experiment: str, swarm: str) -> Any:
    """The swarm's run, made where there is none. Of several, made at the same time, the oldest stays."""
    found = _search(client, experiment, {KIND: WHOLE, SWARM: swarm})
    if not found:
        create(client, experiment, swarm)
        found = _search(client, experiment, {KIND: WHOLE, SWARM: swarm})
    parent, *doubles = sorted(found, key=lambda one: (one.info.start_time, one.info.run_id))
    for double in doubles:
        client.delete_run(double.info.run_id)
    return parent


def join(client: Any, experiment: str, swarm: str, run: str) -> Any:
    """Put a node's run, which has begun, below the swarm's, which is returned, and say in both where
    everything is."""
    parent = whole(client, experiment, swarm)
    own = client.get_run(run)
    above = str(parent.info.run_id)
    name = own.data.tags[NODE]
    wanted = {**OPEN, KIND: ONE, PARENT: above, NOTE: _of_node(experiment, swarm, name, above)}
    for key, value in wanted.items():
        if own.data.tags.get(key) != value:
            client.set_tag(run, key, value)
    if parent.info.status != "RUNNING":
        client.update_run(above, status="RUNNING")
    note = _of_swarm(experiment, swarm, _nodes(client, experiment, above))
    if parent.data.tags.get(NOTE) != note:
        client.set_tag(above, NOTE, note)
    return parent


def leave(client: Any, experiment: str, run: str, status: str, at: float | None = None) -> None:
    """A node's run has ended with `status`: where it was the last, the swarm's ends with it. `at` is in
    seconds; now when not given."""
    parent = client.get_run(run).data.tags.get(PARENT)
    if parent is not None and not _search(client, experiment, {KIND: ONE, PARENT: parent}, running=True):
        client.set_terminated(parent, status, None if at is None else int(at * 1000))


def mean_rewards(client: Any, experiment: str, parent: Any) -> list[tuple[str, float, int, int]]:
    """(name, value, time stamp, round) of the rewards that nodes had in a round, in the mean over nodes. Each
    is dated as the last of the values it is made of, so that it is the same whenever it is computed."""
    rows = []
    nodes = client.search_runs([experiment], f"tags.`{PARENT}` = '{parent.info.run_id}'")
    for name in CURVES:
        by_round: dict[int, dict[str, Any]] = defaultdict(dict)
        for one in nodes:
            for value in client.get_metric_history(one.info.run_id, name):
                by_round[value.step][one.info.run_id] = value
        for round, values in by_round.items():
            mean = fmean(value.value for value in values.values())
            rows.append((name, mean, max(value.timestamp for value in values.values()), round))
    return rows


def link(experiment: str, run: str) -> str:
    """Of a run's page, from any page of the same server."""
    return f"#/experiments/{experiment}/runs/{run}?{_WORKFLOW}"


def charts_link(experiment: str) -> str:
    """Of the charts of all runs of a swarm, likewise."""
    return f"#/experiments/{experiment}/runs?{_WORKFLOW}&compareRunsMode=CHART"


def model_link(model: str) -> str:
    """Of a registered model's page, likewise."""
    return f"#/models/{quote(model, safe='')}?{_WORKFLOW}"


def _search(client: Any, experiment: str, tags: dict[str, str], *, running: bool = False) -> list[Any]:
    terms = [f"tags.`{key}` = '{value}'" for key, value in tags.items()]
    terms += ["attributes.status = 'RUNNING'"] if running else []
    most = 1 if running else _COMPARED
    oldest = ["attributes.start_time ASC"]
    return list(client.search_runs([experiment], " AND ".join(terms), order_by=oldest, max_results=most))


def _nodes(client: Any, experiment: str, parent: str) -> list[Any]:
    """Runs of nodes below the swarm's, in the order of their names and times."""
    found = _search(client, experiment, {KIND: ONE, PARENT: parent})
    return sorted(found, key=lambda one: (len(one.data.tags[NODE]), one.data.tags[NODE], one.info.start_time))


def _of_swarm(experiment: str, swarm: str, nodes: Sequence[Any]) -> str:
    among = f"runs={_packed([one.info.run_id for one in nodes])}&experiments={_packed([experiment])}"
    rewards = f"metric={_packed(CURVES[0])}&plot_metric_keys={_packed(CURVES)}&x_axis=step"
    lines = [
        f"Swarm **{swarm}**: [charts]({charts_link(experiment)}), "
        f"[rewards of all nodes](#/metric?{among}&{rewards}&{_WORKFLOW}), "
        f"[settings side by side](#/compare-runs?{among}&{_WORKFLOW})."
    ]
    lines += ["", _LEGEND, ""]
    for one in nodes[:_LISTED]:
        tags, name = one.data.tags, one.data.tags[NODE]
        facts = f"{tags.get('sapo.model', '')}, {tags.get('sapo.batch', '')}"
        versions = f"[model versions]({model_link(f'{swarm}.{name}')})"
        lines.append(f"- [{name}]({link(experiment, one.info.run_id)}): {facts}; {versions}")
    if len(nodes) > _LISTED:
        lines.append("\nand more")
    return "\n".join(lines)


def _packed(value: str | Sequence[str]) -> str:
    return quote(json.dumps(value, separators=(",", ":")))


def _of_node(experiment: str, swarm: str, node: str, parent: str) -> str:
    return (
        f"Node **{node}** of the swarm [{swarm}]({link(experiment, parent)}), where all nodes are compared. "
        f"[Model versions]({model_link(f'{swarm}.{node}')}). `rollouts.json` below *Artifacts* has "
        f"sample rollouts. Who taught it: `sapo lineage {node}`."
    )
