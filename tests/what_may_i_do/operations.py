"""What people do to models: every operation with the code that a user writes for it.

The code is run as it stands, in a small training loop, on an engine and on plain PyTorch. It sees `engine` (the plain
loop's has the same methods), `model` (the user's module), `optimizer` (the user's own object), `x`, `step` (a number),
`folder`, and `losses`, to which each step adds one. What it leaves in `found` is compared, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

LOOP = """
loss = engine(x).square().mean()
engine.backward(loss)
engine.step()
"""
SGD = "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)"


@dataclass(frozen=True)
class Operation:
    """`when` is where the code stands: start (after initialize), forward (it makes the loss), backward (before the
    step), between (steps), loop (it is the step), born (before initialize)."""

    section: str
    name: str
    code: str
    when: str
    born: str = ""  # what is done to the model before initialize, if the code stands elsewhere
    optimizer: str = SGD  # given to initialize
    given: bool = True

    @property
    def num_steps(self) -> int:
        """Two show what comes of an operation, unless its code asks which step it is."""
        return 3 if "step ==" in self.code else 2

    @property
    def lines(self) -> list[str]:
        return dedent(self.code).strip().splitlines()


def _of(section: str, when: str, *operations: tuple[str, str]) -> list[Operation]:
    return [Operation(section, name, code, when) for name, code in operations]


OPERATIONS = [
    # ------------------------------------------------------------------------------------------------- the loop
    *_of(
        "The loop",
        "loop",
        ("the engine's loop", LOOP),
        ("the loss' own backward", "loss = engine(x).square().mean()\nloss.backward()\nengine.step()"),
        (
            "step the optimizer that was given to initialize",
            "loss = engine(x).square().mean()\noptimizer.zero_grad()\nloss.backward()\noptimizer.step()",
        ),
        (
            "several forwards, then several backwards",
            "first, loss = engine(x).square().mean(), engine(-x).square().mean()\n"
            "engine.backward(first)\nengine.backward(loss)\nengine.step()",
        ),
        (
            "two losses of one forward",
            "out = engine(x)\nloss = out.square().mean()\n"
            "engine.backward(loss, retain_graph=True)\nengine.backward(out.sin().mean())\nengine.step()",
        ),
        (
            "accumulate without communication",
            "with engine.no_sync():\n    engine.backward(engine(-x).square().mean())\n"
            "loss = engine(x).square().mean()\nengine.backward(loss)\nengine.step()",
        ),
        (
            "evaluate between backward and step",
            "loss = engine(x).square().mean()\nengine.backward(loss)\n"
            "with torch.no_grad():\n    found = engine(-x).square().mean()\nengine.step()",
        ),
        (
            "give up a backward and run another",
            "engine.backward(engine(-x).square().mean())\nengine.zero_grad()\n"
            "loss = engine(x).square().mean()\nengine.backward(loss)\nengine.step()",
        ),
        (
            "a gradient penalty",
            "rows = x.clone().requires_grad_()\nloss = engine(rows).square().mean()\n"
            "(slope,) = torch.autograd.grad(loss, rows, create_graph=True)\n"
            "engine.backward(loss + slope.square().sum())\nengine.step()",
        ),
        (
            "SAM: a step up the gradient, a second backward, and back",
            """
            loss = engine(x).square().mean()
            engine.backward(loss)
            with shardwell.zero.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
                before = [p.detach().clone() for p in model.parameters()]
                for p in model.parameters():
                    p.mul_(1.01)
            engine.zero_grad()
            engine.backward(engine(x).square().mean())
            with shardwell.zero.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
                for p, value in zip(model.parameters(), before):
                    p.copy_(value)
            engine.step()
            """,
        ),
        (
            "a GradScaler of torch",
            "scaler = torch.amp.GradScaler('cpu', init_scale=8.0)\nloss = engine(x).square().mean()\n"
            "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()\noptimizer.zero_grad()",
        ),
        (
            "step the optimizer with a closure",
            """
            def closure():
                optimizer.zero_grad()
                loss = engine(x).square().mean()
                loss.backward()
                return loss
            loss = optimizer.step(closure)
            """,
        ),
        (
            "catch an error of the forward and go on",
            "with contextlib.suppress(LookupError):\n    engine(x, 'fails')\n" + LOOP.strip(),
        ),
    ),
    Operation(
        "The loop",
        "an optimizer made before initialize and not given to it",
        "loss = engine(x).square().mean()\nown.zero_grad()\nloss.backward()\nown.step()",
        "loop",
        born=f"own = {SGD}",
        given=False,
    ),
    Operation(
        "The loop",
        "an optimizer made after initialize",
        f"if step == 0:\n    own = {SGD}\n"
        "loss = engine(x).square().mean()\nown.zero_grad()\nloss.backward()\nown.step()",
        "loop",
        given=False,
    ),
    Operation(
        "The loop",
        "two engines, one loss",
        """
        if step == 0:
            other = initialize(second, torch.optim.SGD(second.parameters(), lr=0.1))
        fake = engine(x)
        loss = other(fake).square().mean()
        loss.backward()
        engine.step()
        judged = other(engine(x).detach()).square().mean()
        other.zero_grad()
        judged.backward()
        other.step()
        """,
        "loop",
        born="second = Net()",
    ),
    # ------------------------------------------------------------------------------------------------ gradients
    *_of(
        "Gradients, between backward and step",
        "backward",
        ("read p.grad", "found = [p.grad.clone() for p in model.head.parameters()]"),
        ("ask whether there is one", "found = [p.grad is not None for p in model.head.parameters()]"),
        ("the norm of one", "found = model.head.weight.grad.norm()"),
        ("p.grad.mul_()", "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.5)"),
        ("p.grad.clamp_()", "model.head.weight.grad.clamp_(-0.01, 0.01)"),
        ("p.grad.add_() of a tensor", "model.head.bias.grad.add_(torch.arange(3.0))"),
        ("p.grad = x", "model.head.weight.grad = torch.full_like(model.head.weight, 0.01)"),
        ("p.grad = None", "model.head.weight.grad = None"),
        ("p.grad.zero_()", "model.head.weight.grad.zero_()"),
        ("clip_grad_norm_", "found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),
        ("clip_grad_value_", "torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)"),
        ("engine.zero_grad()", "engine.zero_grad()"),
        ("zero_grad() of the model", "model.zero_grad()"),
        ("zero_grad() of the given optimizer", "optimizer.zero_grad()"),
        ("zero_grad(set_to_none=False)", "model.zero_grad(set_to_none=False)"),
        ("safe_get_full_grad", "found = safe_get_full_grad(model.head.weight)"),
        ("safe_set_full_grad", "safe_set_full_grad(model.head.weight, torch.full((3, 3), 0.01))"),
    ),
    *_of(
        "Gradients, by hooks and before the first step",
        "start",
        ("a hook on a parameter", "model.head.weight.register_hook(lambda grad: grad * 0.5)"),
        (
            "a hook after gradients were accumulated",
            "model.head.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))",
        ),
        ("a hook of a module's backward", "model.head.register_full_backward_hook(lambda m, i, o: (i[0] * 0.5,))"),
        (
            "a step hook of the given optimizer",
            "found = []\noptimizer.register_step_post_hook(lambda *_: found.append(1.0))",
        ),
    ),
    *(
        Operation(
            "Gradients, by hooks and before the first step",
            f"a trial backward before initialize, dropped by {who}.zero_grad()",
            f"{who}.zero_grad()",
            "start",
            born="model(x).square().mean().backward()",
        )
        for who in ("engine", "model", "optimizer")
    ),
    # --------------------------------------------------------------------------------------------------- values
    *_of(
        "Values of parameters, between steps",
        "between",
        ("p.data = x", "model.head.weight.data = torch.full((3, 3), 0.1)"),
        ("p.data.copy_(x)", "model.head.weight.data.copy_(torch.full((3, 3), 0.1))"),
        ("p.data[i] = x", "model.head.weight.data[0] = 0.1"),
        ("with no_grad: p.mul_()", "with torch.no_grad():\n    model.head.weight.mul_(0.5)"),
        (
            "with no_grad: p.clamp_() of all",
            "with torch.no_grad():\n    for p in model.parameters():\n        p.clamp_(-0.1, 0.1)",
        ),
        (
            "vector_to_parameters",
            "vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()\n"
            "torch.nn.utils.vector_to_parameters(vector * 0.5, model.parameters())",
        ),
        ("re-initialise", "torch.nn.init.constant_(model.head.weight, 0.1)"),
        ("model.double().float()", "model.double().float()"),
        (
            "swap the data of two parameters",
            "a, b = model.blocks[0].up.weight, model.blocks[1].up.weight\na.data, b.data = b.data, a.data",
        ),
        (
            "change inside GatheredParameters",
            "with shardwell.zero.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():\n"
            "    model.head.weight.mul_(0.5)",
        ),
        (
            "p.data = x inside GatheredParameters",
            "with shardwell.zero.GatheredParameters(model.head.weight, modifier_rank=0):\n"
            "    model.head.weight.data = torch.full((3, 3), 0.1)",
        ),
        ("safe_set_full_fp32_param", "safe_set_full_fp32_param(model.head.weight, torch.full((3, 3), 0.1))"),
        (
            "engine.load_state_dict",
            "engine.load_state_dict({k: v * 0.5 for k, v in engine.state_dict().items()})",
        ),
        (
            "model.load_state_dict",
            "model.load_state_dict({k: torch.full(v.shape, 0.1) for k, v in model.state_dict(keep_vars=True).items()})",
        ),
    ),
    *_of(
        "Values of parameters, between steps",
        "backward",
        (
            "change between backward and step",
            "with shardwell.zero.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():\n"
            "    model.head.weight.mul_(0.5)",
        ),
    ),
    *_of(
        "Reading parameters, between steps",
        "between",
        ("the sum over all", "found = sum(p.sum() for p in model.parameters()).detach()"),
        ("engine.state_dict()", "found = list(engine.state_dict().values())"),
        ("model.state_dict()", "found = [v.clone() for v in model.state_dict().values()]"),
        (
            "read inside GatheredParameters",
            "with shardwell.zero.GatheredParameters(model.parameters()):\n"
            "    found = [p.detach().clone() for p in model.parameters()]",
        ),
        ("a deep copy of the model", "found = list(copy.deepcopy(model).state_dict().values())"),
        (
            "an average by swa_utils",
            "average = torch.optim.swa_utils.AveragedModel(model)\naverage.update_parameters(model)",
        ),
        ("pickle the model", "found = len(pickle.dumps(model)) > 0"),
    ),
    # ------------------------------------------------------------------------------------------- the parameters
    *_of(
        "Which parameters there are, and which train",
        "between",
        ("freeze", "model.head.weight.requires_grad_(step != 1)"),
        ("freeze a block, and thaw it later", "model.blocks[0].requires_grad_(step != 1)"),
    ),
    *_of(
        "Which parameters there are, and which train",
        "backward",
        ("freeze between backward and step", "model.head.weight.requires_grad_(False)"),
    ),
    *_of(
        "Which parameters there are, and which train",
        "born",
        ("tie two weights", "model.blocks[1].up.weight = model.blocks[0].up.weight"),
        ("one parameter under two names", "model.also = model.head.weight"),
        ("a parameter that is a view of another", "model.blocks[1].up.weight.data = model.blocks[0].up.weight.data"),
        ("weight_norm", "torch.nn.utils.parametrizations.weight_norm(model.head)"),
        ("spectral_norm", "torch.manual_seed(0)\ntorch.nn.utils.parametrizations.spectral_norm(model.head)"),
        ("a lazy module that has not run yet", "model.head = torch.nn.LazyLinear(3)"),
        ("a scripted block", "model.head = torch.jit.script(model.head)"),
        ("a model in DistributedDataParallel", "model = distributed(model)"),
    ),
    Operation(
        "Which parameters there are, and which train",
        "a subclass of Parameter",
        "found = isinstance(model.head.weight, Own)",
        "between",
        born="class Own(torch.nn.Parameter):\n    pass\nmodel.head.weight = Own(model.head.weight.data)",
    ),
    # -------------------------------------------------------------------------------------------------- outputs
    *_of(
        "What the forward gives back, and what is done with it",
        "forward",
        ("a dictionary", "loss = engine(x, 'dict')['logits'].square().mean()"),
        ("a namespace", "loss = engine(x, 'namespace').out.square().mean()"),
        ("a dataclass", "loss = engine(x, 'dataclass').out.square().mean()"),
        ("a deque", "loss = engine(x, 'deque')[0].square().mean()"),
        ("a distribution", "loss = engine(x, 'distribution').mean.square().mean()"),
        (
            "a list of the caller's that the forward appends to",
            "bag = []\nloss = engine(x, bag=bag).square().mean() + bag[0].square().mean()",
        ),
        (
            "a dictionary of the caller's that the forward fills",
            "bag = {}\nloss = (engine(x, bag=bag) * bag['features']).mean()",
        ),
        (
            "an output kept on self",
            "out = engine(x, 'kept side')\nloss = (out * model.blocks[1].kept).mean() + model.kept.square().mean()",
        ),
        (
            "a view of a weight kept on self",
            "out = engine(x, 'kept weight')\n"
            "loss = (out @ model.kept).square().mean() + model.blocks[1].kept.square().mean()",
        ),
        (
            "a returned view, changed in place",
            "out = engine(x, 'view')\nout[0] = 0.0\nloss = out.mul_(0.5).square().mean()",
        ),
        (
            "a block's output, changed in place",
            "features = model.blocks[0](x)\nfeatures.clamp_(-0.5, 0.5)\nloss = features.square().mean()",
        ),
        (
            "features taken by a hook of one's own",
            "kept = []\nhandle = model.blocks[1].register_forward_hook(lambda m, i, o: kept.append(o))\n"
            "loss = (engine(x) * kept[0]).mean()\nhandle.remove()",
        ),
        ("a part of the model called alone", "loss = model.head(model.blocks[1](x)).square().mean()"),
        (
            "a part called alone under no_grad, then the model",
            "with torch.no_grad():\n    features = model.blocks[0](x)\nloss = engine(features).square().mean()",
        ),
        ("a part under no_grad inside the forward", "loss = engine(x, 'no_grad part').square().mean()"),
        ("a model that calls itself", "loss = engine(x, 'recursive', 2).square().mean()"),
        ("the model twice in one loss", "loss = (engine(x) * engine(x.flip(0))).mean()"),
        (
            "a penalty on weights in the loss",
            "loss = engine(x).square().mean() + 0.1 * model.blocks[0].down.weight.square().sum()",
        ),
        (
            "torch.utils.checkpoint around the engine",
            "loss = torch.utils.checkpoint.checkpoint(engine, x, use_reentrant=False).square().mean()",
        ),
        ("torch.compile around the engine", "loss = torch.compile(engine, backend='eager')(x).square().mean()"),
        ("engine.compile()", "engine.compile(backend='eager')\nloss = engine(x).square().mean()"),
        (
            "torch.func.functional_call",
            "values = {k: torch.full(p.shape, 0.1) for k, p in model.named_parameters()}\n"
            "found = torch.func.functional_call(model, values, (x,))\nloss = engine(x).square().mean()",
        ),
        (
            "torch.func.grad over the parameters",
            "values = dict(model.named_parameters())\n"
            "slopes = torch.func.grad(lambda v: torch.func.functional_call(model, v, (x,)).sum())(values)\n"
            "found = slopes['head.weight'].detach()\nloss = engine(x).square().mean()",
        ),
        (
            "torch.func.vmap over the rows",
            "loss = torch.func.vmap(engine)(x).square().mean()",
        ),
        (
            "forward-mode derivatives",
            "found = torch.func.jvp(engine, (x,), (torch.ones_like(x),))[1].detach()\nloss = engine(x).square().mean()",
        ),
        ("torch.jit.trace", "found = torch.jit.trace(model, x)(x).detach()\nloss = engine(x).square().mean()"),
    ),
    # ------------------------------------------------------------------------------------------------ optimizer
    *_of(
        "The optimizer",
        "between",
        ("another learning rate, in engine.optimizer", "engine.optimizer.param_groups[0]['lr'] = 0.05"),
        ("another learning rate, in the given optimizer", "optimizer.param_groups[0]['lr'] = 0.05"),
        (
            "a schedule of torch over the given optimizer",
            "if step == 0:\n    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)\nschedule.step()",
        ),
        (
            "the state of engine.optimizer, out and in",
            "engine.optimizer.load_state_dict(engine.optimizer.state_dict())",
        ),
        ("the state of the given optimizer, out and in", "optimizer.load_state_dict(optimizer.state_dict())"),
        (
            "read the state of the given optimizer",
            "found = optimizer.state[model.head.weight]['momentum_buffer'].clone()",
        ),
    ),
    Operation(
        "The optimizer",
        "a rule that is not elementwise",
        LOOP,
        "loop",
        born="class ByRow(torch.optim.SGD):\n    def step(self, closure=None):\n"
        "        for p in self.param_groups[0]['params']:\n            if p.grad is not None:\n"
        "                with torch.no_grad():\n"
        "                    p.sub_(0.1 * p.grad / (1e-3 + p.grad.norm(dim=-1, keepdim=True)))",
        optimizer="ByRow(model.parameters(), lr=0.1)",
    ),
    Operation(
        "The optimizer",
        "a wrapper that is no Optimizer",
        LOOP,
        "loop",
        born="class Lookahead:\n    def __init__(self, inner):\n        self.inner = inner\n"
        "        self.param_groups = inner.param_groups\n    def step(self):\n        self.inner.step()\n"
        "    def zero_grad(self):\n        self.inner.zero_grad()",
        optimizer=f"Lookahead({SGD})",
    ),
    # ---------------------------------------------------------------------------------------------- checkpoints
    *_of(
        "Saving, loading, and again",
        "between",
        (
            "save and load",
            "engine.save_checkpoint(folder) if step == 0 else engine.load_checkpoint(folder) if step == 1 else None",
        ),
        ("load from a folder that is not there", "engine.load_checkpoint(folder + '/no/such/folder')"),
        ("save without a folder", "engine.save_checkpoint('')"),
        ("initialize the same model again", f"engine = initialize(model, {SGD})"),
        (
            "destroy the engine and initialize the model again",
            f"engine.destroy()\nengine = initialize(model, {SGD})",
        ),
    ),
]
FAILS_STILL: frozenset[str] = frozenset()  # names of operations that are known to fail; the page says so
