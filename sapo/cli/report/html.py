"""HTML pages from the templates beside this file; all but drawings is escaped."""

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from sapo.core.unicode import printable

_ENVIRONMENT = Environment(
    loader=PackageLoader("sapo.cli.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


@dataclass(frozen=True, slots=True)
class Table:
    """A table's column names, all empty for a table without a head, and its rows. With `code`, the first
    column is shown as it was written."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    code: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing of `svg_charts`, which escapes what it is given, and what it means."""

    svg: str
    caption: str


def render(template: str, **values: object) -> str:
    """A whole page as text. Raises `jinja2.UndefinedError` if a value is missing."""
    return printable(_ENVIRONMENT.get_template(template).render(values))


def percent(value: float | None) -> str:
    """A share for a person to read; a dash if it was not measured."""
    return "–" if value is None else f"{100 * value:.1f} %"
