"""Files of a model that are broken, missing or left over: one line that says what, and no other policy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf_files
import pytest
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, Phi3Config, PhimoeConfig

from sapo.core.config.load import load as load_config
from sapo.core.errors import UserError
from sapo.core.types import Sampling
from sapo.policy import models
from sapo.policy.engines.hf import TransformersEngine
from sapo.policy.gguf_file import prepare
from sapo.policy.model_shape import shape_of
from sapo.testing import policies as samples

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
HEAD = "lm_head.weight"
Spoil = Callable[[Path], object]


def weights(change: Callable[[dict], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", {"format": "pt"})

    return spoil


def config(**values: object) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return spoil


def written(name: str, content: Callable[[bytes], bytes]) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content((folder / name).read_bytes()))


BROKEN: dict[str, Spoil] = {
    f"lack the weights {HEAD};": weights(lambda state: state.pop(HEAD)),
    r"lack the weights .* and \d+ more": weights(
        lambda state: [state.pop(k) for k in [*state] if ".1." in k]
    ),
    "that the model has not, value_head": weights(lambda state: state.update(value_head=state[HEAD].clone())),
    f"do not fit in shape: {HEAD}": weights(lambda state: state.update({HEAD: state[HEAD][:9].clone()})),
    r"model.safetensors: only a pointer": written("model.safetensors", lambda data: POINTER),
    r"cannot be loaded: .*[Hh]eader": written("model.safetensors", lambda data: b""),
    r"cannot be loaded: ": written("model.safetensors", lambda data: data[: len(data) // 2]),
    r"tokenizer.json: only a pointer": written("tokenizer.json", lambda data: POINTER),
    r"config.json.*: only a pointer": written("config.json", lambda data: POINTER),
    r"heads": config(num_attention_heads=5),
    r"names code of the hub, some/kernel": config(attn_implementation="some/kernel"),
    r"adapter_config.json beside it": lambda folder: (folder / "adapter_config.json").write_text("{}"),
    r"comes with it, which is never run": config(model_type="new", auto_map={"AutoConfig": "own.Config"}),
}


def stored(folder: Path) -> Path:
    samples.model("llama").save_pretrained(folder)
    samples.tokenizer().save_pretrained(folder)
    return folder


def loaded(spec: str, cache: Path) -> models.LoadedPolicy:
    settings = load_config("tiny", sets=[f"model={spec}", "rules.answer=text"], env={})
    return models.load_policy(spec, config=settings, cache=cache, threads=1)


@pytest.mark.parametrize("line", BROKEN)
def test_what_is_wrong_with_a_models_files_is_said_in_one_line(line: str, tmp_path: Path) -> None:
    BROKEN[line](stored(tmp_path))
    with pytest.raises(UserError, match=line) as refused:
        loaded(str(tmp_path), tmp_path)
    assert refused.value.field == "model"
    assert "\n" not in str(refused.value)


def own_code(name: str, **values: object) -> Spoil:
    """A file that names a class of the model's own, in code that leaves a mark where it is run."""

    def spoil(folder: Path) -> None:
        file = folder / name
        kept = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(kept | values))
        (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")

    return spoil


TOKENIZER = own_code(
    "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]}
)
MODEL = own_code("config.json", model_type="vit", auto_map={"AutoModelForCausalLM": "own.Own"})
CONFIG = own_code("config.json", model_type="new", auto_map={"AutoConfig": "own.Own"})


@pytest.mark.parametrize(
    ("spoil", "read"),
    [
        (CONFIG, lambda folder: loaded(str(folder), folder)),
        (MODEL, lambda folder: loaded(str(folder), folder)),
        (MODEL, lambda folder: shape_of(load_config("tiny", sets=[f"model={folder}"], env={}), folder)),
        (TOKENIZER, lambda folder: loaded(str(folder), folder)),
        (TOKENIZER, lambda folder: prepare(str(gguf_files.written(folder / "m.gguf")), cache=folder)),
    ],
    ids=["config", "model", "shape", "tokenizer", "gguf"],
)
def test_nobody_is_asked_whether_to_run_a_models_own_code(
    spoil: Spoil, read: Spoil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def agree(prompt: str) -> str:
        asked.append(prompt)
        return "y"

    monkeypatch.setattr("builtins.input", agree)
    spoil(stored(tmp_path))
    with pytest.raises(UserError):
        read(tmp_path)
    assert asked == []
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("heads", [5, None])
def test_a_config_of_no_model_has_no_shape(heads: int | None, tmp_path: Path) -> None:
    kind = {"num_attention_heads": heads, "model_type": "llama" if heads else "mamba"}
    config(**kind)(stored(tmp_path))
    with pytest.raises(UserError):
        shape_of(load_config("tiny", sets=[f"model={tmp_path}"], env={}), tmp_path)


@pytest.mark.parametrize("settings", [{"temperature": 0.9, "top_p": 0.6}, {"temperature": 0.0}])
def test_generation_settings_that_cannot_be_saved_are_left_out(
    settings: dict[str, float], tmp_path: Path
) -> None:
    file = stored(tmp_path / "m") / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [1, 9], **settings}))
    policy = loaded(str(tmp_path / "m"), tmp_path)
    models.save(policy, tmp_path / "saved")
    assert set(policy.stop_ids) >= {1, 9}
    assert GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id == [1, 9]


def test_a_name_on_the_hub_is_checked_as_its_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    kept = Path(HF_HUB_CACHE) / "models--some--odd-tokens"
    try:
        folder = kept / "snapshots" / ("a" * 40)
        samples.model("qwen2").save_pretrained(folder)
        samples.tokenizer().save_pretrained(folder)
        (kept / "refs").mkdir()
        (kept / "refs" / "main").write_text(folder.name)
        with pytest.raises(UserError, match="loads as another tokenizer"):
            loaded("some/odd-tokens", tmp_path)
    finally:
        shutil.rmtree(kept)


@pytest.mark.parametrize("family", ["phi3", "phimoe"])
def test_longrope_answers_alike_alone_and_beside_a_long_question(family: str, tmp_path: Path) -> None:
    long = {"long_factor": [2.0 + i for i in range(8)], "long_mscale": 1.3}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    config = {"phi3": Phi3Config, "phimoe": PhimoeConfig}[family](
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=1,
        max_position_embeddings=256,
        original_max_position_embeddings=32,
        pad_token_id=0,
        rope_parameters=rope | {"short_factor": [1.0] * 8, "short_mscale": 1.1} | long,
    )
    torch.manual_seed(0)
    policy = models.wrap("m", AutoModelForCausalLM.from_config(config), samples.tokenizer())
    assert policy.max_length == 256
    short, other = policy.encode_prompt("1+1=?"), policy.encode_prompt("1+1=" * 12)
    alone, beside = (
        TransformersEngine(policy).generate(
            prompts, completions=4, max_new_tokens=40, sampling=Sampling(), seed=3
        )[0]
        for prompts in ([short], [short, other])
    )
    assert [one.token_ids for one in alone] == [one.token_ids for one in beside]
    models.save(policy, tmp_path / "saved")
    ids = torch.tensor([short])
    with torch.no_grad():
        own = policy.model(ids).logits
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(ids).logits
    assert torch.allclose(own, saved, atol=1e-5)


def test_a_model_whose_weights_are_not_finite_is_refused() -> None:
    model = samples.model("llama")
    model.lm_head.weight.data[3, 3] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        models.wrap("m", model, samples.tokenizer())
