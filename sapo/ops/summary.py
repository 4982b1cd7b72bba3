"""A run in figures, those of summary.json: read from journals, MLflow, history and the held-out evaluation.

The three rewards of a run stay apart throughout: `reward/local` (a node's own completions),
`reward/training_set` (everything in its batches, filtered foreign groups included) and the held-out
`eval/pass_at_1` with `eval/greedy` beside it. Held-out results are compared on equal questions only: those of
the full evaluation with each other, probes with probes (`sapo.ops.peaks`).
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sapo.core import silence
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.errors import Unavailable, UserError
from sapo.core.figures import Ends, Gain, HeldOut, NodeFigures, RunFigures, Sampled, Shift, Sweep
from sapo.core.series import range_of
from sapo.node import probes, taken_up
from sapo.node.probes import Probe
from sapo.ops import peaks
from sapo.ops.peaks import Exam
from sapo.store.history import totals
from sapo.store.history.tables import Store
from sapo.store.history.totals import Course
from sapo.store.journal.journal import Journal
from sapo.store.tracking.model_registry import load_mlflow, reaching
from sapo.store.tracking.names import decoded, series_name
from sapo.store.tracking.tracker import NODE

TENTH = 10
"""First and last are means over the first and last tenth of a node's rounds: one round is mostly noise."""
Point = tuple[float, float]
Metrics = dict[str, dict[float, float]]
"""{series: {round: value}} of a node."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a home holds: every node's metric series, its probes, and the full evaluation, if there is one.

    `curves[node][metric]` is a list of (round, value) in order of rounds. `exams[node]` are the exams
    on the probe's questions, by round. `no_tokens` are the nodes whose tokens are not known of every
    round, by series. `notes` say what is missing.
    """

    home: Home
    config: Config
    curves: dict[str, dict[str, list[Point]]]
    evaluation: Sweep = field(default_factory=lambda: Sweep(nodes={}))
    exams: dict[str, list[Exam]] = field(default_factory=dict)
    probes: dict[str, list[Probe]] = field(default_factory=dict)
    course: Course | None = None
    no_tokens: Mapping[str, frozenset[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def curve(self, node: str, name: str) -> list[Point]:
        """One metric of a node where it was measured; empty where it never was."""
        return self.curves[node].get(series_name(name), [])


def read_run(home: Home) -> Run:
    """Read a home without touching it. Raises `UserError` where it holds no swarm.

    A journal is pruned once its rounds are delivered, so older rounds come from MLflow, or from the history
    if MLflow lacks them. What none of them has is noted.
    """
    config, evaluation = home.load_config(), home.load_evaluation() or Sweep(nodes={})
    found: dict[str, Metrics] = {node: {} for node in home.node_names()}
    notes: list[str] = []
    wrong: dict[str, None] = {}

    def take(node: str, name: str, round: float, value: float) -> None:
        """Add a value that an earlier release, too, may have written."""
        if range_of(name).problem(value) is None:
            found[node].setdefault(name, {})[round] = value
        else:
            wrong[f"{node}: a recorded {name} is wrong; it is left out."] = None

    try:
        for node, name, step, value in tracked(home, config.track.uri, config.swarm.name):
            if node in found:
                take(node, decoded(name), step, value)
    except Unavailable as error:
        notes.append(f"MLflow cannot be read ({error}).")
    done, own = {}, {}
    for node in found:
        with Journal.read_only(home.journal(node)) as journal:
            for result in journal.results():
                for name, value in result.metrics.items():
                    take(node, series_name(name), float(result.round), value)
            done[node], own[node] = journal.finished_rounds(), journal.incarnation
    notes += wrong
    course, no_tokens = None, {}
    store: Store | None = None
    try:
        known = Store(config.history.uri or str(home.history))
        course, store = totals.course(known, list(found)), known
    except (Unavailable, UserError) as error:
        notes.append(f"The history cannot be read ({error}).")
    for node, metrics in found.items():
        unknown, note = _complete(store, config.for_node(node), node, own[node], metrics, done[node])
        no_tokens[node] = unknown
        notes += note
    curves = {
        node: {name: sorted(points.items()) for name, points in metrics.items()}
        for node, metrics in found.items()
    }
    asked = {node: probes.read(home.probes(node), own[node]) for node in found}
    exams = {
        node: peaks.exams(
            metrics,
            asked[node],
            evaluation.nodes.get(node),
            every=config.for_node(node).eval.probe_every,
        )
        for node, metrics in found.items()
    }
    return Run(home, config, curves, evaluation, exams, asked, course, no_tokens, tuple(notes))


def _complete(
    store: Store | None, config: Config, node: str, incarnation: str, metrics: Metrics, done: int
) -> tuple[frozenset[str], list[str]]:
    """Add to a node's metrics what only the history knows of its `done` rounds.

    Returns the token series that stay incomplete, and a note about what is missing.
    """
    known = _rounds(metrics)
    lost = done - len(known)
    if lost <= 0:
        return frozenset(), []
    unknown = {"learn/tokens"}
    kept = {} if store is None else totals.by_round(store, node, incarnation)
    for name, points in kept.items():
        metrics[name] = points | metrics.get(name, {})
    left = done - len(known | _rounds(kept))
    if left or config.batch.b > config.batch.local:
        unknown.add("tokens/generated")
    if left:
        note = (
            f"{node}: {left:,} of its {done:,} rounds are neither in MLflow nor in the history. Rewards are "
            "means over the other rounds, tokens are not counted."
        )
    else:
        note = (
            f"{node}: MLflow lacks the metrics of {lost:,} of its {done:,} rounds. Rewards are taken from "
            "the history; other curves lack these rounds."
        )
    return frozenset(unknown), [note]


def _rounds(metrics: Mapping[str, Mapping[float, float]]) -> set[float]:
    """The rounds that any series has. An evaluation is filed under the round that would come next."""
    own = [points for name, points in metrics.items() if not name.startswith(("eval/", "judge/"))]
    return set().union(*own)


def tracked(home: Home, uri: str | None, swarm: str) -> Iterator[tuple[str, str, float, float]]:
    """(node, metric, round, value) of the nodes' own runs in MLflow, recognised by their tag: what-ifs lack
    it."""
    if uri is None:
        if not home.mlflow_db.exists():
            return
        uri = f"sqlite:///{home.mlflow_db}"
    with reaching(uri):
        client = load_mlflow().MlflowClient(uri, uri)
        experiment = client.get_experiment_by_name(swarm)
        own = f"tags.`{NODE}` != ''"
        for run in client.search_runs([experiment.experiment_id], own) if experiment else []:
            for name in run.data.metrics:
                for metric in client.get_metric_history(run.info.run_id, name):
                    if not math.isnan(metric.value):
                        yield run.data.tags[NODE], name, metric.step, metric.value


def summarise(run: Run) -> RunFigures:
    """The figures of a run; what was not measured is None."""
    nodes = {node: _of_node(run, node) for node in run.curves}
    return RunFigures(
        swarm=run.config.swarm.name,
        home=str(run.home.root),
        nodes=nodes,
        held_out=HeldOut(**dict(run.evaluation)),
        notes=(
            *run.notes,
            *silence.told({node: figures.alarm for node, figures in nodes.items()}),
            *(line for node in nodes for line in taken_up.told(run.home, node).values()),
        ),
    )


def _of_node(run: Run, node: str) -> NodeFigures:
    config = run.config.for_node(node)
    start, end = run.evaluation.start(node, config.model), run.evaluation.nodes.get(node)

    def ends(series: str) -> Ends:
        """Means of the first and the last tenth of a series (at least one value each)."""
        values = [value for _, value in run.curve(node, series)]
        if not values:
            return Ends()
        window = max(1, len(values) // TENTH)
        return Ends(first=statistics.fmean(values[:window]), last=statistics.fmean(values[-window:]))

    def total(series: str) -> float | None:
        unknown = series in run.no_tokens.get(node, ())
        return None if unknown else sum(value for _, value in run.curve(node, series))

    external = [value for _, value in run.curve(node, "share/external")]
    before, after = (dict(one.per_task) if one else {} for one in (start, end))
    rounds, curves = _by_round(run.curves[node]), run.curves[node].items()
    # they count from 0 without a gap
    done = int(max(_rounds({name: dict(points) for name, points in curves}), default=-1)) + 1
    return NodeFigures(
        model=config.model,
        rounds=done,
        rounds_total=run.config.swarm.rounds,
        reward_local=ends("reward/local"),
        reward_training_set=ends("reward/training_set"),
        pass_at_1=Sampled(
            start=start and start.pass_at_1,
            start_interval=start and start.interval,
            end=end and end.pass_at_1,
            end_interval=end and end.interval,
            per_task={
                task: Shift(start=before[task].pass_at_1 if task in before else None, end=score.pass_at_1)
                for task, score in sorted(after.items())
            },
        ),
        greedy=Shift(start=start and start.greedy, end=end and end.greedy),
        probe=peaks.figures(run.exams.get(node, []), end and end.round),
        tokens_generated=total("tokens/generated"),
        tokens_trained=total("learn/tokens"),
        traits={trait: ends(f"trait/{trait}") for trait in config.track.traits},
        share_external=statistics.fmean(external) if external else None,
        rounds_taught=sum(map(silence.taught, rounds)) if len(rounds) == done else None,
        alarm=silence.alarm(rounds, run.config.swarm.rounds),
    )


def _by_round(curves: Mapping[str, Sequence[Point]]) -> list[dict[str, float]]:
    found: dict[float, dict[str, float]] = {round: {} for round, _ in curves.get(silence.TRAINED, ())}
    for name in silence.READ:
        for round, value in curves.get(name, ()):
            found.get(round, {})[name] = value
    return [found[round] for round in sorted(found)]


def gain_sentence(figures: RunFigures) -> str:
    """What the held-out evaluation shows: the paired gains with their 95 % intervals."""
    gain, greedy = figures.held_out.gain, figures.held_out.gain_greedy
    if figures.nodes and all(node.alarm and node.rounds_taught == 0 for node in figures.nodes.values()):
        return "Nothing was learned: no answer entered an update in any round."
    if gain is None or gain.low is None or gain.high is None:
        return "There is no held-out evaluation yet, so whether anything was learned is not known."
    points = f"mean pass@1 is {_points(gain)} against the policy each node started from"
    held_out = figures.held_out
    count, evidence = held_out.questions, held_out.effective
    few = "" if evidence is None or round(evidence) == count else f", which count as {evidence:,.0f}"
    on = f"on {count:,} held-out questions{few}, paired, sampled at temperature 1"
    beside = "" if greedy is None else f" Greedy: {_points(greedy)}."
    if gain.low > 0:
        return f"The nodes learned: {points}, {on}.{beside}"
    if gain.high < 0:
        return f"The nodes got worse: {points}, {on}.{beside}"
    return f"No gain can be told from chance: {points}, {on}.{beside}"


def _points(gain: Gain) -> str:
    low, high, mean = (100 * (value or 0.0) for value in (gain.low, gain.high, gain.mean))
    return f"{mean:+.1f} points (95 % interval {low:+.1f} to {high:+.1f})"
