"""Section `gossip`: off by default, refused where replicas would drift apart, and no digest changes."""

import pytest

from sapo.core.config.load import Config, load
from sapo.core.errors import UserError

ON = ("gossip.every=50", 'gossip.members=["n0"]')


def with_gossip(*sets: str) -> Config:
    return load("tiny", sets=[*ON, *sets], env={})


def test_it_is_off_by_default_and_leaves_digests_as_they_were() -> None:
    plain = load("tiny", env={})
    assert plain.gossiping is None
    assert "gossip" not in plain.model_dump(mode="json")
    assert load("tiny", sets=['gossip.members=["n0"]'], env={}).gossiping is None
    assert with_gossip().gossiping is not None


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (("gossip.gamma=1.5",), r"gossip.gamma = 1.5: must be below 2\(1 - alpha²\) = 1.5, .*; correct"),
        (("gossip.gamma=0",), r"gossip.gamma = 0: .*greater than 0"),
        (("gossip.gamma=-0.1",), r"gossip.gamma = -0.1: .*greater than 0"),
        (("gossip.alpha=0.9",), r"gossip.gamma = 0.7: must be below 2\(1 - alpha²\) = 0.38"),
        (("gossip.alpha=1",), r"gossip.alpha = 1: .*less than 1"),
        (("gossip.alpha=-0.1",), r"gossip.alpha = -0.1: .*greater than or equal to 0"),
        (("gossip.beta=0",), r"gossip.beta = 0: .*greater than 0"),
        (("gossip.beta=2.5",), r"gossip.beta = 2.5: .*less than or equal to 2"),
        (("gossip.every=1",), r"gossip.every = 1: leaves no round .*: set 2 or more"),
        (("gossip.every=-3",), r"gossip.every = -3: .*greater than or equal to 0"),
        (("gossip.members=[]",), r"gossip.members = \[\]: gossip.every needs members"),
        (("gossip.store=http://x/y",), r"gossip.store = 'http://x/y': must be a folder or s3://"),
        (("gossip.store=s3://me:secret@x/y",), r"gossip.store = '...': .*password"),
        (("gossip.evry=3",), r"gossip.evry = 3: unknown key; did you mean 'gossip.every'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_field_value_and_remedy(sets: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        with_gossip(*sets)
