"""What a swarm would learn and what it takes of this machine, before it runs: answers, memory, time, disk."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sapo.core.config.home import Home, existing
from sapo.core.config.load import Config
from sapo.core.errors import UserError
from sapo.core.exam_size import answers_to_each, exam_size, sized
from sapo.core.machine import usable
from sapo.core.types import canonical
from sapo.ops.needs import BESIDE, PROCESS, least_memory, run_disk
from sapo.ops.plan_answers import Progress
from sapo.ops.plan_probe import Probed, ProbeFailed, probe
from sapo.policy import initial
from sapo.policy.device import resolve_device
from sapo.policy.model_shape import ModelShape, shape_of
from sapo.tasks.workers import open_workers

RAM = "memory"
LARGE, FASTER = 50_000_000, 1.3
"""Parameters, and times as fast, from which bfloat16 is worth its rounding."""
UNSURE = 1.5
"""How many times what there is has to be needed, by formula, for a swarm to be refused."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What each of the nodes `names` takes, which are alike; None where it is not known."""

    names: tuple[str, ...]
    config: Config
    device: str
    shape: ModelShape | None = None
    memory: tuple[int, int] | None = None
    """Of the machine's, and of the device's: as tried, and no less than `least_memory`."""
    probed: Probed | None = None
    round_s: float | None = None
    """With all nodes of this machine at work."""
    disk: int | None = None
    """Of the whole run."""

    @property
    def who(self) -> str:
        """The names, shortened."""
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]}"

    @property
    def rounds_s(self) -> float | None:
        """Seconds of all its rounds."""
        return None if self.round_s is None else self.round_s * self.config.swarm.rounds

    @property
    def exam_s(self) -> float | None:
        """Seconds of its part of the evaluation at the end: the full exam of each of the nodes and of the
        policy they start from, and of as many earlier versions as are asked too, sampled only."""
        if self.probed is None:
            return None
        # a question's time is that of a sampled answer and a greedy one
        answers = answers_to_each(self.config, len(self.names)) * exam_size(self.config)
        return self.probed.question_s / 2 * answers

    @property
    def in_vain(self) -> bool:
        """Whether nothing would be learned of any task, as far as was asked."""
        return self.probed is not None and bool(self.probed.answers[-1:] and self.probed.answers[-1].alarm)

    @property
    def alarms(self) -> list[str]:
        """A line for each task of which it would learn nothing now, or one for all of them."""
        answers = () if self.probed is None else self.probed.answers
        if self.in_vain:
            answers = answers[-1:]
        return [
            f"{self.who} would learn nothing{'' if one is answers[-1] else f' of {one.task}'}: {one.alarm}"
            for one in answers
            if one.alarm
        ]

    @property
    def faster(self) -> str:
        """The setting that would make its rounds shorter, in a line; empty if none is known to."""
        probed = self.probed
        if probed is None or probed.half_speed < FASTER or probed.parameters < LARGE:
            return ""
        return f'dtype = "bfloat16": its layers compute {probed.half_speed:.1f} times as fast so here'

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "nodes": list(self.names),
            "model": self.config.model,
            "device": self.device,
            "shape": None if self.shape is None else asdict(self.shape),
            "memory": None if self.memory is None else dict(zip((RAM, "device"), self.memory, strict=True)),
            "probed": None if self.probed is None else asdict(self.probed),
            "round_s": self.round_s,
            "rounds_s": self.rounds_s,
            "exam_s": self.exam_s,
            "faster": self.faster,
            "disk": self.disk,
        }


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that all nodes together take of one thing of this machine, and what there is of it."""

    what: str
    need: int
    have: int

    def __str__(self) -> str:
        return f"{self.what}: {in_units(self.need)} are needed, there are {in_units(self.have)}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole site."""

    nodes: tuple[NodePlan, ...]
    needs: tuple[Need, ...]
    missing: tuple[str, ...]
    """What is not known, and why."""

    @property
    def rounds_s(self) -> float | None:
        """Seconds of all rounds, which end with the slowest node; None where one is not known."""
        each = [node.rounds_s for node in self.nodes]
        return max((one for one in each if one is not None), default=None) if None not in each else None

    @property
    def exam_s(self) -> float | None:
        """Seconds of the evaluation after them, which asks one policy after the other."""
        each = [node.exam_s for node in self.nodes]
        return sum(one for one in each if one is not None) if each and None not in each else None

    @property
    def wrong(self) -> bool:
        """Whether something does not fit, or a node would learn nothing at all."""
        return any(one.need > one.have for one in self.needs) or any(node.in_vain for node in self.nodes)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line for each thing that there is too little of, and for what would teach nothing."""
        short = [str(one) for one in self.needs if one.need > one.have]
        return (*short, *(line for node in self.nodes for line in node.alarms))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "nodes": [node.as_dict() for node in self.nodes],
            "needs": [asdict(need) for need in self.needs],
            "rounds_s": self.rounds_s,
            "exam_s": self.exam_s,
            "warnings": list(self.warnings),
            "missing": list(self.missing),
        }


def make_plan(config: Config, home: Home, cache: Path, *, questions: int, progress: Progress) -> Plan:
    """The plan of a site, by formula and, unless no `questions` of each task are to be asked, by trying it.
    Raises `UserError` for a device that is not here, or a model that is unusable."""
    missing: list[str] = []
    config = sized(config)
    nodes = [
        _of_alike(config, own, names, cache, questions, progress, missing) for own, names in _alike(config)
    ]
    return Plan(tuple(nodes), tuple(_needs(nodes, home)), tuple(missing))


def refuse_too_many(config: Config, home: Home, cache: Path) -> tuple[str, ...]:
    """Raise `UserError` where a site's nodes surely do not fit into memory; returns warnings if they may not.
    By formula alone. Of a model whose shape is not known nothing is said."""
    plan = make_plan(config, home, cache, questions=0, progress=lambda label, done, total: None)
    short = [one for one in plan.needs if one.need > UNSURE * one.have]
    if short:
        remedy = "name fewer with --nodes, or a smaller model; `sapo try` measures what one takes"
        raise UserError("swarm.nodes", config.swarm.nodes, str(short[0]), remedy)
    return plan.warnings


def _alike(config: Config) -> list[tuple[Config, tuple[str, ...]]]:
    found: dict[str, tuple[Config, list[str]]] = {}
    for name in config.nodes:
        own = config.for_node(name)
        found.setdefault(canonical(own.model_dump(mode="json")), (own, []))[1].append(name)
    return [(own, tuple(names)) for own, names in found.values()]


def _of_alike(
    config: Config,
    own: Config,
    names: tuple[str, ...],
    cache: Path,
    questions: int,
    progress: Progress,
    missing: list[str],
) -> NodePlan:
    device = str(resolve_device(own))
    if questions:
        _prepare(own, cache, progress)
    shape = shape_of(own, cache)
    if shape is None:
        missing.append(
            f"{names[0]}: all figures, for the model {own.model} has no config here and the hub gives none; "
            "name a folder that has its config.json"
        )
        return NodePlan(names, own, device)
    if not shape.known:
        missing.append(f"{names[0]}: the starter's vocabulary, as it is not made yet; its largest is taken")
    memory = least = least_memory(own, shape)
    if not questions:
        return NodePlan(names, own, device, shape, memory)
    try:
        _refuse_too_large(least, device)
        probed = probe(own, progress, questions)
    except ProbeFailed as error:
        missing.append(f"{names[0]}: seconds, tokens and bytes of history, for {error}")
        return NodePlan(names, own, device, shape, memory)
    if not probed.whole:
        missing.append(f"{names[0]}: memory of an update of a whole batch, for it was tried on two groups")
    tried = probed.peak - probed.bare + PROCESS
    memory = (max(tried, sum(least)), 0) if device == "cpu" else (max(tried, least[0]), probed.device_peak)
    round_s = probed.round_s * _crowding(config, device)
    disk = run_disk(own, shape, history=probed.history, series=probed.series, checkpoint=probed.checkpoint)
    return NodePlan(names, own, device, shape, memory, probed, round_s, disk)


def _refuse_too_large(memory: tuple[int, int], device: str) -> None:
    """Raise `ProbeFailed` where one node alone would not fit: a probe of it could take the machine down."""
    at_peak = {RAM: sum(memory)} if device == "cpu" else {RAM: memory[0], device: memory[1]}
    if any(size > memory_of(place) for place, size in at_peak.items()):
        raise ProbeFailed("one node alone does not fit, so it was not tried")


def _prepare(config: Config, cache: Path, progress: Progress) -> None:
    with open_workers(config) as workers:
        workers.check(config.tasks)
        initial.prepare(
            config, workers, cache=cache, progress=lambda done, total, what: progress(what, done, total)
        )


def _crowding(config: Config, device: str) -> float:
    """How much longer a round takes than alone: nodes share the cores, or a GPU."""
    owns = [config.for_node(name) for name in config.nodes]
    beside = [own.threads for own in owns if str(resolve_device(own)) == device]
    return max(1.0, sum(beside) / usable().cores) if device == "cpu" else float(len(beside))


def _needs(nodes: Sequence[NodePlan], home: Home) -> list[Need]:
    takes = {RAM: BESIDE}
    for node in nodes:
        if node.memory is None:
            return []
        place = RAM if node.device == "cpu" else node.device
        host, on_device = node.memory
        takes[place] = takes.get(place, 0) + on_device * len(node.names)
        takes[RAM] = takes.get(RAM, 0) + host * len(node.names)
    needs = [Need(place, size, memory_of(place)) for place, size in takes.items()]
    disks = [node.disk * len(node.names) for node in nodes if node.disk is not None]
    if len(disks) == len(nodes):
        needs.append(Need("disk", sum(disks), shutil.disk_usage(existing(home.root)).free))
    return needs


def memory_of(place: str) -> int:
    """Bytes of this machine's memory, as far as this process may have them, or of a GPU's."""
    if place != RAM:
        return int(torch.cuda.get_device_properties(place).total_memory)
    return usable().memory


def in_units(size: float) -> str:
    """Bytes for people: 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
