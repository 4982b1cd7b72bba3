"""What people see of a run: charts, summary, page, views, TOML."""

import io
import json
import math
import sqlite3
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from history_samples import INCARNATION, batch, deliver
from hypothesis import example, given
from hypothesis import strategies as st
from makers import finish_round
from rich.console import Console
from searches import searching

from sapo.cli.report.example_groups import ExampleGroup
from sapo.cli.report.live_view import (
    FIRST,
    STOPPING,
    LiveView,
    NodeRow,
    NodeTable,
    Pace,
    PlainView,
    SummaryTable,
    open_view,
    print_summary,
    screen,
)
from sapo.cli.report.run_page import page
from sapo.cli.report.summary import Run, first_and_last, gain_sentence, read_run, summarise, write_summary
from sapo.cli.report.svg_charts import line_chart, rolling_mean, ticks
from sapo.core.config import toml_dump
from sapo.core.config.home import Home
from sapo.core.config.load import Config, load
from sapo.core.config.manifest import Manifest
from sapo.core.errors import UserError
from sapo.core.exam_size import sized
from sapo.core.figures import Ends, RunFigures, Sweep
from sapo.experiment import peaks
from sapo.learn.batch_metrics import reward_metrics, source_metrics
from sapo.store.history.tables import Store
from sapo.store.journal.journal import Journal
from sapo.store.tracking import mlflow_sqlite

EVALUATION: dict[str, Any] = {
    "questions": 2000,
    "samples": 1,
    "starter": {
        "pass_at_1": 0.30,
        "interval": 0.02,
        "greedy": 0.40,
        "per_task": {"gcd": {"pass_at_1": 0.30}},
    },
    "baselines": {
        "starter": {"pass_at_1": 0.30, "greedy": 0.40, "per_task": {"gcd": {"pass_at_1": 0.30}}},
        "starter:bytes": {"pass_at_1": 0.10, "greedy": 0.15, "per_task": {"gcd": {"pass_at_1": 0.10}}},
    },
    "nodes": {
        "n0": {
            "pass_at_1": 0.34,
            "interval": 0.02,
            "greedy": 0.42,
            "model": "starter",
            "per_task": {"gcd": {"pass_at_1": 0.34}},
        },
        "n1": {
            "pass_at_1": 0.12,
            "interval": 0.01,
            "greedy": 0.16,
            "model": "starter:bytes",
            "per_task": {"gcd": {"pass_at_1": 0.12}},
        },
    },
    "gain": {"mean": 0.03, "low": 0.02, "high": 0.04},
    "gain_greedy": {"mean": 0.015, "low": -0.001, "high": 0.031},
}


DEMO = load(
    None,
    None,
    ["swarm.name=demo", "swarm.nodes=2", "swarm.rounds=40", "node.1.model=starter:bytes"],
    env={},
)


def make_run(home: Home, evaluation: dict[str, Any] | None = None) -> Run:
    """Two nodes of forty rounds whose rewards differ, so that mixing them up shows."""
    curves = {
        node: {
            "reward/local": {float(i): 0.2 + i / 100 for i in range(40)},
            "reward/training_set": {float(i): 0.6 + i / 100 for i in range(40)},
            "eval/pass_at_1": {0.0: 0.31, 25.0: 0.36},
            "tokens/generated": {float(i): 10.0 for i in range(40)},
            "learn/tokens": {float(i): 7.0 for i in range(40)},
            "share/external": {float(i): 0.5 for i in range(40)},
        }
        for node in ("n0", "n1")
    }
    lines = {node: {name: list(line.items()) for name, line in own.items()} for node, own in curves.items()}
    sweep = None if evaluation is None else Sweep.model_validate(evaluation)
    exams = {node: peaks.exams(curves[node], [], sweep and sweep.nodes[node], every=25) for node in curves}
    return Run(home, DEMO, lines, sweep, exams)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "demo")


def test_an_evaluation_after_the_last_round_is_no_round(home: Home) -> None:
    run = make_run(home)
    run.curves["n0"]["eval/pass_at_1"].append((40.0, 0.35))
    run.curves["n0"]["judge/cumulative"] = [(40.0, 1.0)]
    assert summarise(run).written()["nodes"]["n0"]["rounds"] == 40


def test_tokens_are_summed_over_the_rounds(home: Home) -> None:
    node = summarise(make_run(home)).written()["nodes"]["n0"]
    assert (node["tokens/generated"], node["tokens/trained"]) == (400.0, 280.0)


def test_figures_of_a_swarm_for_mlflow_come_from_the_summary(home: Home) -> None:
    found = summarise(make_run(home, EVALUATION)).series()
    assert found["tokens/generated"] == [(40, 800.0)]
    assert found["eval/full/pass_at_1"] == [(0, pytest.approx(0.2)), (40, pytest.approx(0.23))]
    assert found["gain/pass_at_1"] == [(40, 0.03)]


def test_first_and_last_are_means_of_a_tenth() -> None:
    assert first_and_last([i / 100 for i in range(20)]) == Ends(first=0.005, last=0.185)


def test_the_three_rewards_are_never_mixed(home: Home) -> None:
    node = summarise(make_run(home, EVALUATION)).written()["nodes"]["n0"]
    assert node["reward/local"]["first"] == pytest.approx(0.215)
    assert node["reward/training_set"]["first"] == pytest.approx(0.615)
    assert node["eval/pass_at_1"]["end"] == 0.34


def test_a_node_is_compared_with_the_model_it_started_from(home: Home) -> None:
    nodes = summarise(make_run(home, EVALUATION)).written()["nodes"]
    assert nodes["n0"]["eval/pass_at_1"]["start"] == 0.30
    assert nodes["n1"]["eval/pass_at_1"]["start"] == 0.10
    assert nodes["n1"]["eval/pass_at_1"]["per_task"] == {"gcd": {"start": 0.10, "end": 0.12}}


def test_a_node_s_own_baseline_comes_before_that_of_its_model(home: Home) -> None:
    n1 = EVALUATION["nodes"]["n1"] | {"model": "starter", "baseline": "starter:bytes"}
    evaluation = EVALUATION | {"nodes": EVALUATION["nodes"] | {"n1": n1}}
    nodes = summarise(make_run(home, evaluation)).written()["nodes"]
    assert nodes["n1"]["eval/pass_at_1"]["start"] == 0.10


def test_without_an_evaluation_nothing_is_claimed(home: Home) -> None:
    figures = summarise(make_run(home))
    assert figures.nodes["n0"].pass_at_1.end is None
    assert "not known" in gain_sentence(figures)


@pytest.mark.parametrize(
    ("low", "high", "begins"),
    [(0.02, 0.04, "The nodes learned"), (-0.04, -0.02, "The nodes got worse"), (-0.01, 0.01, "No gain")],
)
def test_the_sentence_claims_no_more_than_the_interval(
    home: Home, low: float, high: float, begins: str
) -> None:
    gain = {"mean": (low + high) / 2, "low": low, "high": high}
    sentence = gain_sentence(summarise(make_run(home, {**EVALUATION, "gain": gain})))
    assert sentence.startswith(begins)
    assert f"{100 * low:+.1f} to {100 * high:+.1f}" in sentence
    assert "2,000 held-out questions" in sentence


def test_the_summary_file_is_the_summary(home: Home) -> None:
    home.root.mkdir()
    figures = write_summary(make_run(home, EVALUATION))
    assert json.loads(home.summary.read_text()) == figures.written()


def prepared(home: Home) -> Config:
    config = load(None, None, ["swarm.name=demo"], env={})
    home.prepare(config, Manifest.of(config))
    home.node("n0").mkdir()
    return config


def test_a_run_is_read_from_its_journals(home: Home) -> None:
    prepared(home)
    with Journal(home.journal("n0")) as journal:
        finish_round(journal, "n0", 0, {"reward/local": 0.25}, swarm="demo")
        finish_round(journal, "n0", 1, {"reward/local": 0.5, "eval/greedy": 0.75}, swarm="demo")
    run = read_run(home)
    assert run.curve("n0", "reward/local") == [(0.0, 0.25), (1.0, 0.5)]
    assert run.curve("n0", "eval/greedy") == [(1.0, 0.75)]
    assert run.curve("n0", "reward/training_set") == []


def test_rounds_that_the_journal_has_dropped_come_from_mlflow(home: Home) -> None:
    prepared(home)
    with Journal(home.journal("n0")) as journal:
        finish_round(journal, "n0", 0, {"reward/local": 0.5}, swarm="demo")
    with sqlite3.connect(home.mlflow_db) as database:
        database.executescript(f"""
            CREATE TABLE alembic_version (version_num TEXT);
            INSERT INTO alembic_version VALUES ('{mlflow_sqlite.SCHEMA}');
            CREATE TABLE experiments (experiment_id INTEGER, name TEXT);
            CREATE TABLE runs (run_uuid TEXT, name TEXT, experiment_id INTEGER);
            CREATE TABLE metrics (key TEXT, value REAL, timestamp INTEGER, run_uuid TEXT, step INTEGER,
                                  is_nan INTEGER);
            CREATE TABLE tags (key TEXT, value TEXT, run_uuid TEXT);
            INSERT INTO experiments VALUES (1, 'demo'), (2, 'other');
            INSERT INTO runs VALUES ('a', 'n0', 1), ('b', 'n0', 2), ('c', 'n0', 1);
            INSERT INTO tags VALUES ('sapo.node', 'n0', 'a'), ('sapo.node', 'n0', 'b');
            INSERT INTO tags VALUES ('sapo.replay', 'what-if', 'c');
            INSERT INTO metrics VALUES ('reward/local', 0.125, 5, 'a', 7, 0);
            INSERT INTO metrics VALUES ('reward/local', 0.0, 6, 'a', 8, 1);
            INSERT INTO metrics VALUES ('reward/local', 0.75, 5, 'b', 9, 0);
            INSERT INTO metrics VALUES ('reward/local', 1.0, 6, 'c', 7, 0);
            INSERT INTO metrics VALUES ('eval/greedy', 0.25, 5, 'a', 6, 0);
            INSERT INTO metrics VALUES ('eval/greedy', 1e300, 6, 'a', 8, 0);
        """)
    run = read_run(home)
    assert run.curve("n0", "reward/local") == [(0.0, 0.5), (7.0, 0.125)]
    assert run.curve("n0", "eval/greedy") == [(6.0, 0.25)], "an earlier release wrote the other"
    assert any("eval/greedy is wrong" in note for note in run.notes)


def unmeasured(home: Home, rounds: int, delivered: int) -> RunFigures:
    """What n0 is said to have done whose metrics are in no MLflow; the history has its first rounds."""
    prepared(home)
    with Journal(home.journal("n0"), incarnation=INCARNATION) as journal:
        for round in range(rounds):
            finish_round(journal, "n0", round, {}, swarm="demo")
    deliver(Store(str(home.history)), *range(delivered))
    return summarise(read_run(home))


def test_rewards_that_mlflow_lacks_come_from_the_history(home: Home) -> None:
    figures = unmeasured(home, 2, 2)
    n0, made = figures.written()["nodes"]["n0"], [batch(round) for round in range(2)]
    for name in ("reward/local", "reward/training_set"):
        first, last = (reward_metrics(one.groups)[name] for one in made)
        assert n0[name] == {"first": pytest.approx(first), "last": pytest.approx(last)}
    assert n0["share/external"] == pytest.approx(source_metrics(made[0])["share/external"])
    own = [s for one in made for group in one.groups if group.source == "local" for s in group.samples]
    assert n0["tokens/generated"] == sum(sum(sample.loss_mask) for sample in own)
    assert n0["tokens/trained"] is None, "the history does not say which tokens were masked"
    assert n0["rounds"] == 2
    assert "MLflow lacks the metrics of 2 of its 2 rounds" in figures.notes[0]


def test_rounds_that_nothing_has_are_named_and_no_tokens_are_counted(home: Home) -> None:
    figures = unmeasured(home, 3, 2)
    assert "1 of its 3 rounds are neither in MLflow nor in the history" in figures.notes[0]
    assert figures.nodes["n0"].tokens_generated is None
    out = io.StringIO()
    print_summary(figures, home, "sapo", Console(file=out, width=200))
    assert "neither in MLflow nor in the history" in out.getvalue()
    text = page(read_run(home), figures, [])
    assert "neither in MLflow nor in the history" in text


def test_an_mlflow_database_that_is_none_is_named(home: Home) -> None:
    unmeasured(home, 1, 1)
    home.mlflow_db.touch()
    figures = summarise(read_run(home))
    assert figures.notes[0].startswith("MLflow cannot be read (")
    assert "no such table" in figures.notes[0]


def test_a_broken_evaluation_is_bad_input(home: Home) -> None:
    prepared(home)
    for text in ("{", "[]", "{}"):
        home.evaluation.write_text(text)
        with pytest.raises(UserError, match=r"evaluation\.json"):
            read_run(home)


STORY = ExampleGroup(
    group_id="ab" * 32,
    producer="n1",
    round=3,
    dataset="gcd",
    question="What is gcd(4, 6)? <b>",
    answers=(("2", 1.0, 5), ("<script>alert(1)</script>", 0.0, 2), ("", None, 1)),
    learners=(("n0", 5),),
)


def test_the_page_needs_nothing_from_elsewhere_and_runs_no_script(home: Home) -> None:
    run = make_run(home, EVALUATION)
    text = page(run, summarise(run), [STORY])
    assert "<script" not in text
    addresses = {part.split('"')[0] for part in text.split("http")[1:]}
    assert addresses == {"://www.w3.org/2000/svg"}


def test_the_page_shows_the_three_rewards_and_whole_rollouts(home: Home) -> None:
    run = make_run(home, EVALUATION)
    text = page(run, summarise(run), [STORY])
    for series in ("reward/local", "reward/training_set", "eval/pass_at_1", "eval/greedy"):
        assert series in text
    assert "What is gcd(4, 6)? &lt;b&gt;" in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "unscorable" in text
    assert "Written by n1 in its round 3; learned from by n0 in its round 5" in text


def test_a_chart_is_well_formed_and_stays_inside_its_frame() -> None:
    line = [(float(x), x * 0.1) for x in range(30)]
    root = ElementTree.fromstring(
        line_chart("a < b & c", {"n0": line, "empty": []}, x_label="round", y_label="score", window=5)
    )
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 2, "the raw line and its rolling mean"
    for element in lines:
        for point in element.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 640
            assert 0 <= y <= 300


def test_rolling_mean_looks_back_only() -> None:
    assert rolling_mean([(0, 1.0), (1, 3.0), (2, 5.0)], 2) == [(0, 1.0), (1, 2.0), (2, 4.0)]


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
@example(0.0, 0.0)
@example(1e-12, 0.0)
@example(0.0, 1e-12)
def test_ticks_enclose_the_data_and_differ(low: float, span: float) -> None:
    found = ticks(low, low + span)
    slack = 1e-6 * max(abs(low), span, 1e-300)
    assert found[0] <= low + slack
    assert found[-1] >= low + span - slack
    assert 2 <= len(found) <= 14
    assert len(set(found)) == len(found)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


LINK = f"http://127.0.0.1:40000/#/experiments/1/runs?{'x' * 100}"
ROWS = [
    NodeRow("n0", "running", 10, 40, {"reward/local": 0.25, "pool/size": 7, "share/external": 0.5}, 10),
    NodeRow("n1", "failed", 5, 40, {}),
]


def plain() -> tuple[PlainView, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    return PlainView("demo", Console(file=out, width=60), clock), out, clock


def test_without_a_terminal_lines_are_plain_and_whole() -> None:
    assert isinstance(open_view("demo", Console(file=io.StringIO())), PlainView)
    view, out, _ = plain()
    with view:
        view.nodes(ROWS)
    assert out.getvalue().count("\n") == 1, "no line is folded at the console's width"
    assert "\x1b" not in out.getvalue()
    assert "n0 10/40 local 0.25 held-out – pool 7 foreign 50% " in out.getvalue()
    assert "n1 5/40 local – held-out – pool – foreign – age – failed" in out.getvalue()
    assert "means of 10 rounds" in out.getvalue()


def test_on_a_terminal_the_view_is_live() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm"})
    view = open_view("demo", console)
    assert isinstance(view, LiveView)
    with view:
        view.step("starter", 1, 2)
        view.nodes(ROWS)
        view.note("mlflow is away")
        view.link("MLflow", LINK)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "mlflow is away" in text
    assert LINK in text, "whole, though the terminal is narrower"


def rendered(*parts: Any) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(screen(*parts))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_screen_shows_every_figure_of_a_node_and_the_time_left() -> None:
    metrics = {
        "reward/local": 0.251,
        "reward/training_set": 0.352,
        "eval/pass_at_1": 0.453,
        "pool/size": 31,
        "share/external": 0.5,
        "staleness/mean_s": 2.5,
        "tokens/per_second": 1234.5,
    }
    text = rendered("demo", [NodeRow("n0", "running", 10, 40, metrics)], None, 75.0, 65.0)
    for shown in (
        "10/40",
        "0.251",
        "0.352",
        "0.453",
        "31",
        "50%",
        "2.5 s",
        "1,234",
        "1:15",
        "about 1:05 left",
    ):
        assert shown in text


def test_the_table_fits_a_terminal_of_eighty_columns() -> None:
    metrics = {name: 0.512 for name in ("reward/local", "reward/training_set", "eval/pass_at_1")}
    metrics |= {"pool/size": 512, "share/external": 0.5, "staleness/mean_s": 12.5, "tokens/per_second": 1234}
    metrics |= {"trait/steps": 0.5, "trait/hedges": 0.3}
    console = Console(file=io.StringIO(), width=80)
    console.print(NodeTable([NodeRow("n0", "finished", 120, 120, metrics)]))
    assert "…" not in console.file.getvalue()  # type: ignore[attr-defined]
    assert "tokens" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 40])
def test_the_end_keeps_the_names_of_nodes_and_cuts_no_figure_in_a_narrow_place(
    home: Home, width: int
) -> None:
    figures = summarise(make_run(home, EVALUATION))
    traits = {trait: Ends(first=0.5, last=0.75) for trait in ("steps", "hedges")}
    more = {"traits": traits, "tokens_generated": 10**7}
    nodes = {name: node.model_copy(update=more) for name, node in figures.nodes.items()}
    console = Console(file=io.StringIO(), width=width)
    console.print(SummaryTable(figures.model_copy(update={"nodes": nodes})))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    for found in ("node", "n0", "held-out", "30.0 → 34.0 ± 2.0"):
        assert found in text
    assert ("50.0 → 75.0" in text) == (width == 80)


def test_a_narrow_terminal_gets_fewer_columns_none_of_them_cut() -> None:
    metrics = {"reward/local": 0.512, "reward/training_set": 0.6, "eval/pass_at_1": 0.4, "pool/size": 31}
    console = Console(file=io.StringIO(), width=40)
    console.print(NodeTable([NodeRow("n0", "finished", 120, 120, metrics, 10)]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert "120/120" in text
    assert "0.512" in text
    assert "finished" in text
    assert "tokens" not in text


def test_the_figures_are_explained_where_there_is_room() -> None:
    text = " ".join(rendered("demo", ROWS, None, 1.0, None).split())
    assert "Means of the last 10 rounds; held-out and pool: newest." in text
    for word in ("pool:", "foreign share:", "staleness:", "docs/concepts.md"):
        assert word in text
    low = Console(file=io.StringIO(), width=80, height=12, force_terminal=True)
    low.print(NodeTable(ROWS))
    assert "concepts.md" not in low.file.getvalue()  # type: ignore[attr-defined]


def test_the_screen_names_a_step_and_a_failed_node() -> None:
    text = rendered("demo", ROWS, ("held-out evaluation", 500, 2000), 1.0, None)
    assert "held-out evaluation" in text
    assert "500 of 2,000" in text
    assert "failed" in text


def test_time_left_follows_the_pace_of_the_last_minute() -> None:
    pace = Pace()
    for second in range(11):
        pace.left(float(second), second, 400)
    for second in range(11, 200):
        left = pace.left(float(second), min(10 + 2 * (second - 10), 400), 400)
    assert left == pytest.approx((400 - 388) / 2, rel=0.05)


def test_nothing_is_foretold_from_the_first_rounds() -> None:
    pace = Pace()
    assert pace.left(0.0, 0, 480) is None
    assert pace.left(60.0, 1, 480) is None, "a minute of preparation is no pace"
    assert pace.left(61.0, 3, 480) is None, "one step is none either"
    assert pace.left(62.0, 5, 480) is None, "nor are two seconds"
    assert pace.left(71.0, 21, 480) == pytest.approx((480 - 21) * 11 / 20)


def test_what_is_left_never_grows_while_a_step_is_under_way() -> None:
    pace, before = Pace(), math.inf
    for second in range(200):
        left = pace.left(float(second), min(second // 10, 8), 20)  # the ninth step takes long
        if second > 80:
            assert left is not None
            assert left <= before
            before = left
    assert before == pytest.approx(11 * 10), "that of the steps after it"


def test_a_stop_is_answered_in_both_views() -> None:
    view, out, _ = plain()
    view.stopping()
    assert STOPPING in out.getvalue()
    live, text = live_view()
    with live:
        assert FIRST in text(), "something is seen before anything is told"
        live.nodes(ROWS)
        assert "goes on" in text()
        live.stopping()
        assert STOPPING in text()
    assert STOPPING in text().rsplit("goes on", 1)[1], "it stands in the place of the hint"
    assert STOPPING not in text().rsplit("swarm demo", 1)[1], "what stays on the screen has ended"


def live_view(width: int = 100) -> tuple[LiveView, Callable[[], str]]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, _environ={"TERM": "xterm"})
    view = open_view("demo", console, hint="it goes on")
    assert isinstance(view, LiveView)
    return view, console.file.getvalue  # type: ignore[attr-defined]


def test_the_end_shows_figures_places_and_commands_on_one_screen(home: Home) -> None:
    console = Console(file=io.StringIO(), width=100)
    print_summary(summarise(make_run(home, EVALUATION)), home, ".venv/bin/sapo", console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "30.0 → 34.0 ± 2.0" in text
    assert "The nodes learned" in text
    for place in (home.report, home.summary, home.history, home.mlflow_db):
        assert str(place) in text
    assert text.count(".venv/bin/sapo ") == 5
    assert ".venv/bin/sapo ui --home " in text
    assert len(text.splitlines()) <= 24


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("preset", ["tiny", "paper"])
def test_a_config_printed_as_toml_reads_back_as_the_same_config(preset: str, tmp_path: Path) -> None:
    config = sized(load(preset, None, ["node.1.model=starter:bytes", "node.1.batch.local=3"], env={}))
    file = tmp_path / "printed.toml"
    file.write_text(toml_dump.dumps(config.model_dump(mode="json")), encoding="utf-8")
    assert load(None, file, env={}) == config


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars | st.text(),
    lambda inner: (
        st.lists(inner.filter(lambda v: v is not None), max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=12,
)


@searching(200)
@given(st.dictionaries(st.text(), values, max_size=4))
def test_toml_says_what_it_was_given(value: dict[str, Any]) -> None:
    assert tomllib.loads(toml_dump.dumps(value)) == without_none(value)
