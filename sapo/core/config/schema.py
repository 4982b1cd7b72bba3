"""The sections of a config: frozen models that refuse unknown keys. `sapo.core.config.load` joins and reads
them."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from sapo.core.answer_format import AnswerFormat
from sapo.core.config.patterns import OWN_CODE, PACKAGE, VERSION
from sapo.core.traits import checked
from sapo.core.types import AUTHOR_KINDS, AuthorKind, PublicKey, Sampling, unset

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
SecretRef = Annotated[str, Field(pattern=r"^(env:[A-Za-z_][A-Za-z0-9_]*|file:.+|prefect:[a-z0-9-]+)$")]
"""Where a secret is found: an environment variable, a file, or a Secret block of Prefect's. Never itself."""
OwnCode = Annotated[str, Field(pattern=OWN_CODE)]
"""`module:function` of an installed package ([extending](extending.md))."""


def _without_password(address: str | None) -> str | None:
    """Refuse an address with a password inside: configs are printed, logged and stored."""
    if address is not None and re.match(r"^[A-Za-z][A-Za-z0-9+.-]*://[^/@]*:[^/@]*@", address):
        raise ValueError("an address with a password inside would be logged; give it in the environment")
    return address


def _servers(text: str) -> str:
    if re.fullmatch(r"[^\s,:/@]+:[0-9]+(,[^\s,:/@]+:[0-9]+)*", text) is None:
        raise ValueError("must be host:port, or several of them joined by commas")
    return text


Address = Annotated[str, AfterValidator(_without_password)]


class Section(BaseModel):
    """A part of the config; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


FILE = "file:"
"""What the names of sources begin with that are rows of a file."""


class Pin(Section):
    """The very code of a task source: every site of a swarm has the same."""

    package: Annotated[str, Field(pattern=PACKAGE)]
    """The installed package."""
    version: Annotated[str, Field(pattern=VERSION)]
    """Its version."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Over the package's Python files."""


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("must be of printable characters")
    return name


SourceName = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_printable)]


class Task(Section):
    """A source of questions with its parameters, drawn with probability proportional to `weight`."""

    dataset: SourceName
    """A data set of ReasoningGYM, or a source of an installed package: the name of its entry point of the
    group `sapo.tasks`, or `module:Class`. With `file`, `file:NAME`, by default of the file's own name."""
    file: str | None = Field(default=None, exclude_if=unset)
    """Rows of one's own to ask, a .parquet, .jsonl or .csv file; `config` names its columns and scorer."""
    config: dict[str, Any] = {}
    """Its parameters, by the source's names for them; what is left out keeps the source's default."""
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """How often it is drawn, relative to the other tasks: 2 is twice as often as 1, 0 leaves it to others."""
    pin: Pin | None = Field(default=None, exclude_if=unset)
    """The code of a source that is not ReasoningGYM's, by `package`, `version` and `sha256`; found out when a
    swarm begins, if not set."""

    @model_validator(mode="before")
    @classmethod
    def _named_after_file(cls, values: Any) -> Any:
        """A file's rows are named after the file."""
        if isinstance(values, dict) and isinstance(file := values.get("file"), str):
            return {"dataset": f"{FILE}{Path(file).stem}", **values}
        return values

    @model_validator(mode="after")
    def _check_file(self) -> Self:
        if self.file is not None and not self.dataset.startswith(FILE):
            raise ValueError(f"rows of a file are named {FILE}NAME, not {self.dataset}")
        return self


class Rules(Section):
    """What every node of the swarm must agree on, besides the tasks; part of the manifest."""

    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of all questions that are held out from training."""
    salt: str = "sapo"
    """Mixed into the hash that decides which questions are held out: another salt holds out others."""
    answer: AnswerFormat = "text"
    """`tags` scores the content of the last `<answer>` tag only, `boxed` that of the last `\\boxed{}`, as
    mathematical models answer; `text` the whole text."""
    questions: Literal["drawn", "any"] = "drawn"
    """Which questions may be answered: those that an author's key and round draw, or `any`: then who picks
    questions of one answer teaches that answer. A swarm that has begun keeps its rule."""
    min_completions: Annotated[int, Field(ge=2)] = 2
    """The fewest completions a group may have; smaller ones are refused."""
    max_completions: Annotated[int, Field(ge=2)] = 64
    """The most completions a group may have; larger ones are refused."""
    max_text_chars: PositiveInt = 16_384
    """The longest completion that may be published, or taken from a peer, in characters."""
    max_payload_bytes: Annotated[int, Field(ge=1, le=4_000_000)] = 1_000_000
    """Of a group as it travels; a bus reads no record that is larger than any swarm may allow."""
    entry: Literal["open", "allow-list", "invite"] = "open"
    """Who may publish: anybody, `members`, or `members` and those who hold an invitation of one of them."""
    members: list[PublicKey] = []
    """Public keys (`sapo keys show`). The list may change while the swarm runs; the way of entry may not."""
    authors: Annotated[
        list[AuthorKind], Field(min_length=1, exclude_if=lambda kinds: {*kinds} == {*AUTHOR_KINDS})
    ] = list(AUTHOR_KINDS)
    """Which kinds of author may publish: policies that learn, and [members](members.md) that only answer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.entry == "open" and self.members:
            raise ValueError('members mean nothing with entry = "open"')
        if self.entry != "open" and not self.members:
            raise ValueError(
                f'entry = "{self.entry}" needs members: the public keys that `sapo keys show` prints'
            )
        if len(set(self.authors)) < len(self.authors):
            raise ValueError("authors names a kind twice")
        return self


class Lora(Section):
    """Train a low-rank adapter instead of the weights; checkpoints then hold the adapter only."""

    rank: PositiveInt = 8
    """Rank of the adapter's matrices: a higher one can learn more and takes more memory."""
    alpha: PositiveFloat = 16.0
    """The adapter's output is multiplied by alpha / rank."""
    dropout: Literal[0] = 0
    """Only 0: with dropout, replay could not repeat an update."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an adapter; `all-linear` is every linear layer but the output."""


class Starter(Section):
    """How the starter policy is made; equal values share one cached copy."""

    variant: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")] = "small"
    """Its shape: `narrow`, `small`, `wide`, `numbers` (frequent numbers are tokens), `bytes` (no others)."""
    steps: PositiveInt = 600
    """Supervised steps it is taught for."""
    batch: PositiveInt = 64
    """Questions in each of these steps."""
    lr: PositiveFloat = 3e-3
    """Learning rate of these steps."""
    bare: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the supervised answers that are bare; the others are sentences, which score little."""
    seed: int = 0
    """Its weights and questions follow from it, independent of `swarm.seed`."""


class BatchConfig(Section):
    """The paper's letters: I local and J external groups a round, L completions each."""

    local: PositiveInt = 4
    """I: own groups in a batch."""
    external: Annotated[int, Field(ge=0)] = 4
    """J: foreign groups in a batch; 0 is a silo."""
    completions: Annotated[int, Field(ge=2)] = 8
    """L: completions of one question."""
    questions: PositiveInt | None = None
    """B: questions answered a round; I when not set. More than I lets SampleSelf choose."""
    choose: Literal["any", "informative"] = "any"
    """How SampleSelf takes I of B own groups: any of them, or first those whose scores differ."""
    sampler: Literal["uniform", "fresh"] | OwnCode = "uniform"
    """How SampleExternal draws from the pool: at random, the freshest of twice J ([adaptive
    sampling](adaptive.md)), or as `module:function` of an installed package orders it
    ([extending](extending.md))."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.questions is not None and self.questions < self.local:
            raise ValueError("questions (B) must be at least local (I)")
        if self.choose == "informative" and self.b == self.local:
            raise ValueError('choose = "informative" needs more questions (B) than local (I) to choose from')
        return self

    @property
    def b(self) -> int:
        """B: questions answered a round."""
        return self.questions if self.questions is not None else self.local


class ShareConfig(Section):
    """SelectSubset: which of the own groups are published."""

    select: Literal["all", "fraction", "top"] = "all"
    """`top` scores own groups before publishing and sends the most informative ones."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the own groups that `fraction` and `top` publish, rounded up."""
    token_ids: bool = True
    """Send token ids and log-probabilities along with the text."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.select == "all" and self.fraction < 1.0:
            raise ValueError('a fraction below 1 goes with select = "fraction" or "top"')
        return self


class GenerateConfig(Section):
    """How completions are sampled."""

    engine: Literal["transformers", "vllm"] | OwnCode = "transformers"
    """What samples: the model itself through transformers, vLLM ([engines](engines.md)), or what
    `module:function` of an installed package opens ([extending](extending.md))."""
    max_new_tokens: PositiveInt = 256
    """The longest completion, in tokens; one that reaches it is cut off (`finish_reason` is `length`)."""
    temperature: PositiveFloat = 1.0
    """Above 1 samples more evenly, below 1 prefers likely tokens; log-probabilities are taken at it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample only from the likeliest tokens that together have this probability; 1 takes all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample only from this many likeliest tokens; 0 takes all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Leave out tokens less likely than this share of the likeliest one; 0 leaves none out."""
    ahead: Literal[0, 1] = 0
    """1 answers a round's questions while the node still learns from the round before: off by one update."""
    vllm_cache_gb: PositiveFloat = 1.0
    """Memory of vLLM's key-value cache."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.engine == "vllm" and self.top_p < 1 and self.min_p > 0:
            raise ValueError(
                "vLLM applies min_p before top_p, the transformers engine after it: choose one of them"
            )
        return self

    @property
    def sampling(self) -> Sampling:
        """The part that is stored with every group."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)


class PoolConfig(Section):
    """Bounds on the foreign groups a node keeps."""

    max_groups: PositiveInt = 512
    """The most foreign groups that are kept."""
    max_age_s: PositiveFloat = 3600.0
    """Groups older than this, in seconds by the bus's clock, are dropped unused."""
    max_peer_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """No author may hold more than this share of `max_groups`."""
    tail: PositiveInt = 256
    """Per bus partition, read no further back than this many groups."""
    poll_bytes: PositiveInt = 8_000_000
    """The most that one poll reads from the bus, in bytes."""
    newcomer_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share that all newcomers, authors not yet known, have together: of the pool's places, and of the time
    for verification. Each draw also verifies this share of J groups of theirs, so that they become known."""
    newcomer_groups: PositiveInt = 8
    """An author is known once so many of their groups were verified here and found informative."""
    verify_share: PositiveFloat = 0.6
    """Seconds that may go into admitting and verifying foreign groups, per second of the node's own work."""


class LearnConfig(Section):
    """The update: everything replay needs besides weights, optimiser state and batch."""

    loss: Literal["dapo", "grpo", "dr_grpo", "cispo", "gspo"] | OwnCode = "dapo"
    """The policy loss, or `module:function` of an installed package ([extending](extending.md)). With
    `epochs` = 1 the ratio is 1 and no clip acts."""
    lr: Annotated[float, Field(ge=0)] = 1e-6
    """0 learns nothing: what is measured is then the effect of selection alone."""
    decay_from: Annotated[int, Field(ge=0)] = 0
    """From this round on the learning rate is lr x sqrt(decay_from / round): steps that were right on the way
    up are too large for staying there. 0 keeps lr."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's decay of the mean squared gradient."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    grad_clip: PositiveFloat = 1.0
    """The gradient's norm is cut to this."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio of new to old probability is clipped to at least 1 - clip_low; `cispo` has no lower bound."""
    clip_high: PositiveFloat = 0.28
    """The ratio is clipped to at most 1 + clip_high."""
    gspo_clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """The same as `clip_low`, for `gspo`."""
    gspo_clip_high: PositiveFloat = 4e-4
    """`gspo` clips one ratio per sequence, a mean over its tokens, so its bounds are far narrower."""
    dr_grpo_length: PositiveInt = 256
    """`dr_grpo` divides by this many tokens for every completion of the batch, trained or not, however long
    it is: the swarm's max_new_tokens."""
    epochs: PositiveInt = 1
    """Optimiser steps made on one batch; from the second on the ratio leaves 1 and the clip acts."""
    advantage: Literal["centred", "mean_std"] = "centred"
    """`centred`: score minus the group's mean; `mean_std`: that, divided by the group's standard
    deviation."""
    std_floor: PositiveFloat = 1e-3
    """`mean_std` divides by no less than this; above it nothing is added to the deviation."""
    zero_tolerance: Annotated[float, Field(ge=0)] = 1e-6
    """A group whose raw scores spread no wider than this has zero advantage."""
    token_mean: Literal["informative", "all"] = "informative"
    """Whose tokens count in the mean of `dapo` and `cispo`, and whose completions in that of `grpo` and
    `gspo`: informative groups only, or all I + J (preset `paper`)."""
    foreign: Literal["positive", "positive_late", "as_if_own", "bounded", "behaviour", "f_tis"] = "positive"
    """How foreign completions enter the loss: `positive` takes those above their group's mean, which is what
    lasts when peers are late; `positive_late` does so for late groups only. `as_if_own` takes all, as the
    paper does; `bounded` masks improbable tokens; `behaviour` weighs by the ratio to the producing policy;
    `f_tis`, the paper's successor, does so too, and leaves out failures that are far from the own policy."""
    foreign_late: PositiveInt = 2
    """`positive_late`: a group is late if the policy that wrote it is more than so many rounds behind."""
    foreign_floor: Annotated[float, Field(lt=0)] = -7.0
    """`bounded`: foreign tokens below this own log-probability are masked."""
    foreign_weight: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What the loss of foreign tokens is multiplied by, in every mode."""
    foreign_bound: Literal["own", "none"] = "own"
    """What one foreign group may do to a step: no more than an `own` group does, in tokens and in the size of
    its gradient, or, as in the paper, whatever its length and its words do (`none`)."""
    foreign_credit: Literal["all", "floor", "useful"] = Field(
        default="all", exclude_if=lambda kind: kind == "all"
    )
    """Which tokens of a foreign completion are learned: `all`; with `floor` those among the own policy's
    `foreign_top_k`; with `useful` a line, sentence or step as far as it makes what follows it likelier."""
    foreign_top_k: PositiveInt = Field(default=50, exclude_if=lambda top_k: top_k == 50)
    """`foreign_credit = "floor"`: a token that so many others are likelier than is not learned."""
    foreign_reference: float | None = Field(default=None, exclude_if=unset)
    """Multiply the loss of a foreign completion by exp(its mean own log-probability - this), at most 1."""
    foreign_ratio_cap: Annotated[float, Field(gt=1)] = 3.0
    """`behaviour`: the ratio to the producer is truncated to [1/cap, cap]."""
    foreign_tis_cap: Annotated[float, Field(ge=1)] = Field(default=2.0, exclude_if=lambda cap: cap == 2.0)
    """`f_tis`: the ratio to the producer is truncated to at most this (C)."""
    foreign_tis_kl: Annotated[float, Field(ge=0)] = Field(default=50.0, exclude_if=lambda kl: kl == 50.0)
    """`f_tis`: a completion below its group's mean is left out if its KL to the producer, in nats a token, is
    above this (g)."""
    trusted_peers: list[str] = []
    """`behaviour`, `f_tis`: public keys whose log-probabilities are believed, and names of own nodes."""
    truncated: Literal["keep", "mask", "zero_reward"] = "keep"
    """What becomes of completions that hit the length limit."""
    micro_batch: PositiveInt | None = None
    """Sequences per forward pass; None takes the whole batch. The gradient is the same."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit` keeps its moments in 8 bits: a quarter of the memory. Changed in a run, they start anew."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, more time."""
    autocast: bool = False
    """Compute in bfloat16 while the weights stay in float32; pays where the hardware has bfloat16."""
    compile: bool = False
    """Compile the model with torch.compile: pays on an accelerator, after a slow first round."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.trusted_peers and not self.believes:
            raise ValueError('trusted_peers has a meaning only with foreign = "behaviour" or "f_tis"')
        if self.believes and not self.trusted_peers:
            raise ValueError(
                f'foreign = "{self.foreign}" needs trusted_peers: a peer must not choose its own denominator'
            )
        if self.compile and self.activation_checkpointing:
            raise ValueError(
                "compile and activation_checkpointing exclude each other: a compiled model chooses by itself "
                "what it computes again"
            )
        return self

    @property
    def believes(self) -> bool:
        """Whether `foreign` needs the log-probabilities of those who wrote."""
        return self.foreign in ("behaviour", "f_tis")

    def admits(self, advantage: float, staleness: int, *, told: bool) -> bool:
        """Whether `foreign` trains on a foreign completion at all, as far as is known before the update.

        `staleness` is in rounds: the receiver's own less those of the policy that wrote the completion. A
        policy that says it is ahead of the receiver's rounds counts as late: that is its author's word alone.
        `told` is whether there are log-probabilities of a trusted author, for the receiver's own token ids.
        """
        if self.foreign == "f_tis":
            return told
        if self.foreign == "positive_late" and 0 <= staleness <= self.foreign_late:
            return True
        return self.foreign not in ("positive", "positive_late") or advantage > 0.0


class GuardConfig(Section):
    """Thresholds past which learning has gone wrong, and what is done then."""

    action: Literal["skip", "pause", "rollback"] = "skip"
    """What a passed threshold does: `skip` this update, `pause` the node, or `rollback` to a checkpoint."""
    falling_probes: Annotated[int, Field(ge=0)] = 3
    """So many probes in a row that are below the node's best by more than chance pass a threshold, too: a
    warning, with `pause` a stop, with `rollback` a return to the best probe's weights. 0 looks at none."""
    min_entropy: Annotated[float, Field(ge=0)] = 0.0
    """Mean entropy, in nats, of all own tokens of the batch, those of groups without advantage too."""
    max_truncated: Share = 1.0
    """Share of own completions that were cut off by `generate.max_new_tokens`."""
    max_unscorable: Share = 0.5
    """Share of own completions that the verifier could not score."""
    min_foreign_logprob: Annotated[float, Field(le=0)] = -100.0
    """Mean own log-probability of foreign tokens."""
    max_engine_gap: PositiveFloat = 0.2
    """Mean distance, in nats, between the log-probabilities of own tokens in the engine and in the learner.
    `generate.ahead` adds one update to it."""


class CheckpointConfig(Section):
    """A checkpoint is a snapshot: how often, and how many are kept."""

    every_rounds: PositiveInt = 50
    """Take a checkpoint every so many rounds."""
    every_seconds: PositiveFloat = 600.0
    """Also take one when so many seconds have passed since the last."""
    max_share: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Share of a node's time that checkpoints of `every_seconds` may take: after one that took t seconds the
    next waits t / max_share. Those of `every_rounds` and of model versions are never delayed."""
    keep: Annotated[int, Field(ge=2)] = 2
    """How many of the newest are kept, besides those that replay or a model version needs."""
    weight_digest_every: PositiveInt = 50
    """Rounds between weight digests in the history; 1 names the first differing round exactly."""


class SqliteBus(Section):
    """The embedded bus: one SQLite file, many processes on one machine."""

    type: Literal["sqlite"] = "sqlite"
    """A file; the default."""
    path: str | None = None
    """`<home>/bus.sqlite` when not set."""


class KafkaBus(Section):
    """Apache Kafka. A password is only ever named here: configs are printed, logged and stored."""

    type: Literal["kafka"] = "kafka"
    """Brokers, for nodes on many machines."""
    servers: Annotated[str, AfterValidator(_servers)]
    """Brokers to begin with, `host:port,host:port`."""
    topic: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")] | None = None
    """`sapo.<swarm>` when not set."""
    cluster_id: str | None = None
    """Refuse any other cluster than this; when not set, than the one the run began on."""
    compression: Literal["zstd", "lz4"] = "zstd"
    """How the messages this node writes are compressed."""
    ca_file: str | None = None
    """Certificates of the authorities to trust, PEM; set, or with `username`, connections are TLS."""
    username: str | None = None
    """Set: SASL/SCRAM-SHA-512 over TLS."""
    password: SecretRef = "env:SAPO_KAFKA_PASSWORD"
    """Where the password is: `env:NAME`, `file:PATH` or `prefect:BLOCK`."""


class MemoryBus(Section):
    """Inside one process; for tests and experiments."""

    type: Literal["memory"] = "memory"
    """Nothing outside this process."""


class OwnBus(Section):
    """What `module:function` of an installed package opens ([extending](extending.md))."""

    type: Literal["own"] = "own"
    """A bus of one's own."""
    open: OwnCode
    """Called with the swarm's name as `swarm`, and `config`."""
    config: dict[str, Any] = {}
    """Its parameters, by its own names for them. Configs are stored: name no secret here."""


class WorkersConfig(Section):
    """The processes that generate questions and score texts."""

    count: PositiveInt = 1
    """How many processes a node has for it."""
    time_limit_s: PositiveFloat = 10.0
    """For one question or one text."""
    foreign_limit_s: PositiveFloat = 1.0
    """For one text of a peer, in seconds of processor time."""
    memory_mb: PositiveInt = 2048
    """Memory that one process may take, in MiB; a text that needs more is unscorable."""
    unwalled: bool = False
    """Score the texts of peers also where the kernel puts no walls round the processes (`sapo doctor`)."""


class HistoryConfig(Section):
    """The Delta tables."""

    uri: Address | None = None
    """`<home>/history` when not set; any store deltalake can write otherwise."""
    flush_seconds: PositiveFloat = 10.0
    """Rows are collected for so long before they are written: longer makes fewer, larger files."""
    max_owed_mb: PositiveInt = 1024
    """Undelivered journal bytes at which a node pauses instead of dropping history."""
    keep_rounds: Annotated[int, Field(ge=0)] = 0
    """Rounds of each node that stay replayable; 0 keeps all. Cuts are made at kept checkpoints only."""
    maintain_seconds: Annotated[float, Field(ge=0)] = 1800.0
    """How often the archive compacts the tables, cuts what is not kept and vacuums; 0 leaves that to hand."""
    vacuum_hours: Annotated[float, Field(ge=0)] = 24.0
    """Files that no snapshot needs are deleted when they are older than this; readers may still use them."""


class TrackConfig(Section):
    """MLflow."""

    uri: Address | None = None
    """A running tracking server; `sapo swarm` starts one when not set."""
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Where that one listens, on this machine only; a free port when not set."""
    register_every: PositiveInt = 100
    """Rounds between registered model versions; one more is registered at the end."""
    samples_every: Annotated[int, Field(ge=0)] = 25
    """Rounds between those of which sample rollouts are logged, as a bounded table; 0 logs none."""
    keep_rounds: Annotated[int, Field(ge=0)] = 2000
    """All values of this many rounds are logged; of later ones every tenth, then every hundredth: MLflow
    deletes none. Series `eval/*` are logged whole. 0 logs all."""
    traits: Annotated[dict[str, str], AfterValidator(checked)] = {}
    """Patterns (RE2) by name: the share of own completions that match is logged as series `trait/<name>`, and
    `sapo trait` shows how each spread. `worked = '[0-9]=[0-9]'` finds answers that work something out."""


class FlowConfig(Section):
    """How Prefect orchestrates a node."""

    every: PositiveInt = 1
    """Orchestrate every n-th round as tasks; the rounds between run inside the same flow run."""
    rounds_per_run: PositiveInt = 50
    """Rounds in one flow run of a node; the next flow run goes on from there."""
    keep_days: Annotated[float, Field(ge=0)] = 7.0
    """Flow runs that ended longer ago are deleted, with their task runs, logs and artifacts; 0 keeps all."""
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Where the Prefect server that `sapo swarm` starts listens; a free port when not set."""


class DeployConfig(Section):
    """What `sapo deploy` registers with Prefect."""

    pool: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "sapo"
    """The work pool whose workers run the flows; made where there is none."""
    pool_type: Literal["process", "docker", "kubernetes"] = "process"
    """Of a pool that is made."""
    image: str | None = None
    """What pools of containers run; they need one that has this release inside."""
    node_seconds: PositiveFloat = 300.0
    """Between the starts of a node's flow runs; while one runs, no other begins."""
    run_seconds: PositiveFloat = 3600.0
    """A node's flow run that lasted so long ends after the round at hand, however many it has made."""
    archive_seconds: PositiveFloat = 300.0
    """Between the starts of the archive's flow runs."""
    evaluate_seconds: Annotated[float, Field(ge=0)] = 21_600.0
    """Between held-out evaluations of the whole site; 0 leaves that to hand."""
    judge_seconds: Annotated[float, Field(ge=0)] = 300.0
    """Between the judge's questions, one to each node that has a new checkpoint; 0 leaves that to hand."""
    lost_seconds: Annotated[float, Field(ge=60)] = 120.0
    """A flow run without a heartbeat for so long is marked as crashed; it sends one each 30 s."""
    stalled_minutes: PositiveFloat = 60.0
    """A node that made no round for so long raises an event."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pool_type != "process" and self.image is None:
            raise ValueError(f'pool_type = "{self.pool_type}" needs an image')
        return self


class EvalConfig(Section):
    """Held-out evaluation."""

    questions: PositiveInt | None = None
    """Held-out questions that are drawn for the full evaluation. One that is drawn again is asked once and
    counts again. Not set: as many as give about a fifth of the answers that the rounds give, from 50 to
    2,000, and those of the probe; the run keeps that number."""
    samples: PositiveInt = 1
    """Completions per question at temperature 1 in the full evaluation."""
    probe_questions: Annotated[int, Field(ge=0)] = 200
    """Held-out questions a node asks itself every `probe_every` rounds; 0 asks none. With 200 two probes of a
    node differ by up to 7 points by chance, with 1,000 by 3."""
    probe_every: PositiveInt = 25
    """Rounds between two of these probes."""
