"""The full stack against the bare loop: what a round costs beside generation, scoring and gradient.

Full stack: `sapo swarm` on a terminal, as a user runs it, with servers, archive, journals, checkpoints,
history and tracking. Bare loop: as many processes that generate, score in the same task workers behind the
same walls, and learn, probes included; foreign groups are scored as a draw needs them. Both take turns, one
at a time. Start-up is left out; at starter scale it lasts until every sink has delivered, and a model version
was registered, for the first time. The processor time of all processes in the measured rounds counts, that of
the servers too. Only equal work can be compared: completions, tokens sampled, tokens trained on and optimiser
steps of a round are checked to be the same on both sides.

`starter`: that preset with 8 own groups and 8 foreign, with one node and with four. `half-b`: random weights
of Qwen2.5-0.5B's shape, float32, one node in silo on all cores, preset paper but for 2 groups of 16
completions of 8 tokens: a round then takes some 20 s on two cores. A real one takes minutes, so the overhead
looks larger here than it is. One word is to be spelled backward, whose verifier gives a share for every
letter that is right, by chance too: of 16 random answers some always differ, so that every group has an
advantage with no stand-in for the verifier. A checkpoint is due every 600 s (`checkpoint.every_seconds`), or
so much later that checkpoints take a hundredth of the time (`checkpoint.max_share`), so in no measured round:
one is taken after them, and its seconds are added to the full stack's rounds in proportion.
"""

import shutil
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from baselines import shapes
from common import STARTER_ROUND, Report, parser
from overhead_programs import Cost, Program, bare, full

from sapo.core.config.home import Home
from sapo.core.config.load import Config, load

PACKAGES = ("torch", "transformers", "prefect", "mlflow", "deltalake", "reasoning-gym")
EQUAL = {
    "completions": ("completions", 0.0),
    "generated": ("tokens generated", 0.05),
    "trained": ("tokens trained", 0.1),
    "steps": ("optimiser steps", 0.02),
}
"""What a round must hold on both sides: its name, and by what share of the bare loop's it may differ."""


@dataclass(frozen=True)
class Case:
    """One comparison: settings beside those of a preset, rounds left out and measured, times repeated.

    The clock's ratio may be `most`; None where nothing is asked.
    """

    name: str
    sets: tuple[str, ...]
    warm: int
    rounds: int
    turns: int
    most: float | None
    preset: str = "starter"
    shape: shapes.Shape | None = None
    """Of the model, with random weights; None takes the preset's."""
    checkpoint: bool = False
    """Whether one is taken after the measured rounds and counted in proportion."""


HALF_B_SETS = (
    "swarm.nodes=1",
    "threads=2",
    "rules.answer=text",
    'tasks=[{dataset="spell_backward", config={min_word_len=9}}]',
    "batch.local=2",
    "batch.completions=16",
    "generate.max_new_tokens=8",
    "learn.micro_batch=16",
    "eval.questions=20",
    "eval.probe_questions=0",
)
CASES = (
    Case("starter, one node", (*STARTER_ROUND, "swarm.nodes=1"), 150, 200, 3, 1.25),
    Case("starter, four nodes", (*STARTER_ROUND, "swarm.nodes=4"), 150, 200, 3, 1.4),
    Case("half-b, one node", HALF_B_SETS, 1, 4, 2, 1.03, "paper", shapes.HALF_B, checkpoint=True),
)
QUICK = (
    Case("starter, two nodes", ("swarm.nodes=2", "batch.external=8", "eval.questions=20"), 2, 4, 1, None),
    Case("half-b, one node", HALF_B_SETS, 1, 3, 1, None, "paper", shapes.SMALL, checkpoint=True),
)


def settings(case: Case, folder: Path) -> tuple[str, ...]:
    """The settings of a case beside its preset's; makes its model where it has one of its own."""
    sets = case.sets
    if case.shape is not None:
        model = folder / "model"
        if not model.exists():
            shapes.make(case.shape, model)
        sets += (f"model={model}",)
    if case.checkpoint:
        sets += (f"checkpoint.every_rounds={case.warm + case.rounds}",)
    return sets


def measure(case: Case, folder: Path) -> tuple[list[Cost], list[Cost]]:
    """Costs of both programs, in turns; the bare loop gets as many foreign groups as the full stack had."""
    sets = settings(case, folder)
    config = load(case.preset, sets=sets, env={})
    options = [
        "--preset",
        case.preset,
        "--rounds",
        "100000",
        *(part for one in sets for part in ("--set", one)),
    ]
    ours: list[Cost] = []
    baseline: list[Cost] = []
    for turn in range(case.turns):
        place = folder / f"{case.name}-{turn}".replace(", ", "-").replace(" ", "-")
        place.mkdir()
        with full(Home(place / "full"), options, config.nodes) as program:
            cost = program.cost(case.warm, case.rounds)
            ours.append(with_checkpoint(cost, program, config) if case.checkpoint else cost)
        with bare(place / "bare", config, ours[0].work) as program:
            baseline.append(program.cost(case.warm, case.rounds))
        shutil.rmtree(place)  # checkpoints of gigabytes
    return ours, baseline


def with_checkpoint(cost: Cost, program: Program, config: Config) -> Cost:
    """The cost of rounds with their part of a checkpoint, which the next round begins with."""
    took = max(0.0, program.cost(0, 1).seconds - cost.seconds)
    settings = config.for_node(config.nodes[0]).checkpoint
    share = took / max(settings.every_seconds, took / settings.max_share)
    return replace(cost, seconds=cost.seconds * (1.0 + share), checkpoint=took)


def show(report: Report, case: Case, ours: Sequence[Cost], baseline: Sequence[Cost]) -> None:
    """Figures of a case, and where the processor time of a round goes."""
    for what, ms in (("ms", lambda cost: 1e3 * cost.seconds), ("CPU ms", lambda cost: 1e3 * cost.cpu)):
        report.measured(f"{case.name}: {what} a round", list(map(ms, ours)), list(map(ms, baseline)))
    if case.checkpoint:
        report.measured(f"{case.name}: ms a checkpoint", [1e3 * cost.checkpoint for cost in ours], [0.0])
    for part in ("informative", "external", "verified"):
        report.measured(f"{case.name}: groups {part}", held(ours, part), held(baseline, part))
    for part, (name, allowed) in EQUAL.items():
        figure = f"{case.name}: {name} a round"
        report.measured(figure, held(ours, part), held(baseline, part))
        if case.most is not None or not allowed:  # a few rounds of a quick run differ
            same = abs(report.figures[figure].ratio - 1.0) <= allowed
            within = f"within {allowed:.0%}" if allowed else "exactly"
            report.check(f"{figure}: the same, {within}", same, f"{report.figures[figure].ratio:.3f} times")
    for role in sorted({role for cost in ours for role in cost.roles}):
        parts = [[1e3 * cost.roles.get(role, 0.0) for cost in costs] for costs in (ours, baseline)]
        report.measured(f"{case.name}: CPU ms of {role}", *parts)
    if case.most is not None:
        ratio = statistics.median(c.seconds for c in ours) / statistics.median(c.seconds for c in baseline)
        what = f"{case.name}: at most {case.most} times the bare loop"
        report.check(what, ratio <= case.most, f"{ratio:.3f} times")


def held(costs: Sequence[Cost], part: str) -> list[float]:
    """One part of what the rounds held, of every turn."""
    return [getattr(cost.work, part) for cost in costs]


def main() -> int:
    """Run the cases, one after the other; returns the exit status."""
    options = parser(__doc__)
    options.add_argument("--only", choices=[case.name for case in CASES], help="one case alone, in full")
    chosen = options.parse_args()
    cases: tuple[Case, ...] = QUICK if chosen.quick else CASES
    if chosen.only:
        cases = tuple(case for case in CASES if case.name == chosen.only)
    report = Report("overhead", PACKAGES)
    with TemporaryDirectory(prefix="sapo-bench-") as folder:
        for case in cases:
            show(report, case, *measure(case, Path(folder)))
    return report.finish(chosen.json)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the programs would go on without it
    sys.exit(main())
