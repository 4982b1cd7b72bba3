"""A config is printed, logged and stored: no password may be in it, and no message may repeat one."""

import pytest

from sapo.core.config.load import load
from sapo.core.config.secrets import public
from sapo.core.errors import UserError

KAFKA = ("bus.type=kafka", "bus.servers=localhost:9092")
PASSWORD = "hunter2-never-seen"


@pytest.mark.parametrize(
    "setting",
    [
        f"bus.password={PASSWORD}",
        f"bus.sasl_plain={PASSWORD}",
        f"bus.secret={PASSWORD}",
        f"bus.servers=me:{PASSWORD}@localhost:9092",
        f"track.uri=http://me:{PASSWORD}@localhost:5000",
        f"history.uri=s3://key:{PASSWORD}@bucket/history",
    ],
)
def test_a_password_in_a_setting_is_refused_and_not_repeated(setting: str) -> None:
    with pytest.raises(UserError) as caught:
        load("tiny", sets=[*KAFKA, setting], env={})
    assert caught.value.field.rpartition(".")[2] == setting.partition("=")[0].rpartition(".")[2]
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("reference", ["env:MY_PASSWORD", "file:/etc/sapo/password", "prefect:kafka-n0"])
def test_a_password_is_named_by_where_it_is(reference: str) -> None:
    config = load("tiny", sets=[*KAFKA, f"bus.password={reference}"], env={})
    assert config.bus.model_dump()["password"] == reference


def test_the_variable_that_holds_the_password_is_no_setting() -> None:
    config = load("tiny", sets=KAFKA, env={"SAPO_KAFKA_PASSWORD": PASSWORD})
    assert PASSWORD not in config.model_dump_json()


@pytest.mark.parametrize("servers", ["localhost", "localhost:", ":9092", "a:1,,b:2", "a:1, b:2", ""])
def test_servers_that_are_no_addresses_are_refused(servers: str) -> None:
    with pytest.raises(UserError, match=r"bus\.(kafka\.)?servers"):
        load("tiny", sets=["bus.type=kafka", f"bus.servers={servers}"], env={})


def test_a_site_names_its_nodes_and_numbers_still_choose_among_them() -> None:
    config = load("tiny", sets=["swarm.site=berlin-", "swarm.nodes=2", "node.1.learn.lr=1e-3"], env={})
    assert config.nodes == ["berlin-0", "berlin-1"]
    assert [config.for_node(name).learn.lr for name in config.nodes] == [2e-4, 1e-3]


@pytest.mark.parametrize("site", ["", "a1", "-a", "A", "a b", "a/b", "a" * 40])
def test_a_site_whose_node_names_would_be_ambiguous_is_refused(site: str) -> None:
    with pytest.raises(UserError, match="site"):
        load("tiny", sets=[f"swarm.site={site}"], env={})


def test_an_address_is_shown_without_what_may_be_secret_in_it() -> None:
    address = f"https://me:{PASSWORD}@host:5000/path?token={PASSWORD}#{PASSWORD}"
    assert public(address) == "https://host:5000/path"
