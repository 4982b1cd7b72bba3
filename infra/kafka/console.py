"""Kafka's own console consumer, started from the jars: what is on a topic, as any Kafka tool sees it."""

import subprocess
import tempfile
from pathlib import Path

from infra.kafka import tls
from infra.kafka.broker import environment, java_command
from infra.kafka.layout import ADMIN, LOGGING, SCRAM, Layout

CONSUMER = "org.apache.kafka.tools.consumer.ConsoleConsumer"


def run(layout: Layout, topic: str, *, beginning: bool, most: int | None, timeout_s: float | None) -> int:
    """Print a topic's values, one a line, on standard output; returns the consumer's exit code."""
    arguments = ["--bootstrap-server", layout.servers, "--topic", topic]
    arguments += ["--from-beginning"] if beginning else []
    arguments += ["--max-messages", str(most)] if most is not None else []
    arguments += ["--timeout-ms", str(round(timeout_s * 1000))] if timeout_s is not None else []
    with tempfile.TemporaryDirectory(prefix="sapo-console-") as scratch:
        place = Path(scratch)
        (place / "tmp").mkdir()
        (place / "log4j2.properties").write_text(LOGGING, encoding="utf-8")
        if layout.secured:
            tls.write_private(place / "client.properties", _client(layout).encode())
            arguments += ["--command-config", str(place / "client.properties")]
        command = java_command(CONSUMER, arguments, place)
        return subprocess.run(command, env=environment(), check=False).returncode


def _client(layout: Layout) -> str:
    """How the administrator connects, as a Java client reads it."""
    password = layout.password_file(ADMIN).read_text(encoding="ascii").strip()
    login = f'org.apache.kafka.common.security.scram.ScramLoginModule required username="{ADMIN}" '
    return (
        "security.protocol=SASL_SSL\n"
        f"ssl.truststore.type=PEM\nssl.truststore.location={layout.ca_file}\n"
        f"sasl.mechanism={SCRAM}\n"
        f'sasl.jaas.config={login}password="{password}";\n'
    )
