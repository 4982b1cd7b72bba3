"""Pods of what kustomize builds, as processes of this machine, for there is no cluster in a test.

Command, environment and probes of each container are the manifests' own; only hosts, ports and folders are
replaced. Every pod has folders of its own for the volumes it mounts.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from compose_site import DOCKER, Site, program

from infra import gotools
from sapo.core.child_process import Child

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "infra" / "kubernetes"
KUSTOMIZE = "v5.8.1"


def build(folder: Path) -> list[dict[str, Any]]:
    """What `kubectl apply -k` would send."""
    kustomize = gotools.install("kustomize", "sigs.k8s.io/kustomize/kustomize/v5", KUSTOMIZE)
    done = subprocess.run(
        [str(kustomize), "build", str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def pod_template(one: Mapping[str, Any]) -> dict[str, Any]:
    """The pods that an object makes."""
    spec = one["spec"]
    spec = spec["jobTemplate"]["spec"] if "jobTemplate" in spec else spec
    found: dict[str, Any] = spec["template"]
    return found


class Pod:
    """One pod: its volumes below `folder`, servers where `site` runs them, `secret` instead of the Secret."""

    def __init__(
        self,
        site: Site,
        objects: list[dict[str, Any]],
        name: str,
        secret: Mapping[str, str],
        sets: Mapping[str, str],
        *,
        index: int = 0,
    ) -> None:
        self.site, self._secret, self._sets, self._index = site, secret, sets, index
        (owner,) = [one for one in objects if one["metadata"]["name"] == name and one["kind"] != "Service"]
        self._spec = pod_template(owner)["spec"]
        self._maps = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
        self.name = f"{name}-{index}"
        self.folder = site.folder / self.name
        for volume in ("/var/lib/sapo", "/tmp"):
            self.place(volume).mkdir(parents=True, exist_ok=True)
        for volume in self._spec["volumes"]:
            if "configMap" in volume:
                self.place("/etc/sapo").mkdir(parents=True, exist_ok=True)
                for key, text in self._maps[volume["configMap"]["name"]].items():
                    (self.place("/etc/sapo") / key).write_text(text, encoding="utf-8")

    def place(self, mount: str) -> Path:
        """Where a folder of the containers lies here."""
        return self.folder / mount.strip("/")

    def lose(self, volume: str) -> None:
        """What becomes of a folder that is no volume of its own when a pod is replaced."""
        shutil.rmtree(self.place(volume))
        self.place(volume).mkdir()

    def environment(self, container: Mapping[str, Any]) -> dict[str, str]:
        """A container's environment: of its image, the config map, the secret, then its own."""
        given: dict[str, str] = {}
        for source in container["envFrom"]:
            given |= self._maps[source["configMapRef"]["name"]] if "configMapRef" in source else self._secret
        own: dict[str, str] = {}
        for variable in container["env"]:
            own[variable["name"]] = re.sub(
                r"\$\((\w+)\)", lambda found: own[found[1]], self._value(variable, container)
            )
        image = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": "/var/lib/sapo",
            "TMPDIR": str(self.place("/tmp")),
            "PREFECT_HOME": str(self.place("/tmp") / "prefect"),
            "SAPO_HOME": "/var/lib/sapo/home",
            "DO_NOT_TRACK": "1",
            "PYTHONUNBUFFERED": "1",
        }
        whole = {key: self.local(value) for key, value in (image | given | own).items()}
        # starter policies are shared with the other tests
        cache = os.environ.get("SAPO_CACHE") or str(Path.home() / ".cache" / "sapo")
        return whole | {"SAPO_CACHE": cache} | dict(self._sets)

    def local(self, text: str) -> str:
        """A text with this machine's hosts, ports and folders."""
        text = text.replace("/var/lib/sapo", str(self.place("/var/lib/sapo")))
        return text if str(self.folder) in text else self.site.local(text)

    def words(self, command: list[str]) -> list[str]:
        """A command as this machine runs it."""
        script = self.place("/tmp") / "site.sh"
        text = (DOCKER / "site.sh").read_text(encoding="utf-8")
        script.write_text(text.replace("/etc/sapo", str(self.place("/etc/sapo"))), encoding="utf-8")
        words = [str(script) if word == "/opt/sapo/site.sh" else self.local(word) for word in command]
        return program(words)

    def init(self) -> str:
        """Run the containers that prepare it; returns what they said."""
        return "".join(self._once(container) for container in self._spec["initContainers"])

    def once(self) -> str:
        """Run its container to the end, as a job's."""
        return self._once(self._spec["containers"][0])

    def start(self) -> Child:
        """Start its container."""
        (container,) = self._spec["containers"]
        child = Child.start(
            self.name,
            ["-m", "infra.s3.held", *self.words(container["command"])],
            log=self.folder / "log",
            env=self.environment(container),
        )
        self.site.children[self.name] = child
        return child

    def well(self, probe: str) -> bool:
        """What a probe says now."""
        (container,) = self._spec["containers"]
        command = self.words(container[probe]["exec"]["command"])
        env = self.environment(container)
        return not subprocess.run(command, env=env, capture_output=True, timeout=30, check=False).returncode

    def _once(self, container: Mapping[str, Any]) -> str:
        done = subprocess.run(
            self.words(container["command"]),
            env=self.environment(container),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{self.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def _value(self, variable: Mapping[str, Any], container: Mapping[str, Any]) -> str:
        source = variable.get("valueFrom", {})
        if "configMapKeyRef" in source:
            reference = source["configMapKeyRef"]
            return str(self._maps[reference["name"]][reference["key"]])
        if "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
            return str(self._index)
        return str(variable["value"])
