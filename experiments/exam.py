"""Held-out exams: the same questions and random numbers for every arm of a seed.

The held-out questions fall into two halves by their buckets: what learning rates are chosen on is never what
is reported.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from sapo.core.config.load import Config, Task
from sapo.core.errors import UserError
from sapo.core.intervals import effective
from sapo.core.rng import stream
from sapo.core.types import Question, canonical
from sapo.node.round import NodeRuntime
from sapo.policy.evaluate import Evaluation, answer
from sapo.policy.models import LoadedPolicy
from sapo.tasks.questions import held_out_questions, identity
from sapo.tasks.workers import TaskWorkers

from .ensembles.exam import Expert, examine, prior_of
from .ensembles.mixture import log_likelihood
from .grid import ExamPlan
from .record import Exam, Together


def questions_for(
    config: Config, plan: ExamPlan, workers: TaskWorkers, *, tuning: bool, tasks: Sequence[Task] | None = None
) -> list[Question]:
    """A seed's held-out questions, of all tasks that any node asks, or of others.

    Raises `UserError` where hardly any is held out.
    """
    share = config.rules.held_out
    try:
        return held_out_questions(
            workers,
            config.manifest_tasks() if tasks is None else tasks,
            swarm=config.swarm.name,
            seed=config.swarm.seed,
            count=plan.questions,
            held_out=share,
            among=(0.0, share / 2) if tuning else (share / 2, share),
        )
    except UserError as error:
        problem = f"{error.problem}; it is half of them, for learning rates are chosen on others"
        raise UserError("exam.questions", plan.questions, problem, error.remedy) from None


class Examiner:
    """Examines nodes; a node that has learned nothing since, and those that are still one policy, only once.

    `beside` are questions of tasks that no node learns; they are asked after the others. Raises `UserError`
    for a plain text that is longer than a node's context.
    """

    def __init__(
        self, plan: ExamPlan, questions: Sequence[Question], seed: int, beside: Sequence[Question] = ()
    ) -> None:
        self._plan, self._learned = plan, len(questions)
        self._questions = [*questions, *beside]
        self._names = [identity(question) for question in self._questions]
        self._seed = stream(seed, "exam")
        self._known: dict[str, tuple[Sequence[float], float | None]] = {}

    def examine(self, nodes: Sequence[NodeRuntime], rounds: int) -> Iterator[Exam]:
        """Every node's exam after so many rounds."""
        before, self._known = self._known, {}
        for node in nodes:
            config = node.config
            same = canonical([config.policy(), config.generate.model_dump(mode="json")])
            key = same if node.round == 0 else f"{node.name} after {node.round}"
            if key not in self._known:
                self._known[key] = before[key] if key in before else self._asked(node)
            yield self._exam(node.name, rounds, *self._known[key])

    def together(
        self, config: Config, nodes: Sequence[NodeRuntime]
    ) -> tuple[dict[str, Together], float | None]:
        """What the nodes do as one in every way, and the share of questions routed to who learns them."""
        experts = [_expert(node) for node in nodes]
        workers, each = nodes[0].parts.workers, (self._plan.ensemble or len(nodes)) // len(nodes)
        found = examine(
            experts,
            workers,
            self._questions,
            log_prior=prior_of(experts, workers, config),
            form=config.rules.answer,
            samples=self._plan.samples,
            seed=self._seed,
            greedy=False,
            each=each,
        )
        scores = {str(way): self._together(one.sampled) for way, one in found.ways.items()}
        scores["best_single"] = self._together(found.singles[found.best].sampled)
        return scores, _at_home(found.routed, nodes)

    def _together(self, passes: Sequence[float]) -> Together:
        exam = self._exam("", 0, passes)
        return Together(pass_at_1=exam.pass_at_1, untrained=exam.untrained, tasks=exam.tasks)

    def _asked(self, node: NodeRuntime) -> tuple[Sequence[float], float | None]:
        """What a node passes of each question, and its loss on the plain text."""
        parts, text = node.parts, self._plan.text
        text_loss = None if text is None else bits_per_byte(node.name, parts.policy, text)
        parts.rollouts.engine.update_weights()
        found = answer(
            parts.policy,
            parts.rollouts.engine,
            parts.workers,
            self._questions,
            max_new_tokens=node.config.generate.max_new_tokens,
            samples=self._plan.samples,
            seed=self._seed,
            greedy=False,
        )
        return Evaluation.of(self._questions, found).sampled, text_loss

    def _exam(self, node: str, rounds: int, passes: Sequence[float], text_loss: float | None = None) -> Exam:
        by_task: dict[str, list[float]] = {}
        for question, share in zip(self._questions, passes, strict=True):
            by_task.setdefault(question.recipe.dataset, []).append(share)
        learned, beside = passes[: self._learned], passes[self._learned :]
        return Exam(
            round=rounds,
            node=node,
            pass_at_1=fmean(learned),
            tasks={task: fmean(shares) for task, shares in sorted(by_task.items())},
            questions=len(learned),
            effective=effective(self._names[: self._learned]),
            samples=self._plan.samples,
            untrained=fmean(beside) if beside else None,
            text_loss=text_loss,
        )


def bits_per_byte(name: str, policy: LoadedPolicy, text: str) -> float:
    """A node's loss on a text read without a prompt: bits of all tokens but the first, over the text's bytes.

    Raises `UserError` for a text that is longer than the context.
    """
    ids = policy.tokenizer(text).input_ids
    if len(ids) > policy.max_length:
        problem = f"{len(ids)} tokens are more than the context of {name}, {policy.max_length}"
        raise UserError("exam.text", f"{text[:20]}...", problem, "shorten it")
    return -float(log_likelihood(policy.model, [ids])[0]) / math.log(2) / len(text.encode())


def _expert(node: NodeRuntime) -> Expert:
    engine = node.parts.rollouts.engine
    engine.update_weights()
    return Expert(node.name, node.parts.policy, engine, node.config.generate.max_new_tokens)


def _at_home(routed: Mapping[str, Mapping[str, float]], nodes: Sequence[NodeRuntime]) -> float | None:
    """Share that goes to who learns a data set: the mean over those that some nodes learn and some do not."""
    learn = {node.name: {task.dataset for task in node.config.tasks} for node in nodes}
    shares = []
    for dataset, went in routed.items():
        home = [name for name in learn if dataset in learn[name]]
        if 0 < len(home) < len(learn):
            shares.append(sum(went[name] for name in home))
    return fmean(shares) if shares else None
