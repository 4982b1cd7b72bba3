"""What lineage answers, as frozen records; `dataclasses.asdict` makes the JSON of `sapo lineage --json`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Fate = Literal["learned", "undone", "skipped", "no advantage"]
"""What came of a group in a batch."""
LinkState = Literal["agrees", "differs", "missing", "unknown"]
"""Missing: the version has no such tag. Unknown: the history holds nothing to compare with."""


# -- a group ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Author:
    """Who wrote a group; what no row of it has is None."""

    node: str | None
    key: str | None
    incarnation: str | None = None
    round: int | None = None
    policy_version: int | None = None
    created_at: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """What a group answers."""

    dataset: str
    config: str
    seed: int
    index: int
    question: str


@dataclass(frozen=True, slots=True)
class Published:
    """When and where a group came onto the bus."""

    at: float
    bus_position: str
    content_sha256: str
    signature: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion, with what its author claims of it."""

    k: int
    text: str
    finish_reason: str
    claimed_score: float | None


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A copy that the archive kept apart, and why."""

    reason: str
    detail: str
    found_at: float
    bus_position: str
    content_sha256: str


@dataclass(frozen=True, slots=True)
class Received:
    """One node's receipt: when, in which of its rounds, and what became of the group there.

    `became` is None while the group waits in the pool, or if the node has stopped.
    """

    node: str
    incarnation: str
    received_at: float
    published_at: float | None
    round: int
    became: str | None = None
    became_round: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One completion's part in a batch; `trained` if it moved the weights."""

    k: int
    outcome: str
    score: float | None
    advantage: float
    retokenised: bool
    tokens: int
    trained: bool


@dataclass(frozen=True, slots=True)
class HoldingVersion:
    """A model version whose weights have seen the group: the first one, the champion, or both."""

    name: str
    number: int
    rounds: int
    registered_at: float
    first: bool
    champion: bool


@dataclass(frozen=True, slots=True)
class Learned:
    """A batch that the group was in: whose, when, and what came of it."""

    node: str
    incarnation: str
    round: int
    source: str
    fate: Fate
    skipped: str | None
    age_s: float | None
    finished_at: float
    tokens: int
    completions: Sequence[Part]
    versions: Sequence[HoldingVersion]


@dataclass(frozen=True, slots=True)
class MlflowState:
    """Where MLflow is; `away` is why it did not answer, None if it did."""

    uri: str
    away: str | None


@dataclass(frozen=True, slots=True)
class Journey:
    """A group's life, from its author to the model versions it is in."""

    kind: Literal["group"]
    reference: str
    swarm: str
    group_id: str
    author: Author
    task: Task | None
    published: Published | None
    completions: Sequence[Answer]
    quarantine: Sequence[Quarantined]
    received: Sequence[Received]
    learned: Sequence[Learned]
    mlflow: MlflowState
    notes: Sequence[str]
    problems: Sequence[str]


# -- a model version, or a node ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """The model version that is asked about."""

    name: str
    number: int
    aliases: Sequence[str]
    registered_at: float
    pass_at_1: float | None


@dataclass(frozen=True, slots=True)
class Rollback:
    """A round that went back to the weights after round `to`."""

    round: int
    to: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the rounds before `count` did; `cut` is how many of the first are not in the history any more."""

    count: int
    learned: int
    skipped: int
    skipped_because: dict[str, int]
    rolled_back: int
    rollbacks: Sequence[Rollback]
    without_groups: int
    cut: int


@dataclass(frozen=True, slots=True)
class ConfigSpan:
    """A config's digest, with the first and last round it was in force."""

    digest: str | None
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Digests:
    """The digests that name the weights and what made them; None if the history has none."""

    weights_sha256: str | None
    chain: str | None
    batch: str | None
    config: str | None
    configs: Sequence[ConfigSpan]


@dataclass(frozen=True, slots=True)
class HistoryState:
    """Where the history lies, and its table's version: now, and when the model version was registered."""

    uri: str
    registered_uri: str | None
    version: int | None
    registered_version: int | None


@dataclass(frozen=True, slots=True)
class Sums:
    """What some groups taught. Completions and tokens are those with an advantage in steps that last.

    `share` is of all tokens, `advantage` the mean of its absolute value, `age_s` the median.
    """

    groups: int
    informative: int
    completions: int
    tokens: int
    share: float
    advantage: float | None
    age_s: float | None
    policy_versions: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class TaughtByPeer(Sums):
    """What one author taught; `source` is "local" for the node itself."""

    source: str
    producer: str
    producer_key: str


@dataclass(frozen=True, slots=True)
class TaughtByTask(Sums):
    """What one data set taught, own groups and foreign ones apart."""

    source: str
    dataset: str


@dataclass(frozen=True, slots=True)
class TaughtByBoth(TaughtByPeer):
    """What one author taught with one data set."""

    dataset: str


@dataclass(frozen=True, slots=True)
class PeerTokens:
    """Tokens of one author in each stretch of rounds."""

    source: str
    producer: str
    producer_key: str
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class When:
    """Who taught when: stretches of rounds (first, last), and rounds that taught nothing in the end."""

    stretches: Sequence[Sequence[int]]
    peers: Sequence[PeerTokens]
    skipped: Sequence[int]
    rolled_back: Sequence[int]


@dataclass(frozen=True, slots=True)
class Link:
    """A tag of the version beside what the history holds."""

    link: str
    version: str | None
    history: str | None
    state: LinkState


@dataclass(frozen=True, slots=True)
class Teachers:
    """Which peers, tasks and rounds taught a node's weights."""

    kind: Literal["node", "version"]
    reference: str
    swarm: str
    node: str
    incarnation: str
    version: VersionFacts | None
    rounds: Coverage
    digests: Digests
    history: HistoryState
    totals: Sums
    peers: Sequence[TaughtByPeer]
    tasks: Sequence[TaughtByTask]
    flows: Sequence[TaughtByBoth]
    when: When
    links: Sequence[Link]
    notes: Sequence[str]
    problems: Sequence[str]
