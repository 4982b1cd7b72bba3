"""The way to a terminal for tables and styled lines; `sapo.core.unicode.say` is that for plain ones."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from sapo.core.unicode import printable


class Terminal(Console):
    """A console for the texts of others: a string is no markup, and no character of any text steers it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A string as it is shown, before it is measured and folded."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """What is written of anything that can be shown; all that a console writes passes here."""
        if isinstance(renderable, Text):
            renderable = renderable.copy()
            renderable.plain = printable(renderable.plain)
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
