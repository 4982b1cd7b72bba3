"""The bus: how groups travel between the nodes of a swarm."""

from pathlib import Path
from typing import TYPE_CHECKING

from sapo.bus.base import Bus
from sapo.bus.sqlite import SqliteBus
from sapo.core import own_code
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.config.load import KafkaBus as KafkaBusConfig
from sapo.core.config.load import SqliteBus as SqliteBusConfig
from sapo.core.config.schema import OwnBus
from sapo.core.creation_marker import made_in
from sapo.core.errors import UserError

if TYPE_CHECKING:
    from sapo.bus.kafka.diagnose import BusFacts


def open_bus(config: Config, home: Home) -> Bus:
    """The bus that `config` names. Raises `UserError` where a process of its own cannot reach it."""
    section = config.bus
    if isinstance(section, SqliteBusConfig):
        path = Path(section.path).expanduser().absolute() if section.path else home.bus
        if not path.parent.is_dir():
            raise UserError("bus.path", str(path), "its folder does not exist", "create it or name another")
        return SqliteBus(path, made=made_in(home.root))
    if isinstance(section, KafkaBusConfig):
        from sapo.bus.kafka.bus import KafkaBus

        return KafkaBus(section, topic_of(config))
    if isinstance(section, OwnBus):
        opens = own_code.load("bus.open", section.open)
        try:
            opened: Bus = opens(swarm=config.swarm.name, **section.config)
        except (TypeError, ValueError) as error:
            remedy = f"give what {section.open} takes"
            raise UserError("bus.config", section.config, str(error), remedy) from error
        return opened
    raise UserError(
        "bus.type", "memory", "works inside one process only", 'use "sqlite", or pass a MemoryBus in code'
    )


def topic_of(config: Config) -> str:
    """The Kafka topic of a swarm."""
    named = config.bus.topic if isinstance(config.bus, KafkaBusConfig) else None
    return named or f"sapo.{config.swarm.name}"


def check_buses(config: Config) -> "list[BusFacts]":
    """Look at every Kafka bus that nodes and archive of `config` use, each once; none where it uses none.
    Raises `UserError` for the first that cannot be used, within some 10 seconds."""
    configs = [config, *(config.for_node(name) for name in config.nodes)]
    found: dict[KafkaBusConfig, tuple[str, bool]] = {}
    for number, one in enumerate(configs):
        if isinstance(one.bus, KafkaBusConfig):
            writes = number > 0 or found.get(one.bus, ("", False))[1]  # the first is the archive's: it reads
            found[one.bus] = (topic_of(one), writes)
    if not found:
        return []
    from sapo.bus.kafka.diagnose import check

    limit = config.rules.max_payload_bytes
    return [check(bus, topic, max_payload_bytes=limit, write=w) for bus, (topic, w) in found.items()]
