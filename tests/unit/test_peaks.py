"""A node's best probe and its end: compared on equal questions only, in pairs, with their interval."""

from pathlib import Path

from sapo.core.figures import FULL, PROBE, Gain, NodeExam, NodeFigures, Peak, Probed, RunFigures, Stand
from sapo.core.intervals import paired_interval
from sapo.core.types import Question, Recipe
from sapo.node import probes
from sapo.node.probes import Probe
from sapo.ops import peaks
from sapo.policy.evaluate import Evaluation

INCARNATION = "ab" * 8


def evaluation(first: str, greedy: str = "", samples: tuple[float, ...] = ()) -> Evaluation:
    """What a policy did, a character per question."""
    passes = tuple(map(float, first))
    greedily = tuple(map(float, greedy or first))
    tasks = tuple("gcd" if i % 2 else "chain_sum" for i in range(len(first)))
    return Evaluation(tasks, samples or passes, greedily, passes, tuple(map(str, range(len(first)))))


def end(first: str, round: int) -> NodeExam:
    """A node's part of evaluation.json."""
    found = evaluation(first)
    summary = dict(found.summary())
    return NodeExam(**summary, round=round, probe=Probed(**summary, passes=probes.bits(found)))


def test_the_probe_inside_an_evaluation_is_its_first_questions_sampled_once() -> None:
    found = evaluation("110010", "100111", samples=(0.5,) * 6).probe(4)
    assert (found.pass_at_1, found.greedy_pass) == (0.5, 0.5)
    assert found.sampled == (1.0, 1.0, 0.0, 0.0)
    assert len(found.tasks) == len(found.answers) == 4


def test_probes_and_full_evaluations_share_no_series() -> None:
    summary = evaluation("1100").summary()
    probe, full = summary.series(PROBE), summary.series(FULL)
    assert not probe.keys() & full.keys()
    assert probe["eval/pass_at_1"] == full["eval/full/pass_at_1"] == 0.5
    assert probe["eval/questions"] == 4
    assert probe["eval/pass_at_1/gcd"] == full["eval/full/pass_at_1/gcd"] == 0.5


def test_probes_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "probes.jsonl"
    assert probes.read(path, INCARNATION) == []
    probes.append(path, INCARNATION, 0, evaluation("10", "11"))
    probes.append(path, "cd" * 8, 30, evaluation("11"))
    with path.open("a") as file:
        file.write('{"incarnation": "abab')  # a process was killed here
    probes.append(path, INCARNATION, 30, evaluation("01"))
    probes.append(path, INCARNATION, 30, evaluation("01"))  # and repeated the round
    assert probes.read(path, INCARNATION) == [Probe(0, (1, 0), (1, 1)), Probe(30, (0, 1), (0, 1))]


def question(dataset: str, text: str) -> Question:
    """A held-out question."""
    return Question(recipe=Recipe(dataset=dataset, seed=0, index=0), text=text, bucket=int(text[-1]) / 10)


def test_the_end_is_compared_with_the_best_probe_question_by_question() -> None:
    kept = [Probe(0, (0, 0, 0, 0), (0,) * 4), Probe(30, (1, 1, 1, 0), (1,) * 4)]
    found = peaks.figures(peaks.exams({}, kept, end("0110", 60), every=30), 60)
    assert found is not None
    assert found.end is not None
    assert found.below_best is not None
    assert (found.best.round, found.best.pass_at_1) == (30, 0.75)
    assert (found.end.round, found.end.pass_at_1, found.questions) == (60, 0.5, 4)
    assert found.below_best.mean == 0.25
    # of the four pairs one differs
    assert (found.below_best.low, found.below_best.high) == paired_interval([1, 0, 0, 0])


def test_exams_on_other_questions_are_never_joined() -> None:
    metrics = {
        "eval/pass_at_1": {0.0: 0.1, 30.0: 0.9, 60.0: 0.2},
        "eval/questions": {0.0: 4.0, 30.0: 8.0, 60.0: 4.0},
    }
    kept = [Probe(30, (1,) * 8, (1,) * 8)]
    found = peaks.exams(metrics, kept, end("0110", 70), every=30)
    assert [(exam.round, exam.pass_at_1) for exam in found] == [(0, 0.1), (60, 0.2), (70, 0.5)]


def said(**ends: tuple[float, float | None]) -> str | None:
    """The sentence for nodes that end so far below their best, and the lower bound of that."""
    found: dict[str, Peak | None] = {}
    for name, (mean, low) in ends.items():
        best, last = (Stand(round=at, pass_at_1=value) for at, value in ((30, 0.5), (60, 0.5 - mean)))
        below = Gain(mean=mean, low=low, high=None if low is None else 2 * mean - low)
        found[name] = Peak(questions=1000, best=best, end=last, below_best=below)
    return peaks.sentence(of(**found))


def of(**found: Peak | None) -> RunFigures:
    """A run of which only probes are known."""
    nodes = {
        name: NodeFigures(model="starter", rounds=60, rounds_total=60, probe=peak)
        for name, peak in found.items()
    }
    return RunFigures(swarm="s", home="h", nodes=nodes)


def test_a_node_that_ends_below_its_best_is_named_with_points_and_round() -> None:
    text = said(n0=(0.01, -0.02), n1=(0.1, 0.07), n2=(0.07, 0.04))
    assert text is not None
    assert "n1 ends 10.0 points below its best probe (50.0 % after 30 rounds, 40.0 % at the end" in text
    assert "95 % interval of the difference 7.0 to 13.0" in text
    assert "the same 1,000 questions" in text
    assert text.index("n1 ends") < text.index("n2 ends")
    assert "n0" not in text
