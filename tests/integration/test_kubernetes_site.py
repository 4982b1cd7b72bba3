"""What kustomize makes of infra/kubernetes is valid."""

import shutil
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


def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["kind"], re_hash(one["metadata"]["name"])): one for one in objects}


def re_hash(name: str) -> str:
    """A config map's name without the digest of its content."""
    return name.rpartition("-")[0] if name.startswith(("sapo-site-", "sapo-swarm-")) else name


@pytest.mark.services
@pytest.mark.timeout(900)
@pytest.mark.parametrize("folder", ["base", "overlays/gpu"])
def test_kustomize_builds_it_and_every_object_is_valid(folder: str) -> None:
    objects = build(KUBERNETES / folder)
    assert set(by_name(objects)) == {
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


@pytest.mark.services
@pytest.mark.timeout(900)
def test_the_gpu_variant_gives_each_node_one_gpu_and_changes_nothing_else() -> None:
    plain, gpu = (by_name(build(KUBERNETES / folder)) for folder in ("base", "overlays/gpu"))
    key = ("StatefulSet", "sapo-node")
    (container,) = gpu[key]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"name": "SAPO_DEVICE", "value": "cuda"} in container["env"]
    (usual,) = plain[key]["spec"]["template"]["spec"]["containers"]
    added = {"name": "SAPO_DEVICE", "value": "cuda"}
    assert [one for one in container["env"] if one != added] == usual["env"]
    assert {**container, "env": 0, "image": 0, "resources": 0} == {
        **usual,
        "env": 0,
        "image": 0,
        "resources": 0,
    }


def documented_overlay(folder: Path) -> Path:
    """The overlay that docs/kubernetes.md tells to write, as it stands there."""
    text = (KUBERNETES.parents[1] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    blocks = [block.partition("```")[0] for block in text.split("```yaml\n")[1:]]
    (mine,) = [block for block in blocks if "kind: Kustomization" in block]
    (settings,) = [block.partition("```")[0] for block in text.split("```ini\n")[1:]]
    place = folder / "berlin"
    place.mkdir()
    (place / "kustomization.yaml").write_text(mine, encoding="utf-8")
    (place / "site.env").write_text(settings, encoding="utf-8")
    shutil.copy(KUBERNETES / "base" / "tiny.manifest.json", place / "demo.manifest.json")
    shutil.copytree(KUBERNETES / "base", folder / "base")
    return place


@pytest.mark.services
@pytest.mark.timeout(900)
def test_the_overlay_of_the_docs_is_another_site_of_another_swarm(tmp_path: Path) -> None:
    objects = by_name(build(documented_overlay(tmp_path)))
    for one in objects.values():
        kubernetes_validate.validate(one, RELEASES[-1], strict=True)
        assert one["metadata"]["namespace"] == "sapo-demo"
    site = objects["ConfigMap", "sapo-site"]["data"]
    assert (site["SWARM"], site["SITE_NAME"], site["AWS_REGION"]) == ("demo", "berlin", "us-east-1")
    assert list(objects["ConfigMap", "sapo-swarm"]["data"]) == ["demo.manifest.json"]
    assert objects["StatefulSet", "sapo-node"]["spec"]["replicas"] == 4
