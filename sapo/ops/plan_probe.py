"""A probe: a node in a process and a home of its own, thrown away after; what its policy answers, and what
its rounds take.

The node has no peers. It answers some questions of each task and makes two rounds of one group. The update
that is timed is of I + J groups as if half of each were right: the longest a round may have.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from sapo.core.atomic_file import write_atomically
from sapo.core.child_process import POLL_S, Child, tail, watch_parent
from sapo.core.config.home import Home
from sapo.core.config.load import Config, merge, parse
from sapo.core.config.manifest import Manifest
from sapo.core.determinism import thread_settings
from sapo.core.errors import SapoError
from sapo.core.unicode import say
from sapo.ops.plan_answers import (
    Answering,
    Example,
    Progress,
    Stopwatch,
    TaskAnswers,
    ask_tasks,
    counted,
    examples,
)
from sapo.ops.process_group import read_progress, write_progress

if TYPE_CHECKING:
    import torch

    from sapo.core.types import BatchGroup, Sample
    from sapo.node.round import NodeRuntime

NAME = "try"
ROUNDS = 2
"""Of one group each."""
UPDATE_S = 30.0
"""An update that would take longer is reckoned from those of one group and of two."""
NO_THRESHOLD = {"min_entropy": 0, "max_truncated": 1, "max_unscorable": 1, "max_engine_gap": 1e9}
CONFIG, DONE, FOUND = "probe.json", "done.json", "found.json"
DRAIN_S = 30.0
ROWS = 64
"""Positions that are computed at once, as when answers are sampled side by side."""
MATRICES, REPEATS = 24, 3
"""Of a model's layers, that are tried in bfloat16, and how often."""


class ProbeFailed(SapoError):
    """The probe's process ended without a result."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a round takes. Bytes are of memory (`peak`, `bare`) or of the disk (the others)."""

    round_s: float
    """Of a round whose groups all teach; with what held-out probes and checkpoints take of an average one."""
    generated: float
    """Tokens a round, of B groups."""
    learned: float
    """Tokens that entered its update."""
    parameters: int
    peak: int
    """The most memory that the process had, and its task workers with it."""
    bare: int
    """The same before the model was loaded."""
    device_peak: int
    """The most memory of a GPU that it had; 0 on a processor."""
    whole: bool
    """Whether an update was made of a whole batch."""
    checkpoint: int
    history: float
    """Rows of a round in the history, without what each file costs."""
    series: int
    """Series that a round logs."""
    question_s: float
    """Of a held-out question, answered once sampled and once greedily."""
    half_speed: float = 1.0
    """How many times as fast its layers compute in bfloat16; 1 where that was not tried."""
    answers: tuple[TaskAnswers, ...] = ()
    """By task, and of all where there are several."""
    examples: tuple[Example, ...] = ()


def as_probed(config: Config) -> Config:
    """A node's config as the probe runs it."""
    over = {
        "swarm": {"name": NAME, "site": NAME, "nodes": 1, "rounds": ROUNDS},
        "rules": {"entry": "open", "members": []},
        "bus": {"type": "memory"},
        "batch": {"local": 1, "external": 0, "questions": None, "choose": "any"},
        "guard": {"action": "skip", **NO_THRESHOLD},
        "eval": {"questions": 1, "probe_questions": 0},
        "history": {"uri": None, "flush_seconds": 0.1},
        "track": {"uri": None},
    }
    values = merge(config.model_dump(mode="json"), over)
    return parse(values | {"node": {}})


def probe(config: Config, progress: Progress, questions: int) -> Probed:
    """Try a node's config, as `as_probed` changes it, with so many questions of each task.

    Raises `ProbeFailed`.
    """
    with tempfile.TemporaryDirectory(prefix="sapo-try-") as scratch:
        folder = Path(scratch)
        values = {"config": config.model_dump(mode="json"), "questions": questions}
        (folder / CONFIG).write_text(json.dumps(values), encoding="utf-8")
        env = {**os.environ, **thread_settings(config.threads), "SAPO_KEYS": str(folder / "keys")}
        log = folder / "log"
        child = Child.start("probe", ["-m", "sapo.ops.plan_probe", scratch], log=log, env=env)
        try:
            while (code := child.wait(POLL_S * 4)) is None:
                progress(*(read_progress(folder / DONE) or ("trying: loading the model", 0, 1)))
        finally:
            child.kill()
        if code or not (folder / FOUND).exists():
            ended = "was killed: it may have been too much for this machine" if code < 0 else "failed"
            said = tail(log).strip().splitlines() or [f"exit code {code}"]
            raise ProbeFailed(f"the probe {ended}: {said[-1]}")
        return TypeAdapter(Probed).validate_json((folder / FOUND).read_bytes())


def _tell(folder: Path, label: str, done: int, total: int) -> None:
    write_progress(folder / DONE, f"trying: {label}", done, total)


def main(argv: list[str]) -> int:
    """The probe's own process. Arguments: its folder."""
    watch_parent()
    folder = Path(argv[0])
    values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config = parse(values["config"])
    try:
        found = _measure(folder, config, values["questions"])
    except SapoError as error:
        say(str(error))
        return 1
    write_atomically(folder / FOUND, TypeAdapter(Probed).dump_json(found).decode())
    return 0


def _measure(folder: Path, config: Config, questions: int) -> Probed:
    from sapo.bus.memory import MemoryBus
    from sapo.node.parts import open_parts
    from sapo.node.round import NodeRuntime
    from sapo.store.history import create_tables
    from sapo.tasks.workers import open_workers

    probed, home = as_probed(config), Home(folder / "home")
    home.prepare(probed, Manifest.of(probed))
    create_tables(probed, home)
    with open_workers(probed) as workers:
        workers.check(probed.tasks)
        bare = peak_memory()
        parts = open_parts(probed, probed.nodes[0], home, bus=MemoryBus(), workers=workers)
        with NodeRuntime.open(parts) as node:
            found = ask_tasks(node, questions, partial(_tell, folder))
            _tell(folder, "an update", 0, 1)
            node.run_round()
            update = _whole_update(node, found, config.batch.local + config.batch.external)
            last = dict(node.run_round().metrics)  # its checkpoint has an optimiser's state, as a run's have
            node.drain(DRAIN_S)
            taken = {**_round(config, node, last, found, update), **_disk(home, node), **_half(node)}
            return Probed(
                **taken,
                bare=bare,
                peak=peak_memory(),
                device_peak=_device_peak(node),
                answers=tuple(counted(node, found)),
                examples=tuple(examples(found)),
            )


def _round(
    config: Config,
    node: "NodeRuntime",
    last: dict[str, float],
    found: Answering,
    update: tuple[float, float, bool],
) -> dict[str, Any]:
    batch, completions = config.batch, config.batch.completions
    update_s, learned, whole = update
    scored = (batch.b + batch.external) * completions
    round_s = (
        last["time/consume"] + batch.b * completions * found.answer_s + scored * found.score_s + update_s
    )
    question_s = 2 * found.answer_s
    now_and_then = question_s * config.eval.probe_questions / config.eval.probe_every
    now_and_then += node.parts.recovery.last_s / config.checkpoint.every_rounds
    answers = [answer for _, one in found.asked for answer in one.group.completions]
    tokens = sum(len(answer.token_ids or ()) for answer in answers) / len(answers)
    return {
        "round_s": round_s + now_and_then,
        "question_s": question_s,
        "generated": batch.b * completions * tokens,
        "learned": learned,
        "whole": whole,
        "parameters": sum(p.numel() for p in node.parts.policy.model.parameters()),
        "series": len(last),
        "history": _rows(config, node),
    }


def _half(node: "NodeRuntime") -> dict[str, float]:
    """How much faster its layers compute in bfloat16 here; tried where all is float32, on a processor."""
    import torch

    policy, config = node.parts.policy, node.config
    if policy.device.type != "cpu" or config.dtype != "float32" or config.learn.autocast:
        return {}
    layers = [module.weight for module in policy.model.modules() if isinstance(module, torch.nn.Linear)]
    whole = [weight.detach().float() for weight in layers[:MATRICES]]
    return {"half_speed": _product_s(whole) / _product_s([weight.bfloat16() for weight in whole])}


def _product_s(weights: list["torch.Tensor"]) -> float:
    """The least of some tries, in seconds of processor time, which others on the machine take nothing of."""
    rows = [weight.new_ones(ROWS, weight.shape[1]) for weight in weights]
    found = []
    for _ in range(REPEATS + 1):  # the first one warms up
        began = time.process_time()
        for row, weight in zip(rows, weights, strict=True):
            row @ weight.T
        found.append(time.process_time() - began)
    return max(min(found), 1e-9)


def _whole_update(node: "NodeRuntime", found: Answering, count: int) -> tuple[float, float, bool]:
    """Seconds and tokens of an update on so many groups, as if every other answer of each were right; and
    whether it was made."""
    from sapo.node.batch import batch_group

    asked = [found.asked[place % len(found.asked)][1] for place in range(count)]
    signed = node.parts.maker.sign([one.group for one in asked])
    groups = []
    for place, (one, seal) in enumerate(zip(asked, signed, strict=True)):
        about = (node.parts.policy, node.config.learn, one.group, seal, one.outcomes)
        made = batch_group(*about, source="local", position=place, age_s=0.0)
        groups.append(made.model_copy(update={"samples": tuple(map(_taught, made.samples))}))
    seconds, tokens = _update(node, groups[:1])
    if node.config.learn.compile:  # it was compiled for the first one
        seconds, tokens = _update(node, groups[:1])
    if seconds * count <= UPDATE_S or count < 2:
        return (*_update(node, groups), True)
    two, _ = _update(node, groups[:2])  # the optimiser's step takes its time however few there are
    return seconds + max(0.0, two - seconds) * (count - 1), tokens * count, False


def _update(node: "NodeRuntime", groups: list["BatchGroup"]) -> tuple[float, float]:
    assert node.batch is not None
    watch = Stopwatch(node)
    step = node.parts.learner.step(node.batch.model_copy(update={"groups": tuple(groups)}))
    return watch.seconds, step.metrics.get("learn/tokens", 0.0)


def _taught(sample: "Sample") -> "Sample":
    return sample.model_copy(update={"outcome": "score", "advantage": 0.5 - sample.k % 2})


def _rows(config: Config, node: "NodeRuntime") -> float:
    """Of a round: the groups it learns from, and those it publishes, whose rows are no larger."""
    import pyarrow as pa
    from pyarrow import parquet

    folder = node.parts.home.history / "training"
    tables = [parquet.read_table(file) for file in folder.rglob("*.parquet")]
    trained = _compressed(pa.concat_tables(tables)) / ROUNDS if tables else 0.0
    batch = config.batch
    return trained * (batch.local + batch.external + batch.b * config.share.fraction)


def _compressed(table: Any) -> int:
    """What a table's columns take in a file, without its description, which many rounds share."""
    import pyarrow as pa
    from pyarrow import parquet

    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd")
    groups = parquet.read_metadata(pa.BufferReader(sink.getvalue()))
    return sum(
        groups.row_group(i).column(j).total_compressed_size
        for i in range(groups.num_row_groups)
        for j in range(groups.num_columns)
    )


def _disk(home: Home, node: "NodeRuntime") -> dict[str, int]:
    newest = max(home.checkpoints(node.name).iterdir())
    return {"checkpoint": sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())}


def _device_peak(node: "NodeRuntime") -> int:
    import torch

    device = node.parts.policy.device
    return int(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else 0


def peak_memory() -> int:
    """The most memory that this process has had, and what its task workers have now, in bytes."""
    import resource

    import psutil

    unit = 1 if sys.platform == "darwin" else 1024
    children = psutil.Process().children(recursive=True)
    workers = sum(child.memory_info().rss for child in children)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit + workers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
