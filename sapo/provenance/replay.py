"""Replay: a node opened to make its recorded rounds again, from the history alone.

Only a kept checkpoint, the history and the node's config are read; nothing is written and no lock is taken,
so the node may be running. `sapo.provenance.check` compares what comes out, `sapo.provenance.whatif` changes
what goes in.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.errors import UserError
from sapo.core.user_cache import default_cache
from sapo.learn.update import Learner
from sapo.policy import checkpoint, models
from sapo.policy.checkpoint import BrokenCheckpoint, Checkpoint
from sapo.policy.kept_files import KeptFiles
from sapo.policy.model_source import location
from sapo.policy.models import LoadedPolicy
from sapo.provenance.reexecute import Repeater
from sapo.store.history import open_store
from sapo.store.history.query import incarnations
from sapo.store.history.rounds import RecordedRound, Recording
from sapo.store.journal.journal import Journal


@dataclass
class Replay:
    """A node's policy and learner at a kept checkpoint, and the recorded rounds that follow.
    `first` and `last` are the rounds asked for; rounds from `start.round` on lie on the way there."""

    home: Home
    node: str
    config: Config
    incarnation: str
    start: Checkpoint
    first: int
    last: int
    policy: LoadedPolicy
    learner: Learner
    repeater: Repeater
    recording: Recording
    notes: list[str] = field(default_factory=list)

    def rounds(self) -> Iterator[RecordedRound]:
        """The recorded rounds from the checkpoint to `last`, each checked before it is given out."""
        return self.recording.rounds(self.start.round, self.last)


@contextmanager
def opened(home: Home, node: str, *, first: int | None = None, last: int | None = None) -> Iterator[Replay]:
    """A node of this home at the newest whole checkpoint at or before round `first`.

    Without `first` it is the oldest there is, of round 0 while that is kept; without `last` everything is
    replayed that was delivered. Raises `UserError` for rounds that cannot be replayed here, `Mismatch` for a
    checkpoint that does not match its digest, `Unavailable` when the history is away.
    """
    swarm = home.load_config()
    home.check_node(swarm, node, "NODE")
    config, recording = swarm.for_node(node), _recording(home, node, swarm)
    count = recording.count()
    last = _last(node, count, first, last)
    start, notes = _start(home, node, recording.incarnation, first, last, count)
    threads = torch.get_num_threads()
    try:
        policy = _policy(config, start, default_cache())
        learner = Learner(
            policy.model, config.learn, temperature=config.generate.temperature, guard=config.guard
        )
        repeater = Repeater(
            policy,
            learner,
            back_to=recording.rolled_back(start.round, last),
            find=lambda round: _at(home, node, recording.incarnation, round),
            partners=KeptFiles(home.gossip(node)),
        )
        repeater.load(start)
        yield Replay(
            home=home,
            node=node,
            config=config,
            incarnation=recording.incarnation,
            start=start,
            first=start.round if first is None else first,
            last=last,
            policy=policy,
            learner=learner,
            repeater=repeater,
            recording=recording,
            notes=notes,
        )
    finally:
        torch.set_num_threads(threads)


def _recording(home: Home, node: str, swarm: Config) -> Recording:
    """What the history holds of the node whose journal is here, or else of its newest incarnation."""
    store = open_store(swarm, home)
    table = store.find("training")
    if table is None:
        remedy = "let the node deliver a round, or name its place as history.uri in config.json"
        raise UserError("history", store.table_uri("training"), "there is no such table", remedy)
    if home.journal(node).exists():
        with Journal.read_only(home.journal(node)) as journal:
            return Recording(table, swarm.swarm.name, node, journal.incarnation)
    known = incarnations(store, node)
    return Recording(table, swarm.swarm.name, node, known[-1] if known else "")


def _last(node: str, count: int, first: int | None, last: int | None) -> int:
    if not count:
        raise UserError("NODE", node, "the history holds no round of it", "let it run, and deliver a round")
    for option, value in (("--from", first), ("--to", last)):
        if value is not None and not 0 <= value < count:
            problem = f"the history of {node} ends with round {count - 1}"
            raise UserError(option, value, problem, f"name a round from 0 to {count - 1}")
    if first is not None and last is not None and first > last:
        raise UserError("--from", first, f"is after --to {last}", "swap them")
    return count - 1 if last is None else last


def _start(
    home: Home, node: str, incarnation: str, first: int | None, last: int, count: int
) -> tuple[Checkpoint, list[str]]:
    """The checkpoint to begin at, and what there is to say of those that are damaged, wherever it begins."""
    kept = checkpoint.paths(home.checkpoints(node))
    limit = last if first is None else first
    start, notes, recorded = None, [], _recorded_weights(home, node, incarnation)
    for path in kept if first is None else reversed(kept):
        try:
            found = checkpoint.verify(path)
        except BrokenCheckpoint as reason:
            notes.append(f"checkpoint {path.name} is passed over: {reason}")
            continue
        if found.incarnation != incarnation:
            notes.append(f"checkpoint {path.name} is passed over: it is of incarnation {found.incarnation}")
        elif found.weights_sha256 != recorded.get(found.round, found.weights_sha256):
            notes.append(f"checkpoint {path.name} is passed over: the journal recorded other weights of it")
        elif start is None and found.round <= limit:
            start = found
    if start is not None:
        return start, notes
    later = [checkpoint.round_of(path) for path in kept if checkpoint.round_of(path) > limit]
    if later and not notes:
        option = "--to" if first is None else "--from"
        problem = f"the oldest checkpoint of {node} that is kept is of round {later[0]}"
        if later[0] >= count:
            raise UserError("NODE", node, problem, f"let it make rounds after that: it has {count}")
        raise UserError(option, limit, problem, f"name round {later[0]} or a later one")
    why = "; ".join(notes) or "it has no checkpoint here"
    remedy = "replay it where it runs" if not later else f"begin with --from {later[0]}"
    raise UserError("NODE", node, why, remedy)


def _recorded_weights(home: Home, node: str, incarnation: str) -> dict[int, str]:
    """Digests of the checkpoints' weights by round, as the node's journal has them; empty without one."""
    if not home.journal(node).exists():
        return {}
    with Journal.read_only(home.journal(node)) as journal:
        kept = journal.checkpoints()
    return {one.round: one.weights_sha256 for one in kept if one.incarnation == incarnation}


def _at(home: Home, node: str, incarnation: str, round: int) -> Checkpoint | None:
    found = checkpoint.load_latest(home.checkpoints(node), incarnation=incarnation, at_most=round)
    return found if found is not None and found.round == round else None


def _policy(config: Config, start: Checkpoint, cache: Path) -> LoadedPolicy:
    """The model of a checkpoint; only an adapter needs the model that the node began with."""
    if config.lora is None:
        return models.load_policy(str(start.path), config=config, cache=cache)
    made = location(config, cache=cache)
    if made is not None and not made.is_dir():
        remedy = "replay it where it ran, or set SAPO_CACHE to the cache it used"
        raise UserError("model", config.model, f"is not in {cache}, and the adapter needs it", remedy)
    return models.load_policy(config.model, config=config, cache=cache)
