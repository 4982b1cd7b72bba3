"""Verification of what peers wrote: regenerated, scored, and compared with the node's own answers."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType

from sapo.core.config.load import Config
from sapo.core.errors import Refused
from sapo.core.types import Group, Outcome
from sapo.learn.advantage import informative
from sapo.learn.collate import has_own_prompt
from sapo.learn.logprobs import shares_prompts
from sapo.peers.admission import PROVEN
from sapo.peers.pool import Entry, Verdict
from sapo.peers.quotas import Quotas, beyond
from sapo.peers.rejections import Refusals
from sapo.policy.models import LoadedPolicy
from sapo.policy.tokenise import Tokens
from sapo.tasks.workers import PeerGroup, TaskWorkers


@dataclass(frozen=True, slots=True)
class Baseline:
    """The best and the mean score of answers, and the tokens of the largest own group; by default nothing
    falls short of it."""

    best: float = 0.0
    mean: float = 0.0
    tokens: float = math.inf

    def above(self, scores: Sequence[float], tolerance: float) -> bool:
        """Whether `scores` fall short of it: in the best of them, or by half in their mean."""
        return max(scores) < self.best - tolerance or fmean(scores) < self.mean / 2 - tolerance


def own_standards(groups: Sequence[Group], outcomes: Sequence[Sequence[Outcome]]) -> dict[str, Baseline]:
    """What a round's own answers reach, by data set, and all of them together under ``""``."""
    largest = max(map(tokens_of, groups), default=0) or math.inf
    scores: dict[str, list[float]] = {}
    for group, row in zip(groups, outcomes, strict=True):
        for name in (group.recipe.dataset, ""):
            scores.setdefault(name, []).extend(one.score for one in row if one.score is not None)
    return {name: Baseline(max(found), fmean(found), largest) for name, found in scores.items() if found}


def tokens_of(group: Group) -> int:
    """Tokens of an own group's completions."""
    return sum(len(completion.token_ids or ()) for completion in group.completions)


@dataclass
class PeerVerifier:
    """Gives foreign groups their verdicts: no question, answer or score of a peer is believed."""

    config: Config
    policy: LoadedPolicy
    workers: TaskWorkers
    quotas: Quotas
    refusals: Refusals

    def verified(
        self, entries: Sequence[Entry], standards: Mapping[str, Baseline] = MappingProxyType({})
    ) -> list[Entry]:
        """Regenerate and score groups; returns the entries with their verdicts and tokens.

        A newcomer's group that falls short of the node's own (`own_standards`) is `substandard`: until its
        author is known, half-right answers are not learned from. So is one that is larger than any own one,
        and any of who may not teach for lack of time (`Quotas.may_teach`): these count for their author.
        """
        tokens, found, seconds = self._measured(entries)
        good = [i for i in range(len(entries)) if i not in found]
        judgements = self.workers.judge([_claim(entries[i].group) for i in good])
        for i, judgement in zip(good, judgements, strict=True):
            seconds[i] += judgement.seconds
            if judgement.reason is None:
                found[i] = Verdict(outcomes=judgement.outcomes)
            else:
                found[i] = self._bad(entries[i], judgement.reason)
        for i, entry in enumerate(entries):
            key = entry.group.key
            newcomer = not self.quotas.known(key)
            standard = standards.get(entry.group.recipe.dataset) or standards.get("") or Baseline()
            short = newcomer and self._falls_short(found[i], standard)
            useful = not short and informative(found[i].scores, self.config.learn.zero_tolerance)
            self.quotas.judged(key, seconds[i], useful)
            large = newcomer and sum(len(ids) for ids, _ in tokens[i].completions) > standard.tokens
            if short or (useful and (large or not self.quotas.may_teach(key))):
                found[i] = found[i].model_copy(update={"reason": "substandard"})
        return [replace(entry, verdict=found[i], tokens=tokens[i]) for i, entry in enumerate(entries)]

    def _measured(self, entries: Sequence[Entry]) -> tuple[list[Tokens], dict[int, Verdict], list[float]]:
        """Tokens of entries, verdicts on those too long or too costly to learn from, and seconds spent."""
        tokens: list[Tokens] = []
        found: dict[int, Verdict] = {}
        seconds: list[float] = []
        shared = shares_prompts(self.policy.model)
        for i, entry in enumerate(entries):
            began = time.thread_time()
            tokens.append(Tokens.of(self.policy, entry.group))
            lengths = [len(ids) for ids, _ in tokens[i].completions]
            too_long = tokens[i].longest > self.policy.max_length
            alone = has_own_prompt(tokens[i].longest, shared)
            prompt = len(tokens[i].prompt) if alone else 0
            if reason := "too_long" if too_long else beyond(self.config, lengths, prompt):
                found[i] = self._bad(entry, reason)
            seconds.append(time.thread_time() - began)
        return tokens, found, seconds

    def _falls_short(self, verdict: Verdict, standard: Baseline) -> bool:
        """Whether informative scores fall short of the node's own."""
        tolerance = self.config.learn.zero_tolerance
        if not informative(verdict.scores, tolerance):
            return False
        known = [score for score in verdict.scores if score is not None]
        return standard.above(known, tolerance)

    def _bad(self, entry: Entry, reason: str) -> Verdict:
        """The verdict on a group that is unusable as a whole; counted by author in metrics and history."""
        self.refusals.note(Refused(reason, "found when it was verified", entry.group), entry.received)
        if reason in PROVEN:
            self.quotas.fault(entry.group.key, reason)
        return Verdict(reason=reason)


def _claim(group: Group) -> PeerGroup:
    return PeerGroup(group.recipe, group.question, tuple(completion.text for completion in group.completions))
