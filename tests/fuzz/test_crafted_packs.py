"""Packs that nobody's `sapo pack` made: refused in words, with nothing left behind and no memory filled."""

import gzip
import io
import json
import random
import sqlite3
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from packed_nodes import Members, files_of, indexed, make_node, rewritten, with_content
from searches import SEED

from sapo.core.config.home import Home
from sapo.core.config.load import load
from sapo.core.config.manifest import Manifest
from sapo.core.errors import UserError
from sapo.core.types import canonical, sha256
from sapo.ops.node_pack import INDEX, pack_node, unpack_node
from sapo.store.journal.schema import MOST_TEXT

CHECKPOINT = "checkpoints/round-000001"
BLOCK = 512


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node's pack as it should be."""
    folder = tmp_path_factory.mktemp("packs")
    sets = ["swarm.name=s", "swarm.site=a", "swarm.nodes=2"]
    config = load("tiny", None, sets, env={})
    home = Home(folder / "old")
    home.prepare(config, Manifest.of(config))
    make_node(home, "a1", rounds=2)
    pack_node(home, "a1", folder / "a1.tar.gz")
    return folder / "a1.tar.gz"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a neighbour that no pack may touch."""
    (tmp_path / "neighbour").write_text("mine")
    return tmp_path


def refused(crafted: Path, place: Path) -> str:
    """What is said of a pack that is refused, once it is known that nothing came of it."""
    before = files_of(place)
    with pytest.raises(UserError) as caught:
        unpack_node(crafted, place / "deep" / "new")
    assert files_of(place) == before
    assert sorted(entry.name for entry in place.iterdir()) == sorted({Path(name).parts[0] for name in before})
    assert len(str(caught.value)) < 2000
    assert str(caught.value).isprintable()
    return str(caught.value)


def packed(tar: bytes, place: Path) -> Path:
    path = place / "crafted.tar.gz"
    path.write_bytes(gzip.compress(tar, 1))
    return path


def raw(pack: Path) -> bytearray:
    return bytearray(gzip.decompress(pack.read_bytes()))


def header(name: str, size: int, kind: bytes = b"0", *, size_field: bytes | None = None) -> bytes:
    """A member's header with its checksum, of any size and kind."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = b"%011o\0" % size if size_field is None else size_field
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def after_index(pack: Path, crafted: bytes) -> bytes:
    """A pack in which something stands between its index and its first file."""
    tar = raw(pack)
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        at = archive.getmembers()[1].offset
    return bytes(tar[:at]) + crafted + bytes(tar[at:])


NEGATIVE = b"\xff" + (256**11 - 2**20).to_bytes(11, "big")
GIGABYTES = b"\x80" + (2**40).to_bytes(11, "big")


@pytest.mark.parametrize(
    ("crafted", "says"),
    [
        (header("x", 2**33, b"x", size_field=b"77777777777\0"), "too large"),
        (header("x", 0, b"x", size_field=GIGABYTES), "too large"),
        (header("g", 0, b"g", size_field=GIGABYTES), "too large"),
        (header("L", 0, b"L", size_field=GIGABYTES), "too large"),
        (header("x", 0, b"x", size_field=NEGATIVE), "is no whole pack"),
        (header("key.pem", 0, b"0", size_field=NEGATIVE), "is no whole pack"),
        (header("x", 10, b"x") + padded(b"10 size=-1\n"), "is no whole pack"),
        ((header("x", 12, b"x") + padded(b"12 size=big\n")) * 2000, "is no whole pack"),
        (header("x", 30, b"x") + padded(b"30 GNU.sparse.realsize=99999\n"), "is no whole pack"),
        (header("x", 26, b"x") + padded(b"26 GNU.sparse.map=1,2,3,x\n"), "is no whole pack"),
        (header("key.pem", 0, b"S"), "is a link, a folder or a special file"),
        (header("key.pem", 0, b"1"), "is a link, a folder or a special file"),
        (header("key.pem", 0, b"2"), "is a link, a folder or a special file"),
        (header("key.pem", 0, b"3"), "is a link, a folder or a special file"),
        (header("key.pem", 0, b"4"), "is a link, a folder or a special file"),
        (header("key.pem", 0, b"5"), "is a link, a folder or a special file"),
        (header("key.pem", 0, b"6"), "is a link, a folder or a special file"),
        (header("key.pem", 0, b"7"), "is a link, a folder or a special file"),
        (header("/etc/cron.d/evil", 0), "'/etc/cron.d/evil' is not as"),
        (header("../../evil", 0), "'../../evil' is not as"),
        (header("KEY.PEM", 0), "'KEY.PEM' is not as"),
        (header("key.pem\u200b", 0), "is not as"),
        (header("ｋey.pem", 0), "is not as"),
        (header("a" * 99, 0), "is not as"),
        (bytes(BLOCK) * 2, "is missing"),
        (b"\xff" * BLOCK, "is no whole pack"),
    ],
)
def test_what_is_no_plain_file_of_the_index_is_refused(
    pack: Path, place: Path, crafted: bytes, says: str
) -> None:
    assert says in refused(packed(after_index(pack, crafted), place), place)


def files(change: Callable[[dict[str, Any]], object]) -> Callable[[Members], Members]:
    return indexed(lambda found: change(found["files"]))


def many(found: dict[str, Any]) -> None:
    found.update({f"{CHECKPOINT}/{i}.json": found["key.pem"] for i in range(5000)})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (files(lambda f: f.update({f"{CHECKPOINT}/model.safetensors/a": f["key.pem"]})), "names 'check"),
        (files(lambda f: f.update({f"{CHECKPOINT}/hubconf.py": f["key.pem"]})), "names 'check"),
        (files(lambda f: f.update({f"{CHECKPOINT}/pytorch_model.bin": f["key.pem"]})), "names 'check"),
        (files(lambda f: f.update({f"{CHECKPOINT}/" + "/".join("abcdefgh"): f["key.pem"]})), "names 'check"),
        (files(lambda f: f.update({f"{CHECKPOINT}/" + "a" * 300: f["key.pem"]})), "names 'check"),
        (files(lambda f: f.update({"checkpoints/round-٠٠٠٠٠١/x": f["key.pem"]})), "names 'check"),
        (files(lambda f: f.update({f"{CHECKPOINT}/ｗ": f["key.pem"]})), "names 'check"),
        (files(lambda f: f.update({f"{CHECKPOINT}/..": f["key.pem"]})), "names 'check"),
        (files(lambda f: f.update({f"{CHECKPOINT}//x": f["key.pem"]})), "names 'check"),
        (files(lambda f: f.update({"\x1b[31mred": f["key.pem"]})), "names "),
        (files(lambda f: f["key.pem"].update(bytes=10**6)), "names a key.pem of 1000000 bytes"),
        (
            files(lambda f: f[f"{CHECKPOINT}/checkpoint.json"].update(bytes=10**8)),
            "checkpoint.json of 100000000",
        ),
        (files(lambda f: f["journal.sqlite"].update(bytes=2**62)), "more than"),
        (files(lambda f: f["journal.sqlite"].update(bytes=-1)), "files.journal.sqlite.bytes"),
        (files(lambda f: f["journal.sqlite"].update({"\x1b[31mred" * 5000: 1})), "files.journal.sqlite"),
        (files(many), "is missing"),
        (indexed(lambda found: found["config"]["swarm"].update(nodes=10**9)), "swarm.nodes = 10000"),
        (indexed(lambda found: found["config"]["swarm"].update(nodes=10**400)), "swarm.nodes = 10000"),
    ],
)
def test_an_index_that_no_export_writes_is_refused(
    pack: Path, place: Path, change: Callable[[Members], Members], says: str
) -> None:
    crafted = place / "crafted.tar.gz"
    crafted.write_bytes(rewritten(pack, change).read_bytes())
    assert says in refused(crafted, place)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[" * 100_000,
        b'{"manifest":' + b'{"a":' * 5000,
        b"\xff\xfe",
        b"nan",
        b'"\\ud800"',
        b'{"format":1e999}',
        b"1" * 10_000,
    ],
)
def test_an_index_that_is_no_json_of_ours_is_refused(pack: Path, place: Path, text: bytes) -> None:
    crafted = place / "crafted.tar.gz"
    crafted.write_bytes(rewritten(pack, with_content(INDEX, text)).read_bytes())
    assert "pack.json" in refused(crafted, place)


def with_file(name: str, content: bytes) -> Callable[[Members], Members]:
    """Other content of a file, with the size and digest that it has."""

    def change(members: Members) -> Members:
        index = json.loads(members[0][1])
        index["files"][name] = {"bytes": len(content), "sha256": sha256(content)}
        others = [(info, content if info.name == name else data) for info, data in members[1:]]
        return [(members[0][0], canonical(index).encode()), *others]

    return change


def crafted_journal(pack: Path, place: Path, statements: str) -> bytes:
    path = place / "journal"
    with tarfile.open(pack) as archive:
        source = archive.extractfile("journal.sqlite")
        assert source is not None
        path.write_bytes(source.read())
    db = sqlite3.connect(path)
    db.executescript(statements)
    db.close()
    content = path.read_bytes()
    for file in place.glob("journal*"):
        file.unlink()
    return content


ENDLESS = (
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS round, 'a' AS stage FROM c"
)


COMPUTED = (
    "DROP TABLE meta;CREATE TABLE meta (incarnation TEXT AS (hex(zeroblob(490000000))), created_at REAL);"
)
OTHER = "holds other tables, columns, views or triggers"


def owing(kind: str, ref: str) -> str:
    values = f"('{kind}', 1, '{ref}', 0, 0.0)"
    return f"INSERT INTO outbox (kind, round, ref, bytes, owed_at) VALUES {values};"


@pytest.mark.parametrize(
    ("statements", "says"),
    [
        (f"DROP TABLE rounds; CREATE VIEW rounds AS {ENDLESS};", OTHER),
        ("CREATE TRIGGER t AFTER INSERT ON meta BEGIN DELETE FROM meta; END;", OTHER),
        ("DROP TABLE meta;", "its journal"),
        ("DELETE FROM meta;", "its journal"),
        ("UPDATE meta SET incarnation = x'00';", "its journal"),
        ("PRAGMA user_version = 99;", "journal version 99"),
        ("PRAGMA application_id = 1;", "no journal"),
        (COMPUTED, OTHER),
        ("DROP TABLE met; CREATE VIRTUAL TABLE met USING fts5(group_id);", OTHER),
        ("CREATE TABLE extra (x CHECK (x > 0));", OTHER),
        ("CREATE INDEX odd ON rounds (hex(zeroblob(round)));", OTHER),
        ("UPDATE meta SET incarnation = 'x'' OR 1 --';", "does not name its incarnation"),
        ("UPDATE rounds SET groups_at = 'late';", "in its table rounds is of another kind"),
        ("UPDATE rounds SET result = NULL;", "round 0 does not hold what its stage says"),
        ("UPDATE rounds SET batch_sha256 = result_sha256;", "the batch of round 0 does not have the digest"),
        (owing("track\x1b[2J", ""), r"owes 'track\x1b[2J'"),
        (owing("version", "/etc/round-000007"), "owes 'version' of '/etc/round-000007'"),
        (owing("version", "checkpoints/../../n1/round-000001"), "owes 'version'"),
        (owing("publish", "x"), "owes 'publish' of 'x'"),
        ("UPDATE checkpoints SET path = '/etc/round-000007';", "is no checkpoint of this node"),
        ("UPDATE checkpoints SET content = '{}';", "its journal cannot be read"),
    ],
)
def test_a_journal_that_is_more_or_less_than_one_is_refused(
    pack: Path, place: Path, statements: str, says: str
) -> None:
    change = with_file("journal.sqlite", crafted_journal(pack, place, statements))
    crafted = place / "crafted.tar.gz"
    crafted.write_bytes(rewritten(pack, change).read_bytes())
    assert says in refused(crafted, place)


def test_a_journal_one_of_whose_pages_is_led_to_by_many_is_refused(pack: Path, place: Path) -> None:
    """Some such pages below each other have no end of rows."""
    journal = bytearray(crafted_journal(pack, place, ""))
    path = place / "roots"
    path.write_bytes(journal)
    with closing(sqlite3.connect(path)) as db:
        roots = dict(db.execute("SELECT name, rootpage FROM sqlite_schema"))
    path.unlink()
    leaf, cells = roots["positions"].to_bytes(4), 100
    page = bytearray(4096)
    page[:12] = b"\x05\0\0" + cells.to_bytes(2) + (4096 - 5 * cells).to_bytes(2) + b"\0" + leaf
    for key in range(cells):
        at = 4096 - 5 * (key + 1)
        page[12 + 2 * key : 14 + 2 * key] = at.to_bytes(2)
        page[at : at + 5] = leaf + bytes([key + 1])
    start = (roots["outbox"] - 1) * 4096
    journal[start : start + 4096] = page
    crafted = place / "crafted.tar.gz"
    crafted.write_bytes(rewritten(pack, with_file("journal.sqlite", bytes(journal))).read_bytes())
    assert "its pages are not in order" in refused(crafted, place)


def test_what_a_journal_keeps_compressed_is_unpacked_within_bounds(pack: Path, place: Path) -> None:
    """Each text by itself, and all of them together."""
    texts = b"0" * (MOST_TEXT["result"] + 1), b"0" * 2**25
    for column, text, times, says in (
        ("result", texts[0], 1, "the result of round 0 is cut short, or has more than 4 MB"),
        ("batch", texts[1], 9, "is cut short, or has more than"),
    ):
        rows = "WITH RECURSIVE c(x) AS (SELECT 2 UNION ALL SELECT x + 1 FROM c WHERE x < 12)"
        kept = f"{column} = x'{zlib.compress(text).hex()}', {column}_sha256 = '{sha256(text)}'"
        statements = f"UPDATE rounds SET {kept} WHERE round = 0;"
        if times > 1:
            statements += (
                f"INSERT INTO rounds (round, stage, batch, batch_sha256, groups_at) {rows} "
                "SELECT x, 'batch', batch, batch_sha256, 0.0 FROM c, rounds WHERE round = 0;"
            )
        crafted = place / "crafted.tar.gz"
        change = with_file("journal.sqlite", crafted_journal(pack, place, statements))
        crafted.write_bytes(rewritten(pack, change).read_bytes())
        assert says in refused(crafted, place)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("key.pem", b"no key", "holds no Ed25519"),
        ("key.pem", b"", "holds no Ed25519"),
        ("journal.sqlite", b"no database" * 100, "damaged"),
        ("journal.sqlite", b"", "journal"),
        (f"{CHECKPOINT}/checkpoint.json", b"[" * 50_000, "checkpoint"),
        (f"{CHECKPOINT}/checkpoint.json", b"{}", "checkpoint"),
        (f"{CHECKPOINT}/model.safetensors", b"others", "checkpoint"),
    ],
)
def test_files_that_the_index_vouches_for_are_looked_at_all_the_same(
    pack: Path, place: Path, name: str, content: bytes, says: str
) -> None:
    crafted = place / "crafted.tar.gz"
    crafted.write_bytes(rewritten(pack, with_file(name, content)).read_bytes())
    assert says in refused(crafted, place)


@pytest.mark.parametrize("times", [150, pytest.param(5000, marks=pytest.mark.soak)])
def test_a_damaged_pack_is_refused_or_was_not_damaged(pack: Path, place: Path, times: int) -> None:
    """Bits of the tar file flipped, pieces of it cut out and doubled."""
    whole, noise = raw(pack), random.Random(SEED)
    for number in range(times):
        tar = bytearray(whole)
        for _ in range(noise.randint(1, 4)):
            # headers are a small part of a pack, so they are aimed at
            at = noise.randrange(0, len(tar), BLOCK) + noise.choice([0, 100, 124, 136, 148, 156, 257, 345])
            at = min(at, len(tar) - 1)
            piece = noise.randbytes(noise.randint(1, 12))
            tar[at : at + noise.choice([len(piece), 0, BLOCK])] = piece
        crafted = packed(bytes(tar), place)
        target = place / f"new-{number}"
        home = None
        with suppress(UserError):
            home = unpack_node(crafted, target).home
        if home is None:
            assert not target.exists()
        else:
            assert files_of(home.checkpoints("a1")) == files_of(Home(pack.parent / "old").checkpoints("a1"))
        assert not list(place.glob(".sapo*"))
    assert (place / "neighbour").read_text() == "mine"


@pytest.mark.parametrize("kind", ["in a file", "in a header", "after the end"])
def test_a_pack_that_unpacks_to_gigabytes_costs_no_memory(pack: Path, place: Path, kind: str) -> None:
    """In a process of its own, which may not have much."""
    path = place / "bomb.tar.gz"
    tar = after_index(pack, header("x", 2**31, b"x") if kind == "in a header" else b"")
    half = tar[: len(tar) // BLOCK // 2 * BLOCK]
    with path.open("wb") as file:
        pressed = zlib.compressobj(9, wbits=31)
        file.write(pressed.compress(tar if kind == "after the end" else half))
        for _ in range(300):
            file.write(pressed.compress(bytes(2**20)))
        file.write(pressed.flush())
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from sapo.core.errors import UserError\n"
        "from sapo.ops.node_pack import unpack_node\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    unpack_node(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except UserError as error:\n    print(error)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    command = [sys.executable, "-c", code, str(path), str(place / "new")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert int(lines[-1]) < 100
    if kind == "after the end":
        assert (place / "new").exists()
    else:
        assert "is no whole pack" in lines[0]
        assert not (place / "new").exists()
