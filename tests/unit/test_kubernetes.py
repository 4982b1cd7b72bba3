"""What infra/kubernetes holds, without a cluster: checked by Kubernetes' schemas and by sense.

What kustomize makes of it is checked in tests/integration/test_kubernetes_site.py.
"""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sapo.core.config.home import read_manifest
from sapo.core.config.load import load
from sapo.core.config.manifest import Manifest

ROOT = Path(__file__).parents[2]
BASE = ROOT / "infra" / "kubernetes" / "base"
RELEASES = ("1.30", "1.33", "1.37")
"""Of Kubernetes, oldest and newest whose schemas are asked, and one between."""
FILES = ("node.yaml", "archive.yaml", "maintain.yaml")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((BASE / name).read_text(encoding="utf-8")))


OBJECTS = {
    one["metadata"]["name"]: one for name in FILES for one in documents(name) if one["kind"] != "Service"
}


def pod(name: str) -> dict[str, Any]:
    spec = OBJECTS[name]["spec"]
    spec = spec["jobTemplate"]["spec"] if "jobTemplate" in spec else spec
    found: dict[str, Any] = spec["template"]["spec"]
    return found


def containers(name: str) -> list[dict[str, Any]]:
    return [*pod(name)["initContainers"], *pod(name)["containers"]]


def site_env() -> dict[str, str]:
    lines = (BASE / "site.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", FILES)
def test_every_object_obeys_the_schema_and_has_no_unknown_field(name: str, release: str) -> None:
    for one in documents(name):
        kubernetes_validate.validate(one, release, strict=True)


def test_the_manifest_is_that_of_the_preset() -> None:
    values = site_env()
    file = BASE / f"{values['SWARM']}.manifest.json"
    config = load(values["PRESET"], sets=[f"swarm.name={values['SWARM']}"], env={})
    assert read_manifest(file, "manifest", str(file)) == Manifest.of(config)


def test_no_secret_has_a_value_and_each_comes_from_the_secret() -> None:
    example = (ROOT / "infra" / "kubernetes" / "secrets.env.example").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"[A-Z_]+=", line) for line in example)
    names = {line.rstrip("=") for line in example}
    assert not names & set(site_env())
    for name in OBJECTS:
        for container in containers(name):
            assert {"secretRef": {"name": "sapo-secrets"}} in container["envFrom"]
            assert not names & {one["name"] for one in container["env"]}
    assert "secrets.env" in (ROOT / "infra" / "kubernetes" / ".gitignore").read_text().splitlines()
