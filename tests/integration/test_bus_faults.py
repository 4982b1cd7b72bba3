"""The embedded bus when a publisher is killed in the middle of its work."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from makers import make_signed

from sapo.bus.base import Limits
from sapo.bus.sqlite import SqliteBus

pytestmark = pytest.mark.core

PUBLISHER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from makers import make_signed
from sapo.bus.sqlite import SqliteBus
bus = SqliteBus(Path(sys.argv[1]))
batches = [[make_signed(sys.argv[2], round, i) for i in range(5)] for round in range(200)]
print("ready", flush=True)
for round, batch in enumerate(batches):
    bus.publish(batch)
    print(round, flush=True)
"""


@pytest.mark.faults
@pytest.mark.parametrize("acknowledged", [0, 1, 7, 40, 90])
def test_a_publisher_killed_at_any_instant_leaves_whole_batches_and_loses_none_it_confirmed(
    tmp_path: Path, acknowledged: int
) -> None:
    path = tmp_path / "bus.sqlite"
    command = [sys.executable, "-c", PUBLISHER, str(path), "victim", str(Path(__file__).parents[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        for _ in range(acknowledged + 1):
            assert victim.stdout.readline()
        victim.kill()
        confirmed = acknowledged + len(victim.stdout.read().splitlines())
    bus = SqliteBus(path)
    bus.publish([make_signed("survivor")])
    received = bus.poll({}, Limits(max_groups=10_000), random.Random(0)).received
    ids = [one.signed.group_id for one in received]
    assert len(ids) % 5 == 1
    batches = len(ids) // 5
    assert confirmed <= batches
    assert ids[:-1] == [
        make_signed("victim", round, i).group_id for round in range(batches) for i in range(5)
    ]
    bus.close()
