"""The sections of a config: frozen models that refuse unknown keys. `sapo.core.config.load` joins and reads
them."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

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
    """The exact code of a task source. Every site of a swarm has the same."""

    package: Annotated[str, Field(pattern=PACKAGE)]
    """The installed package."""
    version: Annotated[str, Field(pattern=VERSION)]
    """Its version."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Of the package's Python files."""


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("must be of printable characters")
    return name


SourceName = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_printable)]


class Task(Section):
    """A source of questions."""

    dataset: SourceName
    """A ReasoningGYM data set, an entry point `sapo.tasks`, or `module:Class` of an installed package. With
    `file`, `file:NAME`, by default the file's own name."""
    file: str | None = Field(default=None, exclude_if=unset)
    """Ask the rows of this .parquet, .jsonl or .csv file; `config` names its columns and scorer."""
    config: dict[str, Any] = {}
    """The source's parameters. The rest keep their defaults."""
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """How often it is drawn, relative to other tasks; 0 never."""
    pin: Pin | None = Field(default=None, exclude_if=unset)
    """Pins a source that is not ReasoningGYM's. Default: found when a swarm begins."""

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
    """What every node of the swarm must agree on, besides the tasks."""

    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of questions held out from training."""
    salt: str = "sapo"
    """Another salt holds out other questions."""
    answer: AnswerFormat = "text"
    """What is scored: the last `<answer>` tag (`tags`), the last `\\boxed{}` (`boxed`), or the whole text."""
    questions: Literal["drawn", "any"] = "drawn"
    """Which questions may be answered: those an author's key and round draw, or `any`: an author can then
    teach one answer by its choice. Fixed for the life of a swarm."""
    min_completions: Annotated[int, Field(ge=2)] = 2
    """Smallest group that is accepted."""
    max_completions: Annotated[int, Field(ge=2)] = 64
    """Largest group that is accepted."""
    max_text_chars: PositiveInt = 16_384
    """Longest completion, in characters."""
    max_payload_bytes: Annotated[int, Field(ge=1, le=4_000_000)] = 1_000_000
    """Largest group, in bytes as sent."""
    entry: Literal["open", "allow-list", "invite"] = "open"
    """Who may publish: anybody; `members`; `members` and those they invite."""
    members: list[PublicKey] = []
    """Public keys (`sapo keys show`). May change while the swarm runs."""
    authors: Annotated[
        list[AuthorKind], Field(min_length=1, exclude_if=lambda kinds: {*kinds} == {*AUTHOR_KINDS})
    ] = list(AUTHOR_KINDS)
    """Kinds of author that may publish: policies, and [members](members.md) that only answer."""

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
    """Train a low-rank adapter instead of the weights. Checkpoints then hold only the adapter."""

    rank: PositiveInt = 8
    """Rank of its matrices."""
    alpha: PositiveFloat = 16.0
    """Its output is multiplied by alpha / rank."""
    dropout: Literal[0] = 0
    """With dropout, replay could not repeat an update."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Layers that get an adapter; `all-linear` is every linear layer but the output."""


class Starter(Section):
    """How the starter policy is made. Equal values share one cached copy."""

    variant: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")] = "small"
    """`narrow`, `small`, `wide`, `numbers` (frequent numbers are tokens) or `bytes` (no other tokens)."""
    steps: PositiveInt = 600
    """Supervised steps."""
    batch: PositiveInt = 64
    """Questions per step."""
    lr: PositiveFloat = 3e-3
    """Learning rate."""
    bare: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of supervised answers that are bare; the others are sentences."""
    seed: int = 0
    """Independent of `swarm.seed`."""


class BatchConfig(Section):
    """What one round answers and learns from, by the paper's letters."""

    local: PositiveInt = 4
    """I: own groups in a batch."""
    external: Annotated[int, Field(ge=0)] = 4
    """J: foreign groups in a batch; 0 is a silo."""
    completions: Annotated[int, Field(ge=2)] = 8
    """L: completions of one question."""
    questions: PositiveInt | None = None
    """B: questions answered per round; default I."""
    choose: Literal["any", "informative"] = "any"
    """Which I of B own groups SampleSelf takes: any, or first those whose scores differ."""
    sampler: Literal["round_robin", "uniform", "fresh"] | OwnCode = "round_robin"
    """How SampleExternal draws: at random, authors in turn, so that none is heard more because it publishes
    more; `uniform` over groups, as in the paper; the [freshest](adaptive.md) of twice J; or by [your
    own](extending.md) `module:function`."""

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
    """SelectSubset: which own groups are published."""

    select: Literal["all", "fraction", "top"] = "all"
    """`top` publishes the most informative ones."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of own groups published with `fraction` or `top`, rounded up."""
    token_ids: bool = True
    """Publish token ids and log-probabilities with the text."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.select == "all" and self.fraction < 1.0:
            raise ValueError('a fraction below 1 goes with select = "fraction" or "top"')
        return self


class GenerateConfig(Section):
    """How completions are sampled."""

    engine: Literal["transformers", "vllm"] | OwnCode = "transformers"
    """What samples: transformers, [vLLM](engines.md), or [your own](extending.md)."""
    max_new_tokens: PositiveInt = 256
    """Longest completion, in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature. Log-probabilities are taken at it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability; 1 is all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many likeliest tokens; 0 is all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Leave out tokens below this share of the likeliest one's probability."""
    ahead: Literal[0, 1] = 0
    """1 samples a round during the update before it, so one update off-policy."""
    vllm_cache_gb: PositiveFloat = 1.0
    """Size of vLLM's key-value cache."""

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
    """Limits on the foreign groups a node keeps."""

    max_groups: PositiveInt = 512
    """Most foreign groups kept."""
    max_age_s: PositiveFloat = 3600.0
    """Groups older than this by the bus's clock are dropped."""
    max_peer_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Most that one author may hold of `max_groups`."""
    tail: PositiveInt = 256
    """Groups per partition to read back at most."""
    poll_bytes: PositiveInt = 8_000_000
    """Most bytes read per poll."""
    newcomer_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of places and of verification time for all newcomers together. Each draw also verifies this share
    of J of their groups, so that they become known."""
    newcomer_groups: PositiveInt = 3
    """Informative groups, verified here, after which an author is known."""
    verify_share: PositiveFloat = 0.6
    """Seconds for admitting and verifying foreign groups, per second of own work."""


class LearnConfig(Section):
    """The update: all that replay needs besides weights, optimiser state and batch."""

    loss: Literal["dapo", "grpo", "dr_grpo", "cispo", "gspo"] | OwnCode = "dapo"
    """The policy loss, or [your own](extending.md)."""
    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Learning rate. With 0, only the effect of selection is measured."""
    decay_from: Annotated[int, Field(ge=0)] = 0
    """From this round on the rate is lr x sqrt(decay_from / round); 0 keeps it constant."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's beta1."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's beta2."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's."""
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clip of the ratio: 1 - clip_low. `cispo` has none."""
    clip_high: PositiveFloat = 0.28
    """Upper clip of the ratio: 1 + clip_high."""
    gspo_clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """`clip_low` of `gspo`."""
    gspo_clip_high: PositiveFloat = 4e-4
    """`clip_high` of `gspo`: narrower, since the ratio is a mean over a sequence."""
    dr_grpo_length: PositiveInt = 256
    """`dr_grpo` divides by this many tokens per completion. Use the swarm's max_new_tokens."""
    epochs: PositiveInt = 1
    """Optimiser steps per batch."""
    advantage: Literal["centred", "mean_std"] = "centred"
    """Score minus the group's mean; `mean_std` also divides by its standard deviation."""
    std_floor: PositiveFloat = 1e-3
    """Smallest divisor of `mean_std`."""
    zero_tolerance: Annotated[float, Field(ge=0)] = 1e-6
    """A group whose scores spread no wider has zero advantage."""
    token_mean: Literal["informative", "all"] = "informative"
    """Which groups count in the mean over tokens (`dapo`, `cispo`) or completions (`grpo`, `gspo`):
    informative ones, or all I + J (preset `paper`)."""
    foreign: Literal["positive", "positive_late", "as_if_own", "bounded", "behaviour", "f_tis"] = "positive"
    """How foreign completions enter the loss. `positive`: those above their group's mean; lasts when peers
    are late. `positive_late`: so for late groups only. `as_if_own`: all, as in the paper. `bounded`:
    improbable tokens masked. `behaviour`: weighed by the ratio to the producer. `f_tis`, the paper's
    successor: so, without failures far from the own policy."""
    foreign_late: PositiveInt = 2
    """`positive_late`: a group is late if its policy is more than so many rounds behind, or ahead. Its author
    says which it was, and an old policy that claims to be new cannot be told from one: only the bus's stamp
    ages a group."""
    foreign_floor: Annotated[float, Field(lt=0)] = -7.0
    """`bounded`: foreign tokens below this own log-probability are masked."""
    foreign_weight: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor of the loss of foreign tokens, in every mode."""
    foreign_bound: Literal["own", "none"] = "own"
    """`own`: a foreign group does no more to a step than an own group, in tokens and size of gradient.
    `none`: unbounded, as in the paper."""
    foreign_credit: Literal["all", "floor", "useful", "worthwhile"] = "all"
    """Which tokens of a foreign completion are learned: all, as in preset `paper`; with `floor` those in the
    own policy's `foreign_top_k`; with `useful` each segment as far as it makes what follows likelier; with
    `worthwhile`, in every other preset, likewise, and no answer further than its text leads to it."""
    foreign_top_k: PositiveInt = Field(default=50, exclude_if=lambda top_k: top_k == 50)
    """For `foreign_credit = "floor"`."""
    credit_own: bool = Field(default=False, exclude_if=lambda credited: not credited)
    """Credit own completions, too, as `foreign_credit` says of foreign ones."""
    foreign_reference: float | None = Field(default=None, exclude_if=unset)
    """Multiply the loss of a foreign completion by exp(its mean own log-probability - this), at most 1."""
    foreign_ratio_cap: Annotated[float, Field(gt=1)] = 3.0
    """`behaviour`: the ratio is truncated to [1/cap, cap]."""
    foreign_tis_cap: Annotated[float, Field(ge=1)] = Field(default=2.0, exclude_if=lambda cap: cap == 2.0)
    """`f_tis`: the ratio is truncated to at most this (C)."""
    foreign_tis_kl: Annotated[float, Field(ge=0)] = Field(default=50.0, exclude_if=lambda kl: kl == 50.0)
    """`f_tis`: a completion below its group's mean is left out above this KL to the producer, in nats a token
    (g)."""
    trusted_peers: list[str] = []
    """`behaviour`, `f_tis`: whose log-probabilities are believed: public keys, and names of own nodes."""
    truncated: Literal["keep", "mask", "zero_reward"] = "keep"
    """What becomes of completions that hit the length limit; `zero_reward` means own ones."""
    micro_batch: PositiveInt | None = None
    """Sequences per forward pass; default the whole batch. The gradient is the same."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit` needs a quarter of the memory for its moments. A change in a run resets them."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    autocast: bool = False
    """Compute in bfloat16 with float32 weights."""
    compile: bool = False
    """Use torch.compile. Pays on a GPU, after a slow first round."""

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
    """What counts as learning gone wrong, and what happens then."""

    action: Literal["skip", "pause", "rollback"] = "skip"
    """`skip` this update, `pause` the node, or `rollback` to a checkpoint."""
    falling_probes: Annotated[int, Field(ge=0)] = 3
    """Probes in a row below the node's best by more than chance. `skip` warns, `pause` stops, `rollback`
    returns to the best probe's weights. 0 is off."""
    min_entropy: Annotated[float, Field(ge=0)] = 0.0
    """Lowest mean entropy of all own tokens, in nats."""
    max_truncated: Share = 1.0
    """Highest share of own completions cut off."""
    max_unscorable: Share = 0.5
    """Highest share of own completions without a score."""
    min_foreign_logprob: Annotated[float, Field(le=0)] = -100.0
    """Lowest mean own log-probability of foreign tokens."""
    max_engine_gap: PositiveFloat = 0.2
    """Largest mean distance between engine's and learner's log-probabilities of own tokens, in nats."""


class CheckpointConfig(Section):
    """How often checkpoints are taken, and how many are kept."""

    every_rounds: PositiveInt = 50
    """Rounds between checkpoints."""
    every_seconds: PositiveFloat = 600.0
    """Also take one after this time."""
    max_share: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Largest share of a node's time for checkpoints of `every_seconds`."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Newest checkpoints kept, besides those that replay or a model version needs."""
    weight_digest_every: PositiveInt = 50
    """Rounds between weight digests in the history. 1 lets replay name the first round that differs."""


class SqliteBus(Section):
    """The default: one SQLite file, many processes on one machine."""

    type: Literal["sqlite"] = "sqlite"
    """The default."""
    path: str | None = None
    """Default: `<home>/bus.sqlite`."""


class KafkaBus(Section):
    """Apache Kafka, for nodes on many machines."""

    type: Literal["kafka"] = "kafka"
    """Apache Kafka."""
    servers: Annotated[str, AfterValidator(_servers)]
    """Bootstrap servers, `host:port,host:port`."""
    topic: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")] | None = None
    """Default: `sapo.<swarm>`."""
    cluster_id: str | None = None
    """Refuse any other cluster. Default: the one the run began on."""
    compression: Literal["zstd", "lz4"] = "zstd"
    """Of the messages this node writes."""
    ca_file: str | None = None
    """Trusted certificate authorities, PEM. With it, or with `username`, connections use TLS."""
    username: str | None = None
    """User for SASL/SCRAM-SHA-512 over TLS."""
    password: SecretRef = "env:SAPO_KAFKA_PASSWORD"
    """Where the password is: `env:NAME`, `file:PATH` or `prefect:BLOCK`."""


class MemoryBus(Section):
    """Within one process, for tests and experiments."""

    type: Literal["memory"] = "memory"
    """Within one process."""


class OwnBus(Section):
    """A bus of [your own](extending.md)."""

    type: Literal["own"] = "own"
    """A bus of your own."""
    open: OwnCode
    """Called with the swarm's name as `swarm`, and `config`."""
    config: dict[str, Any] = {}
    """Its parameters. Configs are stored: put no secret here."""


class WorkersConfig(Section):
    """The processes that generate questions and score texts."""

    count: PositiveInt = 1
    """Processes per node."""
    time_limit_s: PositiveFloat = 10.0
    """For one question or text."""
    foreign_limit_s: PositiveFloat = 1.0
    """For one text of a peer, in processor time."""
    memory_mb: PositiveInt = 2048
    """MiB per process. A text that needs more is unscorable."""
    unwalled: bool = False
    """Score peers' texts even where the kernel gives no [walls](walls.md)."""


class HistoryConfig(Section):
    """The Delta tables ([history](history.md))."""

    uri: Address | None = None
    """Default: `<home>/history`. Any store that deltalake can write."""
    flush_seconds: PositiveFloat = 10.0
    """Time between writes. Longer makes fewer, larger files."""
    max_owed_mb: PositiveInt = 1024
    """Undelivered journal at which a node pauses."""
    keep_rounds: Annotated[int, Field(ge=0)] = 0
    """Rounds of each node that stay replayable, cut at kept checkpoints; 0 keeps all."""
    maintain_seconds: Annotated[float, Field(ge=0)] = 1800.0
    """How often the archive compacts, cuts and vacuums the tables; 0 never."""
    vacuum_hours: Annotated[float, Field(ge=0)] = 24.0
    """Age at which files that no snapshot needs are deleted."""


class TrackConfig(Section):
    """MLflow ([MLflow and Prefect](mlflow.md))."""

    uri: Address | None = None
    """A running tracking server. Default: `sapo swarm` starts one."""
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Local port of the one it starts; default a free one."""
    register_every: PositiveInt = 100
    """Rounds between registered model versions. One more comes at the end."""
    samples_every: Annotated[int, Field(ge=0)] = 25
    """Rounds between logged sample rollouts; 0 logs none."""
    keep_rounds: Annotated[int, Field(ge=0)] = 2000
    """This many rounds are logged whole, later ones every tenth, then every hundredth. `eval/*` stays whole.
    0 logs all."""
    traits: Annotated[dict[str, str], AfterValidator(checked)] = {}
    """Patterns (RE2) by name, such as `worked = '[0-9]=[0-9]'`. Series `trait/<name>` is the share of own
    completions that match; `sapo trait` shows how it spread."""


class FlowConfig(Section):
    """How Prefect orchestrates a node."""

    every: PositiveInt = 1
    """Show every n-th round as tasks."""
    rounds_per_run: PositiveInt = 50
    """Rounds per flow run of a node."""
    keep_days: Annotated[float, Field(ge=0)] = 7.0
    """Older flow runs are deleted with their logs and artifacts; 0 keeps all."""
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Port of the Prefect server that `sapo swarm` starts; default a free one."""


class DeployConfig(Section):
    """What `sapo deploy` registers with Prefect ([deployments](deployments.md))."""

    pool: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "sapo"
    """Work pool whose workers run the flows. Made if missing."""
    pool_type: Literal["process", "docker", "kubernetes"] = "process"
    """Type of a pool that is made."""
    image: str | None = None
    """Image for pools of containers, with this release inside."""
    node_seconds: PositiveFloat = 300.0
    """Between starts of a node's flow runs. Only one runs at a time."""
    run_seconds: PositiveFloat = 3600.0
    """A node's flow run ends after the round in which it reaches this."""
    archive_seconds: PositiveFloat = 300.0
    """Between starts of the archive's flow runs."""
    evaluate_seconds: Annotated[float, Field(ge=0)] = 21_600.0
    """Between held-out evaluations of the site; 0 makes none."""
    judge_seconds: Annotated[float, Field(ge=0)] = 300.0
    """Between the judge's questions; 0 asks none."""
    lost_seconds: Annotated[float, Field(ge=60)] = 120.0
    """A flow run without a heartbeat (every 30 s) for this long is marked as crashed."""
    stalled_minutes: PositiveFloat = 60.0
    """A node without a new round for this long raises an event."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pool_type != "process" and self.image is None:
            raise ValueError(f'pool_type = "{self.pool_type}" needs an image')
        return self


class EvalConfig(Section):
    """Held-out evaluation ([metrics](metrics.md))."""

    questions: PositiveInt | None = None
    """Questions of the full evaluation. Default: so many that it costs about a fifth of the rounds' answers,
    50 to 2,000, plus the probe's. A run keeps its number."""
    samples: PositiveInt = 1
    """Completions per question, at temperature 1."""
    probe_questions: Annotated[int, Field(ge=0)] = 200
    """Held-out questions of a probe; 0 makes none. By chance two probes differ by up to 7 points with 200, 3
    with 1,000."""
    probe_every: PositiveInt = 25
    """Rounds between probes."""
