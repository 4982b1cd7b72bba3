"""What the administrator's connection does about brokers that learn of a change a moment later."""

from pathlib import Path

import pytest

from infra.kafka import admin
from infra.kafka.admin import Admin
from infra.kafka.layout import Layout
from sapo.core.errors import UserError


class LateBroker:
    """Stands for KafkaAdminClient: it names a user that was made only when asked so many times more.

    A double, since a real broker is late by milliseconds, and never on demand.
    """

    def __init__(self, late: float) -> None:
        self.late, self.asked, self.made = late, 0, {"admin"}

    def alter_user_scram_credentials(self, changes: list[object]) -> dict[str, None]:
        self.made |= {change.user for change in changes}  # type: ignore[attr-defined]
        self.asked = 0
        return {change.user: None for change in changes}  # type: ignore[attr-defined]

    def describe_user_scram_credentials(self) -> dict[str, object]:
        self.asked += 1
        return {name: {} for name in self.made if name == "admin" or self.asked > self.late}


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    monkeypatch.setattr(admin, "PAUSE_S", 0.0)
    monkeypatch.setattr(admin, "SETTLE_S", 0.2)
    made = Layout.make(tmp_path / "cluster", brokers=1, secured=True)
    made.write()
    return made


def test_a_user_that_was_made_is_known_when_adding_it_returns(layout: Layout) -> None:
    broker = LateBroker(late=3)
    connection = Admin(layout, broker)
    connection.add_user("swarm")
    assert "swarm" in connection.users()


def test_a_name_that_nobody_made_is_told_at_once(layout: Layout) -> None:
    broker = LateBroker(late=3)
    assert not Admin(layout, broker).knows("stranger")
    assert broker.asked == 1


def test_brokers_that_never_learn_of_a_user_are_told_of(layout: Layout) -> None:
    broker = LateBroker(late=float("inf"))
    with pytest.raises(UserError, match="do not know it yet"):
        Admin(layout, broker).add_user("swarm")
