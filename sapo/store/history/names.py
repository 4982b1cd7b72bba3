"""Which authors and data sets the history has; without what reads rows, which takes seconds to load."""

from typing import Literal

from deltalake import QueryBuilder
from deltalake.exceptions import DeltaError

from sapo.store.history.tables import Store, TableName, away


def names(store: Store, column: Literal["node", "dataset"]) -> list[str]:
    """All authors, or all data sets, of the completions that `sapo.store.history.query.rollouts` can find."""
    conditions: dict[TableName, str] = {"rollouts": "", "training": " WHERE source = 'local'"}
    found: set[str] = set()
    for name, condition in conditions.items():
        table = store.find(name)
        if table is None:
            continue
        sql = f"SELECT DISTINCT {column} FROM {name}{condition}"
        try:
            rows = QueryBuilder().register(name, table).execute(sql).read_all()
        except (OSError, DeltaError) as error:
            raise away(table.table_uri, error) from error
        found |= {str(value) for value in rows.column(column).to_pylist()}
    return sorted(found)
