"""Checkpoints: whole, verified and named, or not there; broken ones are passed over aloud."""

import errno
import io
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sapo.core.errors import UserError
from sapo.policy import checkpoint
from sapo.policy.checkpoint import BrokenCheckpoint, Checkpoint

INCARNATION = "0123456789abcdef"


def adam_state(steps: int) -> dict[str, Any]:
    """A real optimiser's state after some steps."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for _ in range(steps):
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return optimizer.state_dict()


def save_model(folder: Path) -> None:
    (folder / "config.json").write_text('{"layers": 1}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 8)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.json").write_text("{}")


def save(folder: Path, round: int, **changes: Any) -> Checkpoint:
    values: dict[str, Any] = {
        "incarnation": INCARNATION,
        "weights_sha256": f"{round:064x}",
        "config_digest": "c" * 64,
        "threads": 1,
        "save_model": save_model,
        "optimizer": {"step": round},
    }
    return checkpoint.save(folder, round=round, **(values | changes))


def newest(folder: Path, **how: Any) -> Checkpoint:
    found = checkpoint.load_latest(folder, **how)
    assert found is not None
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_says_what_repeating_the_rounds_after_it_depends_on(tmp_path: Path) -> None:
    saved = save(tmp_path, 123)
    assert saved.path == tmp_path / "round-000123"
    described = json.loads((saved.path / "checkpoint.json").read_text())
    assert described["checkpoint"] == {
        "round": 123,
        "policy_version": 123,
        "incarnation": INCARNATION,
        "weights_sha256": f"{123:064x}",
        "config_digest": "c" * 64,
        "torch": torch.__version__,
        "threads": 1,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    assert described["files"].keys() == {
        "config.json",
        "model.safetensors",
        "optimizer.pt",
        "tokenizer/vocab.json",
    }
    assert described["files"]["model.safetensors"]["bytes"] == 2048
    assert checkpoint.load_latest(tmp_path) == saved


def test_the_optimiser_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = adam_state(3)
    saved = save(tmp_path, 1, optimizer=state)
    loaded = checkpoint.optimizer_state(saved)
    assert loaded["param_groups"] == state["param_groups"]
    for index, values in state["state"].items():
        for name, tensor in values.items():
            assert torch.equal(loaded["state"][index][name], tensor)
    layer = torch.nn.Linear(3, 2)
    torch.optim.AdamW(layer.parameters(), lr=0.1).load_state_dict(loaded)


def test_an_optimiser_file_with_code_in_it_is_not_run(tmp_path: Path) -> None:
    saved = save(tmp_path, 1)
    torch.save({"step": Evil(tmp_path / "ran")}, saved.path / "optimizer.pt")
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        checkpoint.optimizer_state(saved)
    assert not (tmp_path / "ran").exists()


class Evil:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_state_that_could_not_be_loaded_back_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        save(tmp_path, 1, optimizer={"step": Evil(tmp_path / "ran")})
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "tokenizer/vocab.json", "checkpoint.json"]
)
def test_one_flipped_byte_makes_it_fall_back_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    flip_a_byte(newer.path / name)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.load_latest(tmp_path) == older
    (record,) = caplog.records
    assert str(newer.path) in record.getMessage()
    assert name.split("/")[-1] in record.getMessage()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda path: (path / "extra").write_text(""), "extra is not listed"),
        (lambda path: (path / "optimizer.pt").write_bytes(b"x"), "has 1 bytes instead of"),
        (lambda path: (path / "checkpoint.json").unlink(), "checkpoint.json cannot be read"),
        (lambda path: (path / "checkpoint.json").write_text("[]"), "checkpoint.json cannot be read"),
        (lambda path: edit(path, "schema_version", 9), "written with schema version 9"),
        (lambda path: edit(path, "checkpoint", {}), "checkpoint.json"),
    ],
)
def test_what_is_wrong_with_a_broken_checkpoint_is_named(
    tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    saved = save(tmp_path, 1)
    damage(saved.path)
    with pytest.raises(BrokenCheckpoint, match=says):
        checkpoint.verify(saved.path)
    assert checkpoint.load_latest(tmp_path) is None


def edit(path: Path, key: str, value: object) -> None:
    manifest = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps(manifest | {key: value}))


def test_a_broken_checkpoint_set_aside_does_not_push_out_a_whole_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    flip_a_byte(save(tmp_path, 2).path / "optimizer.pt")
    assert newest(tmp_path, set_aside=True).round == 1
    save(tmp_path, 3)
    assert names(tmp_path) == ["round-000001", "round-000003"]


def test_a_checkpoint_ahead_of_the_journal_or_of_another_incarnation_is_not_taken(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    save(tmp_path, 3, incarnation="f" * 16, keep=3)
    assert newest(tmp_path).round == 3
    assert newest(tmp_path, incarnation=INCARNATION).round == 2
    assert newest(tmp_path, incarnation=INCARNATION, at_most=1).round == 1
    assert checkpoint.load_latest(tmp_path, at_most=0) is None
    assert checkpoint.load_latest(tmp_path / "nowhere") is None


def test_only_the_newest_are_kept_and_pinned_ones_stay(tmp_path: Path) -> None:
    pinned = save(tmp_path, 1).path
    for round in range(2, 7):
        save(tmp_path, round, keep=2, pinned=[pinned])
    assert names(tmp_path) == ["round-000001", "round-000005", "round-000006"]
    save(tmp_path, 7, keep=2)
    assert names(tmp_path) == ["round-000006", "round-000007"]


def test_checkpoints_of_a_course_that_is_given_up_do_not_push_out_those_of_the_new_one(
    tmp_path: Path,
) -> None:
    for round in (80, 100):
        save(tmp_path, round, incarnation="f" * 16)
    for round in (0, 20, 40, 60):
        save(tmp_path, round)
        assert newest(tmp_path, incarnation=INCARNATION).round == round
    assert names(tmp_path) == ["round-000040", "round-000060", "round-000080", "round-000100"]
    save(tmp_path, 120)
    assert names(tmp_path) == ["round-000100", "round-000120"]


def test_rounds_are_compared_as_numbers(tmp_path: Path) -> None:
    for round in (999_999, 1_000_000):
        save(tmp_path, round)
    assert newest(tmp_path).round == 1_000_000


def test_leftovers_of_a_crash_are_cleaned_at_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for leftover in (".round-000002.4711.tmp", ".round-000001.deleted.tmp"):
        (tmp_path / leftover / "deep").mkdir(parents=True)
    assert newest(tmp_path).round == 1
    save(tmp_path, 2)
    assert names(tmp_path) == ["round-000001", "round-000002"]


def test_a_rename_that_was_torn_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    older = save(tmp_path, 1)
    torn = tmp_path / "round-000002"
    torn.mkdir()
    save_model(torn)
    assert checkpoint.load_latest(tmp_path) == older
    assert save(tmp_path, 2).path == torn
    assert newest(tmp_path).round == 2


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named_and_leaves_the_older_checkpoint(tmp_path: Path, error: Exception) -> None:
    older = save(tmp_path, 1)

    def full(folder: Path) -> None:
        (folder / "half").write_bytes(b"half")
        raise error

    with pytest.raises(UserError, match="the disk is full") as caught:
        save(tmp_path, 2, save_model=full)
    assert caught.value.value == str(tmp_path)
    assert names(tmp_path) == ["round-000001"]
    assert checkpoint.load_latest(tmp_path) == older


class FullDisk(io.RawIOBase):
    """A file on a disk that has room for so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= size
        return size


@pytest.mark.parametrize("room", [0, 400, 4000])
def test_a_disk_that_is_full_in_the_middle_of_the_optimisers_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    older = save(tmp_path, 1)
    usual = Path.open

    def opened(path: Path, mode: str = "r", **how: Any) -> Any:
        full = path.name == "optimizer.pt" and mode == "wb"
        return FullDisk(room) if full else usual(path, mode, **how)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(UserError, match="the disk is full") as caught:
        save(tmp_path, 2, optimizer={"moments": torch.zeros(5000)})
    assert isinstance(caught.value.__cause__, OSError)
    assert names(tmp_path) == ["round-000001"]
    assert checkpoint.load_latest(tmp_path) == older


def test_files_read_back_differently_are_not_given_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = save(tmp_path, 1)
    sync = checkpoint.sync_file

    def lying_disk(path: Path) -> None:
        sync(path)
        if path.name == "model.safetensors":
            flip_a_byte(path)

    monkeypatch.setattr(checkpoint, "sync_file", lying_disk)
    with pytest.raises(UserError, match=r"model.safetensors does not have the digest"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["round-000001"]
    assert checkpoint.load_latest(tmp_path) == older


def killed_while_saving(folder: Path, kill_at: int) -> bool:
    """Save round 3 in a forked process that dies just before its `kill_at`-th file operation in `folder`."""
    child = os.fork()
    if child == 0:
        left = [kill_at]

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if event in CHANGES or (event == "open" and str(folder) in str(arguments[0])):
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

        sys.addaudithook(watch)
        code = 1
        try:
            save(folder, 3, optimizer=OPTIMIZER)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


OPTIMIZER = adam_state(1)
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def test_killed_before_any_file_operation_the_newest_whole_one_is_the_old_or_the_new(memory: Path) -> None:
    kill_at, killed, reached = 0, True, []
    pristine, folder = memory / "pristine", memory / "checkpoints"
    for round in (1, 2):
        save(pristine, round)
    while killed:
        shutil.copytree(pristine, folder)
        killed = killed_while_saving(folder, kill_at)
        for path in folder.glob("round-*"):
            checkpoint.verify(path)
        reached.append(newest(folder).round)
        again = save(folder, 3)
        assert checkpoint.load_latest(folder) == again
        assert names(folder) == ["round-000002", "round-000003"]
        shutil.rmtree(folder)
        kill_at += 1
    assert reached == sorted(reached)
    assert set(reached) == {2, 3}
    assert len(reached) > 30
