"""Recorded updates made again: what resume, replay and what-if have in common.

A round is repeated under the settings, threads and order it was recorded with, so that weights and optimiser
end where they ended then, bit for bit.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from sapo.core.config.schema import GuardConfig, LearnConfig
from sapo.core.errors import SapoError, UserError
from sapo.core.types import Batch, Gossiped, RoundResult
from sapo.learn.update import Learner, StepResult
from sapo.policy import checkpoint, models
from sapo.policy.checkpoint import Checkpoint
from sapo.policy.exchange import Unusable, averaged_with, trained
from sapo.policy.kept_files import KeptFiles
from sapo.policy.models import LoadedPolicy
from sapo.store.history.rounds import MAX_THREADS, RecordedRound, settings
from sapo.store.history.tables import Damaged

Environment = Mapping[str, Any]


class Mismatch(SapoError):
    """Weights or rounds are not what was recorded."""


class Repeater:
    """Repeats rounds on one policy and learner, in order; begin where `load` has put them.

    `back_to` maps rounds to the one whose weights they go back to: they are kept in memory while needed.
    `find` gives the checkpoint of an earlier round than those repeated, or None. `partners` holds the weights
    that the node averaged with.
    """

    def __init__(
        self,
        policy: LoadedPolicy,
        learner: Learner,
        *,
        back_to: Mapping[int, int] | None = None,
        find: Callable[[int], Checkpoint | None] = lambda round: None,
        partners: KeptFiles | None = None,
    ) -> None:
        self.policy, self.learner, self._find, self._partners = policy, learner, find, partners
        self._back_to = dict(back_to or {})
        self._kept: dict[int, Snapshot] = {}
        self._at = 0

    def load(self, found: Checkpoint) -> None:
        """Begin at a checkpoint, as `load` puts it in place."""
        load(self.policy, self.learner, found)
        self._at = found.round

    def repeat(
        self,
        batch: Batch,
        recorded: RoundResult | RecordedRound,
        environment: Environment | None,
        *,
        rollbacks: bool = True,
    ) -> StepResult:
        """Make a recorded round again: its step, the way back to older weights where it went back, and its
        outer step with the same partner where it ended with one.

        Without `rollbacks` it goes on from its own weights. Raises `Mismatch` where something that it needs
        is gone.
        """
        gossip = recorded.gossip
        if gossip is not None and gossip.begun:
            self.learner.begin_outer()
        result = self.step(batch, environment)
        if rollbacks and recorded.rolled_back_to is not None:
            self.go_back(batch.round, recorded.rolled_back_to)
        if gossip is not None and gossip.stepped:
            self._step_outer(batch.round, gossip)
        return result

    def _step_outer(self, round: int, done: Gossiped) -> None:
        outer, pair = self.learner.outer, None
        if outer is None:
            raise Mismatch(f"round {round} ended with an outer step, and no checkpoint has its slow weights")
        if done.file is not None:
            try:
                if self._partners is None:
                    raise Unusable("absent", "what it averaged with is not here")
                pair = averaged_with(self._partners, round, done.file, trained(self.policy))
            except Unusable as error:
                raise Mismatch(f"round {round} cannot be averaged again: {error}") from None
        factors = {"alpha": done.alpha, "beta": done.beta, "gamma": done.gamma}
        share = 1.0 if done.share is None else done.share
        outer.step(self.learner.weights(), **factors, partner=pair, share=share)
        self.learner.land()

    def step(self, batch: Batch, environment: Environment | None) -> StepResult:
        """The update on a batch under the settings and threads it was recorded with. Raises `Damaged` where
        these are none."""
        self._keep(batch.round)
        if environment and (threads := environment.get("threads")) is not None:
            if threads not in range(1, MAX_THREADS + 1):
                raise Damaged(batch.node, batch.round, f"it names {threads!r:.40} threads")
            torch.set_num_threads(int(threads))
        settle(self.learner, batch)
        return self.learner.step(batch)

    def go_back(self, round: int, target: int) -> None:
        """Weights and optimiser as they were after `target` rounds, at the end of round `round`.
        Raises `Mismatch` where these are neither in memory nor in a checkpoint."""
        kept = self._kept.get(target)
        self._back_to.pop(round, None)
        if target not in self._back_to.values():
            self._kept.pop(target, None)
        if kept is not None:
            kept.restore(self.policy, self.learner)
            return
        found = self._find(target)
        if found is None or target > round:
            raise Mismatch(f"round {round} went back to the weights of round {target}, which are gone")
        load(self.policy, self.learner, found)

    def _keep(self, round: int) -> None:
        """Keep the present weights where a later round goes back to them; empty rounds change nothing."""
        for target in set(self._back_to.values()) - self._kept.keys():
            if self._at <= target <= round:
                self._kept[target] = Snapshot(self.policy, self.learner)
        self._at = round + 1


def settle(learner: Learner, batch: Batch) -> None:
    """Put a learner under the settings that a batch was recorded with. Raises `Damaged` where these are
    none."""
    learner.set_learn(learn_of(batch, learner.device), temperature=batch.temperature)
    learner.guard = settings(GuardConfig, batch.guard, batch.node, batch.round)


def learn_of(batch: Batch, device: torch.device) -> LearnConfig:
    """The settings that a batch was recorded under; compiled where a config may say so, on no CPU: the bits
    of a round that was compiled elsewhere do not repeat there. Raises `Damaged`."""
    found = settings(LearnConfig, batch.learn, batch.node, batch.round)
    return found.model_copy(update={"compile": found.compile and device.type != "cpu"})


class Snapshot:
    """Weights and optimiser, in memory."""

    def __init__(self, policy: LoadedPolicy, learner: Learner) -> None:
        self._weights = {name: p.detach().clone() for name, p in _trained(policy)}
        self._state = copy.deepcopy(learner.state_dict())

    def restore(self, policy: LoadedPolicy, learner: Learner) -> None:
        """Put them back; the snapshot stays as it is."""
        with torch.no_grad():
            for name, parameter in _trained(policy):
                parameter.copy_(self._weights[name])
        learner.load_state_dict(copy.deepcopy(self._state))


def _trained(policy: LoadedPolicy) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, p) for name, p in policy.model.named_parameters() if p.requires_grad)


def load(policy: LoadedPolicy, learner: Learner, found: Checkpoint) -> None:
    """Put a checkpoint's weights and optimiser in place of the present ones. Raises `Mismatch` when it does
    not hold the weights it names, `UserError` when they are another model's."""
    try:
        models.load_weights(policy, found.path)
        learner.load_state_dict(checkpoint.optimizer_state(found))
    except (SapoError, ValueError) as error:
        problem = f"is of another model than the config names: {error}"
        remedy = "set model, starter, lora and dtype as they were when it was written"
        raise UserError("checkpoint", found.path.name, problem, remedy) from error
    if models.weights_sha256(policy.model) != found.weights_sha256:
        raise Mismatch(f"checkpoint {found.path.name} does not hold the weights it names")


@contextmanager
def settings_kept(learner: Learner) -> Iterator[None]:
    """Have the learner's settings, and torch's threads, afterwards as they are now."""
    learn, guard, temperature = learner.learn, learner.guard, learner.temperature
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        learner.set_learn(learn, temperature=temperature)
        learner.guard = guard
        torch.set_num_threads(threads)
