"""What clients of DeepSpeed refuse on a CPU: Trainer's bf16, and Lightning's own `deepspeed_*` strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.as_deepspeed import results, run_python

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

TRAINER = """
import json, os, sys
import accelerate, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

class Data(torch.utils.data.Dataset):
    tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))
    def __len__(self):
        return len(self.tokens)
    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}

def trained(name, stage=None, tier="none", **more):
    set_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32)
    zero = {"stage": stage, "offload_optimizer": {"device": tier}, "reduce_bucket_size": "auto",
            "stage3_gather_16bit_weights_on_model_save": True}
    deepspeed = None if stage is None else {
        "zero_optimization": zero, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto"}
    args = TrainingArguments(output_dir=f"{sys.argv[1]}/{name}", per_device_train_batch_size=4, num_train_epochs=2,
                             learning_rate=3e-3, logging_steps=1, report_to=[], save_strategy="no", seed=0,
                             gradient_accumulation_steps=2, max_grad_norm=1.0, disable_tqdm=True, deepspeed=deepspeed,
                             **more)
    trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=Data())
    trainer.train()
    trainer.save_model(f"{sys.argv[1]}/{name}/saved")
    found = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    print("RESULT " + json.dumps([name, found, str(trainer.model.device), str(trainer.model.dtype),
                                  os.listdir(f"{sys.argv[1]}/{name}/saved")]), flush=True)

trained("plain", bf16=True)
trained("stage 2", 2, bf16=True)
trained("stage 2 offload", 2, "cpu", bf16=True)
trained("stage 3", 3, bf16=True)
trained("stage 3 offload", 3, "cpu", bf16=True)
trained("fp16 plain", fp16=True)
trained("fp16 stage 3", 3, fp16=True)
"""

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def run_script(text: str, folder: Path, **variables: str) -> list[Any]:
    """Run a script in which `import deepspeed` means shardwell, and return what it printed."""
    script = folder / "script.py"
    script.write_text(text)
    way_in = ("-m", "shardwell.compat.deepspeed", script, str(folder))
    done = run_python(*way_in, cwd=folder, limit=380, SHARDWELL_DEVICE="", **variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return results(done.stdout)


def test_trainer_trains_in_bf16_and_fp16_as_without_an_engine(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = {name: rest for name, *rest in run_script(TRAINER, tmp_path, **RANK)}
    assert len(found) == 7
    for name, (history, device, dtype, files) in found.items():
        assert device.startswith("cuda")
        assert "model.safetensors" in files
        half = name.startswith("fp16")
        expected = found["fp16 plain" if half else "plain"][0]
        if "plain" not in name:
            assert dtype == ("torch.float16" if half else "torch.bfloat16")
        assert len(history) == len(expected) == 8
        for (loss, norm), (plain_loss, plain_norm) in zip(history, expected, strict=True):
            assert loss == pytest.approx(plain_loss, rel=0.02), name
            # an overflow of the first loss scales has no norm
            assert not norm or norm != norm or norm == pytest.approx(plain_norm, rel=0.15) or half, name


LIGHTNING = """
import json, sys, torch, lightning as L
from torch import nn

class Linear(nn.Linear):
    def reset_parameters(self):  # the same values, also if the parameters are made on the GPU
        drawn = torch.Generator().manual_seed(self.in_features)
        for parameter in (self.weight, self.bias):
            parameter.data.copy_(torch.randn(parameter.shape, generator=drawn, device="cpu", dtype=torch.float32) * 0.2)

class Regression(L.LightningModule):
    def __init__(self, late):
        super().__init__()
        self.net, self.losses = None if late else self.network(), []
    def network(self):
        return nn.Sequential(Linear(8, 64), nn.Tanh(), Linear(64, 64), nn.Tanh(), Linear(64, 4))
    def configure_model(self):
        if self.net is None:
            self.net = self.network()
    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x.to(next(self.net.parameters()).dtype)).float(), y.float())
        self.losses.append(loss.item())
        return loss
    def configure_optimizers(self):
        if "offload" in strategy:
            from deepspeed.ops.adam import DeepSpeedCPUAdam
            return DeepSpeedCPUAdam(self.net.parameters(), lr=1e-2, weight_decay=0.0)
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2, weight_decay=0.0)

drawn = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=drawn), torch.randn(64, 4, generator=drawn))
for strategy, precision in (("auto", "32-true"), ("deepspeed_stage_1", "32-true"), ("deepspeed_stage_2", "32-true"),
                            ("deepspeed_stage_3", "32-true"), ("deepspeed_stage_3_offload", "32-true"),
                            ("deepspeed_stage_2_offload", "bf16-mixed"), ("deepspeed_stage_3", "bf16-true"),
                            ("deepspeed_stage_2", "16-mixed")):
    module = Regression(late="3" in strategy)
    trainer = L.Trainer(strategy=strategy, accelerator="gpu", devices=1, precision=precision, max_epochs=2,
                        logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        use_distributed_sampler=False,  # it shuffles, unlike the loader
                        gradient_clip_val=1.0, default_root_dir=sys.argv[1])
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    if strategy == "deepspeed_stage_3" and precision == "32-true":
        trainer.save_checkpoint(f"{sys.argv[1]}/saved.ckpt")
        from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
        convert_zero_checkpoint_to_fp32_state_dict(f"{sys.argv[1]}/saved.ckpt", f"{sys.argv[1]}/whole.pt")
    print("RESULT " + json.dumps([strategy, precision, type(trainer.strategy).__name__, module.losses]), flush=True)
"""


def test_lightning_trains_with_its_own_deepspeed_strategies(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    runs = run_script(LIGHTNING, tmp_path)
    plain = runs[0][3]
    assert len(runs) == 8
    assert len(plain) == 16
    for strategy, precision, kind, losses in runs[1:]:
        assert kind == "DeepSpeedStrategy"
        tolerance = 2e-4 if precision == "32-true" else 0.05
        assert losses == pytest.approx(plain, rel=tolerance), (strategy, precision)
    assert (tmp_path / "whole.pt").exists()
