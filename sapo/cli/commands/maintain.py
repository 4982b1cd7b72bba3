"""`sapo maintain` keeps the history's tables small, sorted and as long as they are to be."""

from typing import TYPE_CHECKING, Annotated

import typer

from sapo.cli.commands.options import HomeOption, JsonOption, find_home, print_json

if TYPE_CHECKING:
    from sapo.store.history.maintain import TableReport
    from sapo.store.history.retention import Cut


def maintain(
    home: HomeOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done; nothing is written.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compact the history's tables, cut what is not to be kept, delete files that are not needed.

    Nodes, archives and readers go on meanwhile. What history.keep_rounds keeps stays replayable: rows are cut
    only below a checkpoint that a node still has. The archive does the same every history.maintain_seconds.
    """
    from sapo.core.config.home import refuse_unwritable
    from sapo.core.config.load import load
    from sapo.store.history import open_store
    from sapo.store.history.maintain import maintain as maintain_tables
    from sapo.store.history.retention import cuts

    found = find_home(home)
    config = load(base=found.load_config())  # SAPO_HISTORY__... is heard, as at a start
    if config.history.uri is None and not dry_run:
        refuse_unwritable(found.history, "--home", found.shown)
    store = open_store(config, found)
    decided = cuts(config, found, store)
    reports = maintain_tables(config, store, decided, dry_run=dry_run)
    if as_json:
        from dataclasses import asdict

        body = {"dry_run": dry_run, "tables": [asdict(one) for one in reports]}
        print_json(body | {"nodes": [asdict(cut) for cut in decided]})
    else:
        _show(reports, decided, dry_run)


def _show(reports: "list[TableReport]", decided: "list[Cut]", dry_run: bool) -> None:
    from rich.table import Table

    from sapo.core.terminal import Terminal

    table = Table(title="would be done" if dry_run else None, title_justify="left")
    table.add_column("table")
    for column in ("files", "MB", "merged", "rows cut", "files deleted"):
        table.add_column(column, justify="right")
    for one in reports:
        files, size = f"{one.files_before:,}", f"{one.bytes_before / 1e6:,.1f}"
        if not dry_run:
            files, size = f"{files} → {one.files_after:,}", f"{size} → {one.bytes_after / 1e6:,.1f}"
        table.add_row(one.table, files, size, *(f"{n:,}" for n in (one.merged, one.rows_cut, one.removed)))
    console = Terminal()
    console.print(table if reports else "there are no tables yet")
    for cut in decided:
        kept = f"is kept from round {cut.round} on" if cut.round else f"is kept whole: {cut.why}"
        console.print(f"{cut.node} {kept}", soft_wrap=True)
