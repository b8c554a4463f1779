"""How the listings of the pages are run: scenes of Python, command lines, and what is left out with its reason.

A scene is one start of ranks. Its prelude makes what its listings take for granted: a model, an engine, data. Words that
mean a machine that is not here (GPUs, many ranks, shared folders) are replaced, and nothing else.
"""

# ruff: noqa: E501  (names of listings and of tests stay in one piece)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Piece:
    """A listing of a scene: how its name begins, and words that are replaced."""

    name: str
    changes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scene:
    """Some listings that run one after another, as one script, on some ranks."""

    prelude: str
    pieces: tuple[Piece, ...]
    num_ranks: int = 2
    checks: str = ""  # runs last


NET = """
import torch
import torch.distributed as dist
from torch import nn
import shardwell

torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.head = nn.Linear(32, 64)
        self.lm_head = nn.Linear(32, 64)

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.blocks:
            x = x + block(x)
        return (self.head(x) + self.lm_head(x)).logsumexp(-1).mean()
"""
ENGINE = (
    NET
    + """
from torch.utils.data import TensorDataset

config = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
data = TensorDataset(torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(1)))
model = Model()
engine, optimizer, loader, _ = shardwell.initialize(model=model, config=config, training_data=data)
for (tokens,) in loader:
    engine.backward(engine(tokens))
    engine.step()
inputs, best = next(iter(loader))[0], 0.5
"""
)
LOOP = NET.replace("return (self.head(x) + self.lm_head(x)).logsumexp(-1).mean()", "return self.head(x)") + (
    """
loss_fn = lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
loader = [(torch.randint(64, (2, 8)), torch.randint(64, (2, 8))) for _ in range(3)]
"""
)
LIGHTNING = """
import lightning as L
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Transformer(nn.Sequential):
    def __init__(self, *sizes):
        super().__init__(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

class LitModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Transformer()
    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(8, 8), torch.randn(8, 4)), batch_size=2)
model = LitModel()
"""
SEQUENCES = """
import torch
import transformers
import shardwell

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}, "sequence_parallel_size": 2}
engine, *_ = shardwell.initialize(model=model, config=config)
rows = torch.randint(64, (2, 2, 16), generator=torch.Generator().manual_seed(1))
loader = [{"input_ids": tokens, "labels": tokens} for tokens in rows]
"""
PLANNED = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


model, tokens = Net(), torch.zeros(2, 16, dtype=torch.long)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}
"""
QUIET = "logger=False, enable_progress_bar=False, enable_model_summary=False, barebones=False"
ON_CPU = f'accelerator="cpu", devices=1, max_epochs=1, plugins=[LightningEnvironment()], {QUIET}'

SCENES = {
    "a run and its checkpoints": Scene(
        ENGINE,
        (
            Piece('docs/checkpoints.md: path, client_state = engine.load_checkpoint("checkpoints")',
                  {"    ...\n": "    engine.backward(engine(batch[0]))\n", "% 500": "% 2"}),
            Piece('docs/getting-started.md: engine.save_checkpoint("checkpoints"'),
            Piece("docs/getting-started.md: from safetensors.torch import save_file"),
            Piece("docs/using.md: from shardwell.utils import safe_get_full_fp32_param"),
            Piece("docs/using.md: from shardwell.utils import ExponentialMovingAverage",
                  {"...\nengine.step()": "engine.backward(engine(inputs))\nengine.step()", "    evaluate(engine)": "    engine(inputs)"}),
            Piece("docs/faults.md: with engine.join():", {"engine(batch)": "engine(batch[0])"}),
            Piece('docs/clusters.md: engine.load_checkpoint("/shared/run")', {"/shared/run": "checkpoints"}),
        ),
        checks='engine.save_checkpoint("run")\nassert client_state == {"epoch": 3} and engine.global_steps > 5\n'
        'import os; assert dist.get_rank() or os.path.getsize("weights.safetensors") > 4 * 64 * 32',
    ),
    "files of a checkpoint": Scene(
        "import torch\nimport shutil",
        (
            Piece("docs/checkpoints.md: from shardwell.checkpoint.sources import open_source",
                  {"0, 1000)": "0, 1000).numel() == 1000 or exit(1)"}),
            Piece("docs/checkpoints.md: from shardwell.checkpoint.export import",
                  {"to_safetensors(source, \"model\"": "source = open_source('run')\nto_safetensors(source, \"model\""}),
        ),
        num_ranks=1,
        checks='assert open_source("run").read("model/wte.weight", 0, 9).equal(source.read("model/wte.weight", 0, 9))\n'
        'source.close()',
    ),
    "DeepSpeed's files": Scene(
        'import os\nfrom shardwell.checkpoint.export import to_deepspeed\nfrom shardwell.checkpoint.sources import open_source\n'
        'import shutil; shutil.rmtree("checkpoints")\n'
        'to_deepspeed(open_source("run"), "checkpoints", ranks=2, stage=2)\n'
        '(tag,) = [name for name in os.listdir("checkpoints") if name.startswith("global_step")]\n'
        'os.rename(f"checkpoints/{tag}", "checkpoints/global_step100")\n'
        'open("checkpoints/latest", "w").write("global_step100")\n',
        (
            Piece("docs/checkpoints.md: from shardwell.checkpoint.sources import DeepSpeedSource"),
            Piece("docs/checkpoints.md: source = DeepSpeedSource(\"checkpoints\", ignore="),
        ),
        num_ranks=1,
        checks="assert some.numel() == 1000 and source.tensors",
    ),
    "sharded construction": Scene(
        NET + 'config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}',
        (
            Piece("docs/memory-and-traffic.md: with shardwell.zero.Init(config=config):"),
            Piece("docs/offload.md: with shardwell.zero.Init(config=config):"),
        ),
        checks="assert all(shardwell.zero.is_released(parameter) for parameter in model.wte.parameters())",
    ),
    "a mesh": Scene(
        NET + 'config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}\nmodel = Model()',
        (
            Piece("docs/memory-and-traffic.md: mesh = torch.distributed.init_device_mesh",
                  {'"cuda", (2, 8)': '"cpu", (2, 2)'}),
        ),
        num_ranks=4,
        checks="engine.backward(engine(torch.randint(64, (2, 8))))\nengine.step()",
    ),
    "from DDP": Scene(LOOP, (Piece('docs/from-fsdp2-and-ddp.md: -dist.init_process_group("nccl")'),)),
    "from FSDP2": Scene(
        LOOP + "model = Model()", (Piece("docs/from-fsdp2-and-ddp.md: -for block in model.blocks:"),)
    ),
    "units": Scene(
        "",
        (Piece("docs/units.md: import torch"),),
        checks="names = '\\n'.join(f\"{unit.name or '(root)'} {unit.numel}\" for unit in engine.units)",
    ),
    "Accelerate": Scene("", (Piece("docs/with-libraries.md: import torch"),), checks="assert model.global_steps == 4"),
    "a pipeline": Scene(
        "",
        (
            Piece("docs/pipeline.md: import torch"),
            Piece("docs/pipeline.md: from shardwell.pipeline import LayerSpec"),
            Piece("docs/pipeline.md: from shardwell.pipeline import Costs"),
        ),
        checks="assert float(loss) > 0 and 0 < simulated.bubble() < 0.5",
    ),
    "tensor parallelism": Scene(
        "",
        (
            Piece("docs/tensor-parallelism.md: import torch"),
            Piece("docs/tensor-parallelism.md: from torch.distributed.device_mesh", {'"cuda", (4, 2)': '"cpu", (2, 2)'}),
        ),
        num_ranks=4,
        checks="assert float(loss) > 0",
    ),
    "sequence parallelism": Scene("", (Piece("docs/sequence-parallelism.md: import torch"),), checks="assert float(loss) > 0"),
    "expert parallelism": Scene("", (Piece("docs/expert-parallelism.md: import torch"),)),
    "sequence parallelism of Transformers": Scene(
        SEQUENCES, (Piece("docs/sequence-parallelism.md: from shardwell import"),), checks="assert float(loss) > 0"
    ),
    "the cluster that is not there": Scene(
        "import torch.distributed as dist\ndist.destroy_process_group()",
        (Piece("docs/memory-and-traffic.md: import torch"),),
        num_ranks=1,
        checks="assert engine.world_size == 64 and engine.memory().total() > 0",
    ),
    "Lightning": Scene(
        LIGHTNING,
        (
            Piece("docs/lightning.md: import lightning as L",
                  {'accelerator="gpu", devices=8, precision="bf16-mixed"': ON_CPU}),
            Piece("docs/lightning.md: from shardwell.integrations.lightning import ShardwellStrategy"),
            Piece("docs/lightning.md: def configure_model(self):"),
            Piece("docs/lightning.md: from shardwell.integrations.lightning import MovingAverage",
                  {"callbacks=": f"{ON_CPU}, callbacks="}),
            Piece("docs/lightning.md: fabric = L.Fabric(",
                  {'accelerator="gpu", devices=8': 'accelerator="cpu", devices=1, plugins=[LightningEnvironment()]',
                   "loss_of(": "nn.functional.mse_loss("}),
        ),
        num_ranks=1,
        checks="LitModel.configure_model = configure_model\ntrainer.fit(LitModel(), data)\n"
        'trainer.save_checkpoint("last.ckpt")',
    ),
    "planning": Scene(
        PLANNED,
        (Piece("docs/planning.md: from shardwell.memory import Tier"),),
        num_ranks=1,
        checks="assert report.fits and report.peak(Tier.DEVICE) > 0 and report.costs.traffic",
    ),
}  # fmt: skip

# Listings of commands, run one after another by one process in a folder of their own, with some words replaced.
COMMANDS = {
    "docs/configuration.md: shardwell config ds_config.json": {},
    "docs/checkpoints.md: shardwell checkpoint export run served": {"export run": "export full"},
    "docs/checkpoints.md: shardwell checkpoint inspect run": {
        "hf-model": "model", "--tag-a step-100": "--tag-a {tag}", "run served": "full served", "run merged": "lora merged",
    },
    "docs/getting-started.md: shardwell run -n 8 --max-restarts 10": {},
    "docs/faults.md: shardwell run -n 8 --max-restarts 10": {},
    "docs/lightning.md: shardwell checkpoint export last.ckpt": {},
    "docs/train.md: shardwell train --print-recipe": {},
}  # fmt: skip


@dataclass(frozen=True)
class Page:
    """A page whose listings run from top to bottom, in one folder; pool ranks are what its commands would start."""

    name: str
    overrides: Mapping[str, object] = field(default_factory=dict)  # options of all recipes
    saved: Mapping[str, str] = field(default_factory=dict)  # file -> listing that is this file
    needs: tuple[str, ...] = ()  # files that are there
    leaves: tuple[str, ...] = ()  # files that are there afterwards
    prints: tuple[str, ...] = ()


PAGES = (
    Page("docs/train.md", {"sequence_length": 64, "steps": 2}, needs=("llama", "chats.jsonl", "config.json", "texts"),
         leaves=("run/model/model.safetensors", "recipe.yaml")),
    Page("docs/tutorials/fine-tune.md", leaves=("run/model/model.safetensors",), prints=("A small model.",)),
    Page("docs/tutorials/lora.md", {"sequence_length": 64, "steps": 2}, needs=("llama", "chats.jsonl"),
         leaves=("adapter/model/adapter_model.safetensors", "merged/model/model.safetensors")),
    Page("docs/tutorials/larger-than-memory.md", needs=("config.json", "text.txt"), leaves=("counted/model",)),
    Page("docs/tutorials/resume-anywhere.md", saved={"train.py": "docs/tutorials/resume-anywhere.md: import torch"},
         prints=("ends at step 8 on 2 ranks", "ends at step 11 on 1 ranks")),
)  # fmt: skip

FIRST = "tests/unit/test_commands_of_docs.py"
RAY = "tests/clients/test_ray_train.py"
CLUSTERS = "tests/cli/test_clusters.py"
WAYS_IN = "tests/clients/test_deepspeed_ways_in.py"
RESTARTS = "tests/cli/test_restarts.py"
TIMELINE = "tests/unit/test_timeline.py"
LIGHTNING_FILES = "tests/clients/test_lightning_checkpoints.py"
TRAINING = "tests/train/test_runs.py"
PLANS = "tests/cli/test_plan.py"
FP32 = "tests/checkpoint/test_zero_to_fp32.py"

# Listings that another test runs.
ELSEWHERE = {
    "README.md: import torch": f"{FIRST}::test_the_script_of_the_readme_prints_a_falling_loss",
    "docs/getting-started.md: import torch": f"{FIRST}::test_the_listings_of_the_first_pages_run",
    "docs/observability.md: from shardwell.memory": f"{FIRST}::test_the_listings_of_the_first_pages_run",
    "docs/observability.md: from shardwell.parallel": f"{FIRST}::test_the_listings_of_the_first_pages_run",
    "docs/observability.md: with engine.record(": f"{FIRST}::test_the_listings_of_the_first_pages_run",
    "docs/clusters.md: def train(settings):": f"{RAY}::test_workers_restart_after_a_failure_and_a_later_run_goes_on",
    "docs/clusters.md: (umask 077": f"{CLUSTERS}::test_the_slurm_scripts_of_the_page_start_ranks",
    "docs/clusters.md: #!/bin/bash": f"{CLUSTERS}::test_the_slurm_scripts_of_the_page_start_ranks",
    "docs/clusters.md: #SBATCH": f"{CLUSTERS}::test_the_slurm_scripts_of_the_page_start_ranks",
    "docs/clusters.md: torchrun": f"{CLUSTERS}::test_torchrun_starts_the_ranks_of_the_page",
    "docs/clusters.md: apiVersion": f"{CLUSTERS}::test_kubernetes_objects_fit_together",
    "docs/clusters.md: shardwell run --hostfile": f"{CLUSTERS}::test_a_hostfile_starts_all_hosts_with_the_same_secret",
    "docs/deepspeed.md: shardwell run --as-deepspeed": f"{WAYS_IN}::test_accelerate_launch_gets_two_ranks_of_gloo_on_a_cpu",
    "docs/deepspeed.md: import shardwell.compat.deepspeed": f"{WAYS_IN}::test_before_a_client_it_is_found_by_it",
    "docs/faults.md: SHARDWELL_SECRET_FILE=": f"{RESTARTS}::test_survivors_go_on_without_a_lost_node_and_take_it_back",
    "docs/getting-started.md: shardwell run -n 2 train.py": f"{FIRST}::test_the_listings_of_the_first_pages_run",
    "docs/observability.md: shardwell run -n 2 --profile": f"{TIMELINE}::test_a_run_with_profile_writes_a_timeline_of_each_rank",
    "docs/lightning.md: model = LitModel.load_from_checkpoint": f"{LIGHTNING_FILES}::test_a_folder_becomes_one_file_of_lightnings",
    "docs/tutorials/several-machines.md: shardwell run --hostfile": f"{CLUSTERS}::test_a_hostfile_starts_all_hosts_with_the_same_secret",
    "docs/with-libraries.md: shardwell run --as-deepspeed": f"{WAYS_IN}::test_accelerate_launch_gets_two_ranks_of_gloo_on_a_cpu",
    "docs/train.md: shardwell train --demo": f"{TRAINING}::test_one_command_trains_evaluates_and_exports",
    "docs/planning.md: shardwell plan": f"{PLANS}::test_a_configuration_of_hugging_face_is_planned_as_json_and_as_text",
    "docs/checkpoints.md: python zero_to_fp32.py": f"{FP32}::test_the_script_beside_checkpoints_and_the_command_do_the_same",
}  # fmt: skip

# Listings that no test runs, and why. README's install commands are what `.ci/run` begins with.
BY_HAND = "LLaMA-Factory is not among the packages of the tests; the page says what was tried"
NOT_RUN = {
    "docs/llama-factory.md: model_name_or_path": BY_HAND,
    "docs/llama-factory.md: FORCE_TORCHRUN=1": BY_HAND,
    "docs/tutorials/several-machines.md: node1 slots=8": "is a file of hosts; tests/cli/test_clusters.py writes such files",
    "README.md: python3 -m venv": "changes the environment that the tests run in; .ci/run runs it",
    "README.md: pip install -c constraints.txt '.[demo]'": "needs a package index; tests/cli/test_demo.py runs the demo",
    "README.md: pip install -c constraints.txt -e": "is this suite; .ci/run runs it",
}
