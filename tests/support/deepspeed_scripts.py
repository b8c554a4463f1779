"""Scripts as tutorials of DeepSpeed have them, beside the same loop on DDP. Each prints what differs, as JSON.

They are texts, because each runs in processes of its own in which `import deepspeed` means shardwell.
"""

from __future__ import annotations

from tests.support.as_deepspeed import MARK

COMMON = f'''
import copy, json, os
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def tell(**values):
    if torch.distributed.get_rank() == 0:
        print({MARK!r} + json.dumps(values), flush=True)


class Net(nn.Module):
    def __init__(self, width=24, classes=10):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Linear(4 * 16 if i == 0 else width, width) for i in range(3)])
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = torch.relu(self.conv(x)).flatten(1)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def plain(model, batches, gas, clip, lr, divide=True, make=torch.optim.Adam):
    """The same loop on DDP: losses, norms of the averaged gradients, final weights."""
    ddp = DistributedDataParallel(model)
    optimizer = make(model.parameters(), lr=lr)
    losses, norms = [], []
    for i, (x, y) in enumerate(batches):
        loss = nn.functional.cross_entropy(ddp(x), y)
        (loss / gas if divide else loss).backward()
        losses.append(loss.item())
        if (i + 1) % gas == 0:
            limit = clip if clip else float("inf")
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, {{name: value.detach().clone() for name, value in model.named_parameters()}}


def apart(first, second):
    """The largest relative difference between two lists of numbers."""
    return max(abs(a - b) / max(abs(b), 1e-8) for a, b in zip(first, second, strict=True))


def weights_apart(whole, plain):
    return max(float((whole[name].float() - plain[name].float()).abs().max()) for name in plain)
'''

CIFAR = (
    COMMON
    + """
import argparse
import deepspeed
from deepspeed.accelerator import get_accelerator


def add_argument():
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("-e", "--epochs", default=1, type=int)
    parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from distributed launcher")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


args = add_argument()
assert args.local_rank == int(os.environ["LOCAL_RANK"]), args.local_rank
deepspeed.init_distributed()
torch.manual_seed(5)
trainset = torch.utils.data.TensorDataset(torch.randn(64, 3, 4, 4), torch.randint(10, (64,)))
given = args.deepspeed_config
for stage in range(4):
    torch.manual_seed(7)
    net = Net()
    before = copy.deepcopy(net)
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    with open(given) as file:
        config = json.load(file)
    config["zero_optimization"]["stage"] = stage
    args.deepspeed_config = f"{given}.{stage}.{args.local_rank}"
    with open(args.deepspeed_config, "w") as file:
        json.dump(config, file)
    model_engine, optimizer, trainloader, lr_scheduler = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=trainset
    )
    local_device = get_accelerator().device_name(model_engine.local_rank)
    seen, losses, norms = [], [], []
    for epoch in range(args.epochs):
        for i, data in enumerate(trainloader):
            inputs, labels = data[0].to(local_device), data[1].to(local_device)
            seen.append((inputs.clone(), labels.clone()))
            loss = nn.functional.cross_entropy(model_engine(inputs), labels)
            model_engine.backward(loss)
            model_engine.step()
            losses.append(loss.item())
            norms.append(model_engine.get_global_grad_norm())
    whole = model_engine.module_state_dict()
    plain_losses, plain_norms, final = plain(before, seen, 1, 1.0, 1e-2)
    tell(
        stage=stage,
        losses=apart(losses, plain_losses),
        norms=apart(norms, plain_norms),
        weights=weights_apart(whole, final),
        steps=len(losses),
        config=model_engine.config.get("zero_optimization", {}).get("stage"),
        name=type(model_engine).__name__,
    )
    model_engine.destroy()
"""
)

# Accumulation with and without the engine's division, at a boundary that the loop sets, as Accelerate does.
ACCUMULATION = (
    COMMON
    + """
import deepspeed
deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
torch.manual_seed(3 + rank)
batches = [(torch.randn(4, 3, 4, 4), torch.randint(10, (4,))) for _ in range(8)]
for stage in range(4):
    for scale_wrt_gas in (True, False):
        for sets_boundary in (False, True):
            torch.manual_seed(7)
            net = Net()
            before = copy.deepcopy(net)
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 4,
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            }
            engine, optimizer, _, _ = deepspeed.initialize(
                model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config_params=config
            )
            losses, norms, applied = [], [], []
            for i, (x, y) in enumerate(batches):
                if sets_boundary:
                    engine.set_gradient_accumulation_boundary(is_boundary=(i + 1) % 4 == 0)
                loss = nn.functional.cross_entropy(engine(x), y)
                returned = engine.backward(loss, scale_wrt_gas=scale_wrt_gas)
                losses.append(loss.item())
                assert abs(returned.item() - loss.item() / (4 if scale_wrt_gas else 1)) < 1e-6
                engine.step()
                applied.append(engine.was_step_applied())
                if applied[-1]:
                    norms.append(engine.get_global_grad_norm())
            make = torch.optim.SGD
            theirs = plain(before, batches, 4, 0.0, 0.1, divide=scale_wrt_gas, make=make)
            tell(
                case=[stage, scale_wrt_gas, sets_boundary],
                losses=apart(losses, theirs[0]),
                norms=apart(norms, theirs[1]),
                weights=weights_apart(engine.module_state_dict(), theirs[2]),
                applied=applied,
                steps=[engine.global_steps, engine.micro_steps],
            )
            engine.destroy()
"""
)

# `with deepspeed.zero.Init():` of the tutorial, before the engine and after it.
INIT = (
    COMMON
    + """
import deepspeed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
torch.manual_seed(7)
reference = Net(width=64)
torch.manual_seed(7)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
seen = []


class Built(Net):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        seen.append(hasattr(self.head.weight, "ds_id"))


with deepspeed.zero.Init(config_dict_or_path=config):
    model = Built(width=64)
for name, p in model.named_parameters():
    p.mark = name  # arbitrary attributes stay
early = {name: (p.ds_id, p.ds_numel, tuple(p.ds_shape)) for name, p in model.named_parameters()}
with deepspeed.zero.GatheredParameters(model.head.weight, modifier_rank=0):
    whole_before = torch.equal(model.head.weight, reference.head.weight)
    if rank == 0:
        model.head.weight.data.mul_(2.0)
reference.head.weight.data.mul_(2.0)
engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
weight = model.blocks[1].weight
away = weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
weight.all_gather()
there = weight.ds_status == ZeroParamStatus.AVAILABLE and bool(torch.equal(weight, reference.blocks[1].weight))
weight.partition()
again = weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
weight.all_gather()
with torch.no_grad():
    weight.add_(1.0 if rank == 0 else 5.0)
weight.partition(has_been_updated=True)
reference.blocks[1].weight.data.add_(1.0)
torch.manual_seed(3 + rank)
batches = [(torch.randn(4, 3, 4, 4), torch.randint(10, (4,))) for _ in range(4)]
losses, norms = [], []
for x, y in batches:
    loss = nn.functional.cross_entropy(engine(x), y)
    engine.backward(loss)
    gradient = safe_get_full_grad(model.head.weight)
    engine.step()
    losses.append(loss.item())
    norms.append(engine.get_global_grad_norm())
state = getattr(engine, "_zero3_consolidated_16bit_state_dict")()
second = getattr(engine, "_zero3_consolidated_16bit_state_dict")()
make = lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.0)
theirs = plain(reference, batches, 1, 1.0, 1e-2, make=make)
fp32 = safe_get_full_fp32_param(model.head.weight)
momentum = safe_get_full_optimizer_state(model.head.weight, "exp_avg")
tell(
    early=early,
    sizes={name: [p.numel(), list(p.shape), p.partition_numel()] for name, p in model.named_parameters()},
    late={name: (p.ds_id, p.ds_numel, tuple(p.ds_shape), p.ds_persist, p.mark) for name, p in model.named_parameters()},
    flags=[seen == [True], whole_before, away, there, again, second is not state],
    losses=apart(losses, theirs[0]),
    norms=apart(norms, theirs[1]),
    weights=weights_apart(state, theirs[2]) if rank == 0 else None,
    fp32=float((fp32 - theirs[2]["head.weight"]).abs().max()),
    momentum=list(momentum.shape),
    gradient=list(gradient.shape),
)
assert (state is None) == (rank != 0)
engine.destroy()
assert not hasattr(weight, "ds_id") and weights_apart(dict(model.named_parameters()), theirs[2]) < 1e-4
"""
)
