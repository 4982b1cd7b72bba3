"""Benchmark of lazy verification: what a draw costs beside verifying every group that comes.

    python benchmarks/sampler.py [--json FILE] [--quick]

Lazy is what a node does (`sapo.peers.sampling.sample_external`): it walks a random permutation of the pool,
verifies in that order, keeps the verdicts and stops at J informative groups. Eager verifies a group when it
has got its place in the pool, all of a round in one call, and then draws. Pool, bounds, draw and workers are
the node's own; questions are ReasoningGYM's, and answers are arranged so that a given share of the groups is
informative. Both arms meet equal groups round after round and draw by equal permutations, so they choose the
same: checked. Exits 1 where they do not, where lazy has verified more, or where draws are not uniform over
the informative groups.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common import STARTER_ROUND, Report, benchmark, parser

if __name__ == "__main__":
    # answers --help before what follows is loaded, which takes seconds
    parser(__doc__).parse_args()

import psutil
from scipy.stats import chi2, chi2_contingency

from sapo.core.config.load import Config, load
from sapo.core.rng import rng
from sapo.core.types import Completion, Group, Outcome, Question, Received, Recipe
from sapo.learn.advantage import informative
from sapo.peers.pool import Entry, Pool, Verdict
from sapo.peers.quotas import Quotas
from sapo.peers.sampling import LEAST_SHARE, Draw, sample_external, walk
from sapo.peers.signing import Identity, seal
from sapo.tasks.workers import PeerGroup, TaskWorkers, open_workers

PACKAGES = ("pydantic", "reasoning-gym", "scipy")
TOLERANCE = 1e-6
COMPLETIONS = 8
WANT = 8
"""J where whole distributions are compared."""
ROUND_S = 10.0
"""Simulated seconds a round takes."""
GOOD, DULL = (
    Verdict(outcomes=tuple(Outcome.scored(float(k < right)) for k in range(COMPLETIONS)))
    for right in (COMPLETIONS // 2, 0)
)
LEAST_P = 0.001
"""Below it draws are not called uniform. Seeds are fixed, so that is no matter of luck from run to run."""


@dataclass(frozen=True)
class Setting:
    """A preset's pool, J and tasks, with so many foreign groups coming in a round from so many peers."""

    name: str
    preset: str
    peers: int
    each: int


SETTINGS = (
    Setting("starter, 4 nodes", "starter", 3, 8),
    Setting("starter, full polls", "starter", 64, 1),
    Setting("paper, 8 nodes", "paper", 7, 4),
)


@dataclass(frozen=True)
class Sizes:
    """How much is done. `corpus` groups of each kind are more than a worker remembers."""

    shares: tuple[float, ...]
    settings: tuple[Setting, ...]
    corpus: int
    warm: int
    """Rounds until the pool holds as much as it will, with verdicts from a table."""
    block: int
    """Rounds that are timed together: a worker's processor time is told in hundredths of a second."""
    blocks: int
    draws: int


FULL = Sizes((0.02, 0.1, 0.3, 0.6, 1.0), SETTINGS, 300, 60, 3, 4, 4_000)
QUICK = Sizes((0.3, 1.0), (Setting("starter, 3 nodes", "starter", 2, 8),), 8, 8, 1, 2, 400)


@dataclass(frozen=True)
class Item:
    """A question with answers; whether a verifier finds the group informative."""

    recipe: Recipe
    question: str
    texts: tuple[str, ...]
    useful: bool


def corpus(config: Config, workers: TaskWorkers, count: int) -> tuple[list[Item], list[Item]]:
    """`count` groups whose scores differ, and `count` whose answers are all wrong alike, tasks in turns.

    Half of the first kind's answers are right. Both are what the workers find them to be.
    """
    useful: list[Item] = []
    useless: list[Item] = []
    chance = rng("sampler", "corpus")
    while min(len(useful), len(useless)) < count:
        recipes = [Recipe.make(t.dataset, t.config, chance.randrange(2**30)) for t in config.tasks * 8]
        asked = zip(workers.questions(recipes), workers.answers(recipes), strict=True)
        items = [
            item
            for question, answer in asked
            if isinstance(question, Question) and answer is not None
            for item in _pair(config, question, answer)
        ]
        found = [informative(one.scores, TOLERANCE) for one in verdicts(workers, items)]
        for place in range(0, len(items), 2):
            if found[place] and not found[place + 1]:
                useful.append(items[place])
                useless.append(items[place + 1])
    return useful[:count], useless[:count]


def _pair(config: Config, question: Question, answer: str) -> list[Item]:
    wrong = [_said(config, f"{k} is no answer") for k in range(COMPLETIONS)]
    mixed = [_said(config, answer) if k % 2 else wrong[k] for k in range(COMPLETIONS)]
    return [
        Item(question.recipe, question.text, tuple(texts), useful)
        for texts, useful in ((mixed, True), (wrong, False))
    ]


def _said(config: Config, answer: str) -> str:
    return f"<answer>{answer}</answer>" if config.rules.answer == "tags" else answer


def verdicts(workers: TaskWorkers, items: Sequence[Item]) -> list[Verdict]:
    """What the workers say of groups, as a node asks them."""
    judged = workers.judge([PeerGroup(item.recipe, item.question, item.texts) for item in items])
    return [
        Verdict(outcomes=one.outcomes) if one.reason is None else Verdict.bad(one.reason) for one in judged
    ]


def judged(entries: Sequence[Entry], verdicts: Sequence[Verdict]) -> list[Entry]:
    """The entries with these verdicts."""
    return [replace(one, verdict=verdict) for one, verdict in zip(entries, verdicts, strict=True)]


def told(items: Sequence[Item]) -> list[Verdict]:
    """What they would say, from a table."""
    return [GOOD if item.useful else DULL for item in items]


class Publishers:
    """Who publishes: signed groups made of a corpus, a given share of them informative."""

    def __init__(self, setting: Setting, share: float, items: tuple[list[Item], list[Item]]) -> None:
        self._setting, self._share, self._items = setting, share, items
        self._peers = [Identity.new() for _ in range(setting.peers)]
        self._made = [0, 0]
        self.items: dict[str, Item] = {}

    def publish(self, round: int) -> list[Entry]:
        """What comes in a round."""
        chance = rng("sampler", self._setting.name, str(self._share), round)
        return [
            self._entry(identity, round, position, dull=chance.random() >= self._share)
            for identity in self._peers
            for position in range(self._setting.each)
        ]

    def _entry(self, identity: Identity, round: int, position: int, *, dull: bool) -> Entry:
        kind = self._items[dull]
        item = kind[self._made[dull] % len(kind)]
        self._made[dull] += 1
        group = Group(
            swarm="s",
            node="p",
            key=identity.key,
            incarnation="0123456789abcdef",
            round=round,
            position=position,
            recipe=item.recipe,
            question=item.question,
            completions=tuple(Completion(text=text, finish_reason="stop") for text in item.texts),
            policy_version=round,
            created_at=0.0,
        )
        signed = seal(group, identity)
        self.items[signed.group_id] = item
        stamp = round * ROUND_S
        return Entry(
            Received(signed=signed, bus_position=f"0:{len(self.items)}", timestamp=stamp), group, stamp
        )


class Arm:
    """A node's pool and draw, and what they took; `eager` or lazy. Verdicts come from `ask`."""

    def __init__(
        self, config: Config, workers: TaskWorkers, items: Mapping[str, Item], *, eager: bool
    ) -> None:
        self._config, self._workers, self._items, self._eager = config, workers, items, eager
        self._pool, self._peers = Pool(config.pool), Quotas(config.pool)
        self.ask: Callable[[Sequence[Item]], list[Verdict]] = told
        self.verified = 0
        self._lately = 1.0
        self._seconds = self._here = 0.0

    def begin(self) -> None:
        """From now on the workers are asked; they have started when this returns."""
        self._workers.datasets()
        self.ask = lambda items: verdicts(self._workers, items)

    def round(self, number: int, came: Sequence[Entry]) -> Draw:
        """Take a round's groups and draw J. The pool's own upkeep is not timed."""
        for entry in came:
            self._pool.add(Entry(entry.received, entry.group, entry.received_at))
        self._pool.evict(number * ROUND_S)
        entries = self._pool.entries()
        began, cpu = time.perf_counter(), time.process_time()
        if self._eager:
            self._pool.keep(self._verify([entry for entry in entries if entry.verdict is None]))
            entries = self._pool.entries()
        want, order = self._config.batch.external, walk(entries, rng("sampler", "draw", number))
        draw = sample_external(order, want, self._verify, tolerance=TOLERANCE, share=self._lately)
        self._pool.keep(draw.verified)
        seen = len(draw.chosen) + len(draw.rejected)
        self._lately = max(LEAST_SHARE, len(draw.chosen) / seen) if seen else 1.0
        self._seconds += time.perf_counter() - began
        self._here += time.process_time() - cpu
        return draw

    def leave(self, group_ids: set[str]) -> None:
        """Take groups out of the pool."""
        self._pool.remove(group_ids)

    def _verify(self, entries: Sequence[Entry]) -> list[Entry]:
        self.verified += len(entries)
        found = self.ask([self._items[entry.group_id] for entry in entries])
        for entry, verdict in zip(entries, found, strict=True):
            self._peers.judged(entry.group.key, 0.0, informative(verdict.scores, TOLERANCE))
        return judged(entries, found)

    def spent(self) -> tuple[float, float, float]:
        """Groups verified, seconds, and processor seconds of node and workers, so far."""
        times = [psutil.Process(pid).cpu_times() for pid in self._workers.pids]
        workers = sum(t.user + t.system + t.children_user + t.children_system for t in times)
        return float(self.verified), self._seconds, self._here + workers


WHAT = {"groups verified a round": 1.0, "ms a round": 1e3, "CPU ms a round": 1e3}
"""Figures, with the factor from what `Arm.spent` tells."""


def compare(report: Report, name: str, sizes: Sizes, lazy: Arm, eager: Arm, peers: Publishers) -> None:
    """Steady rounds of both arms in turns, by blocks; then the figures."""
    arms = (lazy, eager)
    found: tuple[list[list[float]], ...] = ([], [])
    same = True
    for number in range(sizes.warm + sizes.blocks * sizes.block):
        if number == sizes.warm:
            lazy.begin()
            eager.begin()
        if number >= sizes.warm and (number - sizes.warm) % sizes.block == 0:
            before = [arm.spent() for arm in arms]
        came = peers.publish(number)
        first, second = arms if number % 2 else arms[::-1]
        draws = first.round(number, came), second.round(number, came)
        same = same and len({tuple(entry.group_id for entry in draw.chosen) for draw in draws}) == 1
        for arm in arms:  # what either found useless leaves both pools, which stay equal
            arm.leave(draws[0].leaving | draws[1].leaving)
        if number >= sizes.warm and (number - sizes.warm + 1) % sizes.block == 0:
            for rows, arm, then in zip(found, arms, before, strict=True):
                rows.append([(x - y) / sizes.block for x, y in zip(arm.spent(), then, strict=True)])
    for place, (what, unit) in enumerate(WHAT.items()):
        report.measured(f"{name}: {what}", *([unit * row[place] for row in rows] for rows in found))
    verified, seconds, cpu = (report.figures[f"{name}: {what}"].ratio for what in WHAT)
    report.say(
        f"{name}: eager verifies {1 / verified:.2f} times as many groups, in {1 / seconds:.2f} times the "
        f"time and {1 / cpu:.2f} times the CPU time"
    )
    report.check(f"{name}: both draw the same", same, "groups and order, in every round")
    least = lazy.verified <= eager.verified
    report.check(f"{name}: lazy has verified no more", least, f"{lazy.verified} and {eager.verified} groups")


def uniform(counts: Sequence[int], draws: int) -> float:
    """Probability of `counts` at least this uneven when each of `draws` took equally probable subsets.

    Pearson's statistic, with the variance of drawing without replacement. Raises `ValueError` where every
    draw took everything.
    """
    cells, taken = len(counts), sum(counts) / draws
    if taken >= cells:
        raise ValueError("nothing was left to chance")
    expected = sum(counts) / cells
    statistic = sum((count - expected) ** 2 for count in counts) / expected
    return float(chi2.sf(statistic * (cells - 1) / (cells - taken), cells - 1))


def distribution(report: Report, setting: Setting, sizes: Sizes, peers: Publishers) -> None:
    """Many draws from one pool, verdicts from a table: whom each arm takes how often."""
    entries = peers.publish(0)
    useful = [entry.group_id for entry in entries if peers.items[entry.group_id].useful]
    arms: dict[str, Callable[[int], bool]] = {
        "lazy": lambda place: False,
        "lazy, half cached": lambda place: place % 2 == 0,
        "eager": lambda place: True,
    }
    counts = []
    for name, cached in arms.items():
        drawn: Counter[str] = Counter()
        for number in range(sizes.draws):
            verdicts = told([peers.items[entry.group_id] for entry in entries])
            pool = [
                Entry(entry.received, entry.group, 0.0, verdict if cached(place) else None)
                for place, (entry, verdict) in enumerate(zip(entries, verdicts, strict=True))
            ]
            draw = sample_external(
                walk(pool, rng("sampler", name, number)),
                WANT,
                lambda some: judged(some, told([peers.items[entry.group_id] for entry in some])),
                tolerance=TOLERANCE,
            )
            drawn.update(entry.group_id for entry in draw.chosen)
        counts.append([drawn[group_id] for group_id in useful])
        p = uniform(counts[-1], sizes.draws)
        report.check(f"{setting.name}: {name} draws are uniform", p >= LEAST_P, f"chi-square p = {p:.3f}")
    p = float(chi2_contingency(counts).pvalue)
    report.check(f"{setting.name}: the arms draw alike", p >= LEAST_P, f"chi-square p = {p:.3f}")


def measure(report: Report, quick: bool, folder: Path) -> None:
    """All settings at all shares."""
    sizes = QUICK if quick else FULL
    made: dict[str, tuple[list[Item], list[Item]]] = {}
    for setting in sizes.settings:
        config = load(setting.preset, sets=STARTER_ROUND if setting.preset == "starter" else (), env={})
        with open_workers(config) as one, open_workers(config) as other:
            if setting.preset not in made:
                made[setting.preset] = corpus(config, one, sizes.corpus)
            items = made[setting.preset]
            if setting is sizes.settings[0]:
                whole = Setting("a pool", setting.preset, config.pool.max_groups, 1)
                distribution(report, whole, sizes, Publishers(whole, 0.3, items))
            for share in sizes.shares:
                peers = Publishers(setting, share, items)
                lazy = Arm(config, one, peers.items, eager=False)
                eager = Arm(config, other, peers.items, eager=True)
                compare(report, f"{setting.name}, {share:.0%} informative", sizes, lazy, eager, peers)


if __name__ == "__main__":
    sys.exit(benchmark(__doc__, "sampler", PACKAGES, measure))
