"""`shardwell train`, whole: as plain PyTorch on all tokens of a step, resumed bit for bit, exported for others."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwell
from shardwell.errors import ConfigError
from shardwell.sharding.ways import Way, ladder
from shardwell.train.memory_choice import Choice, choose, device_bytes
from shardwell.train.models import byte_tokenizer, empty_model, model_config
from shardwell.train.rank import train
from shardwell.train.recipe import as_yaml, check_same_run, keep_recipe, read_recipe
from shardwell.train.rows import IGNORED, Rows
from tests.support.command import shardwell as command
from tests.support.ranks import Ranks

hf = pytest.importorskip("transformers")

TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def chats(tmp_path: Path) -> str:
    """Prompts with responses of different lengths, so that rows have different numbers of labels."""
    lines = [{"prompt": f"say {n}", "response": "word " * (1 + n % 5)} for n in range(24)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(tmp_path / "chats.jsonl")


def options(folder: Path, chats: str, **more: Any) -> dict[str, Any]:
    return {
        "new_model": TINY, "data": [chats], "sequence_length": 48, "packing": False, "output": str(folder),
        "precision": "fp32", "learning_rate": 0.01, "steps": 4, "schedule": "constant", "warmup_steps": 0, **more,
    }  # fmt: skip


def run(given: dict[str, Any]) -> dict[str, Any]:
    return train(read_recipe(None, given))


def weights(folder: Path) -> dict[str, Tensor]:
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "model")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def plain(given: dict[str, Any], rows: Rows, order: list[list[int]]) -> dict[str, Tensor]:
    """The same training in one process: one batch of all rows of a step, its loss the mean over all labels."""
    recipe = read_recipe(None, given)
    torch.manual_seed(recipe.seed)
    model = hf.AutoModelForCausalLM.from_config(model_config(recipe, byte_tokenizer())).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, weight_decay=0.0)
    for numbers in order:
        batch = {name: torch.stack([rows[number][name] for number in numbers]) for name in rows[0]}
        count = (batch["labels"][:, 1:] != IGNORED).sum()
        model(**batch, num_items_in_batch=count).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_and_note_rows(given: dict[str, Any]) -> list[list[int]]:
    """Train, and return which rows this rank had, micro-batch after micro-batch."""
    seen: list[list[int]] = []
    original = Rows.__getitem__

    def noted(self: Rows, index: int) -> Any:
        seen.append([index])
        return original(self, index)

    Rows.__getitem__ = noted  # type: ignore[method-assign]
    try:
        run(given)
    finally:
        Rows.__getitem__ = original  # type: ignore[method-assign]
    return seen


@pytest.mark.slow
def test_every_token_of_a_step_has_the_same_weight(ranks: Ranks, tmp_path: Path, chats: str) -> None:
    given = options(tmp_path / "out", chats, accumulation=2, micro_batch=1, steps=3)
    first, second = ranks.run(2, train_and_note_rows, given)
    order = [
        [first[2 * step][0], second[2 * step][0], first[2 * step + 1][0], second[2 * step + 1][0]] for step in range(3)
    ]
    from shardwell.train.rows import opened

    place = next((tmp_path / "out").glob("rows-*"))
    expected = plain(given, opened(place, 48, byte_tokenizer().pad_token_id), order)
    for name, value in weights(tmp_path / "out").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=2e-5, msg=name)


def test_a_resumed_run_ends_with_the_same_bits(ranks: Ranks, tmp_path: Path, chats: str) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    given = {"save_every": 3, "steps": 6, "schedule": "cosine", "warmup_steps": 1, "keep_last": 3}
    ranks.run(2, run, options(whole, chats, **given))
    shutil.copytree(whole / "checkpoints", part / "checkpoints")
    shutil.rmtree(part / "checkpoints" / "global_step6")
    (part / "checkpoints" / "latest").write_text("global_step3")
    ranks.run(2, run, options(part, chats, **given))
    for (name, value), other in zip(weights(whole).items(), weights(part).values(), strict=True):
        assert torch.equal(value, other), name


def fine_tuned(folder: str, base: str, chats: str) -> dict[str, Any]:
    """Fully, with an adapter, and with an adapter that is merged: the losses at the end."""
    shared = {"model": base, "data": [chats], "eval_data": [chats], "sequence_length": 48, "precision": "fp32"}
    found = {}
    for name, more in {
        "full": {"method": "full"},
        "lora": {"method": "lora", "lora": {"rank": 4, "alpha": 8}},
        "merged": {"method": "lora", "lora": {"rank": 4, "alpha": 8}, "merge": True},
    }.items():
        given = {**shared, **more, "steps": 3, "learning_rate": 0.01, "output": f"{folder}/{name}"}
        found[name] = run(given)["eval_loss"]
    return found


@pytest.mark.slow
def test_models_and_adapters_are_exported_for_from_pretrained(ranks: Ranks, tmp_path: Path, chats: str) -> None:
    peft = pytest.importorskip("peft")
    tokenizer = byte_tokenizer()
    base = tmp_path / "base"
    torch.manual_seed(1)
    config = hf.AutoConfig.for_model(**TINY, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(base)
    tokenizer.save_pretrained(base)
    losses = ranks.run(2, fine_tuned, str(tmp_path), str(base), chats)[0]
    assert losses["lora"] == losses["merged"]

    from shardwell.train.rows import opened, prepare

    place = prepare([chats], tokenizer, tmp_path / "rows", 48, packing=True, text_field="text", writes=True)
    rows = opened(place, 48, tokenizer.pad_token_id)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    start = hf.AutoModelForCausalLM.from_pretrained(base)
    for name in losses:
        folder = tmp_path / name / "model"
        if name == "lora":
            model = peft.PeftModel.from_pretrained(hf.AutoModelForCausalLM.from_pretrained(base), folder)
        else:
            model = hf.AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            assert float(model.eval()(**batch).loss) == pytest.approx(losses[name], rel=1e-4)
            assert losses[name] < float(start(**batch).loss)
        assert hf.AutoTokenizer.from_pretrained(folder).decode(tokenizer("hi")["input_ids"]) == "hi"


def peaks(stages: list[int], given: dict[str, Any]) -> list[int]:
    """The peak of the states of a real step at each stage, from the engine's own statistics."""
    recipe = read_recipe(None, given)
    found = []
    for stage in stages:
        model = hf.AutoModelForCausalLM.from_config(model_config(recipe, byte_tokenizer()))
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = {"zero_optimization": zero, "optimizer": {"type": "AdamW"}}
        engine = shardwell.initialize(model=model, config=config).engine
        tokens = torch.randint(256, (1, 16))
        for _ in range(2):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        found.append(engine.memory().total(at_peak=True))
        engine.destroy(whole=False)
    return found


def test_the_bytes_that_memory_counts_hold_the_engines_peak(ranks: Ranks, tmp_path: Path, chats: str) -> None:
    wide = {**TINY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
    given = options(tmp_path, chats, new_model=wide)
    recipe = read_recipe(None, given)
    model = empty_model(recipe, model_config(recipe, byte_tokenizer()))
    stages = [1, 2, 3]
    for stage, peak in zip(stages, ranks.run(2, peaks, stages, given)[0], strict=True):
        way = next(way for way in ladder(2, has_disk=False, recomputes=False) if way.stage == stage)
        counted = device_bytes(model, way, 2, None, 1)
        assert 0.95 * peak <= counted <= 1.6 * peak, (stage, peak, counted)


def test_memory_chooses_the_first_way_that_fits(tmp_path: Path, chats: str) -> None:
    def choice(memory: str, **more: Any) -> Choice:
        recipe = read_recipe(None, options(tmp_path, chats, memory=memory, new_model=big, **more))
        model = empty_model(recipe, model_config(recipe, byte_tokenizer()))
        return choose(recipe, model, 8, torch.bfloat16)

    def chosen(memory: str, **more: Any) -> Way:
        return choice(memory, **more).way

    big = {**TINY, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16}
    found = [chosen(size) for size in ("80GB", "8GB", "4GB", "1.6GB")]
    assert [way.stage for way in found] == [1, 2, 3, 3]
    assert choice("1.6GB").zero(None)["offload_optimizer"] == {"device": "cpu", "ratio": 1.0}
    assert chosen("0.8GB", nvme_path="/mnt").config("/mnt")["offload_param"]["device"] in ("cpu", "nvme")
    with pytest.raises(ConfigError, match=r"--memory 100MB: the least that was found is .* Use a smaller micro_batch"):
        chosen("100MB")


def test_a_recipe_prints_and_reads_back(tmp_path: Path, chats: str) -> None:
    recipe = read_recipe(None, options(tmp_path, chats))
    (tmp_path / "recipe.yaml").write_text(as_yaml(recipe))
    assert read_recipe(str(tmp_path / "recipe.yaml"), {}) == recipe
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    assert read_recipe(str(tmp_path / "recipe.json"), {"steps": 9}).steps == 9


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data": ["x"]}, "a run needs either --model"),
        ({"new_model": TINY}, "a run needs data"),
        ({"new_model": TINY, "data": ["no such file"]}, "there is no file or folder 'no such file'"),
        ({"new_model": TINY, "data": ["."], "method": "lora"}, "method lora trains an adapter of a model that exists"),
        ({"new_model": TINY, "data": ["."], "memory": "1GB", "config": {}}, "--config and --memory both say"),
        ({"sttes": 1}, "sttes: unknown option; the options are: model, new_model"),
        ({"epochs": -1}, "epochs: Input should be greater than 0"),
    ],
)
def test_a_recipe_that_cannot_be_run_is_refused_in_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_recipe(None, given)


@pytest.mark.slow
def test_one_command_trains_evaluates_and_exports(tmp_path: Path) -> None:
    few = ["--steps", "6", "--set", "log_every=3", "--set", "sample_tokens=8", "--output", str(tmp_path / "out")]
    done = command("train", "--demo", *few, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data, first, *lines = done.stdout.splitlines()
    assert re.fullmatch(r"data: \d+ rows of \d+ tokens; 6 steps of 8 rows, epochs: [\d.]+", data)
    assert first.startswith("LlamaForCausalLM: 357,216 parameters in 4 units on 2 ranks (cpu), stage 3")
    assert [line.split()[0] for line in lines] == ["before:", "step", "step", "step", "after:", "exported:"]
    loss = [float(line.split("loss ")[1].split()[0]) for line in lines if line.startswith("step")]
    assert loss[2] < loss[0]
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    again = command("train", "--demo", *few, cwd=tmp_path)
    assert again.stdout.splitlines()[2].startswith("resumed at step 6")
    assert again.stdout.splitlines()[3].startswith("all 6 steps are done: --steps N for more")


def test_the_folder_of_another_run_is_refused_with_the_way_out(tmp_path: Path, chats: str) -> None:
    first = read_recipe(None, options(tmp_path, chats))
    keep_recipe(first, tmp_path)
    check_same_run(read_recipe(None, options(tmp_path, chats, steps=9)), tmp_path)  # goes on
    other = options(tmp_path, chats, new_model={**TINY, "num_hidden_layers": 1})
    with pytest.raises(ConfigError, match=r"has a run with another new_model; choose another folder, or delete it"):
        check_same_run(read_recipe(None, other), tmp_path)
    check_same_run(read_recipe(None, {**other, "resume": False}), tmp_path)


def test_the_command_prints_its_recipe_and_refuses_in_one_line(tmp_path: Path) -> None:
    printed = command("train", "--print-recipe").stdout
    assert "# Folder of a Hugging Face model to start from.\nmodel: null\n" in printed
    refused = command("train", "--model", str(tmp_path))
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    assert "a run needs data" in " ".join(refused.stderr.split())
