"""A grid: arms, seeds, exams and the comparisons registered before anything is run; read from one TOML file.

Importable without torch. Every arm's config is made and checked when the grid is read.
"""

import difflib
import hashlib
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from importlib.metadata import version
from itertools import product
from operator import not_
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from sapo.core.config.load import Config, load, merge, parse
from sapo.core.config.patterns import in_words
from sapo.core.config.schema import PositiveFloat, PositiveInt, Task
from sapo.core.determinism import UPDATE
from sapo.core.errors import UserError
from sapo.core.types import canonical, sha256, unset
from sapo.peers.signing import Identity

from .planted import ATTACKED, Attack
from .record import Job, slug

RUN = 2
"""Raised when the driver makes another run of the same grid: its records are then made anew."""
TUNING_SEED = 1_000_000
"""Tuning seeds begin here, far from those that are reported."""
NEVER = 2**30
"""Rounds after which something comes that no experiment wants."""
BESIDE_THE_RUN = ("bus", "checkpoint", "deploy", "eval", "flow", "history", "member", "track")
"""Sections of a config that change nothing of a run."""
Control = Literal["echo", "shuffled", "same_questions"]
Figure = Literal[
    "pass_at_1",
    "pass_at_1/untrained",
    "text_loss/end",
    "ensemble/mixture",
    "ensemble/mixture/untrained",
    "ensemble/vote",
    "ensemble/vote/untrained",
    "ensemble/route",
    "reward/local",
    "reward/training_set",
    "tokens_to_target",
    "spread/rounds_to_half",
    "spread/pass_at_1",
    "spread/share",
    "spread/tokens",
]
Text = Annotated[str, Field(min_length=1, max_length=2000)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


class Arm(_Part):
    """One way to run a swarm."""

    name: Annotated[str, Field(min_length=1, max_length=60)]
    about: str = ""
    """What it shows, in a line."""
    set: dict[str, Any] = {}
    """Settings of this arm, over the grid's."""
    rounds: PositiveInt | None = None
    """The grid's where not set."""
    node_rounds: list[PositiveInt] | None = None
    """Rounds of each node, by number, instead: a node that has made its own looks on."""
    control: Control | None = None
    """`echo`: external groups are the node's own of this round, those that are not among its local ones.
    `shuffled`: groups reach others after a number of rounds drawn from 0 to `window`. `same_questions`: all
    nodes ask the same questions."""
    window: PositiveInt | None = None
    attack: Attack | None = None
    """What one more author, which has no policy, plants in its right answers (`planted`)."""
    attackers: PositiveInt = 1
    """How many such authors there are."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.window is not None) != (self.control == "shuffled"):
            raise ValueError('control = "shuffled" goes with a window, and nothing else does')
        if self.attackers > 1 and self.attack is None:
            raise ValueError("attackers say how many plant something: set attack, or leave them out")
        if self.rounds is not None and self.node_rounds is not None:
            raise ValueError("rounds and node_rounds say the same: set one of them")
        return self


class ExamPlan(_Part):
    """Held-out exams of every node: before learning, every so many rounds, and at the end."""

    every: PositiveInt = 50
    questions: PositiveInt = 400
    samples: PositiveInt = 1
    untrained: list[Task] = Field(default=[], exclude_if=not_)
    """Tasks that no node learns: as many questions of these are asked besides, and counted apart."""
    text: Text | None = Field(default=None, exclude_if=unset)
    """Plain text that every node reads in an exam: its loss shows what is forgotten of the language."""
    ensemble: PositiveInt | None = Field(default=None, exclude_if=unset)
    """After the last round, ask an arm's nodes together, with so many answers to a question in all."""


def _refuse_twice(rates: Sequence[float]) -> None:
    if len({f"{rate:g}" for rate in rates}) < len(rates):
        raise ValueError("names a learning rate twice; those that are equal to six digits are one")


class Tune(_Part):
    """Learning rates tried for every arm; the best by held-out pass@1 at the end is the arm's."""

    lr: Annotated[list[PositiveFloat], Field(min_length=1)]
    beside: dict[str, list[PositiveFloat]] = Field(default_factory=dict, exclude_if=lambda more: not more)
    """More rates for some arms, such as one that learns from larger batches than the others."""
    seeds: PositiveInt = 2
    rounds: PositiveInt | None = None
    """Of a tuning run: an arm with other rounds than the grid's is cut in proportion, and none gets more."""

    @field_validator("lr")
    @classmethod
    def _distinct(cls, rates: list[float]) -> list[float]:
        _refuse_twice(rates)
        return rates

    @field_validator("beside")
    @classmethod
    def _not_of_all(cls, more: dict[str, list[float]], info: ValidationInfo) -> dict[str, list[float]]:
        for rates in more.values():
            _refuse_twice([*info.data.get("lr", ()), *rates])
        return more

    def rates(self, arm: str) -> list[float]:
        """What is tried for an arm."""
        return [*self.lr, *self.beside.get(arm, ())]


@dataclass(frozen=True, slots=True)
class Limit:
    """How long a node learns: its rounds, and fewer once it has learned from so many tokens."""

    rounds: int
    tokens: float = math.inf


class Compare(_Part):
    """A comparison registered beforehand: `arm` minus `against`, paired by seed."""

    arm: str
    against: Annotated[str, Field(alias="with")]
    figure: Figure = "pass_at_1"
    what: Text
    """The question it answers."""


class Spread(_Part):
    """A trait, and the nodes whose way to it is followed: figures `spread/...` are theirs."""

    trait: str
    """Of `track.traits`; `trait/task` is of the answers to one task."""
    to: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    """Numbers of the nodes."""


class Grid(_Part):
    """An experiment: every arm with every seed."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,40}$")]
    about: Text
    preset: str | None = None
    rounds: PositiveInt
    trained: PositiveInt | None = None
    """Tokens that the nodes of any run learn from in all; they share them by their rounds, then look on."""
    seeds: PositiveInt = 5
    """How many, unless said otherwise: `first_seed` and those after it."""
    first_seed: Annotated[int, Field(ge=0, lt=TUNING_SEED)] = 1
    set: dict[str, Any] = {}
    """Settings of all arms, over the preset's."""
    arm: Annotated[list[Arm], Field(min_length=1)]
    exam: ExamPlan = ExamPlan()
    tune: Tune | None = None
    compare: list[Compare] = []
    spread: Spread | None = None
    group_s: PositiveFloat | None = Field(default=None, exclude_if=unset)
    """Seconds that a run takes to answer a group, or to learn from one, for an estimate beforehand."""
    target: str | None = None
    """The arm whose pass@1 at the end the others are to reach: tokens generated until then are counted."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [arm.name for arm in self.arm]
        slugs = [slug(name).lower() for name in names]
        known = f"name one of: {', '.join(names)}"
        if "" in slugs or len(set(slugs)) < len(slugs):
            raise UserError("arm", ", ".join(names), "names must differ in letters or digits", "rename one")
        named = [("target", self.target)] if self.target is not None else []
        needs = {
            "needs a target": ("set target", "tokens_to_target", self.target),
            "needs a trait": ("set spread", "spread/", self.spread),
            "needs nodes to be asked together": ("set exam.ensemble", "ensemble/", self.exam.ensemble),
            "needs tasks that nobody learns": ("set exam.untrained", "/untrained", self.exam.untrained),
            "needs a text": ("set exam.text", "text_loss/", self.exam.text),
        }
        for place, one in enumerate(self.compare):
            named += [(f"compare.{place}.arm", one.arm), (f"compare.{place}.with", one.against)]
            for problem, (remedy, part, there) in needs.items():
                if part in one.figure and not there:
                    raise UserError(f"compare.{place}.figure", one.figure, problem, remedy)
        named += [("tune.beside", name) for name in (self.tune.beside if self.tune is not None else ())]
        for field, name in named:
            if name not in names:
                raise UserError(field, name, "there is no such arm", known)
        own = {"set": self.set, **{f"arm {arm.name}: set": arm.set for arm in self.arm}}
        for field, values in own.items():
            _refuse_overwritten(field, values, tuned=self.tune is not None)
        return self

    @cached_property
    def arms(self) -> dict[str, Arm]:
        """By name, in the file's order."""
        return {arm.name: arm for arm in self.arm}

    def named(self, name: str) -> Arm:
        """An arm. Raises `UserError` where there is none of that name."""
        if name not in self.arms:
            near = difflib.get_close_matches(name, self.arms, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError("--arms", name, "there is no such arm", f"{hint}arms are: {', '.join(self.arms)}")
        return self.arms[name]

    def listed(self, text: str) -> list[str]:
        """The arms that a list joined by commas names; names may hold commas, too. Raises `UserError`."""
        parts, found = text.split(","), []
        while parts:
            joined = {size: ",".join(parts[:size]).strip() for size in range(len(parts), 0, -1)}
            size = next((size for size, name in joined.items() if name in self.arms), 1)
            found.append(self.named(joined[size]).name)
            del parts[:size]
        return list(dict.fromkeys(found))

    def seed_list(self, count: int | None = None) -> list[int]:
        """The seeds that are reported."""
        return [self.first_seed + k for k in range(count or self.seeds)]

    def jobs(self, count: int | None = None, arms: Sequence[str] = ()) -> list[Job]:
        """The runs that are reported, seeds before arms; without the learning rates that tuning chooses."""
        chosen = [self.named(name).name for name in arms or self.arms]
        return [Job(arm=name, seed=seed) for seed in self.seed_list(count) for name in chosen]

    def tuning_jobs(self, arms: Sequence[str] = ()) -> list[Job]:
        """The runs that choose learning rates; none where the grid tunes nothing."""
        if self.tune is None:
            return []
        chosen = [self.named(name).name for name in arms or self.arms]
        seeds = range(TUNING_SEED + self.first_seed, TUNING_SEED + self.first_seed + self.tune.seeds)
        return [
            Job(arm=name, seed=seed, lr=lr, tuning=True)
            for seed, name in product(seeds, chosen)
            for lr in self.tune.rates(name)
        ]

    def rounds_of(self, job: Job) -> int:
        """How many rounds a run has."""
        arm = self.named(job.arm)
        rounds = max(arm.node_rounds or [arm.rounds or self.rounds])
        if job.tuning and self.tune is not None and self.tune.rounds is not None:
            return min(rounds, math.ceil(rounds * self.tune.rounds / self.rounds))
        return rounds

    def limits(self, job: Job, nodes: int) -> list[Limit]:
        """How long each of a run's nodes learns; a tuning run that is shorter cuts all alike."""
        arm, made = self.named(job.arm), self.rounds_of(job)
        whole = arm.node_rounds or [arm.rounds or self.rounds] * nodes
        part = made / max(whole)
        tokens = math.inf if self.trained is None else part * self.trained / sum(whole)
        return [Limit(math.ceil(part * rounds), tokens * rounds) for rounds in whole]

    def exam_rounds(self, job: Job) -> list[int]:
        """Rounds made before each exam; a tuning run has only the last."""
        rounds = self.rounds_of(job)
        return [rounds] if job.tuning else sorted({*range(0, rounds, self.exam.every), rounds})

    def groups(self, job: Job) -> float:
        """Groups answered and learned from, in all rounds and exams: what a run's time goes with."""
        config, exam = self.config(job), self.exam
        asked = exam.questions * exam.samples * (2 if exam.untrained else 1) / config.batch.completions
        batch = config.batch.b + config.batch.local + config.batch.external
        return config.swarm.nodes * (self.rounds_of(job) * batch + len(self.exam_rounds(job)) * asked)

    def config(self, job: Job) -> Config:
        """The swarm's config for a run. Raises `UserError` for settings that do not fit."""
        arm = self.named(job.arm)
        values = merge(merge(_preset(self.preset), self.set), arm.set)
        if job.lr is not None:
            values = merge(values, {"learn": {"lr": job.lr}})
        values = merge(values, _fixed(self.name, job.seed, self.rounds_of(job)))
        config = parse(values, prefix=f"arm {arm.name}: ")
        authors = config.swarm.nodes + (arm.attackers if arm.attack else 0)
        keys = [identity(job.seed, number).key for number in range(authors)]
        rules = {"rules": {"entry": "allow-list", "members": keys}}
        config = parse(merge(config.model_dump(mode="json"), rules))
        _check_nodes(arm, self.exam, config)
        _check_control(arm, config)
        if self.spread is not None:
            _check_spread(self.spread, config)
        return config

    def configs(self) -> dict[str, Config]:
        """The config of every arm, in its first run. Raises `UserError` for settings that do not fit."""
        return {name: self.config(Job(arm=name, seed=self.first_seed)) for name in self.arms}


def identity(seed: int, number: int) -> Identity:
    """The key of a run's node: always the same, or orders drawn by key would differ. It guards nothing."""
    secret = hashlib.sha256(f"sapo experiment {seed} {number}".encode()).digest()
    return Identity(Ed25519PrivateKey.from_private_bytes(secret))


def run_digest(grid: Grid, job: Job) -> str:
    """Of everything that determines a run's record."""
    arm = grid.named(job.arm)
    config = grid.config(job).model_dump(mode="json", exclude=set(BESIDE_THE_RUN))
    if config["learn"]["foreign_credit"] == "all":
        del config["learn"]["foreign_credit"]  # runs that are kept have no word for it
    return sha256(
        canonical(
            {
                "run": RUN,
                "update": UPDATE,
                "config": config,
                "arm": [arm.name, arm.control, arm.window],
                **({"node_rounds": arm.node_rounds} if arm.node_rounds else {}),
                **({"attack": arm.attack} if arm.attack else {}),
                **({"attackers": arm.attackers} if arm.attackers > 1 else {}),
                **({"trained": grid.trained} if grid.trained else {}),
                "exam": [grid.exam.model_dump(), grid.exam_rounds(job), job.tuning],
                "versions": {name: version(name) for name in ("torch", "transformers", "reasoning-gym")},
            }
        )
    )


def shipped() -> list[str]:
    """Names of the grids that ship with the package."""
    files = resources.files("sapo.experiments.grids").iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in files if entry.name.endswith(".toml"))


def read(source: str) -> Grid:
    """A grid from a file, or a shipped one by its name. Raises `UserError` for anything wrong with it."""
    if source in shipped():
        text = (resources.files("sapo.experiments.grids") / f"{source}.toml").read_text(encoding="utf-8")
    else:
        text = _read_file(source)
    try:
        return parse_grid(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError("GRID", source, f"is not TOML: {error}", "correct the file") from None


def parse_grid(values: Mapping[str, Any]) -> Grid:
    """A grid from plain values, every arm's config checked. Raises `UserError`."""
    try:
        grid = Grid.model_validate(dict(values))
    except ValidationError as error:
        raise _explain(error) from None
    grid.configs()
    return grid


def _check_control(arm: Arm, config: Config) -> None:
    """Raise `UserError` for a control that would change nothing of a node, or that a node's own settings
    contradict."""
    batches, place = [config.for_node(name).batch for name in config.nodes], f"arm {arm.name}"
    if arm.control in ("echo", "shuffled") and not all(batch.external for batch in batches):
        problem = f"control = {arm.control!r} is about foreign groups, and there are none"
        raise UserError(f"{place}: batch.external", 0, problem, "raise it, or leave the control out")
    for batch in batches:
        if arm.control == "echo" and batch.b <= batch.local:
            problem = f"control = 'echo' is about own groups beside the {batch.local} local ones"
            raise UserError(f"{place}: batch.questions", batch.questions, problem, "set it above batch.local")
    for number, over in config.node.items():
        own = [section for section in ("tasks", "batch") if section in over]
        if arm.control == "same_questions" and own:
            problem = "control = 'same_questions' asks all nodes the same questions, and as many"
            raise UserError(f"{place}: node.{number}", own[0], problem, "leave it out")


def _check_spread(spread: Spread, config: Config) -> None:
    """Raise `UserError` for a trait or a node that an arm lacks."""
    traits, (trait, _, task) = config.track.traits, spread.trait.partition("/")
    if task not in ("", *(one.dataset for one in config.manifest_tasks())):
        raise UserError("spread.trait", spread.trait, f"nobody asks {task}", "name a task of the arms")
    if trait not in traits:
        known = f"traits are: {', '.join(traits)}" if traits else "set track.traits"
        raise UserError("spread.trait", spread.trait, "there is no such trait", known)
    if max(spread.to) >= config.swarm.nodes:
        problem = f"there are nodes 0 to {config.swarm.nodes - 1}"
        raise UserError("spread.to", max(spread.to), problem, "name one of them or raise swarm.nodes")


def _check_nodes(arm: Arm, exam: ExamPlan, config: Config) -> None:
    """Raise `UserError` where the arm's nodes are not as many, or learn other tasks, than is said of them."""
    nodes, place = config.swarm.nodes, f"arm {arm.name}"
    for number in config.node:
        if not number.isdigit() or int(number) >= nodes:
            problem = f"{place} has nodes 0 to {nodes - 1}"
            raise UserError("node", number, problem, "name one of them or raise swarm.nodes")
    asked = config.rules.answer == "tags" and ATTACKED in {one.dataset for one in config.manifest_tasks()}
    taken = config.batch.external and arm.control in (None, "shuffled")
    if arm.attack is not None and not (asked and taken):
        problem = f"it comes with foreign groups of {ATTACKED} in tags, and none are asked, or taken"
        raise UserError(f"{place}: attack", arm.attack, problem, "leave it out, or see grid planted")
    if arm.node_rounds is not None and len(arm.node_rounds) != nodes:
        problem = f"it has {nodes} nodes"
        raise UserError(f"{place}: node_rounds", arm.node_rounds, problem, "give the rounds of each")
    if exam.ensemble is not None and exam.ensemble % nodes:
        problem = f"{place} has {nodes} nodes, which cannot give as many answers each"
        raise UserError("exam.ensemble", exam.ensemble, problem, "set a multiple of every arm's nodes")
    learned = {task.dataset for task in config.manifest_tasks()}
    for task in exam.untrained:
        if task.dataset in learned:
            raise UserError("exam.untrained", task.dataset, f"{place} learns it", "name another data set")


def _refuse_overwritten(place: str, values: Mapping[str, Any], *, tuned: bool) -> None:
    """Raise `UserError` for a setting of a grid that would be silently replaced."""
    made = dict(_flat(_fixed("", 0, 0) | {"rules": {"entry": "", "members": []}}))
    for key, value in _flat(values):
        if key in made:
            own = {"swarm.rounds": "rounds", "swarm.seed": "first_seed"}.get(key)
            remedy = f"set {own} of the grid instead" if own else "leave it out"
            raise UserError(f"{place}.{key}", value, "an experiment sets this itself", remedy)
        if tuned and (key == "learn.lr" or (key.startswith("node.") and key.endswith(".learn.lr"))):
            problem = "[tune] chooses learning rates, one for all nodes of an arm"
            raise UserError(f"{place}.{key}", value, problem, "leave it out, or [tune]")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings with dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _fixed(name: str, seed: int, rounds: int) -> dict[str, Any]:
    """What is so in every experiment: one process, no service, snapshots at both ends only."""
    return {
        "swarm": {"name": name, "seed": seed, "rounds": rounds, "site": "n"},
        "bus": {"type": "memory"},
        "checkpoint": {"every_rounds": NEVER, "every_seconds": 1e15, "weight_digest_every": NEVER},
        "track": {"register_every": NEVER},
        "generate": {"ahead": 0},
        "eval": {"probe_questions": 0},
    }


def _preset(name: str | None) -> dict[str, Any]:
    """Its values; the environment has no say in an experiment."""
    if name is None:
        return {}
    try:
        return load(name, env={}).model_dump(mode="json")
    except UserError as error:
        raise UserError("preset", name, error.problem, error.remedy) from None


def _read_file(source: str) -> str:
    path = Path(source)
    if not path.exists() and not path.suffix:
        near = difflib.get_close_matches(source, shipped(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(shipped())
        raise UserError("GRID", source, "is no file and no shipped grid", f"{hint}shipped are: {known}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise UserError("GRID", source, problem, "give a readable TOML file") from None


_SECTIONS: dict[str, type[BaseModel]] = {"arm": Arm, "exam": ExamPlan, "tune": Tune, "compare": Compare}


def _explain(error: ValidationError) -> UserError:
    """The first thing wrong, with the known key that is nearest to an unknown one."""
    found = error.errors(include_url=False)
    first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
    parts = [str(part) for part in first["loc"]]
    field = ".".join(parts) or "GRID"
    if first["type"] == "extra_forbidden":
        section: type[BaseModel] = _SECTIONS.get(parts[0], Grid) if len(parts) > 1 else Grid
        known = sorted(info.alias or name for name, info in section.model_fields.items())
        near = difflib.get_close_matches(parts[-1], known, n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]!r}?" if near else f"known keys are: {', '.join(known)}"
        return UserError(field, first["input"], "unknown key", remedy)
    if first["type"] == "missing":
        return UserError(field, None, "is not set, and there is no default", f"set {field}")
    message = in_words(dict(first))
    value = "..." if isinstance(first["input"], dict) else first["input"]
    return UserError(field, value, message, "correct the value")
