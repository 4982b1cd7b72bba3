"""The benchmark of floods at small sizes: the attacks are what they say, the node gives them their share."""

from itertools import islice

import fairness
import pytest
from bus_authors import Author, small

from sapo.core.errors import Refused
from sapo.peers.signing import unseal


def test_identities_sign_what_they_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "NAMES", 3)
    assert len({unseal(group).key for group in islice(fairness.identities([]), 6)}) == 3


@pytest.mark.parametrize("attack", [fairness.junk, fairness.forgeries])
def test_junk_and_forgeries_are_refused_for_their_signature(attack: fairness.Attack) -> None:
    honest = [Author(i, small) for i in range(2)]
    with pytest.raises(Refused) as caught:
        unseal(next(attack(honest)))
    assert caught.value.code == "bad_signature"


@pytest.mark.parametrize("name", fairness.ATTACKS)
def test_known_peers_keep_their_places(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "NAMES", 40)
    turns = fairness.rounds(fairness.ATTACKS[name], 2, 3)
    assert all(turn.others_pool <= fairness.NEWCOMERS for turn in turns)
    assert all(turn.honest_pool >= 48 for turn in turns)
    assert all(turn.honest_batch + turn.others_batch == fairness.WANT for turn in turns)
