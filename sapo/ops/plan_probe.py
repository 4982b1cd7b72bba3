"""A probe: two rounds of a real node in a process and a home of its own, thrown away after; what they took,
and what an answer to a held-out question takes.

The node has no peers. It learns from I + J groups all the same, every one its own: an update as large as the
swarm's. What it generates beyond B groups is taken off again. A weak model's groups may teach nothing, so one
more update is made, of the same texts as if half of each group were right: the longest a round may have.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapo.core.atomic_file import write_atomically
from sapo.core.child_process import POLL_S, Child, tail, watch_parent
from sapo.core.config.home import Home
from sapo.core.config.load import Config, merge, parse
from sapo.core.config.manifest import Manifest
from sapo.core.determinism import thread_settings
from sapo.core.errors import SapoError
from sapo.core.exam_size import exam_size

if TYPE_CHECKING:
    from sapo.core.types import Sample
    from sapo.node.round import NodeRuntime

ROUNDS = 2
NAME = "plan"
NO_THRESHOLD = {"min_entropy": 0, "max_truncated": 1, "max_unscorable": 1, "max_engine_gap": 1e9}
ASKED, ASKED_S = (4, 16, 64, 250), 10.0
"""Held-out questions that are asked in one go: more of them while that takes less than so many seconds."""
CONFIG, DONE, FOUND = "probe.json", "done.json", "found.json"
DRAIN_S = 30.0
Progress = Callable[[str, int, int], None]


class ProbeFailed(SapoError):
    """The probe's process ended without a result."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What two rounds took. Bytes are of memory (`peak`, `bare`) or of the disk (the others)."""

    round_s: float
    """Of a round whose groups all teach; with what held-out probes and checkpoints take of an average one."""
    generated: float
    """Tokens a round, of B groups."""
    learned: float
    """Tokens that entered its update."""
    prompt: int
    """Tokens of the longest question."""
    parameters: int
    peak: int
    """The most memory that the process had, and its task workers with it."""
    bare: int
    """The same before the model was loaded."""
    checkpoint: int
    history: float
    """Rows of a round in the history, without what each file costs."""
    series: int
    """Series that a round logs."""
    question_s: float
    """Of a held-out question, answered once sampled and once greedily."""


def as_probed(config: Config) -> Config:
    """A node's config as the probe runs it."""
    groups = config.batch.local + config.batch.external
    over = {
        "swarm": {"name": NAME, "site": NAME, "nodes": 1, "rounds": ROUNDS},
        "rules": {"entry": "open", "members": []},
        "bus": {"type": "memory"},
        "batch": {"local": groups, "external": 0, "questions": None, "choose": "any"},
        "guard": {"action": "skip", **NO_THRESHOLD},
        "eval": {"questions": min(ASKED[-1], exam_size(config)), "probe_questions": 0},
        "history": {"uri": None, "flush_seconds": 0.1},
        "track": {"uri": None},
        "node": None,
    }
    values = merge(config.model_dump(mode="json"), over)
    return parse(values | {"node": {}})


def probe(config: Config, cache: Path, progress: Progress) -> Probed:
    """Run a node's config, as `as_probed` changes it, for two rounds. Raises `ProbeFailed`."""
    with tempfile.TemporaryDirectory(prefix="sapo-plan-") as scratch:
        folder = Path(scratch)
        values = {"config": config.model_dump(mode="json"), "cache": str(cache)}
        (folder / CONFIG).write_text(json.dumps(values), encoding="utf-8")
        keys = {"SAPO_KEYS": str(folder / "keys")}
        env = {**os.environ, **thread_settings(config.threads), **keys}
        log = folder / "log"
        child = Child.start("probe", ["-m", "sapo.ops.plan_probe", scratch], log=log, env=env)
        try:
            while (code := child.wait(POLL_S * 4)) is None:
                progress(*_read_progress(folder))
        finally:
            child.kill()
        if code or not (folder / FOUND).exists():
            ended = "was killed: it may have been too much for this machine" if code < 0 else "failed"
            said = tail(log).strip().splitlines() or [f"exit code {code}"]
            raise ProbeFailed(f"the probe {ended}: {said[-1]}")
        found: dict[str, Any] = json.loads((folder / FOUND).read_text(encoding="utf-8"))
        return Probed(**found)


def _tell(folder: Path, label: str, done: int, total: int) -> None:
    write_atomically(folder / DONE, json.dumps([f"probing: {label}", done, total]))


def _read_progress(folder: Path) -> tuple[str, int, int]:
    if not (folder / DONE).exists():
        return "probing: rounds", 0, ROUNDS
    label, done, total = json.loads((folder / DONE).read_text(encoding="utf-8"))
    return label, done, total


def main(argv: list[str]) -> int:
    """The probe's own process. Arguments: its folder."""
    watch_parent()
    folder = Path(argv[0])
    values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config = parse(values["config"])
    try:
        found = _measure(folder, config, Path(values["cache"]))
    except SapoError as error:
        print(error)
        return 1
    write_atomically(folder / FOUND, json.dumps(found))
    return 0


def _measure(folder: Path, config: Config, cache: Path) -> dict[str, Any]:
    """The fields of `Probed`."""
    from sapo.bus.memory import MemoryBus
    from sapo.node.round import NodeRuntime
    from sapo.store.history import create_tables
    from sapo.tasks.workers import open_workers

    probed, home = as_probed(config), Home(folder / "home")
    home.prepare(probed, Manifest.of(probed))
    create_tables(probed, home)
    with open_workers(probed) as workers:
        workers.check(probed.tasks)
        bare = peak_memory()
        with NodeRuntime.open(
            probed, probed.nodes[0], home, bus=MemoryBus(), cache=cache, workers=workers
        ) as node:
            results = []
            for done in range(ROUNDS):
                results.append(dict(node.run_round().metrics))
                _tell(folder, "rounds", done + 1, ROUNDS)
            node.drain(DRAIN_S)
            question_s = _question_s(node, partial(_tell, folder))
            found = {**_rounds(config, node, results, question_s), **_disk(home, node)}
            return {"bare": bare, "peak": peak_memory(), "question_s": question_s, **found}


def _question_s(node: "NodeRuntime", tell: Progress) -> float:
    """Seconds of a held-out question, among as many as are asked in one go within the time there is."""
    from sapo.policy.evaluate import evaluate, held_out_set

    parts = node.parts
    questions = held_out_set(parts.config, parts.home, parts.workers)
    found = 0.0
    for count, following in pairwise((*ASKED, 0)):
        chosen, started = questions[:count], time.perf_counter()
        evaluate(
            parts.policy,
            parts.rollouts.engine,
            parts.workers,
            chosen,
            max_new_tokens=node.config.generate.max_new_tokens,
            progress=partial(tell, "held-out answers"),
        )
        found = (time.perf_counter() - started) / len(chosen)
        if len(chosen) < count or following * found > ASKED_S:
            break
    return found


def _rounds(
    config: Config, node: "NodeRuntime", results: list[dict[str, float]], question_s: float
) -> dict[str, Any]:
    """Tokens and seconds of the second round, whose first had everything to warm up."""
    from sapo.core.types import Group

    last = results[-1]
    asked = config.batch.b / node.config.batch.b
    round_s = sum(last[f"time/{stage}"] for stage in ("consume", "verify"))
    update_s, learned = _whole_update(node)
    round_s += last["time/generate"] * asked + update_s
    now_and_then = question_s * config.eval.probe_questions / config.eval.probe_every
    now_and_then += node.parts.recovery.last_s / config.checkpoint.every_rounds
    groups = [Group.model_validate_json(one.payload) for one in node.journal.groups(ROUNDS - 1)]
    return {
        "round_s": round_s + now_and_then,
        "generated": last["tokens/generated"] * asked,
        "learned": learned,
        "prompt": max(len(node.parts.policy.encode_prompt(group.question)) for group in groups),
        "parameters": sum(p.numel() for p in node.parts.policy.model.parameters()),
        "series": len(last),
        "history": _rows(config, node, groups),
    }


def _whole_update(node: "NodeRuntime") -> tuple[float, float]:
    """Seconds and tokens of an update on the last batch, as if every other completion of it were right."""
    batch = node.batch
    assert batch is not None
    groups = [
        group.model_copy(update={"samples": tuple(_taught(sample) for sample in group.samples)})
        for group in batch.groups
    ]
    started = time.perf_counter()
    step = node.parts.learner.step(batch.model_copy(update={"groups": tuple(groups)}))
    return time.perf_counter() - started, step.metrics.get("learn/tokens", 0.0)


def _taught(sample: "Sample") -> "Sample":
    return sample.model_copy(update={"outcome": "score", "advantage": 0.5 - sample.k % 2})


def _rows(config: Config, node: "NodeRuntime", groups: list[Any]) -> float:
    """Bytes of a round's rows in `rollouts` and `training`, compressed."""
    import pyarrow as pa

    from sapo.core.types import Received
    from sapo.store.history.rollout_rows import rollout_rows
    from sapo.store.history.tables import ROLLOUTS

    signed = node.journal.groups(ROUNDS - 1)
    rows = [
        row
        for one, group in zip(signed, groups, strict=True)
        for row in rollout_rows(Received(signed=one, bus_position="0:0", timestamp=0.0), group)
    ]
    published = config.batch.b * config.share.fraction / len(groups)
    rollouts = _compressed(pa.Table.from_pylist(rows, schema=ROLLOUTS)) * published
    return rollouts + _trained(node)


def _trained(node: "NodeRuntime") -> float:
    """Bytes of a round's rows in the table `training`."""
    import pyarrow as pa
    from pyarrow import parquet

    folder = node.parts.home.history / "training"
    tables = [parquet.read_table(file) for file in folder.rglob("*.parquet")]
    return _compressed(pa.concat_tables(tables)) / ROUNDS if tables else 0.0


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
