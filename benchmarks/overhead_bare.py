"""The bare loop of benchmarks/overhead.py: generate, score, learn; one process for one node.

The same engine, task workers, walls and learner as a node's, on as many groups of the same kind; the workers
are asked as early as a node asks them. Nothing is signed, published, journalled, tracked or kept. Its own
groups of the last rounds stand for foreign ones: they are as long and as often right as other nodes' would
be, and scored again when they are drawn.
"""

import gc
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from sapo.core.config.home import Home
from sapo.core.config.load import Config, parse
from sapo.core.rng import rng, stream
from sapo.core.types import Batch, Group, Outcome, Question, Received, SignedGroup, Source, canonical
from sapo.core.user_cache import default_cache
from sapo.learn.update import Learner
from sapo.node.batch import batch_group
from sapo.node.scoring import begin_scoring, score_groups
from sapo.peers import sampling
from sapo.peers.pool import Entry, Verdict
from sapo.peers.signing import Identity
from sapo.policy.engines import open_engine
from sapo.policy.evaluate import answer, held_out_set
from sapo.policy.initial import load_initial
from sapo.policy.tokenise import Tokens
from sapo.tasks.questions import QuestionStream
from sapo.tasks.workers import PeerGroup, open_workers

INCARNATION = "0" * 16


@dataclass
class Loop:
    """One process's model, workers and learner; it writes a line per round to `<name>.jsonl`."""

    config: Config
    name: str
    folder: Path

    def __post_init__(self) -> None:
        config = self.config
        self.workers = open_workers(config)
        self.policy = load_initial(config, self.workers, default_cache())
        self.engine = open_engine(config, self.policy)
        self.learner = Learner(
            self.policy.model, config.learn, temperature=config.generate.temperature, guard=config.guard
        )
        draft = Home(self.folder / self.name)
        draft.root.mkdir()
        self.probe = held_out_set(config, draft, self.workers)[: config.eval.probe_questions]
        self.identity = Identity.new()
        self.unsigned = SignedGroup(
            group_id="0" * 64, content_sha256="0" * 64, key="0" * 64, signature="0" * 128, payload=b""
        )
        self.foreign: deque[Entry] = deque(maxlen=config.pool.max_groups)
        self.owed = 0.0
        self.next: QuestionStream | None = None

    def drawing(self, node: str, round: int) -> QuestionStream:
        """Of fresh questions to train on."""
        swarm = self.config.swarm
        return QuestionStream(
            self.workers,
            self.config.tasks,
            (swarm.seed, swarm.name, node, INCARNATION),
            round,
            count=self.config.batch.b,
            held_out=self.config.rules.held_out,
        )

    def groups(self, questions: Sequence[Question], round: int) -> list[Group]:
        """All questions answered."""
        generate = self.config.generate
        answers = self.engine.generate(
            [self.policy.encode_prompt(question.text) for question in questions],
            completions=self.config.batch.completions,
            max_new_tokens=generate.max_new_tokens,
            sampling=generate.sampling,
            seed=stream(self.config.swarm.seed, self.name, round),
        )
        return [
            Group(
                swarm=self.config.swarm.name,
                node=self.name,
                key=self.identity.key,
                incarnation=INCARNATION,
                round=round,
                position=position,
                recipe=question.recipe,
                question=question.text,
                completions=tuple(completions),
                policy_version=round,
                tokenizer=self.policy.fingerprint,
                created_at=0.0,
            )
            for position, (question, completions) in enumerate(zip(questions, answers, strict=True))
        ]

    def round(self, round: int, external: float) -> dict[str, float]:
        """One round, with `external` foreign groups on average; returns what it held."""
        self.engine.update_weights()
        if self.probe and round % self.config.eval.probe_every == 0:
            most = self.config.generate.max_new_tokens
            answer(self.policy, self.engine, self.workers, self.probe, max_new_tokens=most)
        own = self.groups((self.next or self.drawing(self.name, round)).result(), round)
        begin_scoring(self.workers, own)
        tokens = [Tokens.of(self.policy, group) for group in own]
        outcomes = score_groups(self.workers, own)
        self.owed += external
        draw = self.draw(round, int(self.owed), [[one.score for one in row] for row in outcomes])
        self.owed = min(self.owed - len(draw.chosen), external)
        self.foreign.extend(self.entry(group) for group in own if Verdict.at_sight(group) is None)
        batch = self.batch(round, own, outcomes, tokens, draw.chosen)
        self.next = self.drawing(self.name, round + 1)
        self.next.begin()
        learned = self.learner.step(batch).metrics
        self.next.advance()
        completions = [one for group in own for one in group.completions]
        return {
            "informative": sum(group.informative for group in batch.groups),
            "external": len(draw.chosen),
            "verified": len(draw.verified),
            "completions": len(completions),
            "generated": sum(len(one.token_ids or ()) for one in completions),
            "trained": learned.get("learn/tokens", 0.0),
            "steps": learned["learn/steps"],
        }

    def entry(self, group: Group) -> Entry:
        """A group as one that came over a bus."""
        signed = self.unsigned.model_copy(update={"group_id": group.group_id})
        return Entry(Received(signed=signed, bus_position="b:0", timestamp=0.0), group, 0.0)

    def draw(self, round: int, want: int, own: Sequence[sampling.Scores]) -> sampling.Draw:
        """Foreign groups, scored as a draw needs them and by as many a call as a node's; none was before."""
        return sampling.sample_external(
            sampling.walk(self.foreign, rng("draw", round)),
            want,
            self.verified,
            tolerance=self.config.learn.zero_tolerance,
            share=sampling.informative_share(own, self.config.learn.zero_tolerance),
        )

    def verified(self, entries: Sequence[Entry]) -> list[Entry]:
        """Regenerate and score, in the same workers as a node does."""
        groups = [entry.group for entry in entries]
        claims = [
            PeerGroup(group.recipe, group.question, tuple(one.text for one in group.completions))
            for group in groups
        ]
        judged = self.workers.judge(claims)
        return [
            replace(entry, verdict=Verdict(outcomes=one.outcomes))
            for entry, one in zip(entries, judged, strict=True)
        ]

    def batch(
        self,
        round: int,
        own: Sequence[Group],
        outcomes: Sequence[tuple[Outcome, ...]],
        tokens: Sequence[Tokens],
        drawn: Sequence[Entry],
    ) -> Batch:
        """What the learner takes; `tokens` are the own groups'."""
        config, found = self.config, []
        scored = [(group, self.unsigned, some) for group, some in zip(own, outcomes, strict=True)]
        for entry in drawn:
            assert entry.verdict is not None
            scored.append((entry.group, self.unsigned, entry.verdict.outcomes))
        for position, (group, signed, some) in enumerate(scored):
            source: Source = "local" if position < len(own) else "external"
            found.append(
                batch_group(
                    self.policy,
                    config.learn,
                    group,
                    signed,
                    some,
                    source=source,
                    position=position,
                    age_s=0.0,
                    tokens=tokens[position] if position < len(own) else None,
                )
            )
        return Batch(
            swarm=config.swarm.name,
            node=self.name,
            incarnation=INCARNATION,
            round=round,
            policy_version=round,
            learn=canonical(config.learn.model_dump(mode="json")),
            guard=canonical(config.guard.model_dump(mode="json")),
            temperature=config.generate.temperature,
            groups=tuple(found),
        )


def main(settings: Path, name: str, external: float) -> None:
    """Rounds without end, with `external` foreign groups on average; a line for each in `<name>.jsonl`."""
    swarm = parse(json.loads(settings.read_text(encoding="utf-8")))
    loop = Loop(swarm.for_node(name), name, settings.parent)
    gc.freeze()  # as a node does
    with (settings.parent / f"{name}.jsonl").open("w", encoding="utf-8", buffering=1) as lines:
        for round in count():
            held = loop.round(round, external)
            lines.write(json.dumps({**held, "finished_at": time.time()}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
