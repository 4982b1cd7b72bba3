"""What a node is made of, and how it is opened: lock, key, journal, policy, learner, bus, pool, deliverer."""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sapo.bus import open_bus
from sapo.bus.base import Bus
from sapo.bus.poller import Listener
from sapo.core import own_code
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.determinism import arithmetic
from sapo.core.errors import Paused
from sapo.core.outage import Outage
from sapo.core.own_code import Missing
from sapo.core.traits import TraitMatcher
from sapo.core.types import Question
from sapo.core.user_cache import default_cache
from sapo.learn.update import Learner
from sapo.node.author import Author, open_author
from sapo.node.gossip import AnnounceSink, Gossip
from sapo.node.group_maker import GroupMaker
from sapo.node.prober import Prober
from sapo.node.receive import Intake
from sapo.node.recovery import Recovery
from sapo.node.rollout import RolloutMaker
from sapo.node.verify import PeerVerifier
from sapo.peers.admission import Admission
from sapo.peers.freshness import Freshness
from sapo.peers.keyring import refuse_strange_names
from sapo.peers.pool import Pool
from sapo.peers.quotas import Quotas
from sapo.peers.rejections import Refusals
from sapo.peers.resend_guard import KeyCloneDetector, ResendGuard
from sapo.peers.sampling import Sampler, open_sampler
from sapo.policy import models
from sapo.policy.engines import open_engine
from sapo.policy.evaluate import held_out_set
from sapo.policy.initial import load_initial
from sapo.policy.kept_files import KeptFiles
from sapo.policy.models import LoadedPolicy
from sapo.policy.tokenise import false_ids
from sapo.store.history import open_store
from sapo.store.history.training_sink import TrainingSink
from sapo.store.journal.journal import Journal
from sapo.store.journal.outbox import Deliverer, FlushPolicy, PublishSink, Sink
from sapo.tasks import sandbox
from sapo.tasks.pins import missing
from sapo.tasks.workers import TaskWorkers, open_workers

log = logging.getLogger(__name__)

ALL = 2**62
"""Above the number of everything that is owed."""


@dataclass
class NodeParts:
    """What a `NodeRuntime` works with: a part for each thing that a stage does; closed in reverse order."""

    config: Config
    name: str
    home: Home
    clock: Callable[[], float]
    journal: Journal
    workers: TaskWorkers
    policy: LoadedPolicy
    maker: GroupMaker
    rollouts: RolloutMaker
    prober: Prober
    intake: Intake
    verifier: PeerVerifier
    sampler: Sampler
    freshness: Freshness | None
    """What chooses among the informative groups found, with sampler `fresh`."""
    learner: Learner
    traits: TraitMatcher
    recovery: Recovery
    history: TrainingSink
    """What carries finished rounds into the history."""
    gossip: Gossip | None
    announcer: AnnounceSink | None
    """What carries offered weights to others."""
    deliverer: Deliverer
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def weights_sha256(self) -> str:
        """Digest of the policy's weights as they are now."""
        return models.weights_sha256(self.policy.model)

    def check(self) -> None:
        """Raise what the deliverer's thread met that is not a mere outage, and `Paused` at the bound of what
        may be owed: history is never dropped."""
        self.deliverer.check()
        owed, bound = self.journal.owed_bytes(), self.config.history.max_owed_mb * 2**20
        if owed > bound:
            raise Paused(
                f"{self.name} owes {owed / 2**20:.0f} MB, more than history.max_owed_mb = "
                f"{self.config.history.max_owed_mb}; bring back the bus, history and tracking it waits for"
            )

    def close(self) -> None:
        """Stop threads and workers, release files and the lock."""
        self._stack.close()


def refuse_unwalled(config: Config, workers: TaskWorkers) -> None:
    """Raise `UserError` where texts of peers would be scored behind walls that do not suffice."""
    if config.batch.external and not config.workers.unwalled:
        sandbox.require(workers.walls)


def open_parts(
    config: Config,
    name: str,
    home: Home,
    *,
    clock: Callable[[], float] = time.time,
    bus: Bus | None = None,
    tracking: Sequence[Sink] = (),
    incarnation: str | None = None,
    deliver: bool = True,
    workers: TaskWorkers | None = None,
    timed: bool = True,
) -> NodeParts:
    """Open a node's parts. `config` is the whole swarm's; `tracking` are further sinks, such as MLflow's.

    `bus` and `incarnation` are given by tests and experiments; `deliver=False` leaves the outbox undelivered.
    The caller closes `workers` that it gives. With `timed=False` peers have all the time for verification
    there is (`Quotas`), so that nothing depends on the speed of the machine. Raises `UserError` when the
    directory is in use, the home is another swarm's, or the model is unusable.
    """
    refuse_strange_names(config.for_node(name))
    with contextlib.ExitStack() as stack:
        author = open_author(stack, config, name, home, clock=clock, incarnation=incarnation)
        node_config, journal = author.config, author.journal
        own_bus = bus if bus is not None else open_bus(config, home)
        stack.callback(own_bus.close)
        if workers is None:
            workers = open_workers(node_config, tasks=config.manifest_tasks())
            stack.callback(workers.close)
        refuse_unwalled(node_config, workers)
        policy = load_initial(node_config, workers, default_cache())
        learner = Learner(
            policy.model,
            node_config.learn,
            temperature=node_config.generate.temperature,
            guard=node_config.guard,
        )
        engine = open_engine(node_config, policy)
        stack.callback(engine.close)
        history = TrainingSink(open_store(config, home), config.swarm.name, name, journal.incarnation)
        sinks: list[Sink] = [PublishSink(own_bus), history, *tracking]
        probe: Sequence[Question] = ()
        if node_config.eval.probe_questions:
            probe = held_out_set(config, home, workers)[: node_config.eval.probe_questions]
        plans = {"training": FlushPolicy(items=64, flush_s=node_config.history.flush_seconds)}
        journal.set_environment(environment(node_config, policy.device.type))
        listener = Listener(own_bus)
        lacking = missing(config.manifest_tasks())
        intake = _intake(author, home, listener, policy, clock, lacking, timed=timed)
        gossip, announcer = None, None
        if node_config.gossiping is not None:
            gossip = Gossip(author, home, policy, learner)
            announcer = AnnounceSink(gossip, own_bus)
            sinks.append(announcer)
            intake.gossip = gossip
        else:
            journal.acknowledge("gossip", ALL)  # nobody delivers it any more
        deliverer = Deliverer(home.journal(name), sinks if deliver else [], clock=clock, plans=plans)
        stack.callback(deliverer.close)
        kept = stack.pop_all()
    maker = GroupMaker(
        author,
        workers,
        clock,
        tokenizer=policy.fingerprint,
        fits=lambda question: policy.fits(policy.encode_prompt(question.text)),
    )
    rollouts = RolloutMaker(maker, policy, engine)
    prober = Prober(rollouts, probe, home.probes(name))
    return NodeParts(
        config=node_config,
        name=name,
        home=home,
        clock=clock,
        journal=journal,
        workers=workers,
        policy=policy,
        maker=maker,
        rollouts=rollouts,
        prober=prober,
        intake=intake,
        verifier=PeerVerifier(node_config, policy, workers, intake.quotas, intake.refusals),
        sampler=open_sampler(node_config.batch.sampler),
        freshness=Freshness(node_config.adaptive) if node_config.batch.sampler == "fresh" else None,
        learner=learner,
        traits=TraitMatcher(node_config.track.traits),
        recovery=Recovery(
            *(node_config, name, home.checkpoints(name), journal, policy, learner, clock),
            partners=KeptFiles(home.gossip(name)),
            kept_rounds=prober.kept_rounds,
        ),
        history=history,
        gossip=gossip,
        announcer=announcer,
        deliverer=deliverer,
        _stack=kept,
    )


def _intake(
    author: Author,
    home: Home,
    listener: Listener,
    policy: LoadedPolicy,
    clock: Callable[[], float],
    lacking: Mapping[str, Missing],
    *,
    timed: bool,
) -> Intake:
    config, name, manifest, journal = author.config, author.name, author.manifest, author.journal
    trust = manifest.member_keys | {author.identity.key}
    quotas = Quotas(config.pool, trust, journal.peers(), timed=timed)
    pool = Pool.restore(config.pool, journal.pool(), journal.met(), quotas.shares)
    own_key = KeyCloneDetector(journal, author.held.card.incarnations)
    admission = Admission(
        manifest,
        author.identity.key,
        name,
        pool,
        has_control_tokens=policy.has_control_tokens,
        has_false_ids=functools.partial(false_ids, policy),
        may_be_own=own_key.may_be_own,
        streams=ResendGuard(journal.streams(), quotas.shares),
        lacking=lacking,
        dropped=set(journal.dropped()),
    )
    return Intake(
        config=config,
        name=name,
        clock=clock,
        journal=journal,
        listener=listener,
        outage=Outage("the bus is", log, consequence="going on in silo", who=name),
        pool=pool,
        admission=admission,
        quotas=quotas,
        refusals=Refusals(clock),
        own_key=own_key,
        blocklist=home.blocked(name),
    )


def environment(config: Config, device: str) -> dict[str, str | int]:
    """What a round's bits depend on besides its inputs, and code of other packages in the node."""
    own = own_code.versions(own_code.named(config).values())
    return {"config": config.digest(), "threads": config.threads, **arithmetic(device), **own}
