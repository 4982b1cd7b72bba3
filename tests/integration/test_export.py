"""A model that leaves the swarm answers as its node does, for programs that know nothing of sapo."""

import base64
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from finished import FinishedSwarm

from sapo import cli

pytestmark = [pytest.mark.services, pytest.mark.timeout(900)]

TRANSFORMERS = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
answers = []
for question in json.load(sys.stdin):
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )
    ids = model.generate(**asked)[0][asked["input_ids"].shape[1]:]
    answers.append(tokenizer.decode(ids, skip_special_tokens=True))
assert not any(name.split(".")[0] == "sapo" for name in sys.modules)
print(json.dumps(answers))
"""
VLLM = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256)
    chats = [[{"role": "user", "content": question}] for question in json.load(sys.stdin)]
    settings = SamplingParams(temperature=0, max_tokens=int(sys.argv[2]))
    answers = [found.outputs[0].text for found in model.chat(chats, settings)]
    assert not any(name.split(".")[0] == "sapo" for name in sys.modules)
    print(json.dumps(answers))
"""
QUIET = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""vLLM in the process that asks: each of its own would load everything again."""


@pytest.fixture(scope="module")
def exported(finished_swarm: FinishedSwarm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of a node after its last round."""
    folder = tmp_path_factory.mktemp("export") / "model"
    sweep = finished_swarm.home.load_evaluation()
    assert sweep is not None
    rounds = str(sweep.nodes["n0"].round)
    home = str(finished_swarm.home.root)
    assert cli.invoke(["export", "n0", "--to", str(folder), "--round", rounds, "--home", home]) == 0
    return folder


def answers(program: str, folder: Path, swarm: FinishedSwarm, *words: str) -> tuple[list[str], list[str]]:
    """What another program gets from a folder, and what the node said in its exam."""
    sweep = swarm.home.load_evaluation()
    assert sweep is not None
    script = folder.with_name("ask.py")
    script.write_text(program)
    asked = subprocess.run(
        [sys.executable, script, folder, *words],
        input=json.dumps([question for _, question in sweep.examples]),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder.parent,
        env={**os.environ, **QUIET},
    )
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout.splitlines()[-1]), [answer for answer, _ in sweep.nodes["n0"].answers]


def test_plain_transformers_gets_the_nodes_greedy_answers(
    exported: Path, finished_swarm: FinishedSwarm
) -> None:
    got, said = answers(TRANSFORMERS, exported, finished_swarm)
    assert got == said
    assert got
    modes = {stat.S_IMODE(path.stat().st_mode) for path in exported.iterdir()}
    assert len(modes) == 1, "safetensors alone would leave its file to the owner"


@pytest.mark.vllm
def test_vllm_gets_the_nodes_greedy_answers(exported: Path, finished_swarm: FinishedSwarm) -> None:
    length = finished_swarm.home.load_config().generate.max_new_tokens
    got, said = answers(VLLM, exported, finished_swarm, str(length))
    assert got == said


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as an upload of small files asks for."""

    taken: ClassVar[dict[str, bytes]] = {}

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer hf_right":
            self.answer(401, {"error": "Invalid credentials"})
        elif self.path == "/api/repos/create":
            self.answer(200, {"url": f"http://{self.headers['Host']}/me/{json.loads(body)['name']}"})
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            paths = [one["path"] for one in json.loads(body)["files"]]
            files = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            self.answer(200, {"files": files})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.taken[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"http://{self.headers['Host']}/me/model/commit/1"
            self.answer(200, {"commitUrl": url, "commitOid": "1", "success": True})

    def answer(self, code: int, found: object) -> None:
        text = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_champion_goes_to_the_hub_with_its_card(
    finished_swarm: FinishedSwarm,
    hub: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = str(finished_swarm.home.root)

    def words(folder: str) -> list[str]:
        return ["export", "n0", "--to", str(tmp_path / folder), "--push", "me/model", "--home", home]

    def export(folder: str, token: str) -> subprocess.CompletedProcess[str]:
        hubs = {"HF_ENDPOINT": hub, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "sapo.cli", *words(folder)]
        env = {**os.environ, **hubs}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    monkeypatch.setenv("HF_TOKEN", "")
    assert (cli.invoke(words("none")), (tmp_path / "none").exists()) == (2, False)
    assert "there is no token" in capsys.readouterr().err
    wrong = export("wrong", "hf_wrong")
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1)
    done = export("right", "hf_right")
    assert done.returncode == 0, done.stderr
    assert f"pushed to {hub}/me/model" in done.stdout
    assert Hub.taken == {path.name: path.read_bytes() for path in (tmp_path / "right").iterdir()}
    card = Hub.taken["README.md"].decode()
    for part in ("## Tasks", "{question}", "| after", " %", "- chain: ", "- version: models:/tiny.n0/"):
        assert part in card
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert cli.invoke(words("right")) == 2
    assert "is not empty" in capsys.readouterr().err
