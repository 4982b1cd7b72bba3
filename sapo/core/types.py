"""The frozen records that flow through a round: wire types, batch types and their canonical bytes.

Everything is validated when it is constructed; nothing is changed afterwards. The schema version travels
with every group, so that a reader knows what it holds before it interprets it.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, model_validator

SCHEMA_VERSION = 3
"""Of groups and manifests. The next version may only add optional fields: to a group, to its completions, to
the manifest. So a release reads all versions up to the one after its own, and a swarm's sites need not change
to a new release at the same time."""
MAX_SEED = 2**31
"""Seeds plus indices stay below this: `pool_matrix` fails at 2**32, and NumPy wants 32 bits."""
MAX_QUESTION = 65_536
"""Characters of a question that peers take. The longest of ReasoningGYM are those of `arc_agi`, some 10,000
with default parameters."""

Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_FIELD = 2**255 - 19
_ORDER_8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
_SMALL_ORDER = frozenset({0, 1, _FIELD - 1, _ORDER_8, _FIELD - _ORDER_8})
"""The y-coordinates of edwards25519's eight points whose order divides the cofactor, the list of libsodium's
`ge25519_has_small_order` (RFC 7748, section 7): under such a key one signature fits all texts."""


def is_sound_key(key: str) -> bool:
    """Whether 64 hex digits may be an Ed25519 public key: no small order, and y below 2**255 - 19 (RFC 8032,
    section 5.1.3), so that a point has one name. With the sign bit that is all 14 encodings of small order.
    """
    y = int.from_bytes(bytes.fromhex(key), "little") & (2**255 - 1)
    return y < _FIELD and y not in _SMALL_ORDER


def _sound(key: str) -> str:
    if not is_sound_key(key):
        raise ValueError(
            f"{key} is a weak key, under which anybody can sign; give what `sapo keys show` prints"
        )
    return key


PublicKey = Annotated[Hex64, AfterValidator(_sound)]
"""An Ed25519 public key that identifies an author."""
Hex128 = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Incarnation = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Count = Annotated[int, Field(ge=0, lt=2**31)]
"""Peers choose some of these numbers; more than 31 bits fits no table, engine or vocabulary."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]


def _readable(version: int) -> int:
    """Refuse a schema version that is more than one ahead of this release's."""
    last = SCHEMA_VERSION + 1
    if not 1 <= version <= last:
        raise ValueError(f"this release reads schema versions 1 to {last}")
    return version


SchemaVersion = Annotated[int, AfterValidator(_readable)]
FinishReason = Literal["stop", "length"]
Source = Literal["local", "external"]
AuthorKind = Literal["policy", "api", "command", "person"]
"""Who wrote a group: a policy that learns, a model behind an endpoint, a program, or people."""
AUTHOR_KINDS: tuple[AuthorKind, ...] = get_args(AuthorKind)


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical(value: Any) -> str:
    """JSON with sorted keys, no spaces, UTF-8 as is and no NaN: equal values give equal text."""
    return _ENCODER.encode(value)


def _canonical(text: str) -> str:
    """Refuse what is not the canonical JSON of an object: others would read it another way."""
    try:
        same = canonical(json.loads(text)) == text and text.startswith("{")
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise ValueError("must be a JSON object in canonical form")
    return text


CanonicalObject = Annotated[str, AfterValidator(_canonical)]


def sha256(data: bytes | str) -> str:
    """Hex SHA-256 of bytes, or of a text's UTF-8."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def chained(before: str | None, batch_digest: str) -> str:
    """Digest of a whole history of batches: of all up to `before` (None: there are none), and of one more."""
    return sha256((before or "") + batch_digest)


def unset(value: object) -> bool:
    """For `exclude_if` of a field that came later: unset it is left out, so that digests stay what they were
    and earlier releases read what is written."""
    return value is None


class Record(BaseModel):
    """A frozen, strict record that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    ADDED: ClassVar[Mapping[str, int]] = {}
    """Fields that came after schema version 1, with the version that added them; earlier groups lack them."""

    def canonical(self) -> str:
        """The record as canonical JSON text."""
        return canonical(self.model_dump(mode="json"))

    def digest(self) -> str:
        """Hex SHA-256 of the canonical JSON."""
        return sha256(self.canonical())


class Recipe(Record):
    """Enough to regenerate a question, its answer and its verifier, bit for bit.

    `config` is the data set's parameters as canonical JSON text (without `seed`); `index` counts inside
    the data set seeded with `seed`.
    """

    dataset: Annotated[str, Field(min_length=1, max_length=100)]
    config: Annotated[CanonicalObject, Field(max_length=20_000)] = "{}"
    seed: Count
    index: Count

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.seed + self.index >= MAX_SEED:
            raise ValueError("seed + index must stay below 2**31")
        return self

    @classmethod
    def make(cls, dataset: str, params: dict[str, Any], seed: int, index: int = 0) -> Self:
        """A recipe from a plain dictionary of parameters."""
        return cls(dataset=dataset, config=canonical(params), seed=seed, index=index)

    @property
    def params(self) -> dict[str, Any]:
        """The data set's parameters as a fresh dictionary."""
        result: dict[str, Any] = json.loads(self.config)
        return result


class Question(Record):
    """A regenerated question, with the digest that decides whether it is held out."""

    recipe: Recipe
    text: str
    bucket: Annotated[float, Field(ge=0, lt=1)]
    """Where the salted hash of the normalised question falls in [0, 1)."""


class Outcome(Record):
    """The verifier's outcome for one text: a raw task score, or why there is none (never a bare float)."""

    outcome: Literal["score", "unscorable"]
    score: float | None = None
    reason: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.outcome == "score") != (self.score is not None):
            raise ValueError("a score goes with outcome 'score' and with nothing else")
        if self.outcome == "unscorable" and not self.reason:
            raise ValueError("an unscorable outcome needs a reason")
        return self

    @classmethod
    def scored(cls, score: float) -> Self:
        """A text the verifier gave a score to."""
        return cls(outcome="score", score=float(score))

    @classmethod
    def unscorable(cls, reason: str) -> Self:
        """A text the verifier could not score; it never counts as zero."""
        return cls(outcome="unscorable", reason=reason)


class Completion(Record):
    """One answer of one policy. Text is the contract; ids and log-probabilities are an optimisation. In a
    group of a newer schema version it may have further fields, which are kept (`model_extra`)."""

    model_config = ConfigDict(extra="allow")

    text: str
    finish_reason: FinishReason
    token_ids: Annotated[tuple[Count, ...] | None, FailFast()] = None
    """Completion ids in the producer's vocabulary, with the final stop token when `finish_reason` is stop."""
    logprobs: Annotated[tuple[float, ...] | None, FailFast()] = None
    """Log-probability of `token_ids[i]` under the producer, at its sampling temperature."""
    claimed_score: float | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.logprobs is not None and (
            self.token_ids is None or len(self.logprobs) != len(self.token_ids)
        ):
            raise ValueError("logprobs need token_ids of the same length")
        return self


def shown(text: str, finish_reason: FinishReason | str) -> str:
    """An answer as it is shown to people: marked where the length limit cut it off."""
    return f"{text} [cut off]" if finish_reason == "length" else text


class Sampling(Record):
    """How completions were sampled; ratios to the producer mean nothing without it."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def whole_support(self) -> bool:
        """Whether every token could have been drawn."""
        return self.top_p == 1.0 and self.top_k == 0 and self.min_p == 0.0


class Invitation(Record):
    """A member's word that a key may publish until a moment; what a holder puts into its groups."""

    inviter: Hex64
    """Public key of the member."""
    until: Annotated[int, Field(ge=0, lt=2**33)]
    """Unix seconds."""
    signature: Hex128
    """The inviter's, over swarm, invited key and `until`."""


class Group(Record):
    """One recipe and the L completions one policy version gave to it: the unit of exchange.

    `policy_version` counts the rounds the policy had finished when it wrote the completions. Fields of a
    newer schema version are kept and otherwise ignored: the signature covers them, the history holds them.
    """

    model_config = ConfigDict(extra="allow")

    schema_version: SchemaVersion = SCHEMA_VERSION
    swarm: Name
    node: Name
    key: Hex64
    incarnation: Incarnation
    round: Count
    position: Count
    recipe: Recipe
    question: str
    completions: Annotated[tuple[Completion, ...], Field(min_length=2), FailFast()]
    policy_version: Count
    sampling: Sampling = Sampling()
    tokenizer: Annotated[str, Field(max_length=128)] | None = None
    """Fingerprint of the vocabulary `token_ids` belong to."""
    created_at: float
    """The producer's clock; receivers use the bus's time stamp instead."""
    invitation: Invitation | None = None
    """By which its author may publish, where the swarm's manifest asks for one."""
    author: AuthorKind | None = None
    """What kind of author wrote it, by the author's own word; None stands for a policy that learns."""
    ADDED: ClassVar[Mapping[str, int]] = {"invitation": 2, "author": 3}

    @model_validator(mode="after")
    def _check(self) -> Self:
        unknown = self.model_extra or any(completion.model_extra for completion in self.completions)
        if unknown and self.schema_version <= SCHEMA_VERSION:
            raise ValueError(f"it has fields that schema version {self.schema_version} does not have")
        return self

    def canonical(self) -> str:
        """The group as canonical JSON text, with the fields that its own schema version has."""
        values = self.model_dump(mode="json")
        parts = [(self, values), *zip(self.completions, values["completions"], strict=True)]
        for record, part in parts:
            for name, since in record.ADDED.items():
                if since > self.schema_version:
                    del part[name]
        return canonical(values)

    @property
    def kind(self) -> AuthorKind:
        """What kind of author wrote it."""
        return self.author or "policy"

    @property
    def group_id(self) -> str:
        """Hash of who made it and which place it has in their stream."""
        return group_id(self.swarm, self.key, self.incarnation, self.round, self.position, self.recipe)


def group_id(swarm: str, key: str, incarnation: str, round: int, position: int, recipe: Recipe) -> str:
    """The deterministic name of a group: hex SHA-256 over author, place and recipe."""
    place = [swarm, key, incarnation, round, position, recipe.model_dump(mode="json")]
    return sha256(canonical(place))


class SignedGroup(Record):
    """A group's exact payload bytes with digest and signature, as journalled, sent and resent."""

    group_id: Hex64
    content_sha256: Hex64
    key: Hex64
    signature: Hex128
    payload: bytes


class Received(Record):
    """A signed group as the bus delivered it: where it stood, and when by the bus's own clock."""

    signed: SignedGroup
    bus_position: str
    timestamp: float


class Sample(Record):
    """One completion of a batch, in the learner's own vocabulary. `token_ids` is prompt plus completion;
    `loss_mask[i]` is 1 where `token_ids[i]` is trained. Masks come from lengths, never from ids."""

    k: Count
    token_ids: tuple[Count, ...]
    loss_mask: tuple[Literal[0, 1], ...]
    text: str
    finish_reason: FinishReason
    outcome: Literal["score", "unscorable"]
    score: float | None
    advantage: float
    behaviour_logprobs: tuple[float, ...] | None = None
    """Per trained token: of local samples the engine's (its gap to the learner's is a metric), of external
    ones the producer's, in foreign modes `behaviour` and `f_tis` only."""
    retokenised: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.token_ids) != len(self.loss_mask):
            raise ValueError("loss_mask must be as long as token_ids")
        if self.loss_mask and self.loss_mask[0]:
            raise ValueError("the first token has no log-probability and cannot be trained")
        if self.behaviour_logprobs is not None and len(self.behaviour_logprobs) != sum(self.loss_mask):
            raise ValueError("behaviour_logprobs must be one per trained token")
        if not math.isfinite(self.advantage):
            raise ValueError("advantage must be finite")
        return self


class BatchGroup(Record):
    """A group as it enters an update: verified, tokenised, with advantages."""

    position: Count
    """Place in the batch: local groups first, in their own order, then external ones as drawn."""
    group_id: Hex64
    content_sha256: Hex64
    source: Source
    producer: Name
    producer_key: Hex64
    producer_version: Count
    recipe: Recipe
    question: str
    age_s: float
    bus_position: str | None = None
    samples: tuple[Sample, ...]

    @property
    def informative(self) -> bool:
        """Whether any completion carries an advantage."""
        return any(sample.advantage != 0.0 for sample in self.samples)


class Batch(Record):
    """Everything one update depends on besides weights and optimiser state."""

    schema_version: Literal[1] = 1
    swarm: Name
    node: Name
    incarnation: Incarnation
    round: Count
    policy_version: Count
    learn: str
    """The `learn` section of the config in force, as canonical JSON: what replay needs to repeat the step."""
    guard: str = "{}"
    """The `guard` section in force, likewise: it decides whether a step is made."""
    temperature: float
    groups: tuple[BatchGroup, ...]


class Gossiped(Record):
    """What gossip did in a round: all that replay needs besides the partner's file.

    `begun` is true where the slow weights are the weights before the round, `stepped` where an outer step
    ended it. `partner` is the key of whom it averaged with, `file` the digest of their weights and `distance`
    how far they were; without a partner `reason` says why.
    """

    begun: bool = False
    offered: Hex64 | None = None
    """Digest of the weights that are announced."""
    offered_bytes: Annotated[int, Field(ge=0)] = 0
    stepped: bool = False
    alpha: float = 0.0
    beta: float = 0.0
    gamma: float = 0.0
    partner: Hex64 | None = None
    file: Hex64 | None = None
    distance: float | None = None
    share: float | None = Field(default=None, exclude_if=unset)
    """How much of the difference to the partner counted, where that was not all of it."""
    reason: str | None = None


class RoundResult(Record):
    """What a finished round reports; `weights_sha256` is empty where it was not computed."""

    round: int
    policy_version: int
    """After the round."""
    skipped: str | None = None
    """Why no optimiser step was made, if none was."""
    rolled_back_to: int | None = None
    """The checkpoint round whose weights and optimiser were loaded instead, by guard action `rollback`."""
    weights_sha256: str = ""
    tensors: tuple[int, ...] = ()
    """CRC-32 of every tensor under `weights_sha256`, in the order of their names: where it differs, which."""
    metrics: dict[str, float]
    finished_at: float
    remembered: str = ""
    """What the sampler measured so far, as JSON: the next round goes by it."""
    gossip: Gossiped | None = Field(default=None, exclude_if=unset)
