"""One node's full round (generate, score, publish, sample, update, journal) against TRL and genrl.

Each program runs in a process of its own and makes a round when it is asked to; rounds alternate where both
programs fit in memory, those of the warm-up are not counted. Same weights, tokenizer, questions, completions,
length limit, micro-batch and threads for all, one optimiser step a round. TRL and genrl run with what makes
them fastest here, see their programs in benchmarks/baselines. Memory is the peak of the program and its
children in a counted round.

`starter-trl`, `starter-genrl`: preset starter with 8 groups, its trained policy, its verifier, one
thread (a swarm has several nodes on a machine), checkpoints when they are due, 8 groups of 8 completions of
at most 16 tokens; all groups are own (J = 0), so that all programs do the same work. Beside it, untrained
weights of the same shape and a stand-in for the verifier: all 16 tokens are generated and no group has zero
advantage, so nothing but the loop itself can be saved.

`smollm2`, `smollm2-bfloat16`, `smollm2-lora`: SmolLM2-135M-Instruct with preset smollm2's tasks, prompt and
answers of at most 32 tokens, both cores, 8 groups of 8, all own, its verifier. In float32; in bfloat16, where
TRL keeps no float32 masters and ours does; and an adapter of rank 8 on bfloat16 weights.

`half-b`: random weights of Qwen2.5-0.5B's shape, float32, both cores. Preset paper's I = 4 groups and
micro-batch of 8. 4 completions, not its 8, and 64 tokens, not its 256: TRL's round is to stay near two
minutes on two cores. Fewer completions favour TRL (a prompt is shared by fewer), fewer tokens favour us (the
prompt's share grows). Three of its nine data sets, whose prompts are of 70 to 150 tokens; the others' are of
130 to 660, which would favour us. Random weights are never right, so a stand-in scores: every other
completion right, in every other group (half of them at zero advantage) or in every group (none). The programs
run one after the other, since both do not fit in 24 GB: each starts, makes a round of each case as warm-up
and two that count, and ends. What else the machine does in that half hour may thus meet one of them only.
"""

import statistics
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from baselines import shapes
from baselines.child import Scores, Work
from baselines.programs import Program, Round, genrl_python, make_genrl, started
from common import STARTER_ROUND, Report, parser

from sapo.core.config.load import Config, load
from sapo.core.types import Question
from sapo.core.user_cache import default_cache
from sapo.experiments.grid import identity
from sapo.policy import gguf_file
from sapo.policy.starter import prepare
from sapo.tasks.questions import QuestionStream
from sapo.tasks.workers import open_workers

NAMES = {"trl": "TRL", "genrl": "genrl"}
INCARNATION = "0123456789abcdef"
"""Of our node: fixed, so that its questions are known beforehand and others can be asked the same."""


@dataclass(frozen=True)
class Case:
    """Rounds of one kind: who scores, and what of the baseline's seconds and memory is allowed."""

    name: str
    scores: Scores
    seconds: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Part:
    """One comparison. A round of each case is warm-up per `warm`."""

    baseline: str
    model: str
    """`trained` or `untrained` starter, `smollm2` or `half-b`."""
    cases: tuple[Case, ...]
    warm: int
    rounds: int
    blocks: int = 0
    """Turns in which each program runs alone: it starts, warms up, makes `rounds` and ends; 0 where all run
    at once and take turns by the round."""
    sets: tuple[str, ...] = ()
    """Settings of its own."""


STARTER = Case("preset starter", "verifier", seconds=1 / 5, memory=1.0)
SMOLLM2 = Case("preset smollm2", "verifier", seconds=1 / 2.5, memory=0.5)
PARTS = {
    "starter-trl": Part("trl", "trained", (STARTER,), warm=5, rounds=60),
    "starter-genrl": Part("genrl", "trained", (STARTER,), warm=5, rounds=30),
    "untrained-trl": Part(
        "trl", "untrained", (Case("16 tokens each, none at zero", "all"),), warm=3, rounds=20
    ),
    "smollm2": Part("trl", "smollm2", (SMOLLM2,), warm=1, rounds=3, sets=("dtype=float32",)),
    "smollm2-bfloat16": Part("trl", "smollm2", (SMOLLM2,), warm=1, rounds=3),
    "smollm2-lora": Part("trl", "smollm2", (SMOLLM2,), warm=1, rounds=3, sets=("lora.rank=8",)),
    "half-b": Part(
        "trl",
        "half-b",
        (
            Case("half of the groups at zero", "half", seconds=1 / 1.5, memory=0.6),
            Case("none at zero", "all", seconds=1.0),
        ),
        warm=1,
        rounds=2,
        blocks=1,
    ),
}
LONG = ["starter-genrl", "untrained-trl", "smollm2", "smollm2-bfloat16", "smollm2-lora"]
"""Left out of a quick run unless named: genrl's environment and SmolLM2 take a minute to make."""
ALONE = ("swarm.nodes=1", "swarm.rounds=1_000_000", "batch.external=0", "eval.probe_questions=0")
"""A silo of one node, without examinations: no baseline is examined."""
RARELY = (
    "checkpoint.every_rounds=1_000_000",
    "checkpoint.every_seconds=1e9",
    "checkpoint.weight_digest_every=1_000_000",
)
"""No checkpoint falls into a counted round."""


def starter_config(quick: bool) -> Config:
    """Preset starter in silo."""
    return load("starter", sets=[*STARTER_ROUND, *ALONE, *(["starter.steps=20"] if quick else [])], env={})


def smollm2_config(sets: Sequence[str]) -> Config:
    """Preset smollm2 in silo on both cores."""
    return load("smollm2", sets=["threads=2", "batch.local=8", *ALONE, *RARELY, *sets], env={})


def half_b_config(model: Path) -> Config:
    """Preset paper in silo on both cores."""
    names = ("basic_arithmetic", "fraction_simplification", "calendar_arithmetic")
    tasks = ", ".join(f'{{dataset = "{name}"}}' for name in names)
    sets = [
        f"model={model}",
        f"tasks=[{tasks}]",
        "threads=2",
        "batch.completions=4",
        "generate.max_new_tokens=64",
        *ALONE,
        *RARELY,
    ]
    return load("paper", sets=sets, env={})


def prepared(part: Part, quick: bool, folder: Path) -> tuple[Config, Path]:
    """The config of a part and the directory of its model, made now where it has to be."""
    if part.model == "half-b":
        directory = folder / "half-b"
        if not directory.exists():
            shapes.make(shapes.SMALL if quick else shapes.HALF_B, directory)
        return half_b_config(directory), directory
    if part.model == "smollm2":
        return smollm2_config(part.sets), gguf_file.prepare("smollm2", cache=default_cache())
    config = starter_config(quick)
    with open_workers(config) as workers:
        directory = prepare(config, workers, cache=default_cache())
    if part.model == "trained":
        return config, directory
    fresh = folder / "untrained"
    if not fresh.exists():
        shapes.forget(directory, fresh)
    return config.model_copy(update={"model": str(fresh)}), fresh


def questions(config: Config, rounds: int) -> list[list[Question]]:
    """What our node asks in its first rounds."""
    with open_workers(config) as workers:
        return [
            QuestionStream(
                workers,
                config.tasks,
                (config.swarm.name, identity(config.swarm.seed, 0).key, INCARNATION),
                round,
                count=config.batch.b,
                held_out=config.rules.held_out,
            ).result()
            for round in range(rounds)
        ]


def work_of(config: Config, model: Path, asked: Sequence[Sequence[Question]], folder: Path) -> Work:
    """What both programs of a part are to do."""
    sequences = config.batch.b * config.batch.completions
    return Work(
        model=str(model),
        config=config.model_dump(mode="json"),
        rounds=[
            [
                {
                    "text": question.text,
                    "dataset": question.recipe.dataset,
                    "config": question.recipe.params,
                    "seed": question.recipe.seed,
                    "index": question.recipe.index,
                }
                for question in round
            ]
            for round in asked
        ],
        incarnation=INCARNATION,
        system=config.system,
        examples=[list(pair) for pair in config.prompt.examples],
        tagged=config.rules.answer == "tags",
        dtype=config.dtype,
        lora=lora_of(config),
        groups=config.batch.b,
        completions=config.batch.completions,
        new_tokens=config.generate.max_new_tokens,
        micro_batch=config.learn.micro_batch or sequences,
        lr=config.learn.lr,
        threads=config.threads,
        folder=str(folder),
        tasks=[{"dataset": task.dataset, "config": task.config} for task in config.tasks],
    )


def lora_of(config: Config) -> dict[str, Any] | None:
    """An adapter in peft's words."""
    if config.lora is None:
        return None
    own = config.lora
    return {"r": own.rank, "lora_alpha": own.alpha, "target_modules": own.target_modules}


def measure(report: Report, name: str, part: Part, quick: bool, folder: Path) -> None:
    """Run a part and add its figures."""
    warm, counted = (1, 1) if quick else (part.warm, part.rounds)
    config, model = prepared(part, quick, folder)
    if part.baseline == "genrl" and not genrl_python()[1]:
        report.say("making genrl's environment in the cache directory, once: about a minute")
    python = make_genrl() if part.baseline == "genrl" else Path(sys.executable)
    asked = questions(config, (warm + counted) * len(part.cases))
    took: dict[tuple[str, Case], list[Round]] = {}

    def program(side: str, block: int = 0) -> AbstractContextManager[Program]:
        own = folder / f"{name}-{side}-{block}"
        own.mkdir()
        interpreter = python if side == part.baseline else Path(sys.executable)
        return started(side, work_of(config, model, asked, own), interpreter, own)

    sides = ("ours", part.baseline)
    if part.blocks:
        report.say(f"{name}: one program after the other, {part.blocks} times; both do not fit in memory")
        for block in range(part.blocks):
            for side in sides:
                with program(side, block) as alone:
                    take([alone], part.cases, warm, counted, took)
    else:
        with ExitStack() as stack:
            programs = [stack.enter_context(program(side)) for side in sides]
            take(programs, part.cases, warm, counted, took)
    for case in part.cases:
        add(report, name, case, part.baseline, took["ours", case], took[part.baseline, case], quick)


def take(
    programs: Sequence[Program],
    cases: Sequence[Case],
    warm: int,
    counted: int,
    took: dict[tuple[str, Case], list[Round]],
) -> None:
    """Let programs make rounds of each case in turns; those after the warm-up are added to `took`."""
    for number in range(warm + counted):
        for case in cases:
            for program in programs:
                made = program.round(case.scores)
                if number >= warm:
                    took.setdefault((program.name, case), []).append(made)


def add(
    report: Report,
    part: str,
    case: Case,
    baseline: str,
    ours: Sequence[Round],
    theirs: Sequence[Round],
    quick: bool,
) -> None:
    """The figures of one case, and whether they are within bounds; a quick run has none."""
    other = NAMES[baseline]
    for what, unit in (("seconds", "s"), ("cpu", "CPU s"), ("peak", "peak MB")):
        figure = f"{part}, {case.name}: {unit} (baseline: {other})"
        report.measured(figure, [getattr(one, what) for one in ours], [getattr(one, what) for one in theirs])
        bound = {"seconds": case.seconds, "peak": case.memory}.get(what)
        if bound is not None and not quick:
            ratio = report.figures[figure].ratio
            detail = f"{ratio:.3f} times {other}'s" + (
                f", {1 / ratio:.1f} times faster" if unit == "s" else ""
            )
            report.check(
                f"{part}, {case.name}: {unit} at most {bound:.3g} times {other}'s", ratio <= bound, detail
            )
    if case.scores != "verifier":
        steps = sum(one.trained for one in ours)
        report.check(f"{part}, {case.name}: a step in every round", steps == len(ours), f"{steps} of ours")
    for side, rounds in (("ours", ours), (other, theirs)):
        times = [one.seconds for one in rounds]
        steps = sum(one.trained for one in rounds)
        score = statistics.mean(one.reward for one in rounds)
        report.say(
            f"{part}, {case.name}: {side}: {len(rounds)} rounds of {min(times):.3g} to {max(times):.3g} s, "
            f"{steps} with a step, mean score {score:.3f}"
        )


def main() -> int:
    """Run the benchmark; returns the exit status."""
    options = parser(__doc__)
    options.add_argument("--only", choices=PARTS, help="one comparison alone")
    chosen = options.parse_args()
    report = Report("round", ("torch", "transformers", "trl", "reasoning-gym"))
    names = [chosen.only] if chosen.only else [name for name in PARTS if not (chosen.quick and name in LONG)]
    with TemporaryDirectory(prefix="sapo-bench-") as folder:
        for name in names:
            measure(report, name, PARTS[name], chosen.quick, Path(folder))
    return report.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
