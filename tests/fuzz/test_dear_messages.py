"""Messages that are wrong in a hundred thousand places cost no more than those that are wrong in one."""

import json
import tracemalloc
from typing import Any

import pytest
from crafting import sealed
from makers import make_identity, make_signed
from oracle import canonical

from sapo.core.errors import Refused
from sapo.core.types import SignedGroup
from sapo.peers.signing import unseal

GROUP: dict[str, Any] = json.loads(make_signed().payload)
FIRST, SECOND = GROUP["completions"]
MANY = {f"k{number}": 0 for number in range(60_000)}


@pytest.mark.parametrize(
    "change",
    [
        {"completions": [0] * 300_000},
        {"completions": [{}] * 300_000},
        {"completions": [FIRST | {"token_ids": [-1] * 300_000}, SECOND]},
        {"completions": [FIRST | {"token_ids": [1.5] * 200_000}, SECOND]},
        {"completions": [FIRST | {"token_ids": [1], "logprobs": ["x"] * 200_000}, SECOND]},
        {"completions": [FIRST | MANY, SECOND]},
        {"recipe": GROUP["recipe"] | MANY},
        {"sampling": GROUP["sampling"] | MANY},
        {"invitation": MANY},
        MANY,
    ],
)
def test_what_is_wrong_everywhere_is_refused_for_little(change: dict[str, Any]) -> None:
    """Listing every error would take 15 seconds and 700 MB for a payload of one."""
    signed = SignedGroup(**vars(sealed(canonical(GROUP | change), make_identity("peer"))))
    tracemalloc.start()
    with pytest.raises(Refused) as refused:
        unseal(signed)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused.value.code == "malformed"
    assert len(refused.value.detail) < 400
    assert most < 64 * 2**20
