"""Groups, batches and results with awkward values, for the tests of the history and of tracking."""

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from makers import make_batch, make_manifest, make_sample, taken_in

from sapo.core.config.home import Home
from sapo.core.types import (
    Batch,
    BatchGroup,
    Completion,
    Group,
    Recipe,
    RoundResult,
    Sample,
    SignedGroup,
    canonical,
    chained,
)
from sapo.peers.signing import Identity, seal
from sapo.store.history.rounds import RecordedRound, Recording
from sapo.store.history.tables import Store
from sapo.store.history.training_sink import TrainingSink
from sapo.store.journal.rows import ChainLink, Event, OutboxItem, PoolEvent, RefusalRow

IDENTITY = Identity.new()
INCARNATION = "0123456789abcdef"
MANIFEST = make_manifest("tiny", "{min_terms=2,max_terms=2}")
"""The swarm's whose groups these are."""
TEXTS = ("4", "", "naïve \u2028 line", 'NUL \x00 "quoted" 漢字 🙂')


def recorded(
    store: Store, node: str, incarnation: str, first: int = 0, last: int | None = None, *, swarm: str = "tiny"
) -> Iterator[RecordedRound]:
    """A node's rounds `first` to `last` (included), none where there is no table yet."""
    table = store.find("training")
    if table is not None:
        yield from Recording(table, swarm, node, incarnation).rounds(first, last)


def group(
    round: int = 0, position: int = 0, *, node: str = "n1", answer: str = "4", swarm: str = "tiny"
) -> Group:
    """A group of four completions; the first carries ids and log-probabilities, the last only text."""
    completions = [
        Completion(text=answer, finish_reason="stop", token_ids=(7, 2**31 - 1), logprobs=(-0.1, -1e-300)),
        Completion(text=TEXTS[1], finish_reason="length", token_ids=()),
        Completion(text=TEXTS[2], finish_reason="stop", claimed_score=0.1 + 0.2),
        Completion(text=TEXTS[3], finish_reason="length"),
    ]
    return Group(
        swarm=swarm,
        node=node,
        key=IDENTITY.key,
        incarnation=INCARNATION,
        round=round,
        position=position,
        recipe=Recipe.make("chain_sum", {"min_terms": 2, "max_terms": 2}, seed=41 + round, index=position),
        question=f"State the final answer: {round} + {position} =",
        completions=tuple(completions),
        policy_version=round,
        tokenizer=None,
        created_at=1_700_000_000.123 + round,
    )


def signed(round: int = 0, position: int = 0, **changes: str) -> SignedGroup:
    """That group, signed."""
    return seal(group(round, position, **changes), IDENTITY)


def sample(k: int, advantage: float, *, external: bool) -> Sample:
    """A completion in a learner's vocabulary."""
    return make_sample(
        k,
        (1, 2),
        (3, *range(10, 10 + k)),
        text=TEXTS[k],
        finish_reason="stop" if k % 2 == 0 else "length",
        score=None if k == 3 else 1 / (k + 3),
        advantage=advantage,
        behaviour_logprobs=tuple(-1 / (i + 3) for i in range(k + 1)) if external else None,
        retokenised=external,
    )


def batch_group(position: int, round: int, *, external: bool, advantages: Sequence[float]) -> BatchGroup:
    """A group of a batch; external ones are those of `signed(round, position, node="n1")`."""
    return taken_in(
        signed(round, position, node="n1" if external else "n0"),
        position,
        [sample(k, advantage, external=external) for k, advantage in enumerate(advantages)],
        source="external" if external else "local",
        age_s=1 / 3 if external else 0.0,
        bus_position=f"0:{round * 2 + position}" if external else None,
    )


def batch(round: int = 0, *, node: str = "n0", incarnation: str = INCARNATION, groups: int = 4) -> Batch:
    """Half local groups, one of them without any advantage, and half external ones."""
    spreads = [(0.1, -0.1 / 3, 1e-310, -0.0), (0.0, 0.0, 0.0, 0.0)]
    made = [
        batch_group(i, round, external=i >= groups // 2, advantages=spreads[i % 2]) for i in range(groups)
    ]
    learn = canonical({"foreign": "as_if_own", "loss": "dapo", "lr": 1e-4})
    return make_batch(round, made, swarm="tiny", node=node, incarnation=incarnation, learn=learn)


def result(round: int = 0, **metrics: float) -> RoundResult:
    """What that round reported."""
    values = {"learn/loss": 0.1 + 0.2, "reward/local": 1 / 3, "reward/local/chain_sum": 1 / 3} | metrics
    return RoundResult(
        round=round,
        policy_version=round + 1,
        weights_sha256="ab" * 32,
        metrics=values,
        finished_at=1_700_000_000.25 + round,
    )


def movement(group: BatchGroup, event: Event) -> PoolEvent:
    """A group of a batch entering or leaving the pool."""
    at = 1_700_000_000.5
    return PoolEvent(
        event, group.group_id, group.producer, group.producer_key, str(group.bus_position), at, at + 1 / 3
    )


def due(round: int, ref: str = "") -> OutboxItem:
    """An owed round, as the journal names it."""
    return OutboxItem(seq=round, kind="training", round=round, ref=ref)


@cache
def _digest(round: int, node: str, incarnation: str) -> str:
    return batch(round, node=node, incarnation=incarnation).digest()


class Books:
    """The finished rounds of one node."""

    def __init__(self, *batches: Batch) -> None:
        self._batches = {b.round: b for b in batches}

    def batch(self, round: int) -> Batch:
        return self._batches[round]

    def batch_digest(self, round: int) -> str:
        return self._batches[round].digest()

    def result(self, round: int) -> RoundResult:
        return result(round)

    def link(self, round: int) -> ChainLink:
        """The rounds before it that are not in these books had the batches of `batch`."""
        previous, chain = None, None
        for place in range(round + 1):
            known = self._batches.get(place)
            if known is None or known.groups:
                if place < round:
                    previous = place
                mine = self._batches[round]
                digest = known.digest() if known else _digest(place, mine.node, mine.incarnation)
                chain = chained(chain, digest)
        return ChainLink(previous, chain)

    def movements(self, round: int) -> list[PoolEvent]:
        """Each external group came and was drawn in this very round."""
        events: tuple[Event, ...] = ("received", "trained")
        external = [group for group in self._batches[round].groups if group.source == "external"]
        return [movement(group, event) for event in events for group in external]

    def refusals(self, round: int) -> list[RefusalRow]:
        """None, unless a test says otherwise."""
        return []

    def environment(self, round: int) -> Mapping[str, str | int] | None:
        return {"torch": "2.13.0", "threads": 1}


def sink(store: Store, node: str = "n0") -> TrainingSink:
    return TrainingSink(store, "tiny", node, INCARNATION)


def deliver(store: Store, *rounds: int, node: str = "n0") -> None:
    books = Books(*(batch(round, node=node) for round in rounds))
    sink(store, node).deliver([due(round) for round in rounds], books)


def batches(
    store: Store, node: str, incarnation: str, first: int = 0, last: int | None = None
) -> list[Batch]:
    """What the history holds of a node's batches, checked."""
    return [round.batch for round in recorded(store, node, incarnation, first, last)]


def last_release(folder: Path) -> Home:
    """A home that the release with journal and history of version 1 left behind, as `tests/data` says."""
    return left_behind("history-v1", folder, "n0")


def left_behind(name: str, folder: Path, *nodes: str) -> Home:
    """A home of `tests/data`, unpacked into a folder."""
    with zipfile.ZipFile(Path(__file__).parent / "data" / f"{name}.zip") as archive:
        archive.extractall(folder / name)
    home = Home(folder / name)
    for node in nodes:
        (home.node(node) / "key.pem").chmod(0o600)
    config = json.loads(home.config.read_text())
    home.config.write_text(json.dumps(config | {"model": str(home.root / "model")}))
    return home


def deliver_from_a_process(uri: str, node: str, rounds: int) -> None:
    """Deliver rounds one by one; importable by a spawned process."""
    for round in range(rounds):
        deliver(Store(uri), round, node=node)
