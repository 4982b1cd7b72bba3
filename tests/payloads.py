"""Texts that want to be run by who scores them, and lures that show it when one was."""

import base64
import json
import os
import pickle
import random
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

SECRET = "SAPO_LURE_SECRET"
"""Name of the environment variable that payloads look for."""


@dataclass(frozen=True)
class Lures:
    """A folder to write to, a port to connect to, a process to start, a secret to read."""

    folder: Path
    listener: socket.socket
    mark: str
    """What a started process has among its arguments, and the secret's value."""

    @classmethod
    def lay(cls, folder: Path) -> Self:
        """Begin to watch; the listener is the caller's to close."""
        folder.mkdir()
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        listener.setblocking(False)
        return cls(folder, listener, str(86_000 + random.SystemRandom().random()))

    @property
    def port(self) -> int:
        """Where the listener listens, on 127.0.0.1."""
        return int(self.listener.getsockname()[1])

    def taken(self) -> set[str]:
        """What happened so far: files, process, socket, secret. Connections wait to be seen, files stay."""
        found: set[str] = set()
        for file in self.folder.rglob("*"):
            found.add("file")
            if file.is_file() and self.mark in file.read_text(errors="replace"):
                found.add("secret")
        for process in psutil.process_iter(["cmdline"]):
            if self.mark in (process.info["cmdline"] or []):
                found.add("process")
        try:
            self.listener.accept()[0].close()
            found.add("socket")
        except BlockingIOError:
            pass
        return found

    def actions(self) -> list[str]:
        """Python expressions with an effect on a lure."""
        files = (str(self.folder / f"taken{n}") for n in range(1000))
        here, port = f"__import__('os').environ['{SECRET}']", self.port
        return [
            f"open('{next(files)}', 'w').write('x')",
            f"__import__('pathlib').Path('{next(files)}').touch()",
            f"__import__('os').mkdir('{next(files)}')",
            f"exec(\"open('{next(files)}', 'w')\")",
            f"print(file=open('{next(files)}', 'w'))",
            f"(lambda: open('{next(files)}', 'w'))()",
            f"[open(f, 'w') for f in ['{next(files)}']]",
            f"(f := open('{next(files)}', 'w')).close()",
            f"__import__('io').FileIO('{next(files)}', 'w')",
            f"[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0]"
            f".__init__.__globals__['system']('touch {next(files)}')",
            f"__import__('os').system('touch {next(files)}')",
            f"__import__('subprocess').Popen(['sleep', '{self.mark}'])",
            f"__import__('os').spawnlp(1, 'sleep', 'sleep', '{self.mark}')",
            f"__import__('socket').create_connection(('127.0.0.1', {port}), 1).close()",
            f"(lambda s: (s.connect(('127.0.0.1', {port})), s.close()))(__import__('socket').socket())",
            f"open('{next(files)}', 'w').write({here})",
            f"open('{next(files)}', 'w').write(open('/proc/self/environ').read())",
            f"open('{next(files)}', 'w').write(open('/proc/%d/environ' % __import__('os').getppid()).read())",
            f"__import__('socket').create_connection(('127.0.0.1', {port}), 1).send({here}.encode())",
        ]


CHEATS = (
    "__import__('sys')._getframe(1).f_locals['oracle_answer']",
    "__import__('inspect').currentframe().f_back.f_locals['entry']['answer']",
    "(lambda g: (next(g), g.gi_frame.f_back)[1])(x for x in [1])",
    "[o for o in __import__('gc').get_objects() if isinstance(o, dict) and 'answer' in o][0]['answer']",
    "__import__('contextlib').suppress(Exception).__exit__.__globals__['sys']._getframe(1).f_locals",
    "[e.__traceback__.tb_frame.f_back.f_locals for e in [ZeroDivisionError()] if e.__traceback__]",
    "setattr(__import__('reasoning_gym').dataset.ProceduralDataset, 'score_answer', lambda *a: 1.0)",
    "[setattr(c, 'score_answer', lambda *a: 1.0) for c in"
    " __import__('reasoning_gym').dataset.ProceduralDataset.__subclasses__()]",
    "__import__('sys').modules['sapo.tasks.verifier'].__dict__.update(score=lambda *a: 1.0)",
    "__import__('sys').modules['sapo.tasks.safe_parse'].__dict__.update(literal=eval)",
    "__import__('builtins').__dict__.update(float=lambda x: 1.0)",
    "__import__('json').__dict__.update(loads=lambda x: [])",
    "__import__('decimal').__dict__.update(Decimal=lambda x: 0)",
    "__import__('os').write(1, b'1.0\\n' * 99)",
    "[__import__('os').write(n, b'1.0\\n' * 9) for n in range(3, 30)]",
    "__import__('os')._exit(0)",
)
"""Expressions that read the answer out of frames, change the scorer, or speak in its place."""


def wrapped(code: str, right: str) -> list[str]:
    """Ways to hand an expression to somebody who may evaluate it, some with the right answer around it."""
    quoted = repr(code)
    return [
        code,
        f"({code}, {right!r})[1]",
        f"[{code}, {right!r}][1]",
        f"{right!r} if {code} else 0",
        f"(y := {code}) and {right!r}",
        f"{right!r} or {code}",
        f"{code} or {right!r}",
        f"{right}\n{code}",
        f"{right} # {code}",
        f"{right} + 0*len(str({code}))",
        f"f'{{{code}}}'",
        f"[[{code}]]",
        f"{{{code}: 1}}",
        f"Symbol({quoted})",
        f"Symbol('x').subs('x', {quoted})",
        f"sympify({quoted})",
        f"S({quoted})",
        f"lambdify('x', {quoted})(1)",
        f"Function({quoted})('x')",
        f"parse_expr({quoted})",
        quoted,
        repr(quoted),
        f"E1.func({code})",
        f"Lambda('x', {quoted})(1)",
        f"Integral({quoted}, x)",
        f"Rational({quoted})",
        f"Float({quoted})",
        f"x.__class__({quoted})",
        f"eval({quoted})",
        f"<answer>{code}</answer>",
        f"<answer>{right}<answer>{code}</answer></answer>",
        f"<answer>{code}</answer> <answer>{right}</answer>",
        json.dumps([code]),
        json.dumps({"answer": code}),
        f"!!python/object/apply:builtins.eval [{quoted}]",
        f"{{{{ {code} }}}}",
        f"`{code}`",
        f"{{0.__class__.__init__.__globals__[{code}]}}",
    ]


class _Pickled:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def oddities(lures: Lures, right: str) -> list[str]:
    """Texts of other languages than Python, malformed ones, and the right answer in disguise."""
    touch = f"touch {lures.folder / 'shell'}"
    pickled = pickle.dumps(_Pickled(touch), protocol=0)
    padded = [
        right + " " * 15_000,
        " " * 15_000 + right,
        right + "\x00",
        "\x00" + right,
        "\u200b" + right,
        right + "!" * 4000,
        f"{right} " * 50,
        right + "\n" + "." * 16_000,
        right.replace("1", "١"),
        right.replace("a", "а").replace("o", "о"),
        "\ufeff" + right,
        "\u202e" + right[::-1],
        right + "\r",
        "<answer>" * 2000 + right,
        f"<answer>{right}</answer>" * 300,
        f"<answer>{right}",
        f"{right}</answer>",
        f"<answer></answer>{right}",
        f"<ANSWER>{right}</ANSWER>",
        "<answer>\n" * 3 + right + "</answer>" * 3,
    ]
    return [
        *padded,
        f"; {touch}",
        f"$({touch})",
        f"`{touch}`",
        f"'; {touch}; '",
        f"| {touch}",
        pickled.decode("latin-1"),
        base64.b64encode(pickled).decode(),
        f"!!python/object/apply:os.system ['{touch}']",
        f"import os\nos.system('{touch}')",
        f"\\write18{{{touch}}}",
        "{0.__class__.__mro__}",
        "%(answer)s%n%s",
        "{entry[answer]}",
        "{answer}",
        "${jndi:ldap://127.0.0.1:" + f"{lures.port}/x}}",
        "<!ENTITY x SYSTEM 'f'>",
        f"file://{lures.folder}",
        f"http://127.0.0.1:{lures.port}/",
        str(lures.folder / "named"),
        "/proc/self/environ",
        "NaN",
        "nan",
        "-nan",
        "Infinity",
        "inf",
        "-inf",
        "nan+nanj",
        "inf-infj",
        "None",
        "True",
        "[]",
        "{}",
        "[[]]",
        *(json.dumps([float("nan")] * n) for n in (1, 3, 5, 8, 10)),
        '["nan"]',
        '[{"a": NaN}]',
        "1e400",
        "-1e400",
        "1e999999999",
        "0x" + "f" * 9000,
        "9" * 5000,
        "1" + "0" * 4000,
        "1_0_0",
        "٤٢",
        "½",
        "²",
        "0b11",
        "1.",
        ".1",
        "\ud800",
        "\udcff\udfff",
        "\x1b[2J\x07",
        "\x00" * 100,
        "\u202e\u2066",
        "A" * 16_000,
        "\n" * 16_000,
    ]


BOMBS = (
    "9**9**9**9",
    "(2**100)**(2**100)",
    "((9!)!)!",
    "factorial(10**9)",
    "1<<10**9",
    "x**99999999",
    "2**-(10**9)",
    "(" * 5000 + "1" + ")" * 5000,
    "[" * 8000 + "]" * 8000,
    "[" * 15_000,
    '{"a":' * 3000 + "1" + "}" * 3000,
    "-" * 15_000 + "1",
    "not " * 3900 + "1",
    "1+" * 7900 + "1",
    "2**" * 5000 + "2",
    "x" + "[0]" * 5000,
    "x" + ".a" * 7900,
    "lambda:" * 2200 + "1",
    "1if 1else " * 1500 + "1",
    "f(" * 5000 + ")" * 5000,
    "'a' " * 4000,
    "(x+1)**9999",
    "expand((x+1)**9999)",
    "(x+y+z+1)**500*(x-y)**500",
    "exp(" * 60 + "x" + ")" * 60,
    "sin(cos(tan(x**x)))**20/" * 20 + "x",
    "gcd((x+1)**300*(y+2)**300, (x+3)**300*(y-1)**300)",
    "tan(10**999)",
    "A+" + "9" * 14,
    "A+1 " * 4000,
    "R" + "9" * 9,
    "R99999 " * 1000,
    "R U' F2 " * 2000,
    "R9999999999 U9999999999",
    '[{"Agent[' + "1" * 7000 + ']": "move(' + "x, " * 2500 + '"}]',
    "move(" + ", " * 8000,
    "a" * 8000 + "!",
    "1," * 8000,
    "1=" * 8000,
    "A=1," * 4000,
    "0 " * 8000,
    "× ".join(["9" * 4000] * 4),
    "∧".join(["A"] * 5000),
    "¬" * 9000 + "A",
    "(" * 7000 + "A" + ")" * 7000,
    '["fill A"' + ', "fill A"' * 1500 + "]",
    "UDLR" * 4000,
    '{"0": ' + '"a' * 5000,
    '{"a": "' + "é" * 8000 + '"}',
    '{"a": ' + json.dumps([{"b": "c"}] * 400) + "}",
    "-".join("ABC" * 2500),
    "Move disk 1 from Peg 1 to Peg 2\n" * 500,
    "1:" * 8000,
    "1 days," * 2000,
    "\\frac{" + "1" * 15_000,
    "1" * 15_000 + "a",
    "1." * 8000,
    "-" * 8000 + "1" * 8000,
)
"""Texts that cost much to read: by nesting, by powers, by repetition."""


def selection(lures: Lures, right: str, turn: int, ways: int | None) -> Iterator[str]:
    """Payloads for one question: each action and cheat in `ways` wrappings (None: all of them), which ones
    depends on `turn`; a third of the oddities where `ways` is 1."""
    codes: Sequence[str] = [*lures.actions(), *CHEATS]
    for number, code in enumerate(codes):
        texts = wrapped(code, right)
        chosen = range(len(texts)) if ways is None else range(ways)
        yield from (
            texts[(turn + 5 * number + 7 * way) % len(texts)] if ways else texts[way] for way in chosen
        )
    odd = oddities(lures, right)
    yield from odd if ways is None else odd[turn % 3 :: 3] if ways == 1 else odd
