"""A secret in a block of a real Prefect server."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def test_a_secret_comes_from_a_block_of_prefects(tmp_path: Path) -> None:
    """Over a server of Prefect's own, in a process of its own."""
    code = """
        from prefect.testing.utilities import prefect_test_harness
        from sapo.core.config.secrets import fetch
        from sapo.core.errors import UserError

        with prefect_test_harness(server_startup_timeout=120):
            from prefect.blocks.system import Secret

            Secret(value="open sesame").save("kafka-n0", _sync=True)
            print(fetch("prefect:kafka-n0", "bus.password"))
            try:
                fetch("prefect:kafka-n1", "bus.password")
            except UserError as error:
                print(error)
    """
    environment = {key: os.environ[key] for key in ("PATH",) if key in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env=environment | {"HOME": str(tmp_path), "PREFECT_HOME": str(tmp_path / "prefect")},
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[-2:]
    assert first == "open sesame"
    assert "Prefect has no Secret block of this name" in second
