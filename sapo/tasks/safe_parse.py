"""What stands between submitted text and the scorers that would evaluate it.

`literal` takes the place of `eval`; `expression`, `number`, `arithmetic` and `antiderivative` that of
`sympy.parse_expr`; `fraction` that of `Fraction`, `no_nan` that of `float`.
Nothing here compiles or runs text: Python's parser gives a tree, and a closed list of node types is read from
it. Everything is bounded, so that `9**9**9**9` is refused and not computed. Like any malformed text, what is
refused raises an exception, which the scorers catch.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

MAX_LITERAL_CHARS = 1_000_000
MAX_EXPRESSION_CHARS = 20_000
MAX_NODES = 20_000
MAX_FACTORIALS = 100
MAX_BITS = 200_000
"""Size of the largest integer an expression may compute."""
MAX_EXPONENT = 10_000
"""Of a base that is no plain number, and of the powers of ten in a float or fraction."""
MAX_FACTORIAL = 5_000
MAX_SYMBOLIC = 1_000_000
"""Largest number inside a symbolic exponent: `exp(n*log(2))` is 2**n to sympy."""
MAX_ROOT_BITS = 1_000
"""Size of the largest number a root is taken of: sympy looks for its factors."""


_PLAIN = re.compile(r"(?:\s|[()+*/-]|[0-9]++\.?+(?![0-9.]))*+(?:#[^\d\n]*)?")
"""A point may end a number, as it ends a sentence. Scorers look for numbers in comments, too."""


class Refused(ValueError):
    """The text is not of the grammar, or would cost too much."""


def literal(text: str) -> Any:
    """The Python literal that `text` is: numbers, strings, bytes, containers of them, nothing that runs.
    Raises what malformed text raises: `ValueError` (as `Refused` is), `TypeError` or `SyntaxError`."""
    if len(text) > MAX_LITERAL_CHARS:
        raise Refused("longer than any literal answer")
    try:
        return ast.literal_eval(text)
    except (MemoryError, RecursionError):
        raise Refused("nested too deeply") from None


def fraction(text: str) -> Fraction:
    """A fraction of the same float as `Fraction(text)`, at once also where a power of ten is out of bounds.

    Raises `ValueError` for what is no number, as `Fraction` does, and `OverflowError` for one that no float
    holds, as the conversion to a float does.
    """
    power = re.search(r"[eE]([-+]?[\d_]+)\s*$", text)
    exponent = int(power.group(1)) if power else 0
    if power is None or abs(exponent) <= MAX_EXPONENT:
        return Fraction(text)
    mantissa = Fraction(text[: power.start()] + "e0")
    if mantissa == 0:
        return mantissa
    if exponent > 0:
        raise OverflowError("the power of ten is too large")
    return Fraction(-1 if mantissa < 0 else 1, 10**MAX_EXPONENT)


def no_nan(value: Any) -> float:
    """`float(value)`, but NaN is no number: it differs from nothing by more than a tolerance. Raises what
    `float` raises of malformed text."""
    number = float(value)
    if number != number:
        raise Refused("is not a number")
    return number


def expression(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """The sympy object that `sympy.parse_expr(text, local_dict)` gives for elementary functions.

    Sympy's own tokeniser and transformations (factorials, repeated decimals, implicit symbols) are used, as
    they evaluate nothing; the code they produce is read node by node instead of being evaluated.
    Raises `Refused` or what malformed text raises in sympy; a quoted text is refused, as sympy evaluates
    strings wherever it meets them.
    """
    value = _read(text, local_dict)
    if isinstance(value, str):
        raise Refused("a quoted text is no expression")
    return value


def number(text: str) -> Any:
    """As `expression`, for scorers that turn the result into a number: a quoted number is one, too."""
    value = _read(text, None)
    if isinstance(value, str) and not re.fullmatch(r"\s*[-+]?[0-9]{1,99}\.?[0-9]{0,99}\s*", value):
        raise Refused("a quoted text is no number")
    return value


def arithmetic(text: str) -> Any:
    """As `number`, for scorers that want given numbers combined: only plain arithmetic may reach the target.

    Plain arithmetic has whole numbers, the four operations and parentheses, and may end in a comment without
    a number. Any other number, such as one made of constants, powers or functions, is read as NaN, to which
    the scorer gives what it gives to a wrong result.
    """
    value = number(text)
    if _PLAIN.fullmatch(text) and "**" not in text and "//" not in text:
        return value
    float(value)  # what is no number raises what it raises in the scorer
    return float("nan")


def antiderivative(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """As `expression`, for scorers that differentiate the result: sympy reads a quoted expression there."""
    value = _read(text, local_dict)
    if not isinstance(value, str):
        return value
    from sympy.parsing.sympy_parser import convert_xor

    value = _read(value.replace("\n", ""), None, (convert_xor,))
    if isinstance(value, str):
        raise Refused("quoted twice")
    return value


def _read(text: str, local_dict: Mapping[str, Any] | None, transformations: tuple[Any, ...] = ()) -> Any:
    from sympy.parsing.sympy_parser import standard_transformations, stringify_expr

    if len(text) > MAX_EXPRESSION_CHARS or text.count("!") > MAX_FACTORIALS:
        raise Refused("longer than any expression an answer needs")
    local = dict(local_dict or {})
    code = stringify_expr(text, local, _library_names(), standard_transformations + transformations)
    try:
        tree = ast.parse(code.lstrip(" \t"), mode="eval")
    except (MemoryError, RecursionError):
        raise Refused("nested too deeply") from None
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise Refused("too many parts")
    if isinstance(tree.body, ast.Constant) and isinstance(tree.body.value, str):
        return tree.body.value
    return _Reader(local).read(tree.body)


@lru_cache(maxsize=1)
def _library_names() -> dict[str, Any]:
    """The names `parse_expr` knows: they decide what its tokeniser takes for a new symbol."""
    import builtins
    import types

    import sympy

    names = {name: getattr(sympy, name) for name in sympy.__all__}
    for name, value in vars(builtins).items():
        if isinstance(value, types.BuiltinFunctionType):
            names[name] = value
    names["max"], names["min"] = sympy.Max, sympy.Min
    return names


_CONSTANTS = ("pi", "E", "I", "oo", "zoo", "nan", "EulerGamma", "GoldenRatio", "Catalan")
# fmt: off
_FUNCTIONS = frozenset((
    "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc", "sinc", "asin", "acos", "atan", "acot", "asec",
    "acsc", "atan2", "sinh", "cosh", "tanh", "coth", "sech", "csch", "asinh", "acosh", "atanh", "acoth",
    "asech", "acsch", "Abs", "sign", "re", "im", "conjugate", "floor", "ceiling", "frac", "Max", "Min", "Mod",
    "gcd", "lcm", "Heaviside", "erf", "erfc", "erfi", "Si", "Ci", "Shi", "Chi", "Ei", "li", "fresnels",
    "fresnelc",
))
# fmt: on
_BUILTINS = {"abs": "Abs", "max": "Max", "min": "Min"}

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitXor: operator.xor,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.RShift: operator.rshift,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


class _Reader:
    """Reads a tree bottom-up with Python's own operators on sympy objects, as `eval` would."""

    def __init__(self, local: Mapping[str, Any]) -> None:
        import sympy

        self.sympy = sympy
        self.names = {name: getattr(sympy, name) for name in _CONSTANTS} | dict(local)

    def read(self, node: ast.expr) -> Any:
        """The value of a node. Raises `Refused` for a kind of node that no expression needs."""
        if isinstance(node, ast.BinOp):
            return self._chain(node)
        if isinstance(node, ast.UnaryOp):
            return _UNARY[type(node.op)](self.read(node.operand))
        if isinstance(node, ast.Call):
            return self._bounded(self._call(node))
        if isinstance(node, ast.Name) and node.id in self.names:
            return self.names[node.id]
        if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool)):
            return node.value
        return self._logic(node)

    def _chain(self, node: ast.expr) -> Any:
        """A run of binary operators, walked without recursion: `1+1+...` nests to the left."""
        spine: list[ast.BinOp] = []
        while isinstance(node, ast.BinOp):
            spine.append(node)
            node = node.left
        value = self.read(node)
        for step in reversed(spine):
            value = self._bounded(self._binary(step.op, value, self.read(step.right)))
        return value

    def _binary(self, op: ast.operator, left: Any, right: Any) -> Any:
        if isinstance(op, ast.Pow):
            return self._power(left, right)
        if isinstance(op, ast.LShift):
            if not getattr(right, "is_Integer", False) or abs(int(right)) > MAX_BITS:
                raise Refused("too long a shift")
            return operator.lshift(left, right)
        if type(op) not in _BINARY:
            raise Refused(f"{type(op).__name__} is not arithmetic")
        return _BINARY[type(op)](left, right)

    def _logic(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Compare):
            left = self.read(node.left)
            result: Any = True
            for number, (op, other) in enumerate(zip(node.ops, node.comparators, strict=True)):
                if type(op) not in _COMPARE:
                    raise Refused(f"{type(op).__name__} is not arithmetic")
                if number and not result:
                    break
                right = self.read(other)
                result, left = _COMPARE[type(op)](left, right), right
            return result
        if isinstance(node, ast.BoolOp):
            stop = isinstance(node.op, ast.Or)
            for part in node.values:
                result = self.read(part)
                if bool(result) == stop:
                    return result
            return result
        if isinstance(node, ast.IfExp):
            return self.read(node.body if self.read(node.test) else node.orelse)
        raise Refused(f"{type(node).__name__} is not arithmetic")

    def _call(self, node: ast.Call) -> Any:
        if node.keywords or any(isinstance(arg, ast.Starred) for arg in node.args):
            raise Refused("only plain arguments are read")
        if isinstance(node.func, ast.Call):
            inner = node.func
            if not (isinstance(inner.func, ast.Name) and inner.func.id == "Function"):
                raise Refused("not a function")
            return self.sympy.Function(_string(inner))(*[self.read(arg) for arg in node.args])
        if not isinstance(node.func, ast.Name) or node.func.id in self.names:
            raise Refused("not a function")
        return self._apply(node.func.id, node)

    def _apply(self, name: str, node: ast.Call) -> Any:
        if name == "Symbol":
            return self.sympy.Symbol(_string(node))
        if name == "Float":
            return self._float(node)
        if name == "Integer" and len(node.args) == 1:
            return self._integer(node.args[0])
        args = [self.read(arg) for arg in node.args]
        if name in ("factorial", "factorial2"):
            return self._factorial(name, args)
        if name == "exp" and len(args) == 1:
            return self._power(self.sympy.E, args[0])
        if name in ("sqrt", "cbrt") and len(args) == 1:
            return self._power(args[0], self.sympy.Rational(1, 2 if name == "sqrt" else 3))
        if name in ("pow", "Pow") and len(args) == 2:
            return self._power(*args)
        if name == "root" and len(args) == 2:
            return self._power(args[0], 1 / self.sympy.sympify(args[1], strict=True))
        if name == "Integral" and len(args) == 2 and getattr(args[1], "is_Symbol", False):
            return self.sympy.Integral(*args)
        if name == "Rational" and len(args) <= 2 and all(_is_number(arg) for arg in args):
            return self.sympy.Rational(*args)
        if name not in _FUNCTIONS and name not in _BUILTINS:
            raise Refused(f"{name} is not an elementary function")
        return getattr(self.sympy, _BUILTINS.get(name, name))(*args)

    def _integer(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return self._bounded(self.sympy.Integer(node.value))
        value = self.read(node)
        if not getattr(value, "is_Integer", False):
            raise Refused("not a whole number")
        return value

    def _float(self, node: ast.Call) -> Any:
        text = _string(node)
        power = re.search(r"[eE]([-+]?[\d_]+)$", text)
        if power and abs(int(power.group(1))) > MAX_EXPONENT:
            raise Refused("the power of ten is too large")
        return self.sympy.Float(text)

    def _factorial(self, name: str, args: list[Any]) -> Any:
        if len(args) != 1 or (getattr(args[0], "is_number", False) and not abs(args[0]) <= MAX_FACTORIAL):
            raise Refused("too large a factorial")
        return getattr(self.sympy, name)(args[0])

    def _power(self, base: Any, exponent: Any) -> Any:
        base, exponent = self.sympy.sympify(base, strict=True), self.sympy.sympify(exponent, strict=True)
        if exponent.is_Rational:
            self._check_power(base, exponent)
        elif exponent.is_Float:
            if abs(exponent) > MAX_SYMBOLIC:
                raise Refused("too large a power")
        elif any(abs(number) > MAX_SYMBOLIC for number in exponent.atoms(self.sympy.Rational)):
            raise Refused("too large a power")
        return base**exponent

    def _check_power(self, base: Any, exponent: Any) -> None:
        """Bound what `base**exponent` would compute: bits of a number, copies of anything else."""
        size = abs(exponent.p) // exponent.q + 1
        if base.is_Rational:
            if size > 1 and _bits(base) * size > MAX_BITS and abs(base) != 1:
                raise Refused("too large a power")
            if exponent.q != 1 and (_bits(base) > MAX_ROOT_BITS or exponent.q > MAX_EXPONENT):
                raise Refused("too large a root")
            return
        factor = base.as_coeff_Mul()[0]
        if size > MAX_EXPONENT or (factor.is_Rational and _bits(factor) * size > MAX_BITS):
            raise Refused("too large a power")

    def _bounded(self, value: Any) -> Any:
        if getattr(value, "is_Rational", False) and _bits(value) > MAX_BITS:
            raise Refused("too large a number")
        return value


def _bits(number: Any) -> int:
    return max(abs(int(number.p)).bit_length(), int(number.q).bit_length())


def _string(node: ast.Call) -> str:
    if len(node.args) == 1 and isinstance(node.args[0], ast.Constant):
        value = node.args[0].value
        if isinstance(value, str):
            return value
    raise Refused("not a name")


def _is_number(value: Any) -> bool:
    return bool(getattr(value, "is_Rational", False) or getattr(value, "is_Float", False))
