"""What vLLM changes in its process holds while its code runs: here a stand-in of it, with threads."""

import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from sapo.policy.engines.vllm_isolation import Guest, busy

OURS = torch.set_num_threads


def theirs(nthreads: int) -> None:
    """What vLLM puts in the place of `torch.set_num_threads`: nothing happens."""


@pytest.fixture
def guest() -> Iterator[Guest]:
    """A guest that replaced a function as it came."""
    threads, made = torch.get_num_threads(), Guest()
    with made.arrive():
        torch.set_num_threads = theirs
    yield made
    torch.set_num_threads = OURS
    torch.set_num_threads(threads)


def test_its_functions_are_there_inside_and_nowhere_else(guest: Guest) -> None:
    assert torch.set_num_threads is OURS
    with guest.inside(), guest.inside():
        assert torch.set_num_threads is theirs
    assert torch.set_num_threads is OURS


def test_threads_changed_inside_are_as_before_though_it_replaced_what_sets_them(guest: Guest) -> None:
    torch.set_num_threads(2)
    with guest.inside():
        OURS(1)
    assert torch.get_num_threads() == 2


def test_two_threads_inside_leave_nothing_of_it_behind(guest: Guest) -> None:
    entered, leave, second = threading.Event(), threading.Event(), threading.Event()

    def sample() -> None:
        with guest.inside():
            entered.set()
            leave.wait(30)

    def close() -> None:
        with guest.inside():
            second.set()

    first, other = threading.Thread(target=sample), threading.Thread(target=close)
    first.start()
    assert entered.wait(30)
    assert busy()
    other.start()
    assert not second.is_set()
    leave.set()
    first.join(30)
    other.join(30)
    assert second.is_set()
    assert not busy()
    assert torch.set_num_threads is OURS


def test_modules_that_cannot_be_looked_at_are_out_of_sight_while_vllm_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Shy:
        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            raise RuntimeError("outside of a request")

    module = ModuleType("shy")
    module.__dict__["proxy"] = Shy()
    monkeypatch.setitem(sys.modules, "shy", module)
    with Guest().arrive():
        assert "shy" not in sys.modules
    assert sys.modules["shy"] is module
