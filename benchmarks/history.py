"""The history's cost: reading one round of a short and of a long history, and bytes on disk.

Rounds of 2 groups of 4 completions are delivered as a node delivers them, some in each commit, and the table
is maintained every so many commits, as an archive does. One round is read as `sapo replay --from R --to R`
reads it: the table is opened, the round checked against its digests and the rounds before and after it.
"""

import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Report, benchmark, parser

if __name__ == "__main__":
    # answers --help before what follows is loaded, which takes seconds
    parser(__doc__).parse_args()

import pyarrow.parquet as pq
from history_rounds import INCARNATION, NODE, PER_ROUND, SWARM, Rounds, due

from sapo.core.config.load import load
from sapo.store.history.data_files import footprint
from sapo.store.history.maintain import maintain_table
from sapo.store.history.rounds import Recording
from sapo.store.history.tables import Store
from sapo.store.history.training_sink import TrainingSink

PACKAGES = ("deltalake", "pyarrow", "pydantic")
MOST = 2.0
"""One round of the long history may cost so many times what one of the short history costs."""
CONFIG = load(sets=[f"swarm.name={SWARM}"], env={})


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    short: int
    long: int
    bare: int
    """Rounds of the longer history that is never maintained."""
    per_commit: int
    """Rounds that are delivered together."""
    commits: int
    """Commits between two times of maintenance; at preset `starter`'s pace an archive's half hour has 180."""
    since: int
    """Commits since the last maintenance, where some are to be there."""
    repetitions: int


FULL = Sizes(1_000, 100_000, 8_000, 50, 180, 20, 41)
QUICK = Sizes(60, 240, 120, 10, 8, 3, 3)


def fill(store: Store, rounds: int, sizes: Sizes, *, maintained: bool) -> None:
    """Deliver so many rounds; the last commits are left as they came."""
    sink, chain = TrainingSink(store, SWARM, NODE, INCARNATION), None
    for count, first in enumerate(range(0, rounds, sizes.per_commit), start=1):
        last = min(first + sizes.per_commit, rounds)
        made = Rounds(first, last, chain)
        sink.deliver([due(round) for round in range(first, last)], made)
        chain = made.chain
        if maintained and (count % sizes.commits == 0 or last == rounds - sizes.since * sizes.per_commit):
            maintain_table(CONFIG, store, "training", [])


def read(store: Store, round: int) -> float:
    """Milliseconds from a closed table to one checked round of it."""
    began = time.perf_counter()
    table = store.find("training")
    assert table is not None
    recording = Recording(table, SWARM, NODE, INCARNATION)
    (found,) = recording.rounds(round, round)
    took = 1000 * (time.perf_counter() - began)
    assert (found.round, len(found.batch.groups)) == (round, 2)
    return took


def compare(
    report: Report, name: str, ours: Store, baseline: Store, sizes: Sizes, most: float | None
) -> None:
    """Read rounds from all over both histories, in turns; `most` is what their ratio may be."""
    draw = random.Random(1)
    places = [(draw.random(), draw.random()) for _ in range(sizes.repetitions)]
    ends = [_rounds(ours), _rounds(baseline)]
    read(ours, 0), read(baseline, 0)  # modules are loaded once
    mine = [read(ours, int(place * ends[0])) for place, _ in places]
    theirs = [read(baseline, int(place * ends[1])) for _, place in places]
    figure = f"one round of {ends[0]:,}, {name}, ms (baseline: of {ends[1]:,})"
    report.measured(figure, mine, theirs)
    if most is not None:
        ratio = report.figures[figure].ratio
        report.check(f"{name}: within {most:g} times", ratio <= most, f"{ratio:.2f} times")


def _rounds(store: Store) -> int:
    return Recording(store.open("training"), SWARM, NODE, INCARNATION).count()


def disk(report: Report, store: Store, bare: Store, folder: Path) -> None:
    """Bytes a completion, beside what the same rows take in other forms."""
    rows = bare.open("training").to_pyarrow_table()
    count = rows.num_rows
    plain = folder / "plain.parquet"
    pq.write_table(rows, plain)
    lines = sum(len(json.dumps(row)) + 1 for row in rows.to_pylist()) / count
    one_file = plain.stat().st_size / count
    for name, table in (("maintained", store), ("as delivered", bare)):
        held = table.open("training")
        mine = footprint(held)[1] / (_rounds(table) * PER_ROUND)
        report.add(f"bytes a completion, {name} (baseline: JSON lines)", mine, lines, 0.0)
        report.add(f"bytes a completion, {name} (baseline: one plain Parquet file)", mine, one_file, 0.0)
    logged = sum(path.stat().st_size for path in Path(store.table_uri("training"), "_delta_log").iterdir())
    report.add(
        "log: bytes a completion (baseline: the rows)", logged / (_rounds(store) * PER_ROUND), lines, 0.0
    )


def maintenance(report: Report, sizes: Sizes, stores: Sequence[Store]) -> None:
    """How long it takes in a table where some commits came since the last time."""
    took = []
    for store in stores:
        began = time.perf_counter()
        maintain_table(CONFIG, store, "training", [])
        took.append(time.perf_counter() - began)
    name = f"maintenance of {_rounds(stores[0]):,} rounds after {sizes.since} commits, s"
    report.add(f"{name} (baseline: of {_rounds(stores[1]):,})", took[0], took[1], 0.0)


def run(report: Report, sizes: Sizes, folder: Path) -> None:
    """All of it, in `folder`."""
    stores = {name: Store(str(folder / name)) for name in ("short", "long", "bare", "bare short")}
    for name, rounds in (("short", sizes.short), ("long", sizes.long)):
        began = time.perf_counter()
        fill(stores[name], rounds, sizes, maintained=True)
        took = time.perf_counter() - began
        files, size = footprint(stores[name].open("training"))
        report.say(f"{rounds:,} rounds made in {took:.0f} s: {files} files, {size / 1e6:.1f} MB")
    fill(stores["bare"], sizes.bare, sizes, maintained=False)
    fill(stores["bare short"], sizes.short, sizes, maintained=False)
    name = f"{sizes.since} commits since maintenance"
    compare(report, name, stores["long"], stores["short"], sizes, MOST)
    maintenance(report, sizes, [stores["long"], stores["short"]])
    compare(report, "just maintained", stores["long"], stores["short"], sizes, MOST)
    compare(report, "never maintained", stores["bare"], stores["bare short"], sizes, None)
    disk(report, stores["long"], stores["bare short"], folder)


def main() -> int:
    """Run the benchmark; returns the exit status."""

    def work(report: Report, quick: bool, folder: Path) -> None:
        run(report, QUICK if quick else FULL, folder)

    return benchmark(__doc__, "history", PACKAGES, work)


if __name__ == "__main__":
    sys.exit(main())
