"""The update: one batch in, one or more optimiser steps or a reason why none was made.

A deterministic function of weights, optimiser state and batch: nothing random, nothing read or written.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sapo.core.config.foreign import within
from sapo.core.config.load import GuardConfig, LearnConfig
from sapo.core.errors import UserError
from sapo.core.own_code import is_own
from sapo.core.types import Batch
from sapo.learn.collate import Chunk, Row, Selection, collate, common_beginning, longest_own, select, size_of
from sapo.learn.foreign_bound import Bound, Part, weights
from sapo.learn.foreign_credit import credit
from sapo.learn.gossip import SlowWeights
from sapo.learn.guard import guard
from sapo.learn.logprobs import Beginning, Forward, shares_prompts
from sapo.learn.loss import LossInputs, normaliser, policy_loss
from sapo.learn.off_policy import correct
from sapo.learn.optimizer import apply_settings, open_optimizer
from sapo.learn.segments import segment_marks

LARGEST = 1e6
"""A weight beyond this is no weight: products of a few of them are not finite."""
USUAL_LR = 0.1
"""Adam moves a weight by some ten times the learning rate at most. Up to this rate no step from weights below
a tenth of `LARGEST` goes beyond it; any other step is made on trial, with a copy of what was before."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of a batch. `skipped` is why no optimiser step was made; weights are then untouched.

    `alarm` names the guard that was set off, or what was not finite; what to do about it beyond
    leaving the step out (pause, rollback) is the caller's. `metrics` are finite. `logprobs` are mean own
    log-probabilities per trained token, by position of the group in the batch, before the step; `looked` are
    tokens read once more for `learn.foreign_credit`, a third of each: there was no way back.
    """

    skipped: str | None
    metrics: dict[str, float]
    alarm: str | None = None
    logprobs: Mapping[int, float] = field(default_factory=dict)
    looked: Mapping[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Pass:
    """Sums over the micro-batches of one epoch; the loss is not yet divided."""

    sums: dict[str, float] = field(default_factory=dict)
    lowest_foreign: float = math.inf
    by_group: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Sum of log-probabilities and number of tokens, by position of the group."""
    looked: Counter[int] = field(default_factory=Counter)

    def add(self, values: dict[str, Tensor]) -> None:
        if not values:
            return
        # One transfer for all: each of them alone would make an accelerator wait.
        numbers = torch.stack([value.double() for value in values.values()]).tolist()
        for name, number in zip(values, numbers, strict=True):
            self.sums[name] = self.sums.get(name, 0.0) + number

    def add_groups(self, groups: Sequence[int], own: Tensor, counted: Tensor) -> None:
        """Sum up log-probabilities [S, W] of the sequences of each group."""
        sums = torch.where(counted, own, 0.0).sum(1, dtype=torch.float64)
        for group, total, tokens in zip(groups, sums.tolist(), counted.sum(1).tolist(), strict=True):
            before = self.by_group.get(group, (0.0, 0.0))
            self.by_group[group] = (before[0] + total, before[1] + tokens)

    def add_own(self, part: Part) -> None:
        """Sum up what own completions have in a step."""
        self.add({"own_size": part.size.sum(), "own_surprise": part.surprise.sum()})

    def of(self, name: str) -> float:
        return self.sums.get(name, 0.0)


@dataclass(frozen=True, slots=True)
class _Start:
    """A micro-batch before the first epoch: own log-probabilities [S, W], factors of completions [S] and of
    tokens [S, W]."""

    logprobs: Tensor
    weights: Tensor
    credit: Tensor


class Learner:
    """Owns a model's optimiser and makes updates on batches.

    `model` is any Hugging Face-like causal language model: `model(input_ids=, attention_mask=).logits`,
    with `position_ids` and `logits_to_keep` where its signature has them. It is put in evaluation mode:
    with dropout the ratio of a policy to itself is not 1. Only parameters that require gradients are
    trained. Those not in float32 have float32 masters, or steps below their precision would be lost.
    `temperature` is the one the node samples at. Raises `UserError` when there is nothing to train, or where
    a setting does not fit the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        learn: LearnConfig,
        *,
        temperature: float,
        guard: GuardConfig | None = None,
    ) -> None:
        self.model = model.eval()
        self.guard = guard or GuardConfig()
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in trained]
        if not self._parameters:
            raise UserError("model", type(model).__name__, "has no trainable parameter", "unfreeze some")
        self.device = self._parameters[0].device
        self._masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self._parameters]
        both = zip(self._parameters, self._masters, strict=True)
        self._copies = [(parameter, master) for parameter, master in both if master is not parameter]
        """Parameters that are not in float32, each with its master."""
        self._forward = Forward(self.model)
        self._shared = shares_prompts(model)
        self._kind: str = learn.optimizer
        self._optimizer = open_optimizer(self._kind, self._masters)
        self.names = tuple(name for name, _ in trained)
        """Of the trained parameters, tied ones once."""
        self.outer: SlowWeights | None = None
        """Slow weights of a node that gossips."""
        self.named: set[object] = {learn.loss, learn.epochs}
        """Losses of other packages, and epochs beyond `LIMITS`, that may be run: whoever opened this names
        them, never a record."""
        self.set_learn(learn, temperature=temperature)

    def set_learn(self, learn: LearnConfig, *, temperature: float | None = None) -> None:
        """Go on under other settings; the optimiser's moments stay.

        Another optimiser begins with the next step, without moments. Raises `UserError` for what the model
        cannot do, for code of another package that only a record names, and for as many epochs.
        """
        if is_own(learn.loss) and learn.loss not in self.named:
            problem = "a record names this code, the config does not"
            raise UserError("learn.loss", learn.loss, problem, "set learn.loss to it if you know that code")
        if not within("learn.epochs", learn.epochs) and learn.epochs not in self.named:
            problem = "a record names so many, the config does not"
            raise UserError("learn.epochs", learn.epochs, problem, "set learn.epochs to it if it was so")
        self._forward.check(learn)
        if learn.foreign_credit in ("useful", "worthwhile") and segment_marks(self.model) is None:
            problem = "the model does not say where segments end"
            raise UserError(
                "learn.foreign_credit", learn.foreign_credit, problem, "mark them (sapo.learn.segments)"
            )
        self._loss = policy_loss(learn.loss)
        self.learn = learn
        if temperature is not None:
            self.temperature = temperature
        apply_settings(self._optimizer, learn)

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's name and state, and the float32 masters where the model is not in float32; with
        slow weights where there are any."""
        masters = [master for _, master in self._copies]
        outer = {} if self.outer is None else {"outer": self.outer.state_dict()}
        return {"kind": self._kind, "optimizer": self._optimizer.state_dict(), "masters": masters, **outer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; load the model's weights first. The present settings stay. Raises
        `ValueError` where it belongs to another model, `UserError` where its optimiser is missing."""
        self._use(state.get("kind", "adamw"))
        self._optimizer.load_state_dict(state["optimizer"])
        for (_, master), saved in zip(self._copies, state["masters"], strict=True):
            master.copy_(saved)
        self.outer = SlowWeights.of(state["outer"]) if "outer" in state else None
        apply_settings(self._optimizer, self.learn)

    def weights(self) -> list[Tensor]:
        """The trained weights in float32 on the CPU, in the order of `names`; to be looked at only."""
        self._follow_model()
        return [master.detach().cpu() for master in self._masters]

    def begin_outer(self) -> None:
        """Begin slow weights at the weights as they are."""
        self.outer = SlowWeights.begin(self.names, self.weights())

    def land(self) -> float:
        """Put the slow weights in place of the weights; returns the norm of the jump. The optimiser's moments
        stay: they are of the weights before."""
        assert self.outer is not None
        jump = [float(torch.dist(new, old)) for new, old in zip(self.outer.slow, self.weights(), strict=True)]
        with torch.no_grad():
            for slow, master in zip(self.outer.slow, self._masters, strict=True):
                master.copy_(slow)
            for parameter, master in self._copies:
                parameter.copy_(master)
        return math.hypot(*jump)

    def _use(self, kind: str) -> None:
        """A fresh optimiser where the present one is of another kind."""
        if kind != self._kind:
            self._optimizer = open_optimizer(kind, self._masters)
            self._kind = kind

    def step(self, batch: Batch) -> StepResult:
        """Update the model on a batch: `learn.epochs` optimiser steps, or none and the reason.

        None is made without an informative group or a trained token, when a guard is set off, when a
        log-probability, the loss or the gradient is not finite, or where a weight would go beyond `LARGEST`.
        Should that happen after the first epoch, the steps already made stay and the rest is left out. Raises
        `UserError` for a batch that was sampled at another temperature than this learner's (`set_learn`
        changes it).
        """
        if batch.temperature != self.temperature:
            problem = f"the learner's temperature is {self.temperature}"
            raise UserError("batch.temperature", batch.temperature, problem, "set it with set_learn")
        chosen = select(batch, self.learn)
        metrics = chosen.metrics | {"learn/steps": 0.0, "learn/tokens": 0.0}
        alarm = guard(metrics, self.guard)
        if alarm is not None:
            return StepResult(alarm, metrics, alarm)
        with _deterministic(self.device):
            self._follow_model()
            untrained = self._measure(chosen.untrained)
            own = sum(group.source == "local" for group in batch.groups)
            if not chosen.rows:
                metrics |= _own_means(untrained)
                alarm = guard(metrics, self.guard)
                informative = any(group.informative for group in batch.groups)
                why = "no trained token" if informative else "no informative group"
                return StepResult(alarm or why, metrics, alarm)
            self._use(self.learn.optimizer)
            apply_settings(self._optimizer, self.learn, batch.round)
            return self._update(self._chunks(chosen.rows), chosen, untrained, own, metrics)

    @torch.no_grad()
    def _measure(self, rows: Sequence[Row]) -> _Pass:
        """Log-probabilities and entropy of completions that are not trained."""
        done = _Pass()
        chunks = self._collated(rows, self._common(rows)) if rows else []
        beginning = self._forward.begin(chunks, self.learn) if chunks else None
        for chunk in chunks:
            logprobs, entropy = self.logprobs(chunk, beginning)
            done.add(_sums_of_own(chunk, logprobs, entropy))
            done.add_own(Part.of(self.learn.loss, logprobs, chunk.mask))
        return done

    def _chunks(self, rows: Sequence[Row]) -> list[Chunk]:
        """Own completions before foreign ones, which are measured by them."""
        common = self._common(rows)
        if self.learn.foreign_bound == "none":
            return self._collated(rows, common)
        parts = [[row for row in rows if row.external == external] for external in (False, True)]
        return [chunk for part in parts if part for chunk in self._collated(part, common, longest_own(rows))]

    def _common(self, rows: Sequence[Row]) -> tuple[int, ...]:
        """What is computed once for all of them."""
        may = self._shared and self._forward.may_begin(self.learn)
        return common_beginning(rows) if may else ()

    def _collated(
        self, rows: Sequence[Row], beginning: tuple[int, ...] = (), longest: int | None = None
    ) -> list[Chunk]:
        return collate(
            rows,
            beginning=beginning,
            longest=longest,
            micro_batch=self.learn.micro_batch,
            shared=self._shared,
            device=self.device,
            dtype=self._parameters[0].dtype,
        )

    def _update(
        self,
        chunks: Sequence[Chunk],
        chosen: Selection,
        untrained: _Pass,
        own: int,
        metrics: dict[str, float],
    ) -> StepResult:
        old: list[_Start] = []
        problem: str | None = None
        logprobs: dict[int, float] = {}
        looked: dict[int, float] = {}
        for epoch in range(self.learn.epochs):
            done = self._accumulate(chunks, old, untrained, own)
            count = self._normaliser(done, chosen)
            if epoch == 0:
                metrics |= _summary(done, count) | _own_means(done, untrained)
                if self.learn.foreign_credit != "all" and done.of("foreign"):
                    metrics["learn/foreign_credit"] = done.of("credit") / done.of("foreign")
                logprobs = {group: total / n for group, (total, n) in sorted(done.by_group.items()) if n}
                counted = sum(n for _, n in done.by_group.values())
                if counted:
                    total = sum(total for total, _ in done.by_group.values())
                    metrics["learn/logprob_update"] = total / counted
                looked = {group: tokens / (3 * self.learn.epochs) for group, tokens in done.looked.items()}
                if done.of("nan") == 0 and (done.of("tokens") == 0 or count <= 0):
                    self._forget_gradients()
                    return StepResult("no trained token", metrics, looked=looked)
            problem = self._problem(done) or (guard(metrics, self.guard) if epoch == 0 else None)
            if problem is None:
                norm = self._clip(count)
                if math.isfinite(norm):
                    metrics.setdefault("learn/grad_norm", norm)
                else:
                    problem = "non-finite gradient"
            problem = problem or self._apply()
            if problem is not None:
                break
            metrics["learn/steps"] += 1.0
            metrics["learn/clip_share"] = done.of("clipped") / max(done.of("tokens"), 1.0)
        self._forget_gradients()
        return StepResult(None if metrics["learn/steps"] else problem, metrics, problem, logprobs, looked)

    def _accumulate(self, chunks: Sequence[Chunk], old: list[_Start], untrained: _Pass, groups: int) -> _Pass:
        """Forward and backward over all micro-batches; `old` is filled in the first epoch.

        `untrained` holds what was measured of the own completions, of so many `groups`, that are not trained.

        The loss is left undivided: which tokens count is known only after the last forward pass, so the
        gradient is divided once, in `_clip`. That makes micro-batches equal to one batch.
        """
        done = _Pass()
        learn = self.learn
        gspo = learn.loss == "gspo"
        among = Counter(group for chunk in chunks for group in chunk.groups)
        beginning = self._forward.begin(chunks, learn)
        for number, chunk in enumerate(chunks):
            logprobs, entropy = self.logprobs(chunk, beginning)
            own = logprobs.detach()
            if len(old) == number:
                part = Part.of(learn.loss, own, chunk.mask)
                factors = self._weights(chunk, part, among, done, untrained, groups)
                worth, asked = self._credit(chunk, own, beginning)
                for group, row in asked:
                    done.looked[group] += size_of(row, self._shared)
                old.append(_Start(own, factors, worth))
                if not bool(chunk.external.any()):
                    done.add_own(part)
            start, factor = old[number].logprobs, old[number].weights
            foreign = correct(
                learn, start, chunk.mask, chunk.external, chunk.behaviour, chunk.known, chunk.advantages
            )
            inputs = LossInputs(
                logprobs=logprobs,
                old_logprobs=start,
                advantages=chunk.advantages[:, None] * foreign.weights * factor[:, None] * old[number].credit,
                mask=foreign.mask,
                normaliser=1.0,
                clip_low=learn.gspo_clip_low if gspo else learn.clip_low,
                clip_high=learn.gspo_clip_high if gspo else learn.clip_high,
            )
            result = self._loss(inputs)
            result.loss.backward()
            measures = _measures(chunk, own, entropy, result.terms, foreign.mask)
            measures |= _discounts(factor, chunk.external, foreign.mask & own.isfinite() & start.isfinite())
            measures["credit"] = _total(old[number].credit, chunk.mask & chunk.external[:, None])
            for values in (result.metrics, foreign.metrics, measures):
                done.add(values)
            done.add_groups(chunk.groups, own, chunk.mask & own.isfinite())
            foreign_own = own[chunk.mask & chunk.external[:, None] & own.isfinite()]
            if foreign_own.numel():
                done.lowest_foreign = min(done.lowest_foreign, float(foreign_own.min()))
        if beginning is not None:
            beginning.backward()
        return done

    def _weights(
        self,
        chunk: Chunk,
        part: Part,
        among: Mapping[int, int],
        done: _Pass,
        untrained: _Pass,
        groups: int,
    ) -> Tensor:
        """The factor of each completion [S] of a micro-batch: below 1 for foreign ones that would weigh more
        than their group may."""
        if self.learn.foreign_bound == "none" or not bool(chunk.external.any()):
            return torch.ones_like(chunk.advantages)
        size, surprise = (done.of(name) + untrained.of(name) for name in ("own_size", "own_surprise"))
        bound = Bound.of(size, surprise, groups, self.learn.advantage)
        counts = torch.tensor([among[group] for group in chunk.groups], device=self.device)
        return weights(part, chunk.advantages, counts, bound).to(chunk.advantages.dtype)

    def _credit(
        self, chunk: Chunk, own: Tensor, beginning: Beginning | None
    ) -> tuple[Tensor, set[tuple[int, Row]]]:
        """The factor of each token [S, W] of a micro-batch, by what the policy has for it at the start; which
        rows of which groups that took."""

        def again(measure: Callable[[Chunk], Tensor], rows: Sequence[Row]) -> dict[Row, list[float]]:
            size = sum(len(row.token_ids) for row in chunk.sequences) // (self.learn.micro_batch or 1)
            chunks = self._collated(rows, tuple(chunk.beginning[0].tolist()), size)
            with torch.no_grad():
                measured = [(part, measure(part).tolist()) for part in chunks]
            return {
                row: line for part, lines in measured for row, line in zip(part.sequences, lines, strict=True)
            }

        return credit(
            self.learn,
            chunk,
            own,
            segment_marks(self.model),
            partial(again, lambda part: self.logprobs(part, beginning)[0]),
            partial(again, lambda part: self._forward.ranks(part, self.learn, beginning)),
        )

    def logprobs(self, chunk: Chunk, beginning: Beginning | None = None) -> tuple[Tensor, Tensor]:
        """Log-probability [S, W] of every trained token at the sampling temperature, and entropy in nats.
        Float32 whatever the model computes in. Entropy has no gradient."""
        return self._forward(chunk, self.learn, self.temperature, beginning)

    def _normaliser(self, done: _Pass, chosen: Selection) -> float:
        return normaliser(
            self.learn.loss,
            tokens=done.of("tokens") - done.of("token_discount") + chosen.silent_tokens,
            sequences=done.of("sequences") - done.of("sequence_discount") + chosen.silent_sequences,
            constant=self.learn.dr_grpo_length * chosen.completions,
        )

    def _problem(self, done: _Pass) -> str | None:
        """A NaN is the model's, not one token's: no step is worth making."""
        if done.of("nan"):
            return "non-finite log-probabilities"
        return None if math.isfinite(done.of("loss")) else "non-finite loss"

    def _clip(self, count: float) -> float:
        """Divide the summed gradients by the normaliser and clip them; returns the norm before clipping."""
        for parameter, master in self._copies:
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        gradients = [master.grad for master in self._masters if master.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) / count
        # Both in one pass over gradients that may be gigabytes; the small term is torch's own.
        torch._foreach_mul_(gradients, min(1.0, self.learn.grad_clip / (norm + 1e-6)) / count)
        return norm

    def _apply(self) -> str | None:
        """One optimiser step; or what is wrong with one that was made, and undone."""
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        if self._largest() <= LARGEST / 10 and max(rates) <= USUAL_LR:
            self._write_step()
            return None
        tensors = (*self._parameters, *self._masters)
        before = [tensor.detach().clone() for tensor in tensors]
        state = copy.deepcopy(self._optimizer.state_dict())
        self._write_step()
        if self._largest() <= LARGEST:
            return None
        with torch.no_grad():
            for tensor, kept in zip(tensors, before, strict=True):
                tensor.copy_(kept)
        self._optimizer.load_state_dict(state)
        return f"weights beyond {LARGEST:g}"

    def _largest(self) -> float:
        """The largest size of a weight; NaN where one is."""
        ends = [end for master in self._masters for end in torch.aminmax(master.detach())]
        return float(torch.stack(ends).abs().max())

    def _write_step(self) -> None:
        self._optimizer.step()
        # A fused step does not count as a write to its tensors; engines tell by the count what is new.
        torch.autograd.graph.increment_version(self._masters)
        with torch.no_grad():
            for parameter, master in self._copies:
                parameter.copy_(master)
        self._forget_gradients()

    def _follow_model(self) -> None:
        """Take over weights that were loaded into the model since the last step."""
        self._forget_gradients()
        for parameter, master in self._copies:
            if not torch.equal(master.to(parameter.dtype), parameter.detach()):
                master.copy_(parameter.detach())

    def _forget_gradients(self) -> None:
        for tensor in (*self._parameters, *self._masters):
            tensor.grad = None


def _measures(
    chunk: Chunk, own: Tensor, entropy: Tensor, terms: Tensor, counted: Tensor
) -> dict[str, Tensor]:
    external = chunk.external[:, None]
    foreign = chunk.mask & own.isfinite() & external
    sizes = terms.double().abs()
    return _sums_of_own(chunk, own, entropy) | {
        "nan": (own.isnan() & chunk.mask).sum(),
        "loss": terms.sum(dtype=torch.float64),
        "size": sizes.sum(),
        "size_external": (sizes * external).sum(),
        "counted": (counted & own.isfinite()).sum(),
        "counted_external": (counted & foreign).sum(),
        "foreign": foreign.sum(),
        "logprob_foreign": _total(own, foreign),
    }


def _discounts(factor: Tensor, external: Tensor, used: Tensor) -> dict[str, Tensor]:
    """What foreign completions of these factors [S] count less, in tokens and completions, in float64."""
    less = 1.0 - factor.double()
    return {
        "token_discount": (less[:, None] * used).sum(),
        "sequence_discount": (less * used.any(1)).sum(),
        "factor": (factor.double() * external).sum(),
        "factors": external.sum(),
    }


def _sums_of_own(chunk: Chunk, own: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    """Sums over the own tokens of one micro-batch, in float64, and how many these are."""
    local = chunk.mask & own.isfinite() & ~chunk.external[:, None]
    gap = local & chunk.known[:, None]
    return {
        "local": local.sum(),
        "entropy": _total(entropy, local),
        "logprob_local": _total(own, local),
        "gap": _total((own - chunk.behaviour).abs(), gap),
        "gap_tokens": gap.sum(),
    }


def _total(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, 0.0).sum(dtype=torch.float64)


def _own_means(*parts: _Pass) -> dict[str, float]:
    series = {
        "learn/entropy": ("entropy", "local"),
        "learn/logprob_local": ("logprob_local", "local"),
        "learn/engine_gap": ("gap", "gap_tokens"),
    }
    metrics: dict[str, float] = {}
    for name, (value, count) in series.items():
        total, over = (sum(part.of(key) for part in parts) for key in (value, count))
        if over > 0 and math.isfinite(total):
            metrics[name] = total / over
    return metrics


def _summary(done: _Pass, count: float) -> dict[str, float]:
    """The metrics of the first epoch; one that has nothing to be the mean of is left out."""
    metrics = {
        "learn/tokens": done.of("tokens"),
        "learn/foreign_masked": done.of("foreign_masked"),
        "learn/ratio_truncated": done.of("ratio_truncated"),
        "learn/nonfinite": done.of("nonfinite"),
        "learn/clamped": done.of("clamped"),
    }

    def mean(name: str, value: float, over: float) -> None:
        if over > 0 and math.isfinite(value):
            metrics[name] = value / over

    mean("learn/loss", done.of("loss"), count)
    mean("learn/logprob_foreign", done.of("logprob_foreign"), done.of("foreign"))
    mean("learn/loss_share_external", done.of("size_external"), done.of("size"))
    mean("learn/token_share_external", done.of("counted_external"), done.of("counted"))
    mean("learn/foreign_weight", done.of("factor"), done.of("factors"))
    if math.isfinite(done.lowest_foreign):
        metrics["learn/logprob_foreign_min"] = done.lowest_foreign
    return metrics


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Only deterministic kernels while an update runs on CPU; the process's own settings come back after."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        # Nothing here reads memory that was not written; filling it would be one more pass over all tensors.
        memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        memory.fill_uninitialized_memory = filled
