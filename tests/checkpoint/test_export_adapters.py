"""What is exported loads as what was trained: adapters, merged adapters, models without a configuration."""

from __future__ import annotations

import contextlib
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

import shardwell
from shardwell.checkpoint.export import to_safetensors
from shardwell.checkpoint.sources import open_source
from shardwell.errors import CheckpointError
from tests.support.command import shardwell as command
from tests.support.models import zero

peft = pytest.importorskip("peft")
TOKENS = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(2))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(max_new_tokens=7, eos_token_id=3, pad_token_id=0)
    return model


CONFIGS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    "dora and a head": lambda: peft.LoraConfig(
        r=3, use_dora=True, use_rslora=True, target_modules=["v_proj", "embed_tokens"], modules_to_save=["lm_head"]
    ),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


def adapted(kind: str) -> Any:
    model = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(model, CONFIGS[kind]())


def trained(model: Any, root: Path, steps: int = 2, **saving: Any) -> shardwell.Engine:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    config = zero(3, shardwell={"shard_at_world_one": True})
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    for _ in range(steps):
        engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
        engine.step()
    engine.save_checkpoint(root, **saving)
    return engine


def opened(path: Path) -> contextlib.closing[Any]:
    return contextlib.closing(open_source(path))


def logits(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_are_exported_as_peft_reads_them(tmp_path: Path, kind: str) -> None:
    engine = trained(adapted(kind), tmp_path / "saved")
    expected = logits(engine)
    with opened(tmp_path / "saved") as source:
        to_safetensors(source, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "out")
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-5, atol=1e-5)
    assert (logits(llama()) - expected[:, -TOKENS.shape[1] :]).abs().max() > 1e-3  # or nothing was trained


@pytest.mark.parametrize("kind", ["lora", "dora and a head", "ia3"])
def test_adapters_are_merged_on_request(tmp_path: Path, kind: str) -> None:
    engine = trained(adapted(kind), tmp_path / "saved")
    expected = logits(engine)
    with opened(tmp_path / "saved") as source:
        to_safetensors(source, tmp_path / "out", merges=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)
    assert loaded.generation_config.max_new_tokens == 7


def test_what_cannot_be_exported_right_is_refused(tmp_path: Path) -> None:
    model = adapted("lora")
    model.base_model.model.model.norm.weight.requires_grad_(True)
    trained(model, tmp_path / "beside")
    trained(adapted("prompt"), tmp_path / "prompt")
    trained(llama(), tmp_path / "plain")
    trained(adapted("lora"), tmp_path / "frozen", exclude_frozen_parameters=True)
    for name, merges, words in (
        ("beside", False, "norm.weight' .* was trained besides the adapters"),
        ("prompt", True, "adapters of kind PROMPT_TUNING cannot be merged"),
        ("plain", True, "holds no adapters"),
        ("frozen", True, "saved without its frozen weights"),
    ):
        with opened(tmp_path / name) as source, pytest.raises(CheckpointError, match=words):
            to_safetensors(source, tmp_path / "out", merges=merges)
    assert not (tmp_path / "out").exists()
    with opened(tmp_path / "frozen") as source:
        to_safetensors(source, tmp_path / "out")  # an adapter needs no base


def test_adapters_that_nothing_is_known_about_are_refused(tmp_path: Path) -> None:
    trained(adapted("lora"), tmp_path / "saved", steps=1)
    with opened(tmp_path / "saved") as source:
        source.values = {key: value for key, value in source.values.items() if key != "adapters"}
        with pytest.raises(CheckpointError, match="is an adapter's, but the checkpoint does not say"):
            to_safetensors(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_exports_carry_generation_config_and_tokenizer(tmp_path: Path) -> None:
    base = tmp_path / "base"
    llama().save_pretrained(base)
    (base / "tokenizer.json").write_text("{}")
    (base / "chat_template.jinja").write_text("hello")
    model = LlamaForCausalLM.from_pretrained(base)
    trained(model, tmp_path / "saved", steps=1)
    out = tmp_path / "out"
    command("checkpoint", "export", str(tmp_path / "saved"), str(out))
    names = {path.name for path in out.iterdir()}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert json.loads((out / "generation_config.json").read_text())["max_new_tokens"] == 7
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    shutil.rmtree(base)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "vocab.txt").write_text("a")
    with opened(tmp_path / "saved") as source:
        to_safetensors(source, tmp_path / "again", tokenizer=tmp_path / "other")
        assert (tmp_path / "again" / "vocab.txt").exists()
        with pytest.raises(CheckpointError, match="no tokenizer there"):
            to_safetensors(source, tmp_path / "third", tokenizer=tmp_path)


class Block(nn.Module):
    """As in the README's script."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_without_a_configuration_is_exported(tmp_path: Path, dtype: torch.dtype | None) -> None:
    config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    with shardwell.zero.Init(config=config):
        model = nn.Sequential(*[Block(16) for _ in range(2)], nn.Linear(16, 10))
    engine = shardwell.initialize(model=model, config=config, device="cpu").engine
    engine.save_checkpoint(tmp_path / "saved")
    with opened(tmp_path / "saved") as source:
        to_safetensors(source, tmp_path / "out", dtype)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    engine.load_model(tmp_path / "out")


def forged(folder: Path, change: Any) -> Path:
    """A checkpoint with an adapter, whose manifest says something else, with a right checksum."""
    trained(adapted("lora"), folder)
    path = next(folder.glob("*/manifest.json"))
    content = json.loads(path.read_text())
    del content["checksum"]
    change(content["values"])
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**content, "checksum": f"{zlib.crc32(text.encode()):08x}"}))
    return folder


@pytest.mark.parametrize("name", ["../../beside", "/tmp/shardwell-beside", "a/b", "..", ""])
def test_an_adapter_is_not_written_outside_of_the_export(tmp_path: Path, name: str) -> None:
    def change(values: dict[str, Any]) -> None:
        values["adapters"]["of"] = {name: values["adapters"]["of"]["default"]}

    (tmp_path / "out").mkdir()
    with opened(forged(tmp_path / "saved", change)) as source, pytest.raises(CheckpointError, match="a folder of that"):
        to_safetensors(source, tmp_path / "out" / "export")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "saved"]
    assert list((tmp_path / "out").iterdir()) == []


CODE: dict[str, tuple[Any, str]] = {
    "a function of Transformers": (lambda values: values["model_config"].update(architectures=["set_seed"]), "no"),
    "a class that is no model": (lambda values: values["model_config"].update(architectures=["Trainer"]), "has no"),
    "architectures that are no list": (lambda values: values["model_config"].update(architectures="Llama"), "has no"),
    "a module for peft": (
        lambda values: values["adapters"]["of"]["default"]["config"].update(
            megatron_config={"a": 1}, megatron_core="megatron.core"
        ),
        "megatron_core names modules",
    ),
}


@pytest.mark.parametrize("what", CODE)
def test_what_a_checkpoint_names_is_not_run_by_an_export(tmp_path: Path, what: str) -> None:
    change, words = CODE[what]
    with opened(forged(tmp_path / "saved", change)) as source, pytest.raises(CheckpointError, match=words):
        to_safetensors(source, tmp_path / "out", merges=True)


def test_code_of_a_models_own_is_left_out_of_a_merge(tmp_path: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["model_config"]["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}

    with opened(forged(tmp_path / "saved", change)) as source:
        to_safetensors(source, tmp_path / "out", merges=True)
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("adapters", {"of": []}),
        ("adapters", {"of": {"default": {"config": {}, "names": {"a": 1}}}, "active": []}),
        ("aliases", None),
        ("aliases", {"a": 1}),
        ("model_config", "llama"),
        ("optimizer", {"param_groups": [1]}),
        ("counters", {"global_steps": "3"}),
        ("counters", []),
        ("name_or_path", 3),
        ("scheduler", []),
        ("loss_scale", ""),
        ("loader", []),
        ("rng/0", None),
        ("frozen_excluded", "no"),
        ("scalar/a/step", [1]),
    ],
)
def test_values_of_another_form_are_refused_when_a_checkpoint_is_opened(tmp_path: Path, key: str, value: Any) -> None:
    folder = forged(tmp_path / "saved", lambda values: values.update({key: value}))
    with pytest.raises(CheckpointError, match=rf"values\.{key}"):
        open_source(folder)


@pytest.mark.slow
def test_a_command_says_so_without_a_traceback(tmp_path: Path) -> None:
    folder = forged(tmp_path / "saved", lambda values: values.update(adapters={"of": []}))
    done = command("checkpoint", "inspect", folder)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "values.adapters" in done.stderr
