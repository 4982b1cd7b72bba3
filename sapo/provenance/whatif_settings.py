"""What a what-if changes: settings laid over each round's recorded ones, authors whose groups are left out,
and the batches that makes of them.

Only `learn.*` and `guard.*` shape an update; what was decided before it is in the recorded batches. Pure:
nothing is read or written here.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sapo.core.config.load import Config, literal, merge, nested, parse, split_flag
from sapo.core.config.schema import GuardConfig, LearnConfig, Section
from sapo.core.errors import UserError
from sapo.core.types import Batch, canonical
from sapo.learn.advantage import with_advantages
from sapo.peers.blocks import meant

SECTIONS: dict[str, type[Section]] = {"learn": LearnConfig, "guard": GuardConfig}
IN_ADVANTAGES = ("advantage", "std_floor", "zero_tolerance", "truncated")
"""Settings of `learn` that took effect before a batch was recorded: its advantages are worked out again."""
NO_LIMIT = 1e9
"""For a threshold in nats that nothing passes."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Settings that rounds were recorded under, as canonical JSON, and the foreign authors of their batches.
    `authors` maps each author's node name and public key to the first such round."""

    learn: str
    guard: str
    authors: Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class Settled:
    """Changes that fit all rounds: `config` is the node's with them, as it is at the last of the rounds.

    `values` has every changed key with its value as text, `unchanged` the keys that say what was so anyway,
    `without` the names of the authors that are left out by their public keys.
    """

    config: Config
    values: dict[str, str]
    unchanged: tuple[str, ...]
    without: dict[str, str]

    @property
    def label(self) -> str:
        """The changes as a person would type them."""
        sets = [f"{key}={value}" for key, value in self.values.items()]
        return " ".join([*sets, *(f"without {name}" for name in self.without.values())])


class Changes:
    """The `key=value` settings of a what-if, and the authors it is `without`; `config` is the node's own.
    Raises `UserError` for a key that does not shape the updates of this node, or a value it never has."""

    def __init__(self, config: Config, node: str, sets: Sequence[str], without: Sequence[str] = ()) -> None:
        if not sets and not without:
            raise UserError("--set", None, "nothing is to be changed", "name a setting, like learn.lr=1e-5")
        self._config = config
        self._without, self._left_out = without, frozenset[str]()
        self._over: dict[str, Any] = {}
        self._keys: dict[str, None] = {}
        self._made: dict[tuple[str, str], Config] = {}
        for item in sets:
            key, text = split_flag(item)
            path = _path(key, text, config, node)
            self._over = merge(self._over, nested(path, literal(text)))
            self._keys[".".join(path)] = None
        try:
            self.over(config.learn.model_dump_json(), config.guard.model_dump_json())
        except UserError as error:
            # how settings go together is for the recorded ones to say
            if error.field in self._keys:
                raise

    @property
    def named(self) -> set[object]:
        """The losses and epochs that were named on purpose."""
        over = self._over.get("learn", {})
        return {value for key in ("loss", "epochs") if isinstance(value := over.get(key), str | int)}

    def over(self, learn: str, guard: str) -> Config:
        """The node's config with the changes over recorded sections. Raises `UserError` where they clash."""
        if (learn, guard) not in self._made:
            values = self._config.model_dump(mode="json")
            # the engine that is compared with the learner sampled the recorded policy, not this one
            recorded = {"learn": json.loads(learn), "guard": json.loads(guard) | {"max_engine_gap": NO_LIMIT}}
            self._made[learn, guard] = parse(merge(values | recorded, self._over))
        return self._made[learn, guard]

    def settle(self, recorded: Sequence[Recorded]) -> Settled:
        """Lay the changes over everything that was recorded, in the order of rounds: `batch` needs it.

        Raises `UserError` where a change gives no valid settings for some round, or asks for what is not in
        the history.
        """
        if not recorded:
            remedy = "choose others with --from and --to"
            raise UserError("--from", None, "no batch of these rounds has any group", remedy)
        self._check_trusted(recorded)
        without = authors_named(self._without, {author for part in recorded for author in part.authors})
        self._left_out = frozenset(without)
        changed: set[str] = set()
        for part in recorded:
            config = self.over(part.learn, part.guard)
            _check_told(config.learn, part)
            before = {"learn": json.loads(part.learn), "guard": json.loads(part.guard)}
            for key in self._keys:
                section, name = key.split(".")
                # a setting that an earlier release did not record had its default
                if _value(config, key) != getattr(SECTIONS[section].model_validate(before[section]), name):
                    changed.add(key)
        last = self.over(recorded[-1].learn, recorded[-1].guard)
        texts = {key: _text(_value(last, key)) for key in self._keys}
        return Settled(last, texts, tuple(key for key in self._keys if key not in changed), without)

    def _check_trusted(self, recorded: Sequence[Recorded]) -> None:
        """Refuse to trust only those who taught the node nothing: that would change nothing."""
        trusted = self._over.get("learn", {}).get("trusted_peers")
        names = sorted({name for part in recorded for name, _ in part.authors})
        keys = {key for part in recorded for _, key in part.authors}
        if isinstance(trusted, list) and trusted and not {*names, *keys} & {*map(str, trusted)}:
            problem = "none of them taught the node in these rounds"
            remedy = f"those who did are {', '.join(names)}" if names else "nobody did: choose other rounds"
            raise UserError("learn.trusted_peers", trusted, problem, remedy)

    def batch(self, recorded: Batch) -> Batch:
        """The recorded batch under the changed settings, without the groups of those left out."""
        config = self.over(recorded.learn, recorded.guard)
        before = LearnConfig.model_validate(json.loads(recorded.learn))
        groups = tuple(one for one in recorded.groups if one.producer_key not in self._left_out)
        if any(getattr(before, name) != getattr(config.learn, name) for name in IN_ADVANTAGES):
            groups = tuple(with_advantages(group, config.learn) for group in groups)
        settings = {name: canonical(getattr(config, name).model_dump(mode="json")) for name in SECTIONS}
        return recorded.model_copy(update={**settings, "groups": groups})


def authors_named(wanted: Sequence[str], authors: Collection[tuple[str, str]]) -> dict[str, str]:
    """Names of the authors that are meant, by public key; each is `wanted` by key, a beginning of that, or
    name.

    `authors` are names with keys. Raises `UserError` where one is not among them, or several are meant.
    """
    found: dict[str, str] = {}
    names = {key: sorted(name for name, its in authors if its == key) for _, key in authors}
    for text in wanted:
        keys = meant(text, names)
        if len(keys) != 1:
            problem = f"means {len(keys)} authors" if keys else "taught the node nothing in these rounds"
            those = sorted((name, key) for name, key in authors if key in keys or not keys)
            there = ", ".join(f"{name} ({key if keys else key[:16]})" for name, key in those)
            said = f"name one by its key: {there}" if keys else f"those who did are {there}"
            raise UserError("--without", text, problem, said if there else "nobody did: choose other rounds")
        found[keys[0]] = names[keys[0]][-1]
    return found


def _path(key: str, text: str, config: Config, node: str) -> list[str]:
    """Section and name of a key. Raises `UserError` where it shapes no update of this node."""
    path = key.split(".")
    if path[0] == "node" and len(path) > 2:
        if path[1] != node.removeprefix(config.swarm.site):
            raise UserError(key, text, f"is of another node than {node}", f"leave out node.{path[1]}.")
        path = path[2:]
    if path in (["guard", "action"], ["guard", "falling_probes"]):
        why = "a what-if neither probes, pauses nor rolls back: an alarm leaves the step out"
        raise UserError(key, text, why, "set the threshold instead, like guard.min_entropy=0.1")
    if path[0] in SECTIONS and len(path) == 2:
        return path
    if path[0] in SECTIONS:
        raise UserError(key, text, "is no single setting", f"name one, like {path[0]}.NAME=VALUE")
    parse(nested(path, literal(text)))  # an unknown key is said with its nearest known one
    remedy = "change learn.* or guard.*, or begin another swarm with this setting"
    raise UserError(key, text, "shapes no update", remedy)


def _check_told(learn: LearnConfig, part: Recorded) -> None:
    """Refuse a mode that needs log-probabilities for authors whose are not in the history."""
    if not learn.believes:
        return
    before = LearnConfig.model_validate(json.loads(part.learn))
    told = set(before.trusted_peers) if before.believes else set()
    for author, first in part.authors.items():
        if {*author} & {*learn.trusted_peers} and not {*author} & told:
            problem = (
                f"the history has no log-probabilities of {author[0]} in round {first}: "
                "they are recorded only in rounds whose mode needs them and trusted their author"
            )
            remedy = "choose positive, as_if_own or bounded, or rounds that ran so with --from and --to"
            raise UserError("learn.foreign", learn.foreign, problem, remedy)


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else canonical(value)
