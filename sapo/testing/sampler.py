"""What every sampler promises. `check_sampler` holds another one to it."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from sapo.peers.pool import Entry
from sapo.peers.sampling import Sampler
from sapo.testing.samples import make_entry


def pool(**claims: Any) -> list[Entry]:
    """Twenty entries of four authors; `claims` are what the authors say of their groups."""
    return [
        make_entry(f"peer{number % 4}", round=number, at=1000.0 + number, **claims) for number in range(20)
    ]


def ids(entries: Sequence[Entry]) -> list[str]:
    """Ids of groups, in order."""
    return [entry.group_id for entry in entries]


def it_returns_entries_of_the_pool_once_each(sampler: Sampler) -> None:
    entries = pool()
    found = ids(sampler(entries, random.Random(1)))
    assert len(set(found)) == len(found)
    assert {*found} <= {*ids(entries)}


def an_empty_pool_gives_nothing(sampler: Sampler) -> None:
    assert list(sampler([], random.Random(1))) == []


def a_draw_that_is_made_again_is_the_same(sampler: Sampler) -> None:
    """A round that a crash cut short is begun again with the same generator and pool."""
    random.seed(1)
    first = ids(sampler(pool(), random.Random(7)))
    random.seed(2)
    assert ids(sampler(pool(), random.Random(7))) == first


def the_pool_is_left_as_it_is(sampler: Sampler) -> None:
    entries = pool()
    sampler(entries, random.Random(1))
    assert ids(entries) == ids(pool())


def what_authors_claim_of_their_groups_moves_nothing(sampler: Sampler) -> None:
    """Date and version are the author's words. When a group was received, this node saw itself."""
    honest, boasting = pool(), pool(created_at=9e9, policy_version=10**6)
    assert ids(sampler(boasting, random.Random(3))) == ids(sampler(honest, random.Random(3)))


PROMISES: tuple[Callable[[Sampler], None], ...] = (
    it_returns_entries_of_the_pool_once_each,
    an_empty_pool_gives_nothing,
    a_draw_that_is_made_again_is_the_same,
    the_pool_is_left_as_it_is,
    what_authors_claim_of_their_groups_moves_nothing,
)


def check_sampler(sampler: Sampler) -> None:
    """Hold a sampler to what all promise. Raises `AssertionError` at the first that is not kept."""
    for promise in PROMISES:
        promise(sampler)
