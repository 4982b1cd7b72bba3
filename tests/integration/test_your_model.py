"""docs/your-model.md as it is typed: from the name of a model to a better one's folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from documents import FENCED, ROOT, blocks

from sapo.core.config.home import Home

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]

SHORTER = {
    "SAPO_SWARM__NODES": "1",
    "SAPO_SWARM__ROUNDS": "1",
    "SAPO_EVAL__QUESTIONS": "8",
    "SAPO_EVAL__PROBE_QUESTIONS": "0",
    "SAPO_BATCH__LOCAL": "2",
    "SAPO_BATCH__EXTERNAL": "0",
    "SAPO_BATCH__COMPLETIONS": "2",
    "OMP_NUM_THREADS": "1",
}
"""Settings that make the page's run one of minutes; all else is as it stands there."""


def test_the_page_leads_to_a_model_that_answers(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "your-model.md").read_text(encoding="utf-8")
    (config,) = [found[1] for found in FENCED.findall(text) if found[0] == "toml"]
    (tmp_path / "smol.toml").write_text(config, encoding="utf-8")
    # an empty cache: the model is fetched and dequantised
    env = os.environ | SHORTER | {"SAPO_CACHE": str(tmp_path / "cache")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    said = {}
    for block in (one for one in blocks() if one.page == "your-model"):
        program = [sys.executable, "-c"] if block.python else ["bash", "-e", "-c"]
        done = subprocess.run(
            [*program, "\n".join(block.lines)],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block.name}: {done.stdout}"
        said[block.lines[0].split()[1]] = done.stdout
    assert "<|im_start|>assistant\n6 * 7 = 42\n<answer>42</answer><|im_end|>" in said["task"]
    assert "whole run" in said["try"]
    assert "n0" in said["swarm"]
    sweep = Home(tmp_path / "runs" / "smol").load_evaluation()
    assert sweep is not None
    assert sweep.questions == 8
    assert "| before |" in (tmp_path / "better" / "README.md").read_text(encoding="utf-8")
    assert "7" in said["transformers"], "the exported model's answer to 3 + 4"
