"""Who copied whom: the truth table, row by row."""

from itertools import product

import pytest

from sapo.peers.admission import Fates, decide

YES, NO = True, False


@pytest.mark.parametrize(
    ("met_first", "arrives_drawn", "met_drawn", "fates"),
    [
        (YES, YES, NO, Fates("stays", "stays")),
        (YES, YES, YES, Fates("stays", "stays")),
        (YES, NO, YES, Fates("proven", "stays")),
        (YES, NO, NO, Fates("copy", "stays")),
        (NO, NO, YES, Fates("stays", "stays")),
        (NO, YES, YES, Fates("stays", "stays")),
        (NO, YES, NO, Fates("stays", "proven")),
        (NO, NO, NO, Fates("stays", "copy")),
    ],
)
def test_who_copied_whom(met_first: bool, arrives_drawn: bool, met_drawn: bool, fates: Fates) -> None:
    assert fates == decide(
        met_first=met_first, arrives_drawn=arrives_drawn, met_drawn=met_drawn, same_author=False
    )


@pytest.mark.parametrize("row", list(product((YES, NO), repeat=3)))
def test_nobody_is_proven_to_have_copied_from_itself(row: tuple[bool, bool, bool]) -> None:
    met_first, arrives_drawn, met_drawn = row
    alone = decide(met_first=met_first, arrives_drawn=arrives_drawn, met_drawn=met_drawn, same_author=True)
    two = decide(met_first=met_first, arrives_drawn=arrives_drawn, met_drawn=met_drawn, same_author=False)
    assert "proven" not in (alone.arrives, alone.met)
    assert (alone.arrives == "stays", alone.met == "stays") == (two.arrives == "stays", two.met == "stays")
