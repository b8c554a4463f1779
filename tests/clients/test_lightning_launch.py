"""Ranks that Lightning starts, and ranks of torchrun, with strategies by name, of either package of Lightning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.command import environment
from tests.support.patience import HANG

SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
package, strategy = sys.argv[1:]
if package == "lightning":
    import lightning.pytorch as pl
else:
    import pytorch_lightning as pl
import shardwell.integrations.lightning as own


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def training_step(self, batch, index):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def test_step(self, batch, index):
        self.log("end", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


pl.seed_everything(0, verbose=False)
x = torch.randn(32, 8)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, gradient_clip_val=0.5, **quiet)
model = Model()
trainer.fit(model, data)
end = trainer.test(model, data, verbose=False)[0]["end"]
if trainer.is_global_zero:
    print(f"\\nends at {end:.9g} with {trainer.world_size} ranks")
"""


def ends_at(folder: Path, package: str, strategy: str, *launcher: str) -> tuple[float, int]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *launcher, str(script), package, strategy]
    variables = {**environment(), "OMP_NUM_THREADS": "1", "SHARDWELL_NVME_PATH": str(folder)}
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"ends at (\S+) with (\d) ranks", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return float(found[1]), int(found[2])


def plain_end() -> float:
    """Return what one process of plain PyTorch ends at, with the order of torch's DistributedSampler."""
    torch.manual_seed(0)
    x = torch.randn(32, 8)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    orders = [torch.randperm(32, generator=torch.Generator().manual_seed(epoch)) for epoch in range(2)]
    for rows in [rows for order in orders for rows in x[order].split(8)]:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(rows), rows.sum(1, keepdim=True)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return torch.nn.functional.mse_loss(net(x), x.sum(1, keepdim=True)).item()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ranks_of_either_launcher_train_as_one_process(tmp_path: Path) -> None:
    expected = pytest.approx(plain_end(), rel=1e-5)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
    assert ends_at(tmp_path, "pytorch_lightning", "shardwell_stage_3") == (expected, 2)
    assert ends_at(tmp_path, "lightning", "shardwell_infinity", *torchrun) == (expected, 2)
