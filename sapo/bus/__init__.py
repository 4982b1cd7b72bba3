"""The bus: how groups travel between the nodes of a swarm."""

from pathlib import Path

from sapo.bus.base import Bus
from sapo.bus.sqlite import SqliteBus
from sapo.config import Config
from sapo.config import KafkaBus as KafkaBusConfig
from sapo.config import SqliteBus as SqliteBusConfig
from sapo.errors import UserError
from sapo.home import Home


def open_bus(config: Config, home: Home) -> Bus:
    """The bus that `config` names. Raises `UserError` where a process of its own cannot reach it."""
    section = config.bus
    if isinstance(section, SqliteBusConfig):
        path = Path(section.path).expanduser().absolute() if section.path else home.bus
        if not path.parent.is_dir():
            raise UserError("bus.path", str(path), "its folder does not exist", "create it or name another")
        return SqliteBus(path)
    if isinstance(section, KafkaBusConfig):
        from sapo.bus.kafka import KafkaBus

        return KafkaBus(section, topic_of(config))
    raise UserError(
        "bus.type", "memory", "works inside one process only", 'use "sqlite", or pass a MemoryBus in code'
    )


def topic_of(config: Config) -> str:
    """The Kafka topic of a swarm."""
    named = config.bus.topic if isinstance(config.bus, KafkaBusConfig) else None
    return named or f"sapo.{config.swarm.name}"
