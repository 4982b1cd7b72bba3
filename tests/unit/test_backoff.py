"""Waits between the restarts of a process."""

from sapo.core.backoff import HEALTHY_S, Backoff


def test_waits_grow_and_come_to_an_end() -> None:
    backoff = Backoff((1.0, 2.0))
    assert [backoff.next_wait() for _ in range(3)] == [1.0, 2.0, None]
    assert backoff.used == 2


def test_a_process_that_ran_for_long_has_its_restarts_back() -> None:
    now = [0.0]
    backoff = Backoff((1.0,), clock=lambda: now[0])
    for ran, wait in ((1.0, 1.0), (HEALTHY_S, None), (HEALTHY_S + 1.0, 1.0)):
        backoff.started()
        now[0] += ran
        backoff.ended()
        assert backoff.next_wait() == wait
