"""Step `smollm2`: swarms of four SmolLM2-135M-Instruct on one GPU, against nodes that learn alone.

Each arm is a process of its own, all at once, as many rounds as the minutes allow. In the arms `trick…` node
n0 is asked with a worked example, the others without: alone these never write an answer in the wanted form.
"""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from sapo.core.atomic_file import write_atomically
from sapo.experiments.exam import Examiner, questions_for
from sapo.experiments.grid import Grid
from sapo.experiments.lockstep_swarm import SharedWorkers, Swarm, opened
from sapo.policy import gguf_file
from sapo.tasks.workers import open_workers

from .child import Task
from .memory import watched
from .runner import ROOT
from .sharing import beside_each_other
from .steps import MODEL

CARRIED = ROOT / MODEL
"""Or its parts `….00`, `….01`."""
SECONDS = 240.0
"""Of rounds and exams, each arm; the last exam comes after."""
ROUNDS = 60
EXAMPLE = ("What is 12 plus 5?", "12 + 5 = 17\n<answer>17</answer>")
KEPT = ("reward/local", "trait/form", "learn/entropy", "learn/tokens", "tokens/generated")
"""Series of each node that the facts keep."""
TWO = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
ARMS: Mapping[str, Mapping[str, Any]] = {
    "silos": {"batch.external": 0},
    "4/4": {"batch.external": 4},
    "trick, silos": {"batch.external": 0, "trick": True},
    "trick, 4/4": {"batch.external": 4, "trick": True},
}


def run(task: Task) -> None:
    """All arms at once; their exams and series go into the facts."""
    model = smollm2(task)
    arms = {name: grid_of(task, name, model) for name in list(ARMS)[: 1 if task.tiny else None]}
    began = time.perf_counter()
    folder = task.work / "smollm2"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with (
        beside_each_other(task),
        watched(task.device) as seen,
        ProcessPoolExecutor(len(arms), get_context("spawn")) as pool,
    ):
        seconds = 60.0 if task.tiny else SECONDS
        waits = [
            pool.submit(make, grid.model_dump(by_alias=True), seconds, folder, place)
            for place, grid in enumerate(arms.values())
        ]
        found = {name: wait.result() for name, wait in zip(arms, waits, strict=True)}
    task.add("seconds, all arms at once", "s", [time.perf_counter() - began])
    task.add("peak memory, all arms at once", "MB", [seen.peak_mb - seen.before_mb])
    for name, one in found.items():
        task.add(f"{name}: rounds of four nodes", "", [one["rounds"]])
        task.add(f"{name}: seconds a round of four nodes", "s", one["seconds"][1:] or one["seconds"])
        for which, at in (("before", 0), ("at the end", one["rounds"])):
            shares = [exam["pass_at_1"] for exam in one["exams"] if exam["round"] == at]
            task.add(f"{name}: held-out pass@1 {which}, by node", "", shares)
    task.facts |= found


def smollm2(task: Task) -> Path:
    """SmolLM2 as a folder, made once."""
    cache = task.work / "models"
    folder = gguf_file.location(gguf_file.SMOLLM2, cache=cache)
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        parts = [CARRIED] if CARRIED.exists() else sorted(CARRIED.parent.glob(f"{CARRIED.name}.*"))
        whole = cache / CARRIED.name
        whole.write_bytes(b"".join(part.read_bytes() for part in parts))
        if gguf_file.location(str(whole), cache=cache) != folder:
            raise SystemExit(f"{CARRIED}, of {len(parts)} parts: its SHA-256 is not {gguf_file.SHA256}")
        gguf_file.prepare(str(whole), cache=cache)
    return folder


def grid_of(task: Task, name: str, model: Path) -> Grid:
    """An arm as a grid of its own: 4 own groups of 8 answers of 24 tokens, two tasks of arithmetic."""
    settings = {
        "model": str(model),
        "device": task.device,
        "dtype": "bfloat16",
        "threads": 1,
        "workers": {"unwalled": True},  # every answer is of its own models
        "swarm": {"nodes": 2 if task.tiny else 4},
        "batch": {"local": 4, "external": ARMS[name]["batch.external"], "completions": 8},
        "generate": {"max_new_tokens": 24},
        "learn": {"lr": 1e-5, "micro_batch": 8 if task.device == "cpu" else 32},
        "track": {"traits": {"form": "<answer>"}},
        "tasks": [{"dataset": one, "config": TWO} for one in ("products", "chain_sum")],
    }
    shown = {"prompt": {"examples": [EXAMPLE]}}
    settings |= {"node": {"0": shown}} if ARMS[name].get("trick") else shown
    return Grid.model_validate(
        {
            "name": "smollm2",
            "about": f"SmolLM2 on a GPU: {name}",
            "preset": "qwen-0.5b",
            "rounds": 1 if task.tiny else ROUNDS,
            "set": settings,
            "arm": [{"name": name}],
            "exam": {"every": 10, "questions": 8 if task.tiny else 128},
        }
    )


def make(values: dict[str, Any], seconds: float, folder: Path, place: int) -> dict[str, Any]:
    """Make an arm's rounds until the seconds are over; keeps what it has after every exam."""
    grid = Grid.model_validate(values)
    job = grid.jobs(1)[0]
    config = grid.config(job)
    torch.set_num_threads(config.threads)
    home = folder / f"home{place}"
    home.mkdir()
    exams: list[dict[str, Any]] = []
    series: list[list[dict[str, float | None]]] = []
    took: list[float] = []
    until = time.monotonic() + seconds
    with (
        open_workers(config, SharedWorkers) as workers,
        opened(config, grid.named(job.arm), home, workers) as swarm,
    ):
        examiner = Examiner(grid.exam, questions_for(config, grid.exam, workers, tuning=False), job.seed)

        def examined(swarm: Swarm, rounds: int) -> None:
            exams.extend(exam.__dict__ for exam in examiner.examine(swarm.nodes, rounds))
            kept = {"rounds": rounds, "seconds": took, "exams": exams, "series": kept_of(series)}
            write_atomically(folder / f"arm{place}.json", json.dumps(kept))

        rounds = 0
        examined(swarm, 0)
        while rounds < grid.rounds and time.monotonic() < until:
            began = time.perf_counter()
            series.append(swarm.round())
            took.append(time.perf_counter() - began)
            rounds += 1
            if rounds % grid.exam.every == 0:
                examined(swarm, rounds)
        if rounds % grid.exam.every:
            examined(swarm, rounds)
    return {"rounds": rounds, "seconds": took, "exams": exams, "series": kept_of(series)}


def kept_of(rounds: Sequence[Sequence[Mapping[str, float | None]]]) -> dict[str, list[list[float | None]]]:
    """By name: a list for each node, with a value for each round."""
    return {
        name: [[found.get(name) for found in node] for node in zip(*rounds, strict=True)] for name in KEPT
    }
