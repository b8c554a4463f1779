"""Options of Transformers' Trainer that meet the engine in their own ways give the numbers of DDP at stage 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_scripts import run_trainer

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BODY = """
from peft import LoraConfig, PromptTuningConfig, get_peft_model

def fit(name, kind, deepspeed, model, kwargs, options):
    args = arguments(f"{name}-{deepspeed is None}", deepspeed, num_train_epochs=1, **options)
    data = kwargs.pop("data", None) or Data()
    trainer = kind(model=model(), args=args, train_dataset=data, eval_dataset=Data(8, 2), **kwargs)
    trainer.train()
    return [number for entry in history(trainer) for number in entry] + [trainer.evaluate()["eval_loss"]]

class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + outputs.logits.float().square().mean()
        return (loss, outputs) if return_outputs else loss

    def create_scheduler(self, num_training_steps, optimizer=None):
        if self.lr_scheduler is None:
            scheduled = optimizer or self.optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(scheduled, 0.02, total_steps=num_training_steps)
        return self.lr_scheduler

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Data())

def tied():
    set_seed(0)
    shape = config()
    shape.tie_word_embeddings = True
    return LlamaForCausalLM(shape)

def adapted(settings):
    set_seed(0)
    return get_peft_model(build(), settings)

lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
sgd = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})}
plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}
CASES = {
    "label smoothing": (Trainer, build, {}, {"label_smoothing_factor": 0.1}),
    "own loss and schedule": (Own, build, {}, {}),
    "stream": (Trainer, build, {"data": Stream()}, {"max_steps": 2}),
    "uneven data": (Trainer, build, {"data": Data(19)}, {}),
    "tied": (Trainer, tied, {}, {}),
    "no clipping": (Trainer, build, {}, {"max_grad_norm": 0.0}),
    "own optimizer class": (Trainer, build, sgd, {}),
    "plateau": (Trainer, build, {}, plateau),
    "modules to save": (Trainer, lambda: adapted(lora), {}, {}),
    "prompt tuning": (Trainer, lambda: adapted(prompt), {}, {}),
}
for name, (kind, model, kwargs, options) in CASES.items():
    for way, deepspeed in (("ddp", None), ("sharded", ds())):
        given = (name, kind, deepspeed, model, dict(kwargs), options)
        attempt(f"{way}: {name}", lambda given=given: fit(*given))
"""


def test_options_of_the_trainer_give_the_numbers_of_ddp(tmp_path: Path) -> None:
    found: dict[str, Any] = run_trainer(BODY, tmp_path, 3)
    names = [name.removeprefix("ddp: ") for name in found if name.startswith("ddp: ")]
    assert len(names) == 10
    for name in names:
        assert found[f"sharded: {name}"] == pytest.approx(found[f"ddp: {name}"], rel=3e-4, abs=1e-6), name
