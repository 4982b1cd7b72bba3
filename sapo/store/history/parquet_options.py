"""How data files are written: small, and without unused statistics."""

from deltalake import ColumnProperties, WriterProperties

LONG = ("text", "question", "learn", "guard", "environment", "extra", "detail", "payload")
"""Columns of any length. Statistics would put the least and the greatest value of each, whole, into the log
for every file, to be read by everybody who opens the table; rows are looked for by other columns."""


def writing(max_row_group_size: int | None = None) -> WriterProperties:
    """Properties for every write; rows in groups of so many, or of as many as deltalake likes."""
    return WriterProperties(
        compression="ZSTD",
        max_row_group_size=max_row_group_size,
        column_properties={name: ColumnProperties(statistics_enabled="NONE") for name in LONG},
    )
