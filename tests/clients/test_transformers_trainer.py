"""`TrainingArguments(deepspeed=...)` of Transformers trains, evaluates, saves and resumes on shardwell, as in DDP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_scripts import run_trainer

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BODY = """
def in_ddp():
    trainer = Trainer(model=build(), args=arguments("ddp", None), train_dataset=Data(), eval_dataset=Data(8, 2))
    trainer.train()
    return [history(trainer), trainer.evaluate()["eval_loss"], trainer.predict(Data(4, 3)).predictions.sum().item()]
attempt("ddp", in_ddp)

def sharded():
    trainer = trained("plain")
    found = [history(trainer), trainer.evaluate()["eval_loss"], trainer.predict(Data(4, 3)).predictions.sum().item()]
    trainer.save_model(f"{folder}/plain/saved")
    whole = LlamaForCausalLM(config())
    from safetensors.torch import load_file
    missing = whole.load_state_dict(load_file(f"{folder}/plain/saved/model.safetensors"))
    return [*found, type(trainer.model_wrapped).__name__, trainer.args.world_size, len(missing.missing_keys)]
attempt("sharded", sharded)

def evaluated_first():
    model = build()
    before = Trainer(model=model, args=arguments("first", ds()), eval_dataset=Data(8, 2)).evaluate()["eval_loss"]
    accelerate.state.AcceleratorState._reset_state(True)
    return [before, history(trained("first", model))]
if stage == 3:
    attempt("evaluated first", evaluated_first)

def twice():
    model = build()
    trained("one", model)
    accelerate.state.AcceleratorState._reset_state(True)
    second = trained("two", model, Data(16, 5))
    return history(second)
attempt("two trainers", twice)

def best():
    trainer = trained("best", save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
                      load_best_model_at_end=True, metric_for_best_model="loss")
    return [trainer.state.best_metric, trainer.evaluate()["eval_loss"]]
attempt("best", best)

def saved():
    return history(trained("resume", save_strategy="steps", save_steps=2))
attempt("saved", saved)

def resumed():
    return history(trained("resumed", resume=f"{folder}/resume/checkpoint-2"))
attempt("resumed", resumed)

for reentrant in (True, False):
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    attempt(f"recomputed {reentrant}", lambda options=options: history(trained("recomputed", **options)))
"""


@pytest.fixture(scope="module", params=[1, 3])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of all attempts at a stage."""
    found = run_trainer(BODY, tmp_path_factory.mktemp(f"stage{request.param}"), request.param)
    assert not {name: words for name, words in found.items() if str(words).startswith("failed")}
    return {**found, "stage": request.param}


def close(found: list[list[float]], expected: list[list[float]]) -> bool:
    """Whether losses, gradient norms and rates agree; fp32 sums are in another order."""
    pairs = [(a, b) for one, two in zip(found, expected, strict=True) for a, b in zip(one, two, strict=True)]
    return all(abs(a - b) <= 2e-4 * max(abs(b), 1e-3) for a, b in pairs)


def test_losses_norms_rates_and_evaluation_are_those_of_ddp(run: dict[str, Any]) -> None:
    expected, loss, total = run["ddp"]
    found, sharded_loss, sharded_total, kind, world_size, missing = run["sharded"]
    assert (kind, world_size, missing) == ("DeepSpeedEngine", 2, 0)
    assert close(found, expected)
    assert sharded_loss == pytest.approx(loss, rel=1e-4)
    assert sharded_total == pytest.approx(total, abs=1e-2)


def test_a_model_is_trained_after_an_evaluation_by_another_trainer(run: dict[str, Any]) -> None:
    if run["stage"] != 3:
        pytest.skip("the Trainer evaluates with DeepSpeed before it has trained only at stage 3")
    before, found = run["evaluated first"]
    assert before > 4
    assert close(found, run["sharded"][0])


def test_a_second_trainer_goes_on_with_the_model_of_the_first(run: dict[str, Any]) -> None:
    assert len(run["two trainers"]) == 4
    assert run["two trainers"][0][0] != run["sharded"][0][0][0]


def test_the_best_model_is_loaded_at_the_end(run: dict[str, Any]) -> None:
    best, now = run["best"]
    assert now == pytest.approx(best, rel=1e-6)


def test_training_resumes_where_it_was_saved(run: dict[str, Any]) -> None:
    assert run["resumed"] == run["saved"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_number(run: dict[str, Any], reentrant: bool) -> None:
    assert close(run[f"recomputed {reentrant}"], run["sharded"][0])


RESUME = """
attempt("resumed", lambda: history(trained("resumed", resume=f"{folder}/checkpoint-2",
        per_device_train_batch_size=12 // int(os.environ["WORLD_SIZE"]), gradient_accumulation_steps=1)))
"""
SAVE = """
attempt("saved", lambda: history(trained(".", save_strategy="steps", save_steps=2, per_device_train_batch_size=6,
        gradient_accumulation_steps=1, num_train_epochs=3, data=Data(12))))
"""


def test_training_resumes_at_another_world_size(tmp_path: Path) -> None:
    resume = RESUME.replace("resume=f", "num_train_epochs=3, data=Data(12), resume=f")
    expected = run_trainer(SAVE, tmp_path, 3)["saved"]
    found = run_trainer(resume, tmp_path, 3, ranks=3)["resumed"]
    assert close(found, expected), (found, expected)


FIND = '''
class Tight(LlamaForCausalLM):
    """Has memory for one row."""
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        if len(input_ids) > 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)

def found():
    trainer = trained("found", build(Tight), auto_find_batch_size=True, per_device_train_batch_size=2,
                      gradient_accumulation_steps=1, num_train_epochs=1)
    return [trainer._train_batch_size, len(history(trainer))]
for stage in (0, 2):
    attempt(f"found at {stage}", found)
'''


def test_a_batch_size_that_fits_is_found_after_all_ranks_ran_out_of_memory(tmp_path: Path) -> None:
    assert run_trainer(FIND, tmp_path, 0) == {"found at 0": [1, 8], "found at 2": [1, 8]}


LARGE = """
def lora():
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(build(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    trainer = trained("lora", model)
    trainer.save_model(f"{folder}/lora/saved")
    return [history(trainer), sorted(os.listdir(f"{folder}/lora/saved"))]
attempt("lora", lora)

def lora_in_ddp():
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(build(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    trainer = Trainer(model=model, args=arguments("ddp", None), train_dataset=Data())
    trainer.train()
    return history(trainer)
attempt("lora in ddp", lora_in_ddp)

def pretrained():
    torch.distributed.is_initialized() or accelerate.PartialState()
    if rank == 0:
        build().save_pretrained(f"{folder}/weights")
    torch.distributed.barrier()
    args = arguments("loaded", ds())  # from now on from_pretrained knows the stage
    import collections, deepspeed, transformers.modeling_utils as modeling
    reads, gathered = collections.Counter(), collections.Counter()
    class Reading:
        def __init__(self, *args, **options):
            self.file = opener(*args, **options)
        def __enter__(self):
            return self
        def __exit__(self, *_):
            return None
        def __getattr__(self, name):
            return getattr(self.file, name)
        def get_tensor(self, name):
            reads[name] += 1
            return self.file.get_tensor(name)
    class Gathering(deepspeed.zero.GatheredParameters):
        def __init__(self, params, *args, **options):
            listed = list(params) if not isinstance(params, torch.Tensor) else [params]
            for one in listed:
                gathered[id(one)] += 1
            gathered["most"] = max(gathered["most"], sum(one.numel() for one in listed))
            super().__init__(listed, *args, **options)
    opener, gatherer = modeling.safe_open, deepspeed.zero.GatheredParameters
    modeling.safe_open, deepspeed.zero.GatheredParameters = Reading, Gathering
    model = LlamaForCausalLM.from_pretrained(f"{folder}/weights")
    modeling.safe_open, deepspeed.zero.GatheredParameters = opener, gatherer
    largest = max(one.numel() for one in model.parameters())
    once = [sorted(set(reads.values())), len(reads) == len(model.state_dict())]
    most = gathered.pop("most")
    once += [sorted(set(gathered.values())), len(gathered), most <= largest, len(list(model.parameters()))]
    from shardwell.zero import is_released
    shards = sum(is_released(parameter) for parameter in model.parameters())
    trainer = Trainer(model=model, args=args, train_dataset=Data())
    trainer.train()
    words = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False, synced_gpus=True)
    return [shards, history(trainer), words.tolist(), once]
attempt("pretrained", pretrained)
attempt("sharded", lambda: history(trained("sharded")))
"""


def test_adapters_train_and_a_pretrained_model_comes_in_shards_and_generates(tmp_path: Path) -> None:
    found = run_trainer(LARGE, tmp_path, 3)
    losses, files = found["lora"]
    assert close(losses, found["lora in ddp"])
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(files)
    shards, trained, words, (reads, reads_all, gathers, num_gathered, is_small, num_parameters) = found["pretrained"]
    assert shards > 10
    assert (reads, reads_all) == ([1], True)  # each weight is read from the file once
    assert (gathers, num_gathered, is_small) == ([1], num_parameters, True)  # and put into its shards by itself
    assert close(trained, found["sharded"])
    assert len(words[0]) == 6
    assert os.path.exists(tmp_path / "lora" / "saved" / "adapter_model.safetensors")
