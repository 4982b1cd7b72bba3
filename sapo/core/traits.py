"""Traits: named patterns that a text has or lacks. Matching takes time linear in the text (RE2 in DuckDB)."""

import re
from collections.abc import Mapping, Sequence

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
        self.traits = dict(traits)
        if not traits:
            return
        import duckdb  # only those who look for traits load it

        self._connection = duckdb.connect(config={"autoinstall_known_extensions": "false"})
        for name, pattern in traits.items():
            try:
                self.found(name, [""])
            except duckdb.Error as error:
                raise ValueError(f"trait {name}: {pattern!r} is no pattern of RE2: {error}") from None

    def found(self, name: str, texts: Sequence[str]) -> list[bool]:
        """Whether each text has the trait."""
        sql = "SELECT regexp_matches(unnest(?::VARCHAR[]), ?)"
        rows = self._connection.execute(sql, [list(texts), self.traits[name]]).fetchall()
        return [bool(row[0]) for row in rows]

    def shares(self, texts: Mapping[str, Sequence[str]]) -> dict[str, float]:
        """Share of texts with each trait, as series: `trait/<trait>` of all, `trait/<trait>/<task>` by task.

        `texts` are by task.
        """
        series: dict[str, float] = {}
        for name in self.traits:
            found = {task: self.found(name, some) for task, some in texts.items() if some}
            every = [one for some in found.values() for one in some]
            if every:
                series[f"trait/{name}"] = sum(every) / len(every)
            series |= {f"trait/{name}/{task}": sum(some) / len(some) for task, some in found.items()}
        return series
