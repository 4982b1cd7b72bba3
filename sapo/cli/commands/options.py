"""Options that several commands share, and what they resolve to."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sapo.core.errors import UserError
from sapo.core.unicode import say

if TYPE_CHECKING:
    from sapo.core.config.home import Home
    from sapo.core.config.load import Config

SHIPPED_PRESETS = (
    "Settings that ship with sapo: tiny, starter, smollm2, paper, qwen-0.5b, qwen-1.5b-lora or "
    "qwen-0.5b-2gpu."
)
PresetOption = Annotated[str | None, typer.Option("--preset", metavar="NAME", help=SHIPPED_PRESETS)]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A TOML file of settings. They replace those of --preset, else of the preset that the file "
        'names (preset = "paper"), else of preset tiny.',
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="One setting, e.g. learn.lr=1e-4 or node.1.model=starter:numbers."
    ),
]
RoundsOption = Annotated[int | None, typer.Option(metavar="N", help="Rounds each node makes in all.")]
HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        metavar="DIR",
        help="Where the run lies. [env: SAPO_HOME; default: ./runs/<swarm>, or ./runs/<swarm>-<site>]",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved config as TOML and exit; writes nothing.")
]


def resolve(
    preset: str | None,
    file: Path | None,
    sets: Sequence[str] | None,
    *,
    base: "Config | None" = None,
) -> "Config":
    """The config of a command line; the default preset when neither preset, file nor `base` is given. `base`
    is the config a home was started with: a resumed run changes only what is named now."""
    from sapo.core.config.load import DEFAULT_PRESET, load

    if preset is None and file is None and base is None:
        preset = DEFAULT_PRESET
    return load(preset, file, list(sets or []), base=base)


def counted(sets: Sequence[str] | None, nodes: int | None = None, rounds: int | None = None) -> list[str]:
    """The settings of a command line, with those of `--nodes` and `--rounds` behind them."""
    counts = {"swarm.nodes": nodes, "swarm.rounds": rounds}
    return [*(sets or []), *(f"{name}={count}" for name, count in counts.items() if count is not None)]


def find_home(home: Path | None) -> "Home":
    """The home a looking command means: `--home`, `$SAPO_HOME`, or the only run under ./runs. Raises
    `UserError` where it holds no swarm, or where there are several to choose from."""
    from sapo.core.config.home import Home
    from sapo.core.config.load import DEFAULT_PRESET

    if home is not None or os.environ.get("SAPO_HOME"):
        found = Home.at(home, "")
    else:
        runs = sorted(path.parent for path in Path("runs").glob("*/manifest.json"))
        if len(runs) > 1:
            names = ", ".join(str(run) for run in runs)
            raise UserError("--home", "", "there are several runs here", f"name one of {names}")
        found = Home.at(runs[0] if runs else None, DEFAULT_PRESET)
    found.load_manifest()
    return found


def program() -> str:
    """How to type this program's name here: `sapo` when the shell finds it, else its path."""
    script = Path(sys.argv[0])
    if shutil.which("sapo") or script.name != "sapo":
        return "sapo"
    near = os.path.relpath(script)
    return shlex.quote(str(script.absolute()) if near.startswith("..") else near)


def typed(home: "Home", *words: str) -> str:
    """A command of this program for a home, as it can be pasted into a shell."""
    return " ".join([program(), shlex.join([*words, "--home", home.shown])])


def json_object(field: str, given: Any) -> dict[str, Any]:
    """A JSON object, given as text or read already. Raises `UserError` for anything else."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise UserError(field, given, f"is not JSON: {error}", "give a JSON object") from None
    if not isinstance(found, dict):
        raise UserError(field, given, "is not a JSON object", 'write it like {"min_terms": 2}')
    return found


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    say(json_text(value, indent=2))


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON for standard output: with escapes for what could steer a terminal, and where the output's encoding
    is not UTF-8 for all that is not ASCII."""
    ascii_only = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only, allow_nan=False)
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def warn(text: str) -> None:
    """One line on standard error that does not stop anything."""
    say(f"warning: {text}", file=sys.stderr)
