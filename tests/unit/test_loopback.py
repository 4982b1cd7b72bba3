"""Loopback addresses are never asked through a proxy."""

import urllib.request

import httpx
import pytest
import requests.utils

from sapo.core.loopback import LOOPBACK, never_by_proxy


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("before", [{}, {"no_proxy": ""}, {"NO_PROXY": "a.example"}, {"no_proxy": "*"}])
def test_every_client_asks_loopback_directly(variable: str, before: dict[str, str]) -> None:
    environment = {variable: "http://proxy.example:9", **before}
    never_by_proxy(environment)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
            patch.delenv(name, raising=False)
            patch.delenv(name.upper(), raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        for host in LOOPBACK:
            url = f"http://[{host}]:1/" if ":" in host else f"http://{host}:1/"
            assert urllib.request.proxy_bypass(host)
            with httpx.Client() as client:
                assert client._transport_for_url(httpx.URL(url)) is client._transport
        for host in ("localhost", "127.0.0.1"):
            assert not requests.utils.get_environ_proxies(f"http://{host}:1/")


def test_other_hosts_keep_what_the_user_chose() -> None:
    environment = {"no_proxy": "a.example", "NO_PROXY": "b.example"}
    never_by_proxy(environment)
    assert environment["no_proxy"] == environment["NO_PROXY"] == "a.example,b.example,localhost,127.0.0.1,::1"
    again = dict(environment)
    never_by_proxy(again)
    assert again == environment
