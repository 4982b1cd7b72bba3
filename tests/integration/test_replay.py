"""Real nodes, replayed from their history alone: bit for bit, or the round that was changed is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from history_samples import last_release
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import BASE, SILO, TRADE, run_legs, twin
from safetensors.torch import load_file, save_file
from searches import searching
from swarms import open_node, small_config
from tampering import CHANGES, copied, cover_up, rewrite, rows_of
from transformers import AutoModelForCausalLM

from sapo import cli
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.determinism import differences
from sapo.core.errors import SapoError, UserError
from sapo.core.types import canonical, sha256
from sapo.core.user_cache import default_cache
from sapo.ops.model_export import export_model
from sapo.policy import checkpoint, models
from sapo.provenance.check import Checked, Differs, check
from sapo.provenance.replay import opened
from sapo.store.history import open_store
from sapo.store.history.tables import Damaged, Store
from sapo.store.journal.journal import Journal

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("sharing"), pytest.mark.timeout(600)]
ALONE = 5
"""Rounds of the node that runs alone."""


@pytest.fixture(scope="module")
def trade(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Two nodes that learned from each other, under other settings in every round."""
    return run_legs(tmp_path_factory.mktemp("trade") / "home", TRADE, ["swarm.nodes=2"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """One node under the same settings in all rounds; checkpoints after rounds 2 and 4, and at the start."""
    base = [*SILO, "checkpoint.every_rounds=2"]
    return run_legs(tmp_path_factory.mktemp("alone") / "home", [()] * ALONE, base)


@pytest.fixture
def copy(alone: Home, tmp_path: Path) -> Home:
    """The lone node's home with a history of its own."""
    return twin(alone, tmp_path / "twin")


def config_of(home: Home) -> Config:
    return home.load_config().for_node("n0")


def store_of(home: Home) -> Store:
    return open_store(home.load_config(), home)


def replayed(home: Home, node: str = "n0", **rounds: Any) -> Checked:
    with opened(home, node, **rounds) as replay:
        return check(replay)


def wrong(home: Home, **rounds: Any) -> Damaged | Differs:
    with pytest.raises(SapoError) as caught:
        replayed(home, **rounds)
    assert isinstance(caught.value, Damaged | Differs), caught.value
    return caught.value


def journal_weights(home: Home, node: str) -> list[str]:
    with Journal.read_only(home.journal(node)) as journal:
        return [result.weights_sha256 for result in journal.results()]


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_every_round_is_bit_exact_under_each_loss_foreign_mode_and_setting(trade: Home, node: str) -> None:
    found = replayed(trade, node)
    with Journal.read_only(trade.journal(node)) as journal:
        losses = sum("learn/loss" in result.metrics for result in journal.results())
    assert len(TRADE) <= found.rounds == found.weights
    assert len(TRADE) / 2 < losses == found.losses
    assert found.recorded_sha256 == found.weights_sha256 == journal_weights(trade, node)[-1]
    assert (found.first, found.last, found.begun_at, found.recorded_in) == (0, found.rounds - 1, 0, "history")


def test_that_run_had_all_of_it(trade: Home) -> None:
    rows = rows_of(store_of(trade))
    learn = [json.loads(row["learn"]) for row in rows]
    assert {one["loss"] for one in learn} == {"dapo", "grpo", "dr_grpo", "cispo", "gspo"}
    external = [one for row, one in zip(rows, learn, strict=True) if row["source"] == "external"]
    assert {one["foreign"] for one in external} == {
        *("as_if_own", "bounded", "positive", "positive_late", "behaviour", "f_tis")
    }
    told = [row for row in rows if row["source"] == "external" and row["behaviour_logprobs"] is not None]
    assert {json.loads(row["learn"])["foreign"] for row in told} == {"behaviour", "f_tis"}
    assert {one.get("foreign_credit", "all") for one in external} == {"all", "floor", "useful", "worthwhile"}
    assert any(one.get("credit_own") for one in learn)
    assert {json.loads(row["environment"])["threads"] for row in rows} == {1, 2}
    assert {row["temperature"] for row in rows} == {1.0, 0.7}
    assert {row["node"] for row in rows if row["rolled_back_to"]} == {"n0", "n1"}
    assert any(row["skipped"] and row["rolled_back_to"] is None for row in rows)


@pytest.mark.parametrize(
    "sets", [("lora={rank=4}",), ("dtype=bfloat16", "learn.lr=1e-3")], ids=["lora", "bfloat16"]
)
def test_adapters_and_low_precision_are_bit_exact_also_on_the_way_back(
    sets: tuple[str, ...], tmp_path: Path
) -> None:
    back = ("guard.min_entropy=50", "guard.action=rollback")
    home = run_legs(tmp_path / "home", [(), (), back, (), back, ()], [*SILO, *sets])
    assert {row["rolled_back_to"] for row in rows_of(store_of(home))} >= {0}
    found = replayed(home)
    assert 6 <= found.rounds == found.weights
    assert found.weights_sha256 == journal_weights(home, "n0")[-1]
    if config_of(home).lora is not None:
        exported_as_trained(home, tmp_path)


def exported_as_trained(home: Home, folder: Path) -> None:
    """The last checkpoint's adapter, merged or by itself, is for others the model that was trained."""
    config = config_of(home)
    policy = models.load_policy(config.model, config=config, cache=default_cache(), threads=1)
    base = policy.model(ids := torch.tensor([policy.encode_prompt("1 + 1")])).logits
    last = checkpoint.paths(home.checkpoints("n0"))[-1]
    models.load_weights(policy, last)
    trained = policy.model(ids).logits
    assert not torch.allclose(trained, base, atol=1e-2)
    for adapter in (False, True):
        export_model(
            home,
            "n0",
            target := folder / f"adapter-{adapter}",
            round=checkpoint.round_of(last),
            adapter=adapter,
        )
        assert (target / "adapter_config.json").exists() == adapter
        others = AutoModelForCausalLM.from_pretrained(target)(ids).logits
        torch.testing.assert_close(others, trained, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("first", "last", "begun_at"), [(0, 0, 0), (1, 3, 0), (2, 2, 2), (3, 4, 2), (4, None, 4), (None, 2, 0)]
)
def test_a_range_begins_at_the_newest_checkpoint_before_it(
    alone: Home, first: int | None, last: int | None, begun_at: int
) -> None:
    found = replayed(alone, first=first, last=last)
    end = ALONE - 1 if last is None else last
    assert (found.begun_at, found.rounds) == (begun_at, end + 1 - begun_at)
    assert found.weights_sha256 == journal_weights(alone, "n0")[end]


@searching(8, soak=100)
@given(
    change=st.sampled_from(
        ["token_ids", "loss_mask", "advantage", "swap positions", "drop a row", "drop the round", "learn"]
    ),
    round=st.integers(0, ALONE - 1),
    place=st.integers(0, 17),
)
def test_what_an_update_depends_on_gives_itself_away_even_if_all_digests_are_made_anew(
    alone: Home, tmp_path_factory: pytest.TempPathFactory, change: str, round: int, place: int
) -> None:
    home = twin(alone, tmp_path_factory.mktemp("forged") / "twin")
    rows = copied(rows_of(store_of(home)))
    mine = [row for row in rows if row["round"] == round]
    taught = [i for i, row in enumerate(mine) if row["advantage"]]
    if not taught:
        return  # an update that was not made depends on nothing
    if change == "learn":
        for row in mine:
            row["learn"] = row["learn"].replace('"lr":0.0001', '"lr":0.001')
    else:
        CHANGES[change](rows, mine, taught[place % len(taught)])
    cover_up(rows, round, batch_too=True, chain_too=True)
    rewrite(store_of(home), rows)
    assert wrong(home).round == round


@pytest.mark.parametrize("column", ["weights_sha256", "loss", "skipped", "policy_version_after"])
def test_a_result_that_is_not_what_comes_out_names_its_round(copy: Home, column: str) -> None:
    values: dict[str, Any] = {
        "weights_sha256": "0" * 64,
        "loss": 0.5,
        "skipped": "no",
        "policy_version_after": 9,
    }
    rows = rows_of(store_of(copy))
    for row in rows:
        if row["round"] == 2:
            row[column] = values.get(column, "no")
    cover_up(rows, 2, batch_too=False)
    rewrite(store_of(copy), rows)
    found = wrong(copy)
    assert isinstance(found, Differs)
    assert found.round == 2
    assert wrong(copy, first=2).round == 2
    if column != "weights_sha256":
        assert replayed(copy, first=4).rounds == 1


@pytest.mark.parametrize(("round", "pruned"), [(3, False), (0, False), (3, True), (2, True), (0, True)])
def test_what_no_update_depends_on_is_told_by_the_journal_where_that_still_has_it(
    copy: Home, round: int, pruned: bool
) -> None:
    own_checkpoints(copy)
    if pruned:
        with Journal(copy.journal("n0")) as journal:
            for kind in ("track", "version"):
                journal.acknowledge(kind, 10**6)
            assert journal.prune() == 2
    rows = rows_of(store_of(copy))
    CHANGES["text"](rows, [row for row in rows if row["round"] == round], 0)
    cover_up(rows, round, batch_too=True, chain_too=True)
    rewrite(store_of(copy), rows)
    found = wrong(copy)
    assert found.round == (max(round, 2) if pruned else round)
    says = "its batch, or one before it, is not" if pruned and round <= 2 else "its batch is not"
    assert f"{says} the one that the node's journal committed" in found.problem
    copy.journal("n0").unlink()
    assert replayed(copy).rounds == ALONE  # and nobody else knows better


def forged(home: Home, round: int = 3, **columns: Any) -> Differs:
    """What is said when the tokens of a round were changed and all digests made anew."""
    rows = rows_of(store_of(home))
    mine = [row for row in rows if row["round"] == round]
    place = next(i for i, row in enumerate(mine) if row["advantage"])
    CHANGES["token_ids"](rows, mine, place)
    for row in rows:
        row |= columns
    for one in range(ALONE):
        cover_up(rows, one, batch_too=True, chain_too=True)
    rewrite(store_of(home), rows)
    found = wrong(home)
    assert isinstance(found, Differs)
    assert found.round == round
    return found


def test_where_weights_differ_the_first_tensor_is_named(copy: Home) -> None:
    found = forged(copy)
    assert found.tensor is not None
    assert found.tensor.startswith("model.")
    assert f"first in tensor {found.tensor}" in found.problem
    assert "processor, threads and torch are as recorded" in found.problem


def test_weights_that_are_recorded_seldom_are_compared_with_the_checkpoint_after_them(tmp_path: Path) -> None:
    seldom = [*SILO, "checkpoint.weight_digest_every=50", "checkpoint.every_rounds=50"]
    home = run_legs(tmp_path / "home", [()] * 3, seldom)
    found = replayed(home)
    assert (found.weights, found.losses, found.recorded_in, found.compared_last) == (0, 3, None, None)
    shown = journal_weights(home, "n0")
    assert shown == ["", "", ""]
    run_legs_again = small_config([*BASE, *seldom, "checkpoint.every_rounds=1"])
    with open_node(run_legs_again, home):  # recovery takes a checkpoint, which is due now
        pass
    assert replayed(home).recorded_in == "round-000003"


@pytest.fixture(scope="module")
def seldom(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """One node whose weights are recorded in no round."""
    base = [*SILO, "checkpoint.weight_digest_every=50", "checkpoint.every_rounds=50"]
    return run_legs(tmp_path_factory.mktemp("seldom") / "home", [()] * 4, base)


def test_without_weights_and_journal_a_changed_token_names_its_round(seldom: Home, tmp_path: Path) -> None:
    home = twin(seldom, tmp_path / "twin")
    own_checkpoints(home)
    home.journal("n0").unlink()
    rows = rows_of(store_of(home))
    round = next(row["round"] for row in rows if row["round"] and row["advantage"])
    mine = [row for row in rows if row["round"] == round]
    CHANGES["token_ids"](rows, mine, next(i for i, row in enumerate(mine) if row["advantage"]))
    cover_up(rows, round, batch_too=True, chain_too=True)
    rewrite(store_of(home), rows)
    assert wrong(home).round == round


@pytest.mark.parametrize("bit", [0, 20])
def test_a_changed_weight_of_the_checkpoint_that_replay_begins_with_is_named(
    seldom: Home, tmp_path: Path, bit: int
) -> None:
    """By the journal, though the checkpoint's own digests were made anew; without it by the first update."""
    home = twin(seldom, tmp_path / "twin")
    own_checkpoints(home)
    forge_checkpoint(home.checkpoints("n0") / "round-000000", bit)
    assert "the journal recorded other weights" in bad(home, last=2)
    home.journal("n0").unlink()
    if bit:
        assert wrong(home, last=2).round == first_update(home)


def first_update(home: Home) -> int:
    """The first round that trained on something."""
    return min(int(row["round"]) for row in rows_of(store_of(home)) if row["advantage"])


def forge_checkpoint(path: Path, bit: int) -> None:
    """Flip a bit of one weight and have all digests of the checkpoint fit."""
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name].view(torch.int32).view(-1)[0] ^= 1 << bit
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    manifest = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
    policy = models.load_policy(str(path), config=small_config([*BASE, *SILO]), cache=path)
    manifest["checkpoint"]["weights_sha256"] = models.weights_sha256(policy.model)
    content = (path / "model.safetensors").read_bytes()
    manifest["files"]["model.safetensors"] = {"bytes": len(content), "sha256": sha256(content)}
    manifest["sha256"] = sha256(canonical([manifest["checkpoint"], manifest["files"]]))
    (path / "checkpoint.json").write_text(json.dumps(manifest), encoding="utf-8")


def test_a_broken_checkpoint_is_passed_over_for_an_older_one(copy: Home) -> None:
    own_checkpoints(copy)
    (copy.checkpoints("n0") / "round-000004" / "model.safetensors").write_bytes(b"broken")
    found = replayed(copy, first=4)
    assert (found.begun_at, found.first) == (2, 4)
    assert "checkpoint round-000004 is passed over: model.safetensors has 6 bytes" in found.notes[0]


def test_a_checkpoint_with_other_weights_than_the_history_has_is_named(copy: Home) -> None:
    own_checkpoints(copy)
    copy.journal("n0").unlink()  # it would say that the checkpoint is another
    shutil.rmtree(copy.checkpoints("n0") / "round-000004")
    kept = checkpoint.verify(copy.checkpoints("n0") / "round-000002")

    def save_model(folder: Path) -> None:
        others = shutil.ignore_patterns("checkpoint.json", "optimizer.pt")
        shutil.copytree(kept.path, folder, dirs_exist_ok=True, ignore=others)

    made = checkpoint.save(
        copy.checkpoints("n0"),
        round=4,
        incarnation=kept.incarnation,
        weights_sha256=kept.weights_sha256,
        config_digest=kept.config_digest,
        threads=1,
        save_model=save_model,
        optimizer=checkpoint.optimizer_state(kept),
        keep=10,
    )
    assert made.round == 4
    found = wrong(copy, first=4)
    assert (found.round, "its weights are not those of round-000004" in found.problem) == (3, True)


def own_checkpoints(home: Home) -> None:
    """Give a twin the node's folder, too."""
    source = home.node("n0").resolve()
    home.node("n0").unlink()
    shutil.copytree(source, home.node("n0"))


def bad(home: Home, node: str = "n0", **rounds: Any) -> str:
    with pytest.raises(UserError) as caught:
        replayed(home, node, **rounds)
    return str(caught.value)


def test_rounds_that_cannot_be_replayed_are_said(copy: Home) -> None:
    assert "--to = 9: the history of n0 ends with round 4" in bad(copy, last=9)
    assert "--from = 5: the history of n0 ends with round 4" in bad(copy, first=5)
    own_checkpoints(copy)
    shutil.rmtree(copy.checkpoints("n0") / "round-000000")
    says = "the oldest checkpoint of n0 that is kept is of round 2; name round 2 or a later one"
    assert f"--from = 1: {says}" in bad(copy, first=1)
    assert f"--to = 1: {says}" in bad(copy, last=1)
    assert replayed(copy).begun_at == 2
    shutil.rmtree(copy.checkpoints("n0"))
    assert "it has no checkpoint here" in bad(copy)
    shutil.rmtree(copy.history)
    assert "there is no such table; let the node deliver a round, or name its place as history.uri in" in bad(
        copy
    )


def test_of_several_incarnations_the_journals_own_is_replayed(copy: Home) -> None:
    rows = rows_of(store_of(copy))
    later = [row | {"incarnation": "f" * 16, "finished_at": row["finished_at"] + 1e6} for row in rows]
    rewrite(store_of(copy), [*rows, *later])
    assert replayed(copy).incarnation == "0" * 16
    own_checkpoints(copy)
    copy.journal("n0").unlink()
    assert f"it is of incarnation {'0' * 16}" in bad(copy)  # the newest has no checkpoint here


def test_a_home_of_the_last_release_is_replayed_from_the_oldest_checkpoint_it_kept(tmp_path: Path) -> None:
    home = last_release(tmp_path)
    recorded = json.loads(rows_of(store_of(home))[0]["environment"])
    other = differences({name: recorded[name] for name in recorded if name != "threads"})
    try:
        found = replayed(home)
    except Differs as error:
        if not other or "the machine is another" not in str(error):
            raise
        return  # other processors may give other bits, and it says so
    assert (found.begun_at, found.rounds, found.weights) == (3, 2, 2)  # it still owes its sixth round
    assert found.weights_sha256 == journal_weights(home, "n0")[found.last]
    assert found.run_seconds is not None  # from when the rounds ended


def test_the_command_says_what_it_found_and_ends_with_it(
    copy: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--home", str(copy.root)]
    assert cli.invoke(["replay", "n0", "--check", *place]) == 0
    assert f"n0: rounds 0 to {ALONE - 1} are as recorded, bit for bit" in capsys.readouterr().out
    assert cli.invoke(["replay", "n0", *place, "--from", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["identical"], found["first"], found["begun_at"]) == (True, 3, 2)
    rows = rows_of(store_of(copy))
    CHANGES["text"](rows, [row for row in rows if row["round"] == 3], 0)
    rewrite(store_of(copy), rows)
    assert cli.invoke(["replay", "n0", *place]) == 1
    assert "error: history of n0, round 3: the row at position 0" in capsys.readouterr().err
    assert cli.invoke(["replay", "n0", *place, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["identical"], found["node"], found["round"]) == (False, "n0", 3)
