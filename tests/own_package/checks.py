from sapo_demo.losses import reinforce
from sapo_demo.samplers import newest_first

pytest_plugins = ["sapo.testing"]


def test_the_task(check_task):
    check_task("doubling", largest=999)


def test_the_sampler(check_sampler):
    check_sampler(newest_first)


def test_the_loss(check_loss):
    check_loss(reinforce)
