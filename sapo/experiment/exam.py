"""Held-out exams: the same questions and random numbers for every arm of a seed.

The held-out questions fall into two halves by their buckets: what learning rates are chosen on is never what
is reported.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean

from sapo.core.config.load import Config
from sapo.core.errors import UserError
from sapo.core.rng import stream
from sapo.core.types import Question, canonical
from sapo.experiment.grid import ExamPlan
from sapo.experiment.record import Exam
from sapo.node.round import NodeRuntime
from sapo.policy.evaluate import evaluate
from sapo.tasks.questions import held_out_questions
from sapo.tasks.workers import TaskWorkers


def questions_for(config: Config, plan: ExamPlan, workers: TaskWorkers, *, tuning: bool) -> list[Question]:
    """A seed's held-out questions, of all tasks that any node asks.

    Raises `UserError` when the data sets have too few.
    """
    share = config.rules.held_out
    try:
        return held_out_questions(
            workers,
            config.manifest_tasks(),
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
    """Examines nodes; those that are still one policy only once."""

    def __init__(self, plan: ExamPlan, questions: Sequence[Question], seed: int) -> None:
        self._plan, self._questions = plan, questions
        self._seed = stream(seed, "exam")

    def examine(self, nodes: Sequence[NodeRuntime], rounds: int) -> Iterator[Exam]:
        """Every node's exam after so many rounds."""
        known: dict[str, Sequence[float]] = {}
        for node in nodes:
            config = node.config
            same = canonical([config.policy(), config.generate.model_dump(mode="json")])
            key = same if rounds == 0 else node.name
            if key not in known:
                known[key] = self._passes(node)
            yield self._exam(node.name, rounds, known[key])

    def _passes(self, node: NodeRuntime) -> Sequence[float]:
        parts = node.parts
        parts.rollouts.engine.update_weights()
        found = evaluate(
            parts.policy,
            parts.rollouts.engine,
            parts.workers,
            self._questions,
            max_new_tokens=node.config.generate.max_new_tokens,
            samples=self._plan.samples,
            seed=self._seed,
            greedy=False,
        )
        return found.sampled

    def _exam(self, node: str, rounds: int, passes: Sequence[float]) -> Exam:
        by_task: dict[str, list[float]] = {}
        for question, share in zip(self._questions, passes, strict=True):
            by_task.setdefault(question.recipe.dataset, []).append(share)
        return Exam(
            round=rounds,
            node=node,
            pass_at_1=fmean(passes),
            tasks={task: fmean(shares) for task, shares in sorted(by_task.items())},
            questions=len(passes),
            samples=self._plan.samples,
        )
