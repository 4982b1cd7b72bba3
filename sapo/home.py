"""Where a swarm's files lie: one home, one folder per node inside."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapo.config import Config
from sapo.errors import UserError
from sapo.manifest import Manifest
from sapo.records import SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Home:
    """The paths of one swarm's home."""

    root: Path

    @classmethod
    def at(cls, path: Path | str | None, swarm: str) -> "Home":
        """`path`, else `$SAPO_HOME`, else `./runs/<swarm>`; always absolute."""
        chosen = path or os.environ.get("SAPO_HOME") or Path("runs") / swarm
        return cls(Path(chosen).expanduser().absolute())

    @property
    def config(self) -> Path:
        """The resolved config, as JSON."""
        return self.root / "config.json"

    @property
    def manifest(self) -> Path:
        """What all nodes of the swarm agree on."""
        return self.root / "manifest.json"

    @property
    def bus(self) -> Path:
        """The embedded bus."""
        return self.root / "bus.sqlite"

    @property
    def history(self) -> Path:
        """Delta tables `rollouts`, `training`, `quarantine`."""
        return self.root / "history"

    @property
    def mlflow_db(self) -> Path:
        """MLflow's database."""
        return self.root / "mlflow.db"

    @property
    def artifacts(self) -> Path:
        """MLflow's artifacts."""
        return self.root / "artifacts"

    @property
    def prefect(self) -> Path:
        """This swarm's own PREFECT_HOME."""
        return self.root / "prefect"

    @property
    def logs(self) -> Path:
        """One log per process."""
        return self.root / "logs"

    @property
    def services(self) -> Path:
        """Addresses and pids of the servers that run now."""
        return self.root / "services.json"

    @property
    def swarm_state(self) -> Path:
        """How the swarm's processes stand, or stood when it ended."""
        return self.root / "swarm.json"

    @property
    def held_out(self) -> Path:
        """The evaluation questions, regenerated once and kept."""
        return self.root / "held-out.json"

    @property
    def evaluation(self) -> Path:
        """The last full held-out evaluation."""
        return self.root / "evaluation.json"

    @property
    def report(self) -> Path:
        """The run as one page."""
        return self.root / "report.html"

    @property
    def summary(self) -> Path:
        """The run's figures."""
        return self.root / "summary.json"

    @property
    def stop_flag(self) -> Path:
        """Exists while the swarm is asked to stop after the rounds in hand."""
        return self.root / "stop"

    def node(self, name: str) -> Path:
        """A node's folder; only its owner writes there."""
        return self.root / name

    def journal(self, name: str) -> Path:
        """A node's journal."""
        return self.node(name) / "journal.sqlite"

    def checkpoints(self, name: str) -> Path:
        """A node's checkpoints."""
        return self.node(name) / "checkpoints"

    def prepare(self, config: Config, manifest: Manifest) -> None:
        """Create the home, or check that it belongs to this swarm. Raises `UserError` where it does not."""
        if self.manifest.exists():
            self.check(manifest)
        elif self.root.exists() and any(self.root.iterdir()):
            raise UserError(
                "--home", str(self.root), "is not empty and holds no swarm", "choose another folder"
            )
        self.root.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(exist_ok=True)
        write_atomically(self.config, config.model_dump_json(indent=1) + "\n")
        write_atomically(self.manifest, manifest.canonical() + "\n")

    def check(self, manifest: Manifest) -> None:
        """Raise `UserError` unless the home was made by the same swarm, schema and rules."""
        found = json.loads(self.manifest.read_text(encoding="utf-8"))
        self._check_schema(found)
        if found.get("swarm") != manifest.swarm:
            raise UserError(
                "--home",
                str(self.root),
                f"belongs to swarm {found.get('swarm')!r}",
                "choose another folder or swarm.name",
            )
        if found != json.loads(manifest.canonical()):
            raise UserError(
                "--home",
                str(self.root),
                "its swarm has other tasks or rules than this config",
                "choose another folder, or resume with the config it was started with",
            )

    def _check_schema(self, found: dict[str, Any]) -> None:
        if found.get("schema_version") != SCHEMA_VERSION:
            raise UserError(
                "--home",
                str(self.root),
                f"was written with schema version {found.get('schema_version')}, this is {SCHEMA_VERSION}",
                "choose another folder, or the sapo release that made it",
            )

    def load_manifest(self) -> Manifest:
        """The manifest of an existing home. Raises `UserError` where there is none."""
        if not self.manifest.exists():
            raise UserError(
                "--home", str(self.root), "holds no swarm", "start one with `sapo swarm`, or name its folder"
            )
        found = json.loads(self.manifest.read_text(encoding="utf-8"))
        self._check_schema(found)
        return Manifest.model_validate_json(self.manifest.read_bytes())

    def load_config(self) -> Config:
        """The config an existing home was last started with."""
        if not self.config.exists():
            raise UserError(
                "--home", str(self.root), "holds no swarm", "start one with `sapo swarm`, or name its folder"
            )
        return Config.model_validate_json(self.config.read_bytes())

    def node_names(self) -> list[str]:
        """Nodes that have a journal here, n2 before n10."""
        names = [path.parent.name for path in self.root.glob("*/journal.sqlite")]
        return sorted(names, key=lambda name: (len(name), name))


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content so that a reader, or a crash, sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
