"""Below which round a node's rows are not kept: that of its oldest whole checkpoint, where replay begins."""

import logging
from dataclasses import dataclass

import pyarrow.dataset as ds
from deltalake import DeltaTable

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.policy import checkpoint
from sapo.policy.checkpoint import BrokenCheckpoint, Checkpoint
from sapo.store.history.data_files import TRAINING_LAYOUT, data_files
from sapo.store.history.tables import Store
from sapo.store.history.training_sink import transaction_id
from sapo.store.journal.journal import Journal

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows of an incarnation of a node below `round` are not kept; 0 keeps all, and `why` is the reason."""

    node: str
    incarnation: str
    round: int
    why: str = ""


def cuts(config: Config, home: Home, store: Store) -> list[Cut]:
    """A cut for each node that lives in this home; others are not this home's to cut. Raises `Unavailable`
    when the store cannot be reached."""
    names = sorted({*home.here(config), *home.node_names()}, key=lambda name: (len(name), name))
    table = store.find("training") if config.history.keep_rounds else None
    return [_cut(config, home, table, name) for name in names if not home.moved(name).exists()]


def _cut(config: Config, home: Home, table: DeltaTable | None, node: str) -> Cut:
    keep = config.history.keep_rounds
    if keep == 0:
        return Cut(node, "", 0, "history.keep_rounds is 0")
    if table is None or not home.journal(node).exists():
        return Cut(node, "", 0, "it has no history yet")
    with Journal.read_only(home.journal(node)) as journal:
        incarnation, done = journal.incarnation, journal.finished_rounds()
    swarm = config.swarm.name
    delivered = table.transaction_version(transaction_id(swarm, node, incarnation)) or 0
    origin = _origin(home, node, incarnation, table)
    if origin is None:
        why = "no whole checkpoint continues in the history"
    elif origin.round > done - keep:
        why = (
            f"its oldest whole checkpoint is of round {origin.round}, and round {max(done - keep, 0)} is kept"
        )
    elif origin.round > delivered:
        why = f"the history ends at round {delivered}, before its oldest whole checkpoint, {origin.round}"
    else:
        return Cut(
            node, incarnation, origin.round, "" if origin.round else "its oldest checkpoint is the first"
        )
    return Cut(node, incarnation, 0, why)


def _origin(home: Home, node: str, incarnation: str, table: DeltaTable) -> Checkpoint | None:
    """The oldest whole checkpoint of an incarnation from which the history goes on. Older ones that were
    restored from a backup may lie beside it: rounds after them are cut already."""
    for path in checkpoint.paths(home.checkpoints(node)):
        try:
            found = checkpoint.verify(path)
        except (BrokenCheckpoint, OSError) as reason:  # its owner may be deleting it
            log.info("checkpoint %s is passed over: %s", path, reason)
            continue
        if found.incarnation == incarnation and _goes_on(table, node, incarnation, found.round):
            return found
    return None


def _goes_on(table: DeltaTable, node: str, incarnation: str, round: int) -> bool:
    """Whether nothing was cut between `round` and the first round held; rows of version 1 do not say."""
    files = [file for file in data_files(table, TRAINING_LAYOUT) if file.group == (node, incarnation)]
    last = min((file.last for file in files if file.last >= round), default=None)
    if last is None:
        return True
    terms = [("node", "=", node), ("round", ">=", str(round)), ("round", "<=", str(int(last)))]
    wanted = (ds.field("node") == node) & (ds.field("incarnation") == incarnation)
    wanted &= (ds.field("round") >= round) & (ds.field("round") <= int(last))
    data = table.to_pyarrow_dataset(file_pruning_predicate=terms)
    if "previous_round" not in data.schema.names:
        return True
    rows = data.to_table(columns=["round", "previous_round"], filter=wanted).sort_by("round")
    previous: int | None = rows["previous_round"][0].as_py()
    return previous is None or previous < round
