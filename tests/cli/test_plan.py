"""`shardwell plan`, as a user runs it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shardwell.cli import app
from shardwell.errors import ShardwellError
from shardwell.plan.decoder import Decoder, DecoderSizes
from shardwell.plan.devices import gpu, gpus
from shardwell.plan.models import PRESETS, sizes_of

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def written(path: Path, **changes: Any) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps({key: value for key, value in {**LLAMA, **changes}.items() if value is not None}))
    return file


def planned(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    if isinstance(result.exception, ShardwellError):
        return 2, str(result.exception)
    return result.exit_code, result.output


def test_a_configuration_of_hugging_face_is_planned_as_json_and_as_text(tmp_path: Path) -> None:
    written(tmp_path)
    code, text = planned(str(tmp_path), "--gpus", "4", "--gpu", "t4", "--seq", "32", "--json")
    assert code == 0
    found = json.loads(text[text.index("{") :])
    assert found["fits"] is True
    assert found["num_parameters"] == 2 * 100 * 64 + 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
    code, text = planned(str(tmp_path / "config.json"), "--gpus", "4", "--gpu", "t4", "--seq", "32")
    assert code == 0
    assert "It fits" in text
    assert "Assumed:" in text


def test_a_page_without_forms_says_why_and_shows_the_plan(tmp_path: Path) -> None:
    written(tmp_path)
    page = tmp_path / "plan.html"
    code, _ = planned(str(tmp_path), "--gpus", "4", "--gpu", "t4", "--seq", "32", "--html", str(page))
    assert code == 0
    text = page.read_text()
    assert "There is no what-if panel: forms are for 2 ranks or more" in text
    assert '"peaks": {"forward device": "' in text
    assert "<h2>A step of the plan</h2>" in text
    code, text = planned(str(tmp_path), "--gpus", "4", "--html", str(tmp_path / "no" / "plan.html"))
    assert (code, "its folder does not exist" in text) == (2, True)


def test_a_gpu_without_products_in_bf16_is_planned_in_fp16(tmp_path: Path) -> None:
    for name, key in (("t4", "fp16"), ("v100", "fp16"), ("l40s", "bf16")):
        code, text = planned(str(written(tmp_path)), "--gpus", "2", "--gpu", name, "--seq", "32", "--json")
        assert code == 0
        assert json.loads(text[text.index("{") :])["config"][key] == {"enabled": True}


def test_what_does_not_fit_comes_with_the_smallest_change(tmp_path: Path) -> None:
    wide = written(tmp_path, hidden_size=8192, intermediate_size=32768, num_attention_heads=64, num_key_value_heads=8)
    code, text = planned(str(wide), "--gpus", "8", "--gpu", "t4", "--stage", "0", "--seq", "32", "--json")
    found = json.loads(text[text.index("{") :])
    assert code == 1
    assert found["fits"] is False
    assert found["smallest_change"]["words"] == "stage 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("no-such-model",), "no model is known as 'no-such-model'"),
        (("lama-3-8b",), "Did you mean llama-3-8b"),
        (("llama-3-8b", "--gpu", "h1000"), "no GPU is known as 'h1000'"),
        (("llama-3-8b", "--gpus", "10", "--nodes", "4"), "cannot be divided over 4 nodes evenly"),
        (("llama-3-8b", "--gpus", "0"), "expected 1 or more"),
        (("llama-3-8b", "--gpus", "1000000000"), "expected at most 16,777,216"),
        (("llama-3-8b", "--gpus", "9"), "nodes of 8 cannot have so many evenly"),
        (("llama-3-8b", "--price", "inf", "--tokens", "1T"), "--price inf: expected a number"),
        (("llama-3-8b", "--html", "/"), "--html /: is a folder"),
        (("llama-3-8b", "--html", "/proc/plan.html"), "--html /proc/plan.html: cannot be written"),
        (("x" * 5000,), "no model is known as 'xxx"),
        (("llama-3-8b", "--config", "/nowhere.json"), "no such file"),
        (("llama-3-8b", "--config", "/dev/zero"), "a device, not a file"),
        (("/dev/zero",), "/dev/zero: a device, not a file"),
        (("llama-3-8b", "--machine", "/dev/zero"), "a device, not a file"),
        (("llama-3-8b", "--seq", "0"), "expected 1 or more"),
        (("llama-3-8b", "--gpus", "4", "--nodes", "8"), "cannot be divided over 8 nodes evenly"),
        (("llama-3-8b", "--micro-batch", "0"), "expected 1 or more"),
        (("llama-3-8b", "--auto", "--stage", "2"), "--auto chooses the stage"),
        (("llama-3-8b", "--auto", "--explain"), "--explain is about one plan"),
        (("llama-3-8b", "--stage", "2", "--config", "zero.json"), "write it into zero.json"),
        (("llama-3-8b", "--host-memory", "much"), "--host-memory"),
        (("no.such.module:build",), "cannot be imported"),
        (("tests.support.asking_model:build", "--keep"), "decides it itself"),
        (
            ("tests.support.asking_model:build", "--seq", "8"),
            "asking_model.py:16 (if x.sum().item() > 0:) asks for the value",
        ),
        (("tests.support.asking_model:number",), "returned a int, expected a module"),
        (("",), "no model is known as ''"),
        (("llama-3-8b", "--tp", "3"), "8 rank(s) cannot be divided by"),
        (("mixtral-8x7b", "--ep", "3"), "3 (shardwell.expert_parallel_size) = 3; start a multiple of that"),
        (("llama-3-8b", "--ep", "2"), "the model has no experts that ranks can share"),
        (("llama-3-8b", "--seq", "99999999999999999999"), "expected at most 4,294,967,296 tokens"),
        (("llama-3-8b", "--price", "2"), "Add --tokens"),
        (("bloom-176b", "--as-published", "--micro-batch", "4"), "remove it, or --micro-batch"),
        (("bloom-176b", "--as-published", "--gpus", "8"), "remove it, or --gpus"),
        (("tests.support.asking_model:raises",), "raised ValueError: no weights here"),
        (("tests.support.asking_model:empty",), "returned a Identity without parameters"),
        (("tests.support.asking_model:constant",), "is a int, expected a function"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], says: str) -> None:
    code, text = planned(*arguments)
    assert code == 2
    assert says in text
    assert "\n" not in text.strip()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("hidden_size", 10**30, "expected at most 4,194,304"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1,000,000,000, expected at most 16,384"),
        ("vocab_size", 10**12, "expected at most 2,147,483,648"),
    ],
)
def test_a_number_beyond_any_model_is_refused(tmp_path: Path, name: str, value: int, says: str) -> None:
    written(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    code, text = planned(str(tmp_path))
    assert code == 2
    assert says in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "import torch\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.rows = torch.nn.EmbeddingBag(9, 4, sparse=True)\n    def forward(self, x):\n"
            "        return self.rows(x).sum()\nbuild = Model",
            "plan the embedding with sparse=False",
        ),
        (
            "import torch\nbuild = lambda: (torch.nn.LazyLinear(4), torch.ones(2, 4))",
            "the parameter 'weight' has no size yet",
        ),
        (
            "import torch\nbuild = lambda: (torch.nn.Linear(4, 4), {1: torch.ones(2, 4)})",
            "returned inputs by [1], expected the names of arguments",
        ),
        ("import sys\nbuild = lambda: sys.exit(0)", "raised SystemExit: 0"),
        (
            "import torch\nclass Model(torch.nn.Linear):\n    def forward(self, x):\n"
            "        return super().forward(x)[: x.unique().numel()].sum()\n"
            "build = lambda: (Model(4, 4), torch.ones(2, 4))",
            "how many elements are chosen by a mask, are not zero or differ from each other depends on values",
        ),
        ("def build(:", "raised SyntaxError when it was imported: invalid syntax"),
        ("import torch\nbuild = lambda: (torch.nn.Linear(4, 4), 'tokens')", "returned a str as the inputs"),
        (
            "import torch\nclass Model(torch.nn.Linear):\n    other = torch.ones(4)\n    def forward(self, x):\n"
            "        return super().forward(x * self.other).sum()\n"
            "build = lambda: (Model(4, 4), torch.ones(2, 4))",
            "own.py:5 (return super().forward(x * self.other).sum()) uses a tensor that is on another device",
        ),
        (
            "import torch\nclass Model(torch.nn.Linear):\n    def forward(self, x):\n        return x[x > 0].sum()\n"
            "build = lambda: (Model(4, 4), torch.ones(2, 4))",
            "how many elements are chosen by a mask",
        ),
        (
            "import torch\nbuild = lambda: torch.nn.Linear(4, 4)",
            "0: (1, 8) of int64; a function of your own may return",
        ),
        (
            "import torch\nclass Model(torch.nn.Linear):\n    def forward(self, x):\n        return x.nothing\n"
            "build = lambda: Model(4, 4)",
            "own.py:4 (return x.nothing): 'Tensor' object has no attribute 'nothing'",
        ),
    ],
)
def test_a_module_of_this_folder_is_found_and_what_it_raises_is_one_sentence(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{tmp_path.name}_own".replace("-", "_")  # not in sys.modules yet
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    code, found = planned(f"{name}:build", "--gpus", "2", "--seq", "8")
    assert code == 2
    assert says in found
    assert "\n" not in found.strip()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": -1}, "expected a whole number"),
        ({"model_type": "alien"}, "model_type is 'alien'"),
        ({"sliding_window": -5}, "sliding_window is -5, expected a whole number"),
        ({"sliding_window": "wide"}, "sliding_window is 'wide', expected a whole number"),
        ({"num_local_experts": 8}, "a model of experts of which model_type is"),
        ({"num_attention_heads": 5}, "cannot be divided into 5 heads"),
    ],
)
def test_a_wrong_configuration_is_one_sentence(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ShardwellError, match=says):
        sizes_of(str(written(tmp_path, **changes)))


def test_every_figure_of_a_gpu_has_a_source() -> None:
    assert {"a100-80gb", "h100-80gb", "h200", "b200", "mi300x", "rtx-4090", "rtx-5090", "l40s", "t4"} <= set(gpus())
    for one in gpus().values():
        for figure in (one.memory_mib, one.matmul_tflops, one.gpu_link_gbs):
            assert figure.value > 0
            assert figure.source
            assert 2015 < figure.year < 2030
            assert figure.kind in ("measured", "stated")
    assert gpu("H100").key == "h100-80gb"


def billions_of(sizes: DecoderSizes) -> float:
    with torch.device("meta"):
        one, two = (Decoder(replace(sizes, layers=layers)) for layers in (1, 2))
    first, second = (sum(parameter.numel() for parameter in model.parameters()) for model in (one, two))
    return (first + (sizes.layers - 1) * (second - first)) / 1e9


def test_presets_have_the_sizes_of_their_names() -> None:
    for name in ("turing-nlg-17b", "bloom-176b", "mt-nlg-530b", "llama-2-7b", "llama-3-70b", "qwen2.5-72b"):
        assert billions_of(PRESETS[name]) == pytest.approx(float(name.split("-")[-1].rstrip("b")), rel=0.05), name


@pytest.mark.slow
def test_the_fastest_plan_comes_with_a_configuration_that_can_be_planned(tmp_path: Path) -> None:
    written(tmp_path)
    code, text = planned(str(tmp_path), "--gpus", "2", "--gpu", "t4", "--seq", "32", "--auto", "--keep", "--json")
    assert code == 0
    found = json.loads(text[text.index("{") :])
    assert found["plan"]["fits"] is True
    assert found["runners_up"] is not None
    assert all(one["why"] for one in found["dropped"])
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(found["config"]))
    code, text = planned(str(tmp_path), "--gpus", "2", "--gpu", "t4", "--seq", "32", "--keep", "--config", str(file))
    assert code == 0
    assert "It fits" in text


def test_a_stage_that_initialize_would_choose_is_not_planned(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": "auto"}}))
    code, text = planned(str(tmp_path), "--gpus", "2", "--config", str(tmp_path / "zero.json"))
    assert code == 2
    assert "let shardwell plan --auto choose" in text


@pytest.mark.slow
def test_blocks_that_are_null_are_absent_and_numbers_may_be_text(tmp_path: Path) -> None:
    written(tmp_path)
    where = tmp_path / "zero.json"

    def asked(**keys: Any) -> dict[str, Any]:
        where.write_text(json.dumps(keys))
        code, text = planned(str(tmp_path), "--gpus", "2", "--seq", "8", "--config", str(where), "--json")
        assert code == 0, text
        found: dict[str, Any] = json.loads(text[text.index("{") :])
        return found

    for text, number in ((None, {}), ({"stage": "2"}, {"stage": 2})):
        assert asked(zero_optimization=text)["traffic"] == asked(zero_optimization=number)["traffic"]
    assert asked(sequence_parallel_size="2")["peaks"] == asked(sequence_parallel_size=2)["peaks"]
    where.write_text(json.dumps({"train_micro_batch_size_per_gpu": True}))
    code, said = planned(str(tmp_path), "--config", str(where))
    assert (code, "expected a whole number, found true" in said) == (2, True)


@pytest.mark.slow
def test_what_is_auto_in_the_batch_is_left_to_the_search(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    file.write_text(json.dumps(dict.fromkeys(batch, "auto")))
    assert planned(str(written(tmp_path)), "--gpus", "2", "--seq", "32", "--config", str(file), "--auto")[0] == 0


def test_what_every_plan_is_refused_for_is_said(tmp_path: Path) -> None:
    code, text = planned(str(written(tmp_path)), "--auto", "--tp", "4", "--gpus", "4", "--seq", "32")
    assert code == 2
    assert text == "tensor_parallel.autotp_size: ranks cannot share 2 heads evenly; use a divisor of it"


def test_layers_that_a_plan_of_the_user_does_not_cut_alike_are_told(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"tensor_parallel": {"autotp_size": 2, "plan": {"blocks.*.query": "colwise"}}}))
    code, text = planned(str(written(tmp_path)), "--gpus", "2", "--seq", "32", "--config", str(file))
    assert code == 2
    assert text.startswith("tensor_parallel.plan: layers that are cut by it do not fit together: ")
    assert "\n" not in text


def test_a_batch_of_all_ranks_that_is_asked_for_is_planned(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "zero.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 1}}))
    code, text = planned(str(tmp_path), "--gpus", "2", "--seq", "8", "--config", str(tmp_path / "zero.json"), "--json")
    assert code == 0
    assert json.loads(text[text.index("{") :])["config"]["train_micro_batch_size_per_gpu"] == 4


@pytest.mark.slow
def test_questions_are_answered_in_words_and_in_figures(tmp_path: Path) -> None:
    written(tmp_path)
    code, text = planned(str(tmp_path), "--gpus", "2", "--gpu", "t4", "--seq", "128", "--explain", "--json")
    assert code == 0
    answers = json.loads(text[text.index("{") :])["answers"]
    assert len(answers) == 7
    assert all(one["question"].endswith("?") and one["words"].endswith(".") for one in answers)
    assert next(one for one in answers if "largest micro-batch" in one["question"])["micro_batch"] > 1
