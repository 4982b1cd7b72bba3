"""What ReasoningGYM's scorers reach is known and was looked through: a release that adds to it is noticed."""

import builtins
from pathlib import Path

import pytest
import reasoning_gym
from scorer_source import reached

from sapo.tasks import verifier


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


EVALUATORS = {
    "builtins.eval": {
        "algorithmic/binary_matrix.py",
        "algorithmic/number_sorting.py",
        "algorithmic/spiral_matrix.py",
        "algorithmic/string_insertion.py",
        "arithmetic/bitwise_arithmetic.py",
        "games/n_queens.py",
    },
    "fractions.Fraction": {"probability/coin_flip.py"},
    "sympy.parse_expr": {
        "algebra/intermediate_integration.py",
        "algebra/polynomial_multiplication.py",
        "algebra/simple_integration.py",
    },
    "sympy.parsing.sympy_parser.parse_expr": {"games/countdown.py", "games/puzzle24.py"},
}
"""What gives text a meaning of its own, and who reaches it."""

OWN_TEXT = {
    ("builtins.eval", "algorithmic/number_sorting.py"),
    ("builtins.eval", "arithmetic/bitwise_arithmetic.py"),
}
"""Evaluations of the regenerated answer and problem, not of what was submitted."""

FILES = {"builtins.open", "importlib.resources.files", "csv.DictReader", "pathlib.Path"}
"""Reached by name only: word lists are read when a data set is made, and no scorer loads a puzzle's file."""

# fmt: off
HARMLESS = frozenset((
    "builtins.abs", "builtins.all", "builtins.any", "builtins.bool", "builtins.bytes", "builtins.chr",
    "builtins.classmethod", "builtins.complex", "builtins.dict", "builtins.dir", "builtins.enumerate",
    "builtins.float", "builtins.frozenset", "builtins.int", "builtins.isinstance", "builtins.iter",
    "builtins.len", "builtins.list", "builtins.map", "builtins.max", "builtins.min", "builtins.next",
    "builtins.ord", "builtins.print", "builtins.property", "builtins.range", "builtins.reversed",
    "builtins.set", "builtins.slice", "builtins.sorted", "builtins.staticmethod", "builtins.str",
    "builtins.sum", "builtins.super", "builtins.tuple", "builtins.type", "builtins.zip",
    "collections.defaultdict", "collections.namedtuple", "copy.deepcopy", "dataclasses.field",
    "decimal.Decimal", "functools.reduce", "json.JSONDecodeError", "json.dumps", "json.loads",
    "magiccube.cube.Cube", "math.exp", "math.gcd", "math.inf", "math.prod", "numpy.abs",
    "numpy.allclose", "numpy.array", "numpy.empty", "numpy.float32", "numpy.isclose", "numpy.loadtxt",
    "numpy.ndarray", "numpy.round", "random.Random", "re.IGNORECASE", "re.compile", "re.findall",
    "re.finditer", "re.fullmatch", "re.match", "re.search", "re.split", "sympy.Symbol", "sympy.diff",
    "sympy.simplify", "zss.Node", "zss.simple_distance",
))
# fmt: on
"""`loadtxt` gets lists of lines, never a name; patterns are the library's own; `dir` is a parameter there."""

EXCEPTIONS = {f"builtins.{name}" for name, value in vars(builtins).items() if _is_exception(value)}
METHODS = {".eval", ".exec", ".load", ".literal_eval", ".parse_expr", ".popen", ".sympify", ".system"}
"""Names that would give text a meaning whatever object they are called on."""


@pytest.fixture(scope="module")
def names() -> dict[str, set[str]]:
    return reached(Path(reasoning_gym.__file__).parent)


def test_scorers_reach_nothing_that_was_not_looked_through(names: dict[str, set[str]]) -> None:
    known = EVALUATORS.keys() | FILES | HARMLESS
    assert {name for name in names.keys() - known if not name.startswith((".", "typing."))} <= EXCEPTIONS
    assert not names.keys() & METHODS


def test_who_evaluates_is_known_and_has_a_parser_in_its_place(names: dict[str, set[str]]) -> None:
    assert {name: names[name] for name in EVALUATORS} == EVALUATORS
    guarded = {
        (name, path.removeprefix("reasoning_gym.").replace(".", "/") + ".py")
        for path, parsers in verifier.EVALUATORS.items()
        for name in parsers
        if name != "float"
    } | {
        ("parse_expr", path.removeprefix("reasoning_gym.").replace(".", "/") + ".py")
        for path in verifier.SYMPY_ALIASES
    }
    called = {(name, path) for name, paths in EVALUATORS.items() for path in paths} - OWN_TEXT
    assert {(name.rpartition(".")[2], path) for name, path in called} == guarded


@pytest.mark.parametrize(
    "hidden",
    [
        "class D:\n def score_answer(self, a, e): return eval(a)",
        "parse = eval\nclass D:\n def score_answer(self, a, e): return parse(a)",
        "class D:\n parse = eval\n def score_answer(self, a, e): return self.parse(a)",
        "class D:\n def __init__(self): self.p = eval\n def score_answer(self, a, e): return self.p(a)",
        "def f(a): return eval(a)\nclass D:\n def score_answer(self, a, e): return list(map(f, a))",
        "class B:\n def __init__(self, a): eval(a)\nclass D:\n def score_answer(self, a, e): return B(a)",
        "from .other import f\nclass D:\n def score_answer(self, a, e): return f(a)",
        "from . import other as o\nclass D:\n def score_answer(self, a, e): return o.f(a)",
        "class D:\n def score_answer(self, a, e):\n  def g(): return [eval][0](a)\n  return g()",
        "import builtins as b\nclass D:\n def score_answer(self, a, e): return b.eval(a)",
    ],
)
def test_an_evaluator_is_found_however_it_is_reached(hidden: str, tmp_path: Path) -> None:
    package = tmp_path / "gym"
    package.mkdir()
    (package / "other.py").write_text("def f(a):\n    return eval(a)\n")
    (package / "data.py").write_text(hidden)
    assert "builtins.eval" in reached(package)


def test_other_ways_to_give_text_a_meaning_are_found_by_their_names(tmp_path: Path) -> None:
    package = tmp_path / "gym"
    package.mkdir()
    (package / "data.py").write_text(
        "import importlib, pickle, yaml\n"
        "from ast import literal_eval\n"
        "from sympy import sympify as s\n"
        "class D:\n"
        "    def score_answer(self, a, e):\n"
        "        return pickle.loads(a), yaml.load(a), literal_eval(a), s(a), getattr(e, a),"
        " importlib.import_module(a)\n"
    )
    unknown = reached(package).keys() - HARMLESS
    assert unknown >= {"pickle.loads", "yaml.load", "ast.literal_eval", "sympy.sympify", "builtins.getattr"}
    assert "importlib.import_module" in unknown
