"""Loopback addresses are never asked through a proxy."""

import urllib.request

import httpx
import pytest
import requests

from sapo.core.loopback import never_by_proxy


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("before", [{}, {"no_proxy": ""}, {"NO_PROXY": "a.example"}, {"no_proxy": "*"}])
def test_every_client_asks_loopback_directly(
    variable: str, before: dict[str, str], healthy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    environment = {variable: "http://127.0.0.1:9", **before}
    never_by_proxy(environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with urllib.request.urlopen(healthy, timeout=5) as answer:
        assert answer.status == 200
    assert httpx.get(healthy).status_code == 200
    assert requests.get(healthy, timeout=5).status_code == 200


def test_other_hosts_keep_what_the_user_chose() -> None:
    environment = {"no_proxy": "a.example", "NO_PROXY": "b.example"}
    never_by_proxy(environment)
    assert environment["no_proxy"] == environment["NO_PROXY"] == "a.example,b.example,localhost,127.0.0.1,::1"
    again = dict(environment)
    never_by_proxy(again)
    assert again == environment
