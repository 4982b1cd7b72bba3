"""What others wrote, on a terminal: whatever text a pack, a history or a broker brings, it is only shown."""

import io
import json
import re
import sqlite3
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from history_samples import MANIFEST, deliver, signed
from makers import finish_round
from packed_nodes import take_checkpoint
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sapo import cli
from sapo.bus.memory import MemoryBus
from sapo.core.config.home import Home
from sapo.core.config.load import load
from sapo.core.config.manifest import Manifest
from sapo.core.terminal import Terminal
from sapo.core.types import canonical, sha256
from sapo.node.taken_up import _Kept
from sapo.ops.archiver import Archiver
from sapo.ops.doctor import Check, render
from sapo.peers.phrases import Phrase
from sapo.peers.signing import Identity
from sapo.store.history.tables import Store
from sapo.store.journal.journal import Journal

EVIL = "\x1b]0;pwned\x07\x1b[2J\x9b2J\u202e\r[/x][bold red]"
"""A title, a cleared screen twice, letters turned round, a line overwritten; two pieces of markup."""
OURS = re.compile(r"\x1b(\[[\d;]*m|\]8;[^\x1b]*\x1b\\)")
"""What a terminal may get: colours, and links."""


def harmless(text: str) -> bool:
    return text.replace("\n", "").isprintable()


@pytest.mark.parametrize("width", [30, 500])
def test_a_terminal_shows_any_text_and_obeys_none(width: int) -> None:
    table = Table(title=EVIL)
    table.add_column(EVIL, overflow="fold")
    table.add_row(EVIL)
    table.add_row(Text(EVIL))
    terminal = Terminal(file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor")
    for one in (EVIL, Text(EVIL, style="red"), Padding(EVIL, 1), Markdown(EVIL), table):
        terminal.print(one, style="bold")
    terminal.print(EVIL, soft_wrap=True)
    shown = OURS.sub("", terminal.file.getvalue())  # type: ignore[attr-defined]
    assert harmless(shown)
    assert "".join(shown.split()).count("[boldred]") >= 6, "folded, and not cut"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home whose journal, history and phrases hold such a text wherever others choose one."""
    monkeypatch.chdir(tmp_path)
    config = load("tiny", None, ["swarm.nodes=2", "track.traits={hail='a'}"], env={})
    home = Home.at(tmp_path / "home", "tiny")
    home.prepare(config, Manifest.of(config))
    for name in config.nodes:
        home.node(name).mkdir()
        Identity.load_or_create(home.node(name) / "key.pem")
    with Journal(home.journal("n0")) as journal:
        series = {f"trait/{EVIL}": 0.5, EVIL: 1.0, "reward/local": 0.5}
        finish_round(journal, "n0", 0, series, swarm="tiny")
        take_checkpoint(home, "n0", journal)
        incarnation = journal.incarnation
    with closing(sqlite3.connect(home.journal("n0"))) as db, db:
        owed = "INSERT INTO outbox (kind, round, ref, bytes, owed_at) VALUES (?, 0, 'x', 1, 0.0)"
        db.execute(owed, [EVIL])
        (kept_result,) = db.execute("SELECT result FROM rounds").fetchone()
        result = json.loads(zlib.decompress(kept_result))
        text = canonical(result | {"metrics": result["metrics"] | {f"share/{EVIL}": 5.0}})
        known = [zlib.compress(text.encode()), sha256(text)]
        db.execute("UPDATE rounds SET result = ?, result_sha256 = ?", known)
    phrase = Phrase(EVIL, EVIL, {}, 20.0, 20.0, 20.0, "f" * 64)
    kept = _Kept(incarnation=incarnation, names={"f" * 64: EVIL}, watched=(phrase,))
    home.phrases("n0").write_text(kept.model_dump_json())
    store = Store(str(home.history))
    deliver(store, 0, 1)
    bus = MemoryBus()
    for number in range(2):
        bus.publish([signed(number, 2, node="n1")])
    Archiver(bus, store, MANIFEST).run_once()
    rewrite(store, "training")
    rewrite(store, "rollouts")
    return home


def rewrite(store: Store, name: Literal["training", "rollouts"]) -> None:
    """Let every text of a table begin with that one, unless rows are found by it."""
    table = DeltaTable(store.table_uri(name))
    kept = {"swarm", "incarnation", "group_id", "recipe", "source", *table.metadata().partition_columns}

    def evil(key: str, value: Any) -> Any:
        chosen = isinstance(value, str) and key not in kept and not value.startswith("{")
        return EVIL + value if chosen else value

    rows = [
        {key: evil(key, value) for key, value in row.items()} for row in table.to_pyarrow_table().to_pylist()
    ]
    data = pa.Table.from_pylist(rows, schema=pa.schema(table.schema().to_arrow()))
    write_deltalake(table, data, mode="overwrite")


def test_no_command_hands_on_what_steers_a_terminal(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    group = signed(0, 2, node="n1").group_id[:12]
    for words in (
        "status",
        "status --json",
        "report",
        "report --json",
        "rollouts",
        "rollouts --completions",
        "rollouts --json",
        "lineage --swarm",
        "lineage n0",
        f"lineage {group}",
        f"lineage {group} --json",
        "trait hail",
        "trait hail --json",
        "pack n0",
    ):
        code = cli.invoke([*words.split(), "--home", str(home.root)])
        out, err = capsys.readouterr()
        assert code in ((2,) if words == "pack n0" else (0, 1)), out + err
        assert harmless(out + err), words
        assert EVIL not in out
    render([Check("bus", "missing", f"Kafka cluster {EVIL}", EVIL)])
    assert harmless(capsys.readouterr().out)
    pages = [page.read_text() for page in home.root.rglob("*.html")]
    assert len(pages) == 4
    assert all(map(harmless, pages))
