"""A real node that reads what is put on its bus, round after round, with an oracle beside it."""

import json
import random
import sqlite3
import struct
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import pyarrow.parquet as pq
import pytest
import zstandard
from crafting import JSON_TREES, Kitchen, Message, enveloped
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from kafka.record.memory_records import MemoryRecordsBuilder
from makers import make_identity
from oracle import Rules, flaw, flaw_here
from pydantic import ValidationError
from swarms import hand_over, make_home, open_node, small_config

from sapo.bus.base import Bus, Limits, Reading
from sapo.bus.kafka.bus import Ends, KafkaBus
from sapo.bus.kafka.metadata import Layout, Place
from sapo.bus.memory import MemoryBus
from sapo.bus.sqlite import SqliteBus
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.config.schema import KafkaBus as KafkaSection
from sapo.core.errors import Refused
from sapo.core.types import Question, Received, SignedGroup
from sapo.node.round import NodeRuntime
from sapo.ops.archiver import Archiver
from sapo.peers.dedup import fingerprint
from sapo.peers.group_rules import keeps_to
from sapo.peers.signing import Identity
from sapo.store.history.rollout_rows import group_of
from sapo.store.history.tables import Store

SETTINGS = (
    "swarm.nodes=4",
    "swarm.rounds=100000",
    "batch.local=4",
    "batch.completions=4",
    "batch.external=4",
    "checkpoint.every_rounds=200",
    "checkpoint.weight_digest_every=1000",
    "pool.tail=20000",
    "pool.poll_bytes=64_000_000",
    "pool.max_groups=512",
    "pool.newcomer_share=1",
    "rules.max_payload_bytes=200_000",
    "rules.max_completions=8",
    "rules.max_text_chars=4000",
    "rules.entry=invite",
)
CROOKS = 6
CONTROL = ("<|end|>",)
"""A control token of some node."""
WRITERS = ("n1", "n2")
PER_ROUND = 250
LATER = {"not_regenerable", "question_mismatch", "slow", "too_long"}
"""Reasons that only verification finds: these were admitted."""


@dataclass(frozen=True)
class Grounds:
    """The swarm, the keys of all in it, and groups that two real nodes of it have made."""

    config: Config
    home: Home
    authors: dict[str, Identity]
    crooks: list[Identity]
    real: list[SignedGroup]

    def kitchen(self, number: int, trees: Any, name: str, control: Sequence[str]) -> Kitchen:
        """Draws messages for a node from a seed."""
        groups = [json.loads(one.payload) for one in self.real]
        others = {name: self.authors[name] for name in WRITERS}
        rng = random.Random(number)
        return Kitchen(rng, groups, others, self.crooks, self.authors[name], trees, control, name)

    def rules(self) -> Rules:
        """What the swarm asks for, whoever receives a group."""
        config, manifest = self.config, self.home.load_manifest()
        members = [key.key for key in self.authors.values()] + [key.key for key in self.crooks]
        return Rules(
            swarm=config.swarm.name,
            tasks=frozenset((task.dataset, task.config) for task in manifest.tasks),
            salt=config.rules.salt,
            held_out=config.rules.held_out,
            completions=range(config.rules.min_completions, config.rules.max_completions + 1),
            max_text=config.rules.max_text_chars,
            max_payload=config.rules.max_payload_bytes,
            members=frozenset(members),
        )

    def rules_of(self, node: NodeRuntime) -> Rules:
        """What one node asks for."""
        policy = node.parts.policy
        return replace(
            self.rules(),
            own_key=node.parts.maker.own.identity.key,
            own_node=node.name,
            control=policy.control,
            fingerprint=policy.fingerprint,
            vocabulary=policy.vocabulary,
            decode=lambda ids: str(policy.decode(ids)),
        )


def make_grounds(folder: Path, rounds: int = 5) -> Grounds:
    """A swarm of members only, of which n1 and n2 have made some rounds."""
    home = Home(folder / "home")
    keys = {name: Identity.load_or_create(_key_file(home, name)) for name in ("n0", "n1", "n2", "n3")}
    crooks = [make_identity(f"crook {i}") for i in range(CROOKS)]
    members = ",".join(f'"{one.key}"' for one in [*keys.values(), *crooks])
    config = small_config([*SETTINGS, f"rules.members=[{members}]"])
    make_home(home.root, config)
    real: list[SignedGroup] = []
    for name in WRITERS:
        bus = MemoryBus()
        with open_node(config, home, name, bus=bus, deliver=False, timed=False) as node:
            for _ in range(rounds):
                node.run_round()
                hand_over(node, bus)
            taken = node.parts.policy.has_control_tokens
            poll = bus.poll({}, Limits(), random.Random(0))
            for one in poll.received:
                texts = {answer["text"] for answer in json.loads(one.signed.payload)["completions"]}
                if len(texts) > 1 and not any(map(taken, texts)):
                    real.append(one.signed)
    return Grounds(config, home, keys, crooks, real)


def _key_file(home: Home, name: str) -> Path:
    home.node(name).mkdir(parents=True)
    return home.node(name) / "key.pem"


class Carrier(Protocol):
    """A bus that messages are put on by a stranger's hand."""

    @property
    def bus(self) -> Bus:
        """What nodes read it with."""

    def put(self, messages: Sequence[Message], rng: random.Random) -> list[float]:
        """Put messages on the bus in this order; returns the time stamps that a reader may see."""

    def forget(self) -> None:
        """Let retention take all that was read."""


def grown(rss: Sequence[int]) -> int:
    """By how much the second half's largest size exceeds that after the first fifth."""
    warm = rss[len(rss) // 5 :]
    return max(warm[len(warm) // 2 :]) - warm[0]


@dataclass
class Outcome:
    """What became of all messages so far."""

    sent: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    used: int = 0
    slowest_s: float = 0.0
    rss: list[int] = field(default_factory=list)

    def told(self) -> str:
        """Counts, memory and the slowest reading in a few lines."""
        kinds = {kind.removeprefix("again ") for kind in self.sent}
        rows = [f"{kind}: {self.accepted[kind]} of {self.sent[kind]} taken" for kind in sorted(kinds)]
        tenths = [self.rss[len(self.rss) * tenth // 10] for tenth in range(10)] + self.rss[-1:]
        megabytes = " ".join(f"{size / 2**20:.0f}" for size in tenths)
        memory = f"{megabytes} MB, by tenths; {self.grown() / 2**20:.1f} more since the first fifth"
        head = f"{self.sent.total()} messages, {self.accepted.total()} taken, {self.used} learned from"
        return "\n".join([head, memory, f"slowest {self.slowest_s:.2f} s", str(self.refused), *rows])

    def grown(self) -> int:
        """Bytes by which the process grew after the first fifth of the rounds."""
        return grown(self.rss)


class Trial:
    """One node against what a kitchen serves."""

    def __init__(self, grounds: Grounds, carrier: Carrier, node: NodeRuntime) -> None:
        self.grounds, self.carrier, self.node = grounds, carrier, node
        self.rules, self.outcome = grounds.rules_of(node), Outcome()
        self.taken: set[str] = set()
        self.rng = random.Random(0)
        self._process = psutil.Process()

    def round(self, messages: Sequence[Message], *, counted: bool = True) -> None:
        """Have the node read messages in one of its rounds, and look at what it took."""
        node, pool, outcome = self.node, self.node.parts.intake.pool, self.outcome
        node.generate()
        node.publish()
        stamps = self.carrier.put(messages, self.rng)
        sent = {
            (str(m.envelope.group_id), str(m.envelope.content_sha256), m.envelope.payload): (m, stamp)
            for m, stamp in zip(messages, stamps, strict=True)
            if isinstance(m.envelope.payload, bytes)
        }
        begun = time.perf_counter()
        try:
            node.consume_sample()
        except Exception as error:
            error.add_note("\n".join(self._culprits(messages)))
            raise
        outcome.slowest_s = max(outcome.slowest_s, time.perf_counter() - begun)
        accepted = {}
        for entry in pool.entries():
            signed = entry.received.signed
            message, stamp = sent[signed.group_id, signed.content_sha256, signed.payload]
            accepted[signed.group_id] = message
            self._judge(message, stamp)
        missed = [m for m in messages if m.honest and m.envelope.group_id not in accepted]
        assert not missed, f"refused an honest group: {missed[0].hex}"
        self._keep_some(accepted)
        node.verify()
        metrics = node.grpo_update().metrics
        self._look_at_batch()
        refused = {
            name.rpartition("/")[2]: int(count)
            for name, count in metrics.items()
            if name.startswith("pool/refused/")
        }
        early = sum(count for code, count in refused.items() if code not in LATER)
        if counted:
            assert len(messages) == len(accepted) + early, [m.hex for m in messages]
        outcome.refused.update(refused)
        outcome.sent.update(message.kind for message in messages)
        outcome.accepted.update(message.kind for message in accepted.values())
        outcome.rss.append(self._process.memory_info().rss)

    def _culprits(self, messages: Sequence[Message]) -> list[str]:
        """The messages that the rules alone fail on; all of them where memory had a part in it."""
        found = []
        for message in messages:
            try:
                signed = SignedGroup(**vars(message.envelope))
                fingerprint(
                    keeps_to(
                        Received(signed=signed, bus_position="p:0", timestamp=time.time()),
                        self.node.parts.maker.own.manifest,
                    )
                )
            except (Refused, ValidationError):
                pass
            except Exception:
                found.append(message.hex)
        return found or [message.hex for message in messages]

    def _judge(self, message: Message, stamp: float) -> None:
        """Hold against the oracle what the node took."""
        envelope, now = message.envelope, time.time()
        wrong = flaw_here(envelope, self.rules, stamp, now, self.grounds.config.pool.max_age_s)
        assert wrong is None, f"took a group though {wrong}: {message.hex}"
        assert envelope.group_id not in self.taken, f"took a group twice: {message.hex}"
        self.taken.add(str(envelope.group_id))

    def _keep_some(self, accepted: dict[str, Message]) -> None:
        """Leave some groups to be drawn and verified; an honest one with a made-up recipe would be blamed."""
        ids = [group_id for group_id, message in accepted.items() if message.kind != "fresh"]
        kept = set(self.rng.sample(ids, min(8, len(ids))))
        kept |= {group_id for group_id, message in accepted.items() if message.kind == "real"}
        pool = self.node.parts.intake.pool
        pool.remove([entry.group_id for entry in pool.entries() if entry.group_id not in kept])
        self.node._now.order = [entry for entry in self.node._now.order or () if entry.group_id in pool]

    def _look_at_batch(self) -> None:
        """What is learned from has the question that its recipe gives."""
        batch = self.node.journal.batch(self.node.round - 1)
        groups = [group for group in batch.groups if group.source == "external"]
        for group, question in zip(
            groups, self.node.parts.workers.questions([group.recipe for group in groups]), strict=True
        ):
            assert isinstance(question, Question)
            assert question.text == group.question
        self.outcome.used += len(groups)
        pool = self.node.parts.intake.pool
        pool.remove([entry.group_id for entry in pool.entries()])


HEADER = struct.Struct(">qiibIhiqqqhii")


class KafkaCarrier:
    """A topic of one partition in memory: batches as they might lie on a broker, read by the real bus.

    Of a batch the broker checks the header alone, so its body may hold anything.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[int, int, bytes]] = []
        self.end = 0
        bus = KafkaBus(KafkaSection(servers="nowhere:1"), "t")
        layout = Layout(uuid.UUID(int=7), "c", {0: ("nowhere", 1)}, {0: Place(0, 0, 0)}, frozenset())
        monkeypatch.setattr(bus, "_ends", lambda: (layout, Ends({0: self.first()}, {0: self.end})))
        monkeypatch.setattr(bus, "_fetch", self._fetch)
        self.bus = bus

    def first(self) -> int:
        """The offset of the oldest record."""
        return self.log[0][0] if self.log else self.end

    def put(self, messages: Sequence[Message], rng: random.Random) -> list[float]:
        """Batches of some messages each; those without honest ones are damaged here and there."""
        now = int(time.time() * 1000)
        ordered = list(messages)
        while ordered:
            size = rng.randint(1, 12)
            self._append(ordered[:size], rng, now)
            del ordered[:size]
        return [now / 1000] * len(messages)

    def _append(self, messages: Sequence[Message], rng: random.Random, now: int) -> None:
        codec = rng.choice([0, 3, 4, 4])
        builder = MemoryRecordsBuilder(2, codec, batch_size=2**31 - 1)
        for message in messages:
            found = message.envelope
            named = {"content_sha256": found.content_sha256, "key": found.key, "signature": found.signature}
            headers = [(name, str(value).encode(errors="replace")) for name, value in named.items()]
            builder.append(now, str(found.group_id).encode(errors="replace"), found.payload, headers)
        builder.close()
        raw = bytes(builder.buffer())
        body, attributes, count = raw[HEADER.size :], codec, len(messages)
        if not any(message.honest or "fresh" in message.kind for message in messages) and rng.random() < 0.4:
            body, attributes = self._damaged(body, rng), rng.choice([codec, codec, 0, 1, 2, 3, 4, 7])
        base, self.end = self.end, self.end + count
        values = (
            base,
            HEADER.size - 12 + len(body),
            0,
            2,
            0,
            attributes | 8,
            count - 1,
            now,
            now,
            -1,
            -1,
            -1,
        )
        self.log.append((base, count, HEADER.pack(*values, count) + body))

    def _damaged(self, body: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.1:
            return zstandard.ZstdCompressor(write_content_size=False).compress(
                bytes(rng.choice([2**20, 2**26]))
            )
        data = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(min(len(data), rng.choice([8, 80, 10**9])))
            data[at : at + rng.randint(0, 3)] = rng.choice([rng.randbytes(2), b"\xff" * 9 + b"\x01", b"\x00"])
        return bytes(data)

    def _fetch(
        self, layout: Layout, places: Sequence[Place], reading: Reading, limit: int
    ) -> dict[int, bytes]:
        position, found = reading.at(layout.name(0)), b""
        for base, count, raw in self.log:
            if base + count <= position:
                continue
            if found and len(found) + len(raw) > limit:
                break  # as a broker does: what comes after it must not be given before it
            found += raw
        return {0: found}

    def forget(self) -> None:
        """Retention takes all."""
        self.log.clear()


class SqliteCarrier:
    """The embedded bus's file, written by who does not use the bus's own code."""

    def __init__(self, path: Path) -> None:
        self.path, self.bus = path, SqliteBus(path)
        self.bus.end_positions()

    def put(self, messages: Sequence[Message], rng: random.Random) -> list[float]:
        """Rows with what an envelope says, of whatever type; some with stamps of their own."""
        now = time.time()
        stamps: list[Any] = [self._stamp(message, rng, now) for message in messages]
        with sqlite3.connect(self.path) as db:
            (following,) = db.execute("SELECT next FROM bus").fetchone()
            for number, (message, stamp) in enumerate(zip(messages, stamps, strict=True)):
                found = message.envelope
                row = (found.group_id, found.content_sha256, found.key, found.signature, found.payload)
                db.execute("INSERT INTO log VALUES (?, ?, ?, ?, ?, ?, ?)", (following + number, stamp, *row))
            db.execute("UPDATE bus SET next = ?, stamp = ?", (following + len(messages), now))
        db.close()
        return [min(stamp, time.time()) if isinstance(stamp, float) else now for stamp in stamps]

    def forget(self) -> None:
        """Retention takes all."""
        self.bus.trim(0)

    def _stamp(self, message: Message, rng: random.Random, now: float) -> Any:
        if message.kind in ("mutant", "tree", "rewritten") and rng.random() < 0.1:
            return rng.choice([now - 3000, now - 4000, 0.0, -1e300, now + 10, 1e300, 9e999, "noon", b"\xff"])
        return now


class Archive:
    """The archive of a carrier's bus, with the oracle beside it."""

    def __init__(self, grounds: Grounds, carrier: Carrier, folder: Path) -> None:
        self.rules, self.store = grounds.rules(), Store(str(folder))
        self.archiver = Archiver(carrier.bus, self.store, grounds.home.load_manifest())
        self.groups = 0
        self._read: set[str] = set()
        self._held: set[str] = set()

    def take(self, messages: Sequence[Message]) -> None:
        """Archive what is on the bus, and look at what became rows."""
        done = self.archiver.run()
        sent = {str(m.envelope.content_sha256): m for m in messages}
        rows = self._new_rows()
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault(row["content_sha256"], []).append(row)
        for digest, own in groups.items():
            message = sent[digest]
            wrong = flaw(message.envelope, self.rules, own[0]["published_at"])
            assert wrong is None, f"archived a group though {wrong}: {message.hex}"
            assert group_of(own).canonical().encode() == message.envelope.payload, message.hex
            assert own[0]["group_id"] not in self._held, f"archived twice: {message.hex}"
            self._held.add(own[0]["group_id"])
        lost = [m.hex for m in messages if m.honest and m.envelope.group_id not in self._held]
        assert not lost, f"not archived: {lost[0]}"
        assert done.groups == len(groups)
        assert done.passed == done.groups + done.duplicates + done.refused == len(messages)
        self.groups += done.groups

    def _new_rows(self) -> list[dict[str, Any]]:
        files = set(self.store.open("rollouts").file_uris())
        fresh, self._read = files - self._read, files
        return [row for file in sorted(fresh) for row in pq.read_table(file).to_pylist()]


@contextmanager
def trial(grounds: Grounds, carrier: Carrier, name: str) -> Iterator[Trial]:
    """A node that reads a carrier's bus."""
    with open_node(grounds.config, grounds.home, name, bus=carrier.bus, deliver=False, timed=False) as node:
        yield Trial(grounds, carrier, node)


def real_messages(grounds: Grounds) -> list[Message]:
    """The real groups as they were published."""
    return [Message("real", enveloped(one), honest=True) for one in grounds.real]


def served(
    grounds: Grounds, name: str, count: int, number: int, control: Sequence[str] = CONTROL
) -> Iterator[list[Message]]:
    """`count` messages in rounds of `PER_ROUND`; the JSON in them is hypothesis's. All is of one seed."""
    stock: list[Any] = []

    def tree() -> Any:
        return stock.pop() if stock else None

    kitchen = grounds.kitchen(number, tree, name, control)
    for turn in range(-(-count // PER_ROUND)):
        stock.extend(made_up(number + turn, PER_ROUND // 8))
        yield [kitchen.draw() for _ in range(min(PER_ROUND, count - turn * PER_ROUND))]


def made_up(number: int, count: int) -> list[Any]:
    """So many JSON values of hypothesis's own making."""
    found: list[Any] = []

    @seed(number)
    @settings(max_examples=1, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.lists(JSON_TREES, min_size=count, max_size=count))
    def draw(values: list[Any]) -> None:
        found.extend(values)

    draw()
    return found
