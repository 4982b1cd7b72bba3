"""Profile of a round and of its update: where the time goes, and how far it is from the arithmetic.

    python benchmarks/profile_round.py [--json FILE] [--quick]

The round is a silo node's of preset starter on one thread, with deliverer, workers behind their walls and
checkpoints when they are due. Its parts are wall seconds, each without the parts inside it.

The updates are of random weights and tokens in two shapes: the starter policy's, 8 groups of 8 completions on
one thread, and Qwen2.5-0.5B's, 2 groups of 4 completions of 64 tokens on all cores, all with an advantage.
Shares are of torch's own time by kind of operation, measured in another update; what is left of the wall is
Python's.

Baseline of all seconds is the floor: floating-point operations of matrix products and attention, as torch
counts them, at the rate that the same machine reaches in a plain matrix product of the model's shape, best
of many. `--quick` makes few rounds, and takes the starter's shape only; the larger one takes 10 GB.
"""

import os
import sys
import time
from pathlib import Path
from statistics import fmean, median, pstdev

from common import STARTER_ROUND, Report, benchmark, parser

if __name__ == "__main__":
    # answers --help before what follows is loaded, which takes seconds
    parser(__doc__).parse_args()

import torch
from stopwatch import by_part
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from updates import Shape

import sapo.policy.models  # noqa: F401  (fixes what determinism needs before torch computes)
from sapo.core.config.home import Home
from sapo.core.config.load import LearnConfig, load
from sapo.core.config.manifest import Manifest
from sapo.core.types import Batch
from sapo.learn.update import Learner
from sapo.node.round import NodeRuntime

KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "attention": ("aten::_scaled_dot_product",),
    "optimiser and clipping": ("aten::_fused_adamw_", "aten::linalg_vector_norm", "aten::_foreach"),
}


STARTER = Shape("starter", 1024, 128, 320, 4, 4, 4, 8, 8, 20, 8, threads=1, updates=20)
HALF_B = Shape("half-b", 151_936, 896, 4864, 24, 14, 2, 2, 4, 72, 64, torch.get_num_threads(), updates=2)


def measure(report: Report, quick: bool, folder: Path) -> None:
    """Profile a node's round, then updates of both shapes, or of the small one."""
    _rounds(report, folder, warm=3 if quick else 20, count=5 if quick else 100)
    for shape in [STARTER] if quick else [STARTER, HALF_B]:
        torch.set_num_threads(shape.threads)
        _profile(report, shape)


def _rounds(report: Report, folder: Path, *, warm: int, count: int) -> None:
    """Parts of a silo node's round: the mean of each, so that they add up to the round."""
    os.environ["SAPO_KEYS"] = str(folder / "keys")
    alone = ["swarm.nodes=1", "swarm.rounds=100_000", "batch.external=0", "eval.probe_questions=0"]
    sets = [*STARTER_ROUND, *alone]
    config, home = load("starter", sets=sets, env={}), Home(folder / "home")
    home.prepare(config, Manifest.of(config))
    torch.set_num_threads(config.threads)
    with NodeRuntime.open(config, "n0", home) as runtime:
        by_part(runtime, warm)
        spent = by_part(runtime, count)
        with FlopCounterMode(display=False) as counter:
            runtime.run_round()
    walls = [sum(one.values()) for one in spent]
    rate = _matmul_rate(STARTER)
    floor = counter.get_total_flops() / rate
    report.measured("node: seconds a round", walls, [floor])
    report.say(f"node: {counter.get_total_flops() / 1e9:,.2f} GFLOP a round at {rate / 1e9:.0f} GFLOP/s")
    parts = {part: [one.get(part, 0.0) for one in spent] for one in spent for part in one}
    for part, found in sorted(parts.items(), key=lambda item: -fmean(item[1])):
        report.add(f"node: {part}, seconds", fmean(found), fmean(walls), pstdev(found))


def _profile(report: Report, shape: Shape) -> None:
    learner = Learner(shape.model(), LearnConfig(), temperature=1.0)
    batch = shape.batch()
    with FlopCounterMode(display=False) as counter:
        _update(learner, batch)  # it also makes the optimiser's moments, so it is not timed
    seconds = [_update(learner, batch) for _ in range(shape.updates)]
    rate = _matmul_rate(shape)
    floor = counter.get_total_flops() / rate
    report.measured(f"{shape.name}: seconds an update", seconds, [floor])
    report.say(f"{shape.name}: {counter.get_total_flops() / 1e9:,.1f} GFLOP at {rate / 1e9:.0f} GFLOP/s")
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        wall = _update(learner, batch)
    spent = dict.fromkeys([*KINDS, "everything else in torch"], 0.0)
    for event in seen.key_averages():
        spent[_kind(event.key)] += event.self_cpu_time_total / 1e6
    inside = sum(spent.values())
    for kind, value in spent.items():
        report.add(f"{shape.name}: {kind}, seconds", value, wall, 0.0)
    report.add(f"{shape.name}: outside of torch, seconds", max(0.0, wall - inside), wall, 0.0)
    finite = all(bool(p.isfinite().all()) for p in learner.model.parameters())
    report.check(f"{shape.name}: the weights are finite", finite, f"median of {median(seconds):.3f} s")


def _update(learner: Learner, batch: Batch) -> float:
    began = time.perf_counter()
    result = learner.step(batch)
    assert result.skipped is None, result.skipped
    return time.perf_counter() - began


def _kind(operation: str) -> str:
    for kind, prefixes in KINDS.items():
        if operation.startswith(prefixes):
            return kind
    return "everything else in torch"


def _matmul_rate(shape: Shape, times: int = 30) -> float:
    """Operations a second in the model's commonest product, best of `times`."""
    rows = min(512, shape.groups * (shape.prompt + shape.completions * shape.length))
    left, right = torch.randn(rows, shape.hidden), torch.randn(shape.hidden, shape.inner)
    product = torch.empty(rows, shape.inner)
    took = [_seconds(left, right, product) for _ in range(times)]
    return 2.0 * rows * shape.hidden * shape.inner / min(took)


def _seconds(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor) -> float:
    began = time.perf_counter()
    torch.mm(left, right, out=product)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(benchmark(__doc__, "profile_round", ["torch", "transformers"], measure))
