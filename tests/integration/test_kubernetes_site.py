"""What kustomize makes of infra/kubernetes is valid."""

import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from infra import gotools

pytestmark = pytest.mark.soak
"""It builds kustomize, which takes longer than most tests."""
KUBERNETES = Path(__file__).parents[2] / "infra" / "kubernetes"
KUSTOMIZE = "v5.8.1"
RELEASES = ("1.30", "1.37")


def build(folder: Path) -> list[dict[str, Any]]:
    """What `kubectl apply -k` would send."""
    kustomize = gotools.install("kustomize", "sigs.k8s.io/kustomize/kustomize/v5", KUSTOMIZE)
    done = subprocess.run(
        [str(kustomize), "build", str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def re_hash(name: str) -> str:
    """A config map's name without the digest of its content."""
    return name.rpartition("-")[0] if name.startswith(("sapo-site-", "sapo-swarm-")) else name


@pytest.mark.services
@pytest.mark.timeout(900)
@pytest.mark.parametrize("folder", ["base", "overlays/gpu"])
def test_kustomize_builds_it_and_every_object_is_valid(folder: str) -> None:
    objects = build(KUBERNETES / folder)
    assert {(one["kind"], re_hash(one["metadata"]["name"])) for one in objects} == {
        ("ConfigMap", "sapo-site"),
        ("ConfigMap", "sapo-swarm"),
        ("Service", "sapo-node"),
        ("StatefulSet", "sapo-node"),
        ("Deployment", "sapo-archive"),
        ("CronJob", "sapo-maintain"),
    }
    for one in objects:
        for release in RELEASES:
            kubernetes_validate.validate(one, release, strict=True)
    maps = {one["metadata"]["name"] for one in objects if one["kind"] == "ConfigMap"}
    for one in objects:
        if one["kind"] not in ("ConfigMap", "Service"):
            spec = one["spec"]
            template = (spec["jobTemplate"]["spec"] if "jobTemplate" in spec else spec)["template"]
            assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "sapo"
            for container in [*template["spec"]["initContainers"], *template["spec"]["containers"]]:
                assert container["envFrom"][0]["configMapRef"]["name"] in maps
                assert container["image"] == f"sapo:0.1.0-{'gpu' if folder.endswith('gpu') else 'cpu'}"
