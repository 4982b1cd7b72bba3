"""`sapo peer block`: who is left out, from which round on, and how an author is named."""

from pathlib import Path

import pytest
from makers import make_identity
from swarms import hand_over, make_home, open_node, small_config

from sapo import cli
from sapo.bus.memory import MemoryBus
from sapo.core.errors import UserError
from sapo.peers import blocks

KEYS = {"aa01" + "0" * 60: {"n1"}, "aa02" + "0" * 60: {"aa01", "n2"}, "bb03" + "0" * 60: {"n2"}}
FIRST, SECOND, THIRD = KEYS


def test_an_author_is_named_by_key_by_name_or_by_the_beginning_of_a_key() -> None:
    stranger = make_identity("stranger").key
    assert blocks.find(stranger, KEYS) == stranger, "whether it was met or not"
    assert blocks.find("bb", KEYS) == THIRD
    assert blocks.find("n1", KEYS) == FIRST
    assert blocks.find("aa02", KEYS) == SECOND


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("aa0", "may be 2 authors: aa01"),
        ("aa01", "may be 2 authors"),  # one took the beginning of the other's key for a name
        ("n2", "may be 2 authors"),
        ("", "no author"),
        ("n9", "no author"),
    ],
)
def test_who_is_named_badly_is_refused_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as error:
        blocks.find(text, KEYS)
    assert "\n" not in str(error.value)


def test_a_blocked_author_leaves_the_pool_in_the_next_round_and_is_taken_in_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config, bus = small_config(["swarm.rounds=9", "batch.external=1", "pool.max_peer_share=1.0"]), MemoryBus()
    home = make_home(tmp_path / "home", config)

    def sapo(*args: str) -> str:
        code = cli.invoke([*args, "--home", str(home.root)])
        said = capsys.readouterr()
        assert code == (2 if said.err else 0)
        return said.out + said.err

    with (
        open_node(config, home, "n0", bus=bus, deliver=False) as node,
        open_node(config, home, "n1", bus=bus, deliver=False) as other,
    ):

        def round() -> None:
            other.run_round()
            hand_over(other, bus)
            node.run_round()

        pool, author = node.parts.intake.pool, f"n1 ({other.parts.intake.admission.key[:12]})"
        round()
        held = len(pool)
        assert held, "there is something to leave out"
        assert sapo("peer", "unblock", "n1").endswith("nobody is blocked here; name another home\n")
        assert sapo("peer", "block", "n1") == f"n0: {author} is left out from the next round on\n"
        assert len(pool) == held, "the round in hand goes on with what it has"
        round()
        series = node.journal.result(1).metrics
        assert (len(pool), series["pool/refused/blocked"]) == (0, 3.0)
        assert node.journal.pool_ids() == set()
        assert [group.source for group in node.journal.batch(1).groups] == ["local"] * 3
        assert f"n0: {author} is left out from round 1 on" in caplog.text
        assert "left out by n0 since " in sapo("status")
        assert "KEY = 'n2': is no author met here" in sapo("peer", "unblock", "n2")
        sapo("peer", "unblock", other.parts.intake.admission.key[:6])
        round()
        assert "pool/refused/blocked" not in node.journal.result(2).metrics, "what it publishes from now on"
        assert "left out" not in sapo("status")
        home.blocked("n0").write_text("[{}]")
        assert "blocked.json" in sapo("status")
