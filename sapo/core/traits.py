"""Traits: named patterns that a text has or lacks. Matching takes time linear in the text (RE2)."""

import re
from collections.abc import Mapping, Sequence

import re2

NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


def checked(traits: Mapping[str, str]) -> dict[str, str]:
    """The traits. Raises `ValueError` for a name that no series can have, or a pattern that RE2 refuses."""
    for name, pattern in traits.items():
        if not NAME.fullmatch(name):
            problem = "must be small letters a to z, digits and _, a letter first, 32 characters at most"
            raise ValueError(f"the name of trait {name!r} {problem}")
        TraitMatcher({name: pattern})
    return dict(traits)


class TraitMatcher:
    """Finds which texts have which trait, anywhere in them. Raises `ValueError` for a pattern RE2 refuses."""

    def __init__(self, traits: Mapping[str, str]) -> None:
        options = re2.Options()
        options.log_errors = False
        self._patterns = {}
        for name, pattern in traits.items():
            try:
                self._patterns[name] = re2.compile(pattern, options)
            except re2.error as error:
                problem = error.args[0].decode("utf-8", "replace")
                raise ValueError(f"trait {name}: {pattern!r} is no pattern of RE2: {problem}") from None

    def found(self, name: str, texts: Sequence[str]) -> list[bool]:
        """Whether each text has the trait."""
        pattern = self._patterns[name]
        # half a surrogate pair has no UTF-8
        plain = (text.encode("utf-8", "replace").decode() for text in texts)
        return [pattern.search(text) is not None for text in plain]

    def shares(self, texts: Mapping[str, Sequence[str]]) -> dict[str, float]:
        """Share of texts with each trait, as series: `trait/<trait>` of all, `trait/<trait>/<task>` by task.
        `texts` are by task."""
        series: dict[str, float] = {}
        for name in self._patterns:
            found = {task: self.found(name, some) for task, some in texts.items() if some}
            every = [one for some in found.values() for one in some]
            if every:
                series[f"trait/{name}"] = sum(every) / len(every)
            series |= {f"trait/{name}/{task}": sum(some) / len(some) for task, some in found.items()}
        return series
