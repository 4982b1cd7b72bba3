"""The swarm's judge: every node, at its newest checkpoint, on the same held-out questions.

A sweep asks all of them, of the policies the nodes started from too. A judging asks one of each node that has
a checkpoint which was not judged yet, as the paper's demo does (section 6, Figure 3).
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapo.core.atomic_file import write_atomically
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.errors import UserError
from sapo.core.figures import Exam, Gain, NodeExam, Probed, Sweep
from sapo.core.rng import rng, stream
from sapo.core.types import Question, Sampling, canonical, shown
from sapo.core.user_cache import default_cache
from sapo.node import probes
from sapo.node.tracked import tracker_of
from sapo.ops.judge_store import Standing, Verdict, Verdicts
from sapo.ops.supervisor import holder
from sapo.policy import checkpoint, models
from sapo.policy.checkpoint import Checkpoint
from sapo.policy.engines import open_engine
from sapo.policy.evaluate import Evaluation, Progress, ask, examples, gain, held_out_set
from sapo.policy.initial import load_initial
from sapo.policy.models import LoadedPolicy
from sapo.store.journal.journal import Journal
from sapo.store.tracking.tracker import Tracker
from sapo.tasks.workers import TaskWorkers, open_workers

log = logging.getLogger(__name__)

Rivals = Callable[[str, int], Mapping[int, Path]]
"""From a node and its newest round: directories with weights to ask as well, by round."""
ATTEMPTS = 5
"""A running node may delete a checkpoint while it is being read; then there is a newer one."""


@dataclass(frozen=True, slots=True)
class Judging:
    """What became of one question: how each node stands that answered it, and why the others did not."""

    standings: Mapping[str, Standing]
    passed_over: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. `question` is null if no node was asked."""
        first = next(iter(self.standings.values()), None)
        asked = None if first is None else first.verdict
        return {
            "judging": None if asked is None else asked.judging,
            "dataset": None if asked is None else asked.dataset,
            "question": None if asked is None else asked.question,
            "nodes": {
                name: {
                    "round": one.verdict.round,
                    "answer": one.verdict.answer,
                    "score": one.verdict.score,
                    "judged": one.judged,
                    "cumulative": one.cumulative,
                }
                for name, one in self.standings.items()
            },
            "passed_over": dict(self.passed_over),
        }


def judge_swarm(config: Config, home: Home, nodes: Sequence[str] | None = None) -> Judging:
    """Ask every node that has a new round the same held-out question, once; keeps the verdicts.

    The question is drawn by the seed and the number of the judging. Raises `UserError` for a home without
    nodes, or when there are too few held-out questions.
    """
    with closing(Verdicts(home.verdicts)) as verdicts:
        passed_over: dict[str, str] = {}
        new = []
        for name in home.choose_nodes(config, nodes):
            found = newest(home, name)
            if found is None:
                passed_over[name] = "has no whole checkpoint yet"
            elif found.round <= verdicts.last_round(name, found.incarnation):
                passed_over[name] = (
                    f"has no checkpoint after the one of round {found.round}, which was judged"
                )
            else:
                new.append(name)
        standings: dict[str, Standing] = {}
        if new:
            number = verdicts.next_judging()
            with open_workers(config) as workers:
                questions = held_out_set(config, home, workers)
                question = questions[rng(config.swarm.seed, "judge", number).randrange(len(questions))]
                for name in new:
                    answered = _judge(config, home, name, workers, question, number)
                    if verdicts.add(answered):
                        standings[name] = verdicts.standings(name, answered.incarnation)[-1]
                    else:
                        passed_over[name] = f"was judged at round {answered.round} by another judge meanwhile"
    return Judging(standings, passed_over)


def _judge(
    config: Config, home: Home, name: str, workers: TaskWorkers, question: Question, number: int
) -> Verdict:
    own = config.for_node(name)
    policy = load_initial(own, workers, default_cache())
    found = load_newest(home, name, policy)
    with closing(open_engine(own, policy)) as engine:
        ((completion,),) = engine.generate(
            [policy.encode_prompt(question.text)],
            completions=1,
            max_new_tokens=own.generate.max_new_tokens,
            sampling=Sampling(),
            seed=stream(config.swarm.seed, "judge", number),
        )
    (outcome,) = workers.score([(question.recipe, completion.text)])
    return Verdict(
        judging=number,
        node=name,
        incarnation=found.incarnation,
        round=found.round,
        dataset=question.recipe.dataset,
        question=question.text,
        answer=shown(completion.text, completion.finish_reason),
        score=outcome.score,
        at=time.time(),
    )


def tell_verdicts(config: Config, home: Home, node: str, *, uri: str) -> int:
    """Log a node's verdicts that are not in the MLflow at `uri` yet, at their rounds; returns how many.
    Telling one again changes nothing. Raises `Unavailable` when MLflow is away."""
    tracker = tracker_of(config, node, home, uri=uri)
    with closing(Verdicts(home.verdicts)) as verdicts:
        due = verdicts.standings(node, tracker.incarnation, untold=True)
        for one in due:
            series = {"judge/reward": one.verdict.reward, "judge/cumulative": one.cumulative}
            tracker.log_metrics(series, round=one.verdict.round, at=one.verdict.at)
        if due:
            leave_run(config, home, tracker)
        verdicts.acknowledge(due)
    return len(due)


def leave_run(config: Config, home: Home, tracker: Tracker) -> None:
    """End a node's run that was left open, as a killed node leaves it, at the time of the last round.
    One that has ended keeps its end; that of a running node is left."""
    if holder(home.node(tracker.node)) is not None:
        return
    with Journal.read_only(home.journal(tracker.node)) as journal:
        done = journal.finished_rounds()
        at = journal.result(done - 1).finished_at if done else time.time()
        ended = journal.ended(config.for_node(tracker.node))
    tracker.close("FINISHED" if ended else "KILLED", at)


def evaluate_swarm(
    config: Config,
    home: Home,
    nodes: Sequence[str] | None = None,
    *,
    progress: Progress | None = None,
    rivals: Rivals | None = None,
) -> Sweep:
    """Evaluate nodes at their newest checkpoints and their starting policies; writes `evaluation.json`.

    Policies of earlier rounds that `rivals` finds are asked the same questions, sampled only. Nodes that have
    no whole checkpoint yet are left out, unless they are named. Raises `UserError` for a named one, when no
    node has any, or when there are too few held-out questions.
    """
    names = home.choose_nodes(config, nodes)
    if not nodes:
        whole = [name for name in names if newest(home, name) is not None]
        for name in sorted({*names} - {*whole}):
            log.warning("%s is not evaluated: it has no whole checkpoint yet", name)
        names = whole or names
    baselines: dict[str, Evaluation] = {}
    labels: dict[str, str] = {}
    asked: dict[str, _Asked] = {}
    with open_workers(config) as workers:
        questions = held_out_set(config, home, workers)
        for name in names:
            own = config.for_node(name)
            policy = load_initial(own, workers, default_cache())
            begun = _begun_with(own)
            if begun not in labels:
                label = labels[begun] = (
                    own.model if own.model not in baselines else f"{own.model} as of {name}"
                )
                baselines[label] = ask(own, policy, workers, questions, label, progress)
            round = load_newest(home, name, policy).round
            found = ask(own, policy, workers, questions, name, progress)
            earlier = {}
            for before, weights in (rivals(name, round) if rivals else {}).items():
                models.load_weights(policy, weights)
                label = f"{name} after {before} rounds"
                older = ask(own, policy, workers, questions, label, progress, greedy=False)
                earlier[before] = older.pass_at_1
            asked[name] = _Asked(own, labels[begun], round, found, earlier)
    main = baselines[labels.get(_begun_with(config), next(iter(baselines)))]
    sweep = _sweep(config, questions, main, baselines, asked)
    write_atomically(home.evaluation, json.dumps(sweep.written(), indent=1) + "\n")
    return sweep


@dataclass(frozen=True, slots=True)
class _Asked:
    config: Config
    baseline: str
    round: int
    found: Evaluation
    earlier: Mapping[int, float]


def _begun_with(config: Config) -> str:
    """Names what a node's held-out figures are set against: its starting policy, and the room for answers."""
    return canonical([config.policy(), config.generate.max_new_tokens])


def newest(home: Home, name: str) -> Checkpoint | None:
    """A node's newest whole checkpoint, of its journal's incarnation where it has one: a node that began
    anew keeps the checkpoints it had before."""
    incarnation = None
    if home.journal(name).exists():
        with Journal.read_only(home.journal(name)) as journal:
            incarnation = journal.incarnation
    return checkpoint.load_latest(home.checkpoints(name), incarnation=incarnation)


def load_newest(home: Home, name: str, policy: LoadedPolicy, option: str = "--node") -> Checkpoint:
    """Load the newest whole checkpoint's weights. Raises `UserError` naming `option` where there is none."""
    for attempt in range(ATTEMPTS):
        found = newest(home, name)
        if found is None:
            break
        try:
            models.load_weights(policy, found.path)
            return found
        except Exception:
            if found.path.exists() or attempt == ATTEMPTS - 1:
                raise
    raise UserError(option, name, "has no whole checkpoint", "let it run until it has taken one")


def _sweep(
    config: Config,
    questions: Sequence[Question],
    main: Evaluation,
    baselines: Mapping[str, Evaluation],
    asked: Mapping[str, _Asked],
) -> Sweep:
    shown = examples(questions)

    def exam(found: Evaluation) -> dict[str, Any]:
        answers = tuple((found.answers[place], found.greedy[place]) for place in shown)
        return {**dict(found.summary()), "answers": answers}

    def probed(one: _Asked) -> Probed | None:
        count = one.config.eval.probe_questions
        probe = one.found.probe(count) if count else None
        return None if probe is None else Probed(**dict(probe.summary()), passes=probes.bits(probe))

    def gained(of: Callable[[Evaluation], Sequence[float]]) -> Gain:
        start = {name: of(baselines[one.baseline]) for name, one in asked.items()}
        return gain(start, {name: of(one.found) for name, one in asked.items()}, main.asked)

    return Sweep(
        questions=len(main.sampled),
        effective=main.effective,
        samples=config.eval.samples,
        examples=tuple((questions[place].recipe.dataset, questions[place].text) for place in shown),
        starter=Exam(**exam(main)),
        baselines={label: Exam(**exam(found)) for label, found in baselines.items()},
        nodes={
            name: NodeExam(
                **exam(one.found),
                round=one.round,
                model=one.config.model,
                baseline=one.baseline,
                probe=probed(one),
                earlier=one.earlier,
            )
            for name, one in asked.items()
        },
        gain=gained(lambda found: found.sampled),
        gain_greedy=gained(lambda found: found.greedy),
    )
