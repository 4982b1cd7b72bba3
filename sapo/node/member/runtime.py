"""A member's round: Algorithm 1 without its update. Questions, answers of somebody else, groups, the bus.

It has a journal like a node's, so `sapo status`, the outbox and MLflow know it: a round is three transactions
here too, the batch of which is empty.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from sapo.bus import open_bus
from sapo.bus.base import Bus
from sapo.core.atomic_file import write_atomically
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.config.members import OpenAIMember
from sapo.core.errors import Paused, Unavailable
from sapo.core.outage import Outage
from sapo.core.series import Sieve
from sapo.core.types import Batch, Completion, Group, Question, RoundResult
from sapo.learn.batch_metrics import reward_means
from sapo.node.author import Author, open_author
from sapo.node.group_maker import GroupMaker
from sapo.node.member.answer_book import AnswerBook, Ask
from sapo.node.member.backend import Backend, open_backend
from sapo.node.scoring import score_groups
from sapo.store.journal.outbox import Deliverer, PublishSink, Sink
from sapo.tasks.workers import TaskWorkers, open_workers

log = logging.getLogger(__name__)

BOOK = "answers.sqlite"
"""File in a member's folder: what it has been answered and has spent."""
FIRST_WAIT_S, LAST_WAIT_S = 1.0, 60.0
"""Between two tries at a backend that is away."""
LOOK_S = 0.2
"""How often it is asked meanwhile whether to stop."""
KEPT_ROUNDS = 100
"""Rounds that stay in the journal; what is owed of older ones stays, too."""


class MemberRuntime:
    """A member's journal, answers and round. Open it by `MemberRuntime.open`, as a context manager."""

    def __init__(
        self,
        author: Author,
        home: Home,
        maker: GroupMaker,
        backend: Backend,
        book: AnswerBook,
        deliverer: Deliverer,
        stop: threading.Event,
    ) -> None:
        self.config, self.name, self.journal, self.home = author.config, author.name, author.journal, home
        self.maker, self.backend, self.book, self.deliverer = maker, backend, book, deliverer
        self.round = self.journal.finished_rounds()
        self._clock, self._stop, self._stack = maker.clock, stop, contextlib.ExitStack()
        self._outage = Outage("what answers is", log, consequence="asking again", who=author.name)
        self.beside: Callable[[], Mapping[str, float]] = dict
        """More series for every round, of what goes on around the member."""
        # of a round that was cut short after its groups were journalled
        signed = self.journal.groups(self.round) if self._committed() else []
        self._groups = [Group.model_validate_json(one.payload) for one in signed]
        self._metrics: dict[str, float] = {}
        self._figures = Sieve(self.name)

    @classmethod
    def open(
        cls,
        config: Config,
        name: str,
        home: Home,
        *,
        clock: Callable[[], float] = time.time,
        bus: Bus | None = None,
        tracking: Sequence[Sink] = (),
        workers: TaskWorkers | None = None,
        backend: Backend | None = None,
        stop: threading.Event | None = None,
        deliver: bool = True,
    ) -> Self:
        """Lock the member's folder and open all it works with; `config` is the whole site's.

        Tests give `bus`, `workers` and `backend`; the caller closes `workers` that it gives. `stop` ends the
        waiting for answers. Raises `UserError` as `sapo.node.author.open_author` does, and for a backend that
        cannot be used.
        """
        with contextlib.ExitStack() as stack:
            author = open_author(stack, config, name, home, clock=clock)
            own_bus = bus if bus is not None else open_bus(config, home)
            stack.callback(own_bus.close)
            if workers is None:
                workers = open_workers(author.config, tasks=config.manifest_tasks())
                stack.callback(workers.close)
            folder, member = home.node(name), author.config.member
            bounds = (member.max_tokens, member.max_cost) if isinstance(member, OpenAIMember) else ()
            book = stack.enter_context(AnswerBook(folder / BOOK, *bounds, clock=clock))
            if backend is None:
                score = workers.score
                backend = open_backend(author.config, folder, lambda recipe, text: score([(recipe, text)])[0])
            stack.callback(backend.close)
            for leftover in (home.waiting(name), home.page(name)):
                leftover.unlink(missing_ok=True)
                stack.callback(leftover.unlink, missing_ok=True)
            if backend.address is not None:
                write_atomically(home.page(name), backend.address + "\n", mode=0o600)
            sinks: list[Sink] = [PublishSink(own_bus), *tracking] if deliver else []
            deliverer = Deliverer(home.journal(name), sinks, clock=clock)
            stack.callback(deliverer.close)
            runtime = cls(
                author,
                home,
                GroupMaker(author, workers, clock, kind=backend.kind),
                backend,
                book,
                deliverer,
                stop or threading.Event(),
            )
            runtime._stack = stack.pop_all()
        return runtime

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def finished(self) -> bool:
        return self.round >= self.config.swarm.rounds

    def run_round(self) -> RoundResult:
        """One whole round. Raises `Paused` where it is stopped before all is answered, or out of budget."""
        self.generate()
        self.publish()
        return self.finish()

    def generate(self) -> tuple[str, ...]:
        """Have the round's questions answered L times each; returns the ids of the groups.

        Answers that are there are not asked for again. Raises `Paused` as `run_round` does, `UserError` for
        what a person must mend.
        """
        self.deliverer.check()
        started = self._clock()
        if not self._committed() and not self._groups:
            questions = self.maker.question_stream(self.round).result()
            lost = self.book.begin(self.round, [question.recipe.digest() for question in questions])
            if lost:
                log.warning("%s: %d requests were under way when it was killed; given up", self.name, lost)
            self._await_answers([Ask(n, q, self.config.batch.completions) for n, q in enumerate(questions)])
            self._groups = self._answered(questions)
        self._metrics["time/generate"] = self._clock() - started
        return tuple(group.group_id for group in self._groups)

    def publish(self) -> None:
        """Select, sign and journal the groups; the deliverer sends them beside the next round."""
        if not self._committed():
            self._groups, _, withheld = self.maker.publish(self.round, self._groups)
            self._metrics["share/withheld"] = float(withheld)
        self.deliverer.notify()

    def finish(self) -> RoundResult:
        """Score the round's answers, and journal its figures with an empty batch."""
        stage = self.journal.stage()
        if stage is not None and stage[1] == "groups":
            batch = Batch(
                swarm=self.config.swarm.name,
                node=self.name,
                incarnation=self.journal.incarnation,
                round=self.round,
                policy_version=0,
                learn="{}",
                temperature=self.config.generate.temperature,
                groups=(),
            )
            self.journal.commit_batch(
                batch, positions={}, pool_added=[], pool_removed=[], verdicts={}, training_owed=False
            )
        result = RoundResult(
            round=self.round,
            policy_version=0,
            skipped="a member does not learn",
            metrics=self._figures.kept(self._round_metrics()),
            finished_at=self._clock(),
        )
        self.journal.commit_result(result)
        self.journal.forget(self.round - KEPT_ROUNDS)
        self.round += 1
        self._groups, self._metrics = [], {}
        self.deliverer.notify()
        return result

    def outages(self) -> dict[str, float]:
        """The series `outage/*`: 1 for every service that is away now."""
        away = self.deliverer.away() | ({"answers"} if self._outage.away else set())
        return {f"outage/{service}": 1.0 for service in sorted(away)}

    def drain(self, timeout: float) -> bool:
        """Deliver what is owed, within `timeout` seconds; whether nothing is owed any more."""
        return self.deliverer.drain(timeout)

    def close(self) -> None:
        """End the backend, stop deliveries, release the lock. What is owed stays in the journal."""
        self._stack.close()

    # -- inside --------------------------------------------------------------------------------------------

    def _await_answers(self, asks: Sequence[Ask]) -> None:
        wait = FIRST_WAIT_S
        while any(self.book.missing(ask) for ask in asks):
            if self._stopping():
                raise Paused(f"{self.name} stops in round {self.round}; the answers it has are kept")
            try:
                self.backend.answer(asks, self.book, self._stopping)
                if self._stopping():
                    continue
                self._outage.ended()
                self.home.waiting(self.name).unlink(missing_ok=True)
                wait = FIRST_WAIT_S
            except Unavailable as error:
                self._outage.began(error)
                write_atomically(self.home.waiting(self.name), f"{error}\n")
                self._rest(wait)
                wait = min(2.0 * wait, LAST_WAIT_S)

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stopping() and (left := until - time.monotonic()) > 0:
            self._stop.wait(min(left, LOOK_S))

    def _stopping(self) -> bool:
        return self._stop.is_set() or self.home.stop_flag.exists()

    def _answered(self, questions: Sequence[Question]) -> list[Group]:
        given_up = self.book.given_up()
        for why in sorted(set(given_up.values())):
            log.warning("%s: round %d: a question makes no group: %s", self.name, self.round, why)
        created = self._clock()
        return [
            self.maker.group(
                self.round,
                place,
                0,
                question,
                [
                    Completion(text=one.text, finish_reason=one.finish_reason)
                    for one in self.book.answers(place)[: self.config.batch.completions]
                ],
                created,
            )
            for place, question in enumerate(questions)
            if place not in given_up
        ]

    def _round_metrics(self) -> dict[str, float]:
        outcomes = score_groups(self.maker.workers, self._groups) if self._groups else []
        pairs = zip(self._groups, outcomes, strict=True)
        scores = ((group.recipe.dataset, one.score) for group, row in pairs for one in row)
        metrics = self._metrics | reward_means("reward/local", scores) | self.outages() | dict(self.beside())
        metrics |= {f"member/{name}": amount for name, amount in self.book.totals().items()}
        metrics["member/groups"] = float(len(self._groups))
        metrics |= {f"owed/{kind}": float(count) for kind, count in self.journal.owed_counts().items()}
        return metrics

    def _committed(self) -> bool:
        stage = self.journal.stage()
        return stage is not None and stage[0] == self.round
