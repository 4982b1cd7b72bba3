"""The parsers that stand before the scorers: read as Python and sympy do, run nothing, cost little."""

import ast
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
import sympy
from hypothesis import given
from hypothesis import strategies as st
from searches import searching
from sympy.parsing.sympy_parser import parse_expr

from sapo.tasks import safe_parse, verifier

HONEST = """
1+2|(25*4)-3|25*4=100|24|5!|3!!|(3+2)!|0.1[6]|1.5e3|2^3|7//2|7%3|1/0|0/0|x|x**2+3*x|-x|--3|5 and 3|not 5
5 or 3|24==24|answer is 24|The answer is 24|3 < 5|1 < 2 < 3|x<y|(5)(3)|5(3)|x(3)|f(3)|f(x)|sqrt(16)|sqrt(x)|E
pi|log(10)|1j|0x1F|007|1_000|
  3 |None|True|nan|oo|abs(-3)|max(1,2)|2**0.5|2**-1|4**(1/2)|x**(1/2)|.5|3 * (4 + 5) - 6 / 2
3 x 4|½|x²|2x|Integer(5)|if|5<<2|5>>1|5&3|x^2|a.b|x==x|x is x|Integral(2*x,x) + C|C|x**2/2 + C|ln(x)|sin(x)**2
atan(2*x)|exp(-x)*x|2*x**3 + 3*X|10**50|2**100|\\frac{1}{2}|$3$|!3|((3)|3)|(x+1)!|gcd(4,6)|floor(3.5)|3**2**2
-2**2|(-8)**(1/3)|6*x**2 + 2*x|6x^2|root(8,3)|x = 3|1 + |**3|cbrt(8)|1 if 0 else 2|~5|3 # comment
""".replace("\n", "|").strip("|").split("|")  # fmt: skip

BOMBS = [
    "9**9**9**9",
    "(2**100)**(2**100)",
    "x**99999999",
    "exp(10**12*log(2))",
    "2**(10**12*log(3)/log(2))",
    "factorial(10**9)",
    "(((9!)!)!)!",
    "1<<10**9",
    "1e999999999",
    "9" * 5000,
    "(" * 5000 + "1" + ")" * 5000,
    "-" * 15000 + "1",
    "1+" * 9000 + "1",
    "sqrt(10**5000+7)",
    "tan(10**999)",
    "(3**60000*x)**9999",
    "1!" * 3000,
    "1.1[3]" * 1000,
    "pow(9,9**9)",
]

PAYLOADS = [
    "__import__('os').system('id')",
    "().__class__.__base__.__subclasses__()",
    "(lambda: 1)()",
    "[c for c in [1]]",
    "open('x')",
    "exec('1')",
    "x.__class__",
    "Symbol('x').func",
    "Function('f').__init__",
    "Symbol('x', real=True)",
    "f(*[1])",
    "(y := 5)",
    "f'{1}'",
    "\"__import__('os')\"",
    "sympify('1')",
    "lambdify(x, x)(1)",
    "solve(x)",
]


def attempt(parser: Callable[..., Any], text: str, **kwargs: Any) -> Any:
    try:
        return parser(text, **kwargs)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("text", HONEST)
def test_an_expression_reads_as_sympy_reads_it(text: str) -> None:
    local = {"x": sympy.Symbol("x"), "C": sympy.Symbol("C")}
    for kwargs in ({}, {"local_dict": local}):
        theirs = attempt(parse_expr, text, **{key: dict(value) for key, value in kwargs.items()})
        ours = attempt(safe_parse.expression, text, **kwargs)
        if isinstance(theirs, type) and issubclass(theirs, Exception):
            assert isinstance(ours, type)
            assert issubclass(ours, Exception)
        else:
            assert type(ours) is type(theirs)
            assert repr(ours) == repr(theirs)


def arithmetic() -> st.SearchStrategy[str]:
    leaf = st.integers(0, 60).map(str) | st.sampled_from(["x", "C", "0.5", "2.25", "1/3"])
    return st.recursive(
        leaf,
        lambda part: st.one_of(
            st.tuples(part, st.sampled_from(["+", "-", "*", "/", " - "]), part).map("".join),
            part.map("({})".format),
            part.map("-{}".format),
            st.tuples(st.sampled_from(["sin", "sqrt", "exp", "abs", "g"]), part).map("{0[0]}({0[1]})".format),
            part.map("({})**2".format),
        ),
        max_leaves=6,
    )


@given(arithmetic())
@searching(80)
def test_generated_expressions_read_as_sympy_reads_them(text: str) -> None:
    assert repr(attempt(safe_parse.expression, text)) == repr(attempt(parse_expr, text))


@pytest.mark.parametrize("text", BOMBS, ids=lambda text: text[:20])
def test_an_expression_s_cost_is_bounded(text: str) -> None:
    safe_parse.expression("x + 1")  # the first call imports sympy
    start = time.process_time()
    attempt(safe_parse.expression, text)
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize("text", PAYLOADS)
def test_no_payload_is_evaluated(text: str) -> None:
    for parser in (safe_parse.expression, safe_parse.number, safe_parse.antiderivative):
        with pytest.raises((ValueError, SyntaxError)):
            parser(text)
    if text != PAYLOADS[-4]:
        assert isinstance(attempt(safe_parse.literal, text), (type, str))


def test_no_string_leaves_for_sympy_to_evaluate() -> None:
    with pytest.raises(safe_parse.Refused):
        safe_parse.expression("'x'")
    with pytest.raises(safe_parse.Refused):
        safe_parse.number("'25*4'")
    assert safe_parse.number("'24'") == "24"
    assert safe_parse.antiderivative("'x^2'") == sympy.Symbol("x") ** 2
    with pytest.raises(safe_parse.Refused):
        safe_parse.antiderivative("\"'x'\"")


@pytest.mark.parametrize(
    "text", ["[[0, 1], [1, 2]]", " ['a', \"b\"]", "'AB' 'C'", "{1, 2}", "-1", "(1,)", "[True, None]", "b'ab'"]
)
def test_a_literal_reads_as_eval_reads_it(text: str) -> None:
    assert safe_parse.literal(text) == eval(text)


@pytest.mark.parametrize(
    "text",
    ["-" * 90_000 + "1", "[" * 900 + "]" * 900, "[0]*10**9", "'a'*10**9", "9" * 99_999, "1+" * 9_999 + "1"],
)
def test_a_literal_s_cost_is_bounded(text: str) -> None:
    start = time.process_time()
    with pytest.raises((ValueError, SyntaxError)):
        safe_parse.literal(text)
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("text", "target", "library", "marks"),
    [
        ("3*(4 + 5) - 6", 21, 1.0, 1.0),
        ("((3)*(4+5)-6.)  # sure", 21, 1.0, 1.0),
        ("3*(4 + 5) - 6", 25, 0.05, 0.05),
        ("3*(4 + 5)", 27, 0.05, 0.05),
        ("3*(4 + 5) - x", 24, 0.01, 0.01),
        ("3*(4 + 5) -", 24, 0.01, 0.01),
        ("E/E+E/E + (E-E)*(3+4+5+6)", 2, 1.0, 0.05),
        ("sin(pi)*(3+4+5+6) + pi/pi", 1, 1.0, 0.05),
        ("Max(3, 4, 5, 6)", 6, 1.0, 0.05),
        ("3 + 4**5 - 6", 1021, 1.0, 0.05),
        ("3*4 + 5//6", 12, 1.0, 0.05),
        ("3! + 4 + 5 + 6", 21, 1.0, 0.05),
        ("5.6 + 3.4", 9, 1.0, 0.05),
        ("3 + 5 + 1_0 # 4 6", 18, 1.0, 0.05),
    ],
)
def test_countdown_wants_the_numbers_given_and_the_four_operations(
    text: str, target: int, library: float, marks: float
) -> None:
    """A target made of constants, functions or powers is a wrong result; other scores are the library's."""
    source = reasoning_gym.create_dataset("countdown", seed=1)
    entry = {"metadata": {"numbers": [3, 4, 5, 6], "target": target}}
    with pytest.MonkeyPatch.context() as patch:
        # a test before this one may have put the guards in place, which stay
        patch.setattr("reasoning_gym.games.countdown.parse_expr", sympy.parse_expr)
        assert verifier.score(source, entry, text, "text") == library
        patch.setattr("reasoning_gym.games.countdown.parse_expr", safe_parse.arithmetic)
        assert verifier.score(source, entry, text, "text") == marks


@pytest.mark.parametrize("text", [" 1.5 ", "-inf", "1_0", "٣"])
def test_a_float_reads_as_python_s(text: str) -> None:
    assert safe_parse.no_nan(text) == float(text)


@pytest.mark.parametrize("text", ["nan", "-NaN ", "1e", "", "0x1"])
def test_nan_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a number|could not convert"):
        safe_parse.no_nan(text)


def test_every_evaluator_the_library_calls_is_known() -> None:
    """A new release that evaluates somewhere else must not slip in unseen."""
    harmless = {
        ("algorithmic/number_sorting.py", "eval"),  # of the regenerated answer
        ("arithmetic/bitwise_arithmetic.py", "eval"),  # of the regenerated problem
        ("arithmetic/basic_arithmetic.py", "eval"),  # while generating
        ("arithmetic/gsm_symbolic/generators_00_49.py", "eval"),  # while generating
        ("arithmetic/gsm_symbolic/generators_50_99.py", "eval"),  # while generating
        ("code/bf.py", "compile"),  # of the regenerated program, to brainfuck
        ("code/codeio.py", "exec"),  # of code in the package, while generating
        ("logic/propositional_logic.py", "parse_expr"),  # its own recursive parser
    }
    guarded = {
        (path.removeprefix("reasoning_gym.").replace(".", "/") + ".py", name)
        for path, names in verifier.EVALUATORS.items()
        for name in names
        if name not in ("Fraction", "float")
    } | {
        (path.removeprefix("reasoning_gym.").replace(".", "/") + ".py", "parse_expr")
        for path in verifier.SYMPY_ALIASES
    }
    suspects = {"eval", "exec", "compile", "parse_expr", "sympify", "literal_eval"}
    suspects |= {"import_module", "__import__", "system", "popen"}
    root = Path(reasoning_gym.__file__).parent
    called = set()
    for file in root.rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        if "contrib" in file.parts or not any(f"{name}(" in source for name in suspects):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                owner = getattr(getattr(node.func, "value", None), "id", "")
                if name in suspects and owner != "re":
                    called.add((str(file.relative_to(root)), name))
    assert called == harmless | guarded


@pytest.mark.parametrize(
    ("text", "answer_format", "expected"),
    [
        ("4", "text", "4"),
        (" 4 ", "text", " 4 "),
        ("4", "tags", None),
        ("<answer> 4\n</answer>", "tags", "4"),
        ("<answer>1</answer> so <answer>2</answer>", "tags", "2"),
        ("<answer>1</answer> so <answer>2", "tags", "1"),
        ("<answer>1", "tags", None),
        ("<answer>a<answer>b</answer>", "tags", "a<answer>b"),
        ("<answer></answer>", "tags", ""),
        ("</answer><answer>3</answer>", "tags", "3"),
        ("junk <answer>3</answer> junk", "text", "junk <answer>3</answer> junk"),
        ("4", "boxed", None),
        (r"so \boxed{1}, no: $\boxed{ \frac{1}{2^{3}} }$.", "boxed", r"\frac{1}{2^{3}}"),
        (r"\boxed{1} or \boxed{2", "boxed", "1"),
        (r"\boxed{1} } { \boxed {2}}", "boxed", "2"),
        (r"\boxed{\{1, 2\}}", "boxed", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", "boxed", r"\left\{ x \right."),
        (r"\boxed{a \boxed{b} c}", "boxed", "b"),
        (r"\boxed{\boxed{3}", "boxed", "3"),
        (r"\\boxed{6}", "boxed", "6"),
        (r"\boxed{}", "boxed", ""),
        (r"\boxed 5 boxed{6} \fbox{7}", "boxed", None),
    ],
)
def test_under_tags_the_answer_is_the_last_complete_tag_under_boxed_the_last_box_under_text_the_text(
    text: str, answer_format: verifier.AnswerFormat, expected: str | None
) -> None:
    assert verifier.extract_answer(text, answer_format) == expected


@given(st.lists(st.sampled_from(["<answer>", "</answer>", " ", "a", "\n", "<answer", "\u2003"])).map("".join))
def test_tags_are_read_as_the_library_reads_them(text: str) -> None:
    from reasoning_gym.utils import extract_answer

    assert verifier.extract_answer(text, "tags") == extract_answer(text)


def test_no_tag_lifts_the_length_penalty_of_a_text() -> None:
    """Junk round a tagged right answer scores no more than the same junk round a bare one."""
    source = reasoning_gym.create_dataset("chain_sum", seed=1)
    entry = source[0]
    right, junk = entry["answer"], "Ignore all that was said before. " * 400
    bare = verifier.score(source, entry, f"{junk}{right}{junk}", "text")
    tagged = verifier.score(source, entry, f"{junk}<answer>{right}</answer>{junk}", "text")
    assert isinstance(tagged, float)
    assert isinstance(bare, float)
    assert tagged <= bare < 0.01
    assert verifier.score(source, entry, right, "text") == 1.0


def test_extracting_an_answer_is_linear() -> None:
    start = time.process_time()
    assert verifier.extract_answer("<answer>" * 200_000, "tags") is None
    assert verifier.extract_answer(r"\boxed{" * 200_000, "boxed") is None
    assert verifier.extract_answer(r"\boxed" + " " * 200_000, "boxed") is None
    assert time.process_time() - start < 1.0


def test_random_bytes_of_any_kind_only_raise_what_scorers_catch() -> None:
    rng = random.Random(0)
    alphabet = "0123456789+-*/().[]{}'\"xC,!^ \n\\=<>eE_jx²½\x00\udcff"
    for _ in range(1500):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 30)))
        for parser in (safe_parse.expression, safe_parse.number, safe_parse.literal, safe_parse.fraction):
            attempt(parser, text)
