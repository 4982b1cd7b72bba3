"""What docker/ holds, without a Docker engine: checked by the Compose Specification's schema and by sense."""

import fcntl
import importlib.resources
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
SECRETS = {"S3_ACCESS_KEY", "S3_SECRET_KEY", "PREFECT_PASSWORD", "PREFECT_DB_PASSWORD", "MLFLOW_DB_PASSWORD"}


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text(encoding="utf-8"))
    return content


SERVICES: dict[str, dict[str, Any]] = compose()["services"]


# -- compose ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_files_obey_the_specification(name: str) -> None:
    folder = importlib.resources.files("check_jsonschema.builtin_schemas.vendor")
    schema = json.loads((folder / "compose-spec.json").read_text(encoding="utf-8"))
    validator = jsonschema.validators.validator_for(schema)(schema)
    problems = [f"{list(error.path)}: {error.message}" for error in validator.iter_errors(compose(name))]
    assert not problems


def test_no_secret_stands_in_a_command_an_address_or_the_file_itself() -> None:
    for name, service in SERVICES.items():
        words = " ".join(map(str, [*service.get("command", []), *service.get("entrypoint", [])]))
        assert not SECRETS & set(re.findall(r"\w+", words)), name
        for key, value in service.get("environment", {}).items():
            assert not re.search(r"://[^/@]*:[^/@]*@", str(value)), f"{name}: {key}"
            if re.search("PASSWORD|SECRET|ACCESS_KEY|AUTH_STRING", key):
                assert re.fullmatch(r"\$\{[A-Z0-9_]+:\?[^}]*\}", value), f"{name}: {key}"
    assert ".env" in (DOCKER / ".gitignore").read_text(encoding="utf-8").splitlines()


# -- names of replicas --------------------------------------------------------------------------------------

CLAIM = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from node import claim
print(claim(Path(sys.argv[2]) / "home", ["n0", "n1"]), flush=True)
time.sleep(60)
"""


def claimant(place: Path) -> tuple["subprocess.Popen[str]", str]:
    """A container's process, and the name it got."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(DOCKER), str(place)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_containers_of_one_site_take_different_names_and_free_ones_again(tmp_path: Path) -> None:
    running = [claimant(tmp_path), claimant(tmp_path), claimant(tmp_path)]
    try:
        assert [name for _, name in running] == ["n0", "n1", "None"]
        running[0][0].kill()
        running[0][0].wait()
        running.append(claimant(tmp_path))
        assert running[-1][1] == "n0"
    finally:
        for process, _ in running:
            process.kill()
            process.wait()


def test_a_name_is_kept_by_the_program_that_a_container_becomes(tmp_path: Path) -> None:
    places = tmp_path / "names"
    code = CLAIM.replace("time.sleep(60)", "import os; os.execvp('sleep', ['sleep', '60'])")
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(DOCKER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "n0"
        deadline = time.monotonic() + 20
        while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n" and time.monotonic() < deadline:
            time.sleep(0.01)
        with (places / "n0").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        process.kill()
        process.wait()
