"""Cut a model that comes whole: its parameters become parts, and its layers those of `layers.py`.

Parameters keep their identity. One parameter at a time is whole on a device, also if the model was built in
`zero.Init`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwell.errors import ConfigError, ShardwellError
from shardwell.parallel import Collectives
from shardwell.sharding import EngineContext, released
from shardwell.sharding.context import TiedCopies
from shardwell.sharding.init_parameters import PartKeeper
from shardwell.sharding.tensor_part import TensorPart, mark_part, mark_partial, part_of
from shardwell.sharding.whole_tensor import first_values
from shardwell.tensor_parallel import layers, overlap
from shardwell.tensor_parallel.plan import blocks_of, kind_of
from shardwell.tensor_parallel.region import CutRegion
from shardwell.tensor_parallel.whole_modules import gather_around

_COLUMNS, _ROWS = (
    ("colwise", "colwise_gather_output", "packed_colwise"),
    ("rowwise", "rowwise_split_input", "packed_rowwise"),
)


@dataclass
class Cutter:
    """Cuts the layers of one model."""

    model: nn.Module
    plan: Mapping[str, str]  # style by full name
    context: EngineContext
    inside: CutRegion  # of layers in blocks, between which sequences may be split
    outside: CutRegion  # of other layers
    blocks: tuple[str, ...]  # names of the blocks
    gathered: CutRegion | None = None  # of layers in modules of blocks that take whole sequences
    hooks: list[Any] = field(default_factory=list)
    keeper: PartKeeper = field(init=False)

    def __post_init__(self) -> None:
        self.keeper = PartKeeper(self.context)

    def cut(self) -> None:
        """Cut all that the plan names."""
        modules, parameters = dict(self.model.named_modules()), dict(self.model.named_parameters())
        for name, style in self.plan.items():
            if name in modules:
                self._cut_module(name, modules[name], style)
            else:
                self._cut_parameter(name, parameters[name], style)
        self._check_sums()
        self._follow_ties()
        tied = self.context.tied  # parameters that another pipeline stage has, too
        if tied is not None and tied.comm.rank_group.size > 1:
            self._follow_copies(tied, parameters)

    def _check_sums(self) -> None:
        """Raise if outputs of experts would be summed although every rank has these experts whole."""
        for name in (name for name, style in self.plan.items() if style == "moe_tp_experts"):
            experts = self.model.get_submodule(name)
            is_cut = any(part_of(parameter) is not None for parameter in experts.parameters())
            if not is_cut and not getattr(experts, "is_elsewhere", False):
                raise ShardwellError(
                    f"tensor_parallel.plan: the outputs of '{name}', a {type(experts).__name__}, would be summed over "
                    "the ranks (moe_tp_experts), and nothing in it is cut, so that each expert would count several "
                    "times. If adapters wrap its parameters (target_parameters of PEFT), adapt other layers; "
                    "otherwise let the plan cut its weights, too"
                )

    def _region(self, name: str) -> CutRegion:
        block = next((block for block in self.blocks if name.startswith(f"{block}.")), None)
        if block is None:
            return self.outside
        around = name.rpartition(".")[0]
        if self.gathered is not None and around in self.closed():
            return self.outside
        is_direct = around == block
        return self.inside if is_direct or self.gathered is None else self.gathered

    def gathering(self) -> list[str]:
        """Return the modules inside of blocks that hold layers cut by columns: they take whole sequences.

        Experts do so by hooks of their own, and modules inside of others get what these have gathered.
        """
        found = dict.fromkeys(
            name.rpartition(".")[0] for name, style in self.plan.items() if kind_of(style) in _COLUMNS
        )
        closed = self.closed()
        names = [name for name in found if self.plan.get(name) != "moe_tp_experts" and name not in closed]
        names = [name for name in names if any(name.startswith(f"{block}.") for block in self.blocks)]
        return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]

    def closed(self) -> list[str]:
        """Return the modules inside of blocks whose cut layers all gather their outputs: what leaves them is whole."""
        styles: dict[str, set[str]] = {}
        for name, style in self.plan.items():
            styles.setdefault(name.rpartition(".")[0], set()).add(kind_of(style))
        names = [name for name, found in styles.items() if found == {"colwise_gather_output"}]
        return [name for name in names if any(name.startswith(f"{block}.") for block in self.blocks)]

    def whole_in(self, name: str) -> list[nn.Parameter]:
        """Return the parameters of such a module whose gradients all ranks compute whole, as norms of queries.

        They are those of its layers that are not cut, where outputs of all others are all-gathered.
        """
        styles = [kind_of(style) for other, style in self.plan.items() if other.rpartition(".")[0] == name]
        if any(style in _COLUMNS and style != "colwise_gather_output" for style in styles):
            return []
        inner = [one for one in self.model.get_submodule(name).modules() if not isinstance(one, layers.CutLayer)]
        return [parameter for one in inner for parameter in one.parameters(recurse=False)]

    def _cut_module(self, name: str, module: nn.Module, style: str) -> None:
        region = self._region(name)
        if style == "replicate" or isinstance(module, layers.CutLayer) or getattr(module, "is_elsewhere", False):
            return
        if style == "replicated_with_grad_allreduce":
            for parameter in module.parameters():
                mark_partial(parameter)
            if type(module).forward is nn.Linear.forward:
                self._become(module, layers.InnerLinear, name, region)
                module.ends = self._has_end(name)  # type: ignore[assignment]
        elif style == "moe_tp_experts":
            is_split = region.splits_sequences
            self.hooks += (gather_around if is_split else layers.sum_around)(module, self.inside, name)
        elif style == "mla_kv_a_proj":
            if not region.splits_sequences:  # else each rank computes a part of the gradients of all that is not cut
                self.hooks.append(layers.enter_rope(module, self.model.get_submodule(name.rpartition(".")[0]), region))
        elif isinstance(module, nn.Embedding) and style.startswith("embedding"):
            self._cut_embedding(name, module, region, by_words=style == "embedding_rowwise")
        elif hasattr(module, "base_layer"):
            self._cut_adapter(name, module, style)
        elif kind_of(style) in (*_COLUMNS, *_ROWS):
            self._cut_linear(name, module, style, region)
        else:
            raise _misfit(name, module, style)

    def _cut_linear(self, name: str, module: nn.Module, style: str, region: CutRegion) -> None:
        is_conv = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
        if not is_conv and type(module).forward is not nn.Linear.forward:
            raise _misfit(name, module, style)
        is_column = kind_of(style) in _COLUMNS
        bias: nn.Parameter | None = module.bias  # type: ignore[assignment]
        dim = int(is_column) if is_conv else int(not is_column)
        part = self._cut_tensor(f"{name}.weight", module.weight, dim, style)  # type: ignore[arg-type]
        if bias is not None and is_column:
            self._cut_tensor(f"{name}.bias", bias, 0, style)
        elif bias is not None and region.splits_sequences:
            mark_partial(bias)
        kinds = (layers.ColumnConv1D, layers.RowConv1D) if is_conv else (layers.ColumnLinear, layers.RowLinear)
        self._become(module, kinds[0] if is_column else kinds[1], name, region, part)
        if is_column:
            module.gathers, module.ends = style == "colwise_gather_output", self._has_end(name)  # type: ignore[assignment]
        else:
            module.splits_input = style == "rowwise_split_input"  # type: ignore[assignment]

    def _has_end(self, name: str) -> bool:
        """Return whether a layer that is cut by rows follows in the same module."""
        around = name.rpartition(".")[0]
        return any(kind_of(style) in _ROWS and other.rpartition(".")[0] == around for other, style in self.plan.items())

    def _cut_embedding(self, name: str, module: nn.Embedding, region: CutRegion, *, by_words: bool) -> None:
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            raise ShardwellError(
                f"tensor_parallel.plan: embedding '{name}' has max_norm, sparse or scale_grad_by_freq, which need all "
                "words: leave it out of the plan"
            )
        weight: Any = module.weight
        own = type(module).forward
        if own is not nn.Embedding.forward and "super" not in own.__code__.co_names:
            raise ShardwellError(
                f"tensor_parallel.plan: embedding '{name}' is a {type(module).__name__}, whose forward looks words up "
                "itself, so that it cannot be cut: leave it out of the plan, and what is tied to it"
            )
        part = self._cut_tensor(f"{name}.weight", weight, 0 if by_words else 1)
        self._become(module, layers.VocabularyEmbedding if by_words else layers.WidthEmbedding, name, region, part)
        if by_words:
            module.first = part.ranges[0][0]  # type: ignore[assignment]

    def _cut_adapter(self, name: str, module: nn.Module, style: str) -> None:
        """Cut a layer with low-rank adapters (LoRA): B follows outputs, A follows inputs, the other one is whole."""
        if style.startswith("packed"):
            raise _misfit(name, module, style)
        region, is_column = self._region(name), style in _COLUMNS
        if style not in ("colwise", "rowwise"):
            raise ShardwellError(
                f"tensor_parallel.plan: '{name}' has adapters, and style {style} would gather or split around them; "
                "use colwise or rowwise for it"
            )
        others = [
            which
            for which in getattr(module, "adapter_layer_names", ())
            if which not in ("lora_A", "lora_B") and isinstance(held := getattr(module, which, None), nn.Module | dict)
            if len(held)  # type: ignore[arg-type]
        ]
        if others and (is_column or hasattr(module, "lora_A")):
            raise ShardwellError(
                f"tensor_parallel.plan: '{name}' has adapters of another kind than plain LoRA ({', '.join(others)}), "
                "which are of the whole layer: use LoRA without variants, or leave the layer out of the plan"
            )
        self._cut_linear(f"{name}.base_layer", module.base_layer, style, region)  # type: ignore[arg-type]
        for which in ("lora_A", "lora_B"):
            for adapter, inner in getattr(module, which, {}).items():
                full = f"{name}.{which}.{adapter}"
                if (which == "lora_B") is is_column:
                    self._cut_linear(full, inner, style, region)

    def _become(
        self, module: nn.Module, kind: type[nn.Module], name: str, region: CutRegion, part: TensorPart | None = None
    ) -> None:
        layer: Any = module
        if "late_product" in vars(module):  # the cut layer calls it itself
            vars(module).pop("forward", None)
        elif region.overlaps and issubclass(kind, layers.ColumnLinear | layers.InnerLinear | layers.ColumnConv1D):
            layer.late_product = overlap.product
        layer.kind, layer.region, layer.full_name = type(module), region, name
        if part is not None:
            layer.sizes = [part.shape_of(index)[part.dim] for index in range(part.num_parts)]
        if type(module) in (nn.Linear, nn.Embedding) or kind.__name__.endswith("Conv1D"):
            layer.__class__ = kind
        else:  # what a subclass does around `super().forward` stays around the cut one
            bases = (type(module), kind) if issubclass(kind, nn.Embedding) else (kind, type(module))
            layer.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})

    def _cut_parameter(self, name: str, parameter: nn.Parameter, style: str) -> None:
        """Cut a parameter that a module uses itself, as packed experts do: the last two dims are out and in."""
        if parameter.ndim == 1 and style == "colwise":  # one number for each head, such as attention sinks
            self._cut_tensor(name, parameter, 0, style)
            return
        if kind_of(style) not in (*_COLUMNS, *_ROWS) or parameter.ndim < 2:
            raise ShardwellError(
                f"tensor_parallel.plan: {style} does not fit parameter '{name}' {tuple(parameter.shape)}"
            )
        self._cut_tensor(name, parameter, parameter.ndim - (2 if kind_of(style) in _COLUMNS else 1), style)

    @torch.no_grad()
    def _cut_tensor(self, name: str, parameter: nn.Parameter, dim: int, style: str = "") -> TensorPart:
        """Replace the values of a parameter, which are those of the first rank, by this rank's part."""
        axis, shape = self.outside.axis, tuple(parameter.shape)
        if (known := part_of(parameter)) is not None:
            if known.dim != dim:
                raise ShardwellError(
                    f"tensor_parallel.plan: '{name}' is shared by layers that cut it along dims {known.dim} and {dim}"
                )
            return known
        size = shape[dim]
        blocks = blocks_of(style, size)
        if size < axis.size or (blocks and (sum(blocks) != size or min(blocks) < 1)):
            raise ConfigError(
                f"tensor_parallel.autotp_size: '{name}' {shape} cannot be cut along dim {dim} into {axis.size} parts"
                + (f" by {style}" if blocks else "")
            )
        part = TensorPart(shape, dim, axis.size, axis.rank, blocks)
        before = released.owner_or_none(parameter)
        parameter.data = part.cut(first_values(name, parameter, self.context.roles.stage)).clone(
            memory_format=torch.contiguous_format
        )
        mark_part(parameter, part)
        self.keeper.keep(name, parameter, before)
        return part

    def _follow_ties(self) -> None:
        """Cut the layers that share a cut parameter: the embedding of a vocabulary whose last layer is cut."""
        for name, module in self.model.named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(module, layers.CutLayer) or not isinstance(weight, nn.Parameter):
                continue
            part = part_of(weight)
            if part is None or name in self.plan or getattr(module, "is_elsewhere", False):
                continue
            self._follow(name, module, part.dim)

    def _follow_copies(self, tied: TiedCopies, parameters: Mapping[str, nn.Parameter]) -> None:
        """Cut the copies of parameters that another pipeline stage has cut: the embedding of a last layer that is cut.

        The ranks that hold the copies tell each other by sums along which dimensions theirs are cut. In a simulation
        nobody tells, and a plan that cuts a layer which is elsewhere is taken to cut the copy.
        """
        names = sorted(name for name, parameter in parameters.items() if id(parameter) in tied.names)
        dims = [-1 if (part := part_of(parameters[name])) is None else part.dim for name in names]
        for name, dim, other in zip(names, dims, self._dims_elsewhere(dims, tied.comm), strict=True):
            if dim == -1 and other >= 0:
                self._follow(*self._user_of(name, parameters[name]), other)
            elif dim != other and other >= 0:
                raise ShardwellError(
                    f"tensor_parallel.plan: '{name}' is shared by layers of two pipeline stages that cut it along dims "
                    f"{dim} and {other}"
                )

    def _user_of(self, name: str, weight: nn.Parameter) -> tuple[str, nn.Module]:
        """Return the layer of this stage that has a copied weight, with its name."""
        users = [(at, one) for at, one in self.model.named_modules() if getattr(one, "weight", None) is weight]
        if not users:
            raise ShardwellError(
                f"tensor_parallel.plan: '{name}' is shared with another pipeline stage, which cuts it, and is not the "
                "weight of a layer of this one: name both layers in the plan"
            )
        return next((user for user in users if not getattr(user[1], "is_elsewhere", False)), users[0])

    def _dims_elsewhere(self, dims: list[int], comm: Collectives) -> list[int]:
        """Return along which dimensions the copies on the other stage are cut; -1: they are not."""
        if comm.rank_group.is_simulated:  # nobody answers: what the plan says of a layer that is elsewhere
            modules = dict(self.model.named_modules())
            elsewhere = [
                style for name, style in self.plan.items() if getattr(modules.get(name), "is_elsewhere", False)
            ]
            is_cut = any(style in ("colwise", "colwise_gather_output", "embedding_rowwise") for style in elsewhere)
            return [0 if is_cut else dim for dim in dims]
        mine = torch.tensor([dim + 1.0 for dim in dims], device=comm.device.torch_device)
        total = torch.empty_like(mine)
        comm.direct.all_reduce(mine.clone(), total, 1.0, False).wait()
        found: list[int] = (total - mine - 1).int().tolist()
        return found

    def _follow(self, name: str, module: nn.Module, dim: int) -> None:
        """Cut a layer that is not in the plan as the one with which it shares its weight."""
        if isinstance(module, nn.Embedding) and dim == 0:
            self._cut_embedding(name, module, self._region(name), by_words=True)
            return
        raise ShardwellError(
            f"tensor_parallel.plan: '{name}' shares its weight with a layer that is cut, and is not in the plan: add "
            "it there, or leave the other out"
        )


def _misfit(name: str, module: nn.Module, style: str) -> ShardwellError:
    return ShardwellError(
        f"tensor_parallel.plan: '{name}' is a {type(module).__name__}, and {style} does not fit it: linear layers are "
        "cut by colwise and rowwise, embeddings by embedding_rowwise and embedding_colwise"
    )
