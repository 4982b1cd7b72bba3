"""A cache with which Java starts a broker in half the time and half the work, made once per machine.

Java writes it itself at the end of a first run of a broker (its AOT cache), in a folder that is thrown away.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path

from infra.kafka import runtime
from infra.kafka.broker import START_S, Broker, format_all
from infra.kafka.layout import Layout
from sapo.core.errors import Unavailable
from sapo.core.user_cache import locked

WRITING_S = 120.0


def options() -> list[str]:
    """Options for Java; none if such a cache can't be made."""
    jars = runtime.jars()
    file = jars.with_name(f"{jars.name}-{runtime.java_version()}.aot")
    if not file.exists():
        with locked(file.with_name(f"{file.name}.lock")):
            if not file.exists():
                _make(file)
    # an empty file stands for "not on this machine"
    return [f"-XX:AOTCache={file}"] if file.stat().st_size else []


def _make(file: Path) -> None:
    print("Kafka's first start here: preparing, for about 10 s", file=sys.stderr, flush=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{file.name}.", dir=file.parent))
    written = folder / "written.aot"
    try:
        layout = Layout.make(folder / "cluster", brokers=1, secured=True)
        layout.write()
        format_all(layout)
        broker = Broker(layout, 0, [f"-XX:AOTCacheOutput={written}"])
        broker.launch()
        try:
            broker.wait(time.monotonic() + START_S)
            assert broker.child is not None
            broker.child.stop(WRITING_S)
        finally:
            broker.kill()
        written.rename(file)
    except (Unavailable, FileNotFoundError) as error:
        print(f"Kafka will start more slowly: {error}", file=sys.stderr)
        file.touch()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
