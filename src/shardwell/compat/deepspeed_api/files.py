"""Checkpoints and weights of a `DeepSpeedEngine`, with DeepSpeed's arguments and results."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from shardwell.checkpoint.sources.universal import latest_universal
from shardwell.compat.deepspeed_api import checkpoint_names as names
from shardwell.compat.deepspeed_api.data import DeepSpeedDataLoader
from shardwell.compat.deepspeed_api.module_moves import returned_to
from shardwell.errors import CheckpointError, ShardwellError

if TYPE_CHECKING:
    from shardwell.engine import Engine

    _Base = Engine
else:
    _Base = object


class TagError(CheckpointError, AssertionError):
    """Ranks save under different tags; an AssertionError, as DeepSpeed raises with `tag_validation: "Fail"`."""


class NotAtStage3Error(ShardwellError, ValueError):
    """Weights are not sharded, so nothing is to be consolidated; clients catch the ValueError."""


class EngineFiles(_Base):
    """Saving and loading, for `DeepSpeedEngine`."""

    def save_checkpoint(  # type: ignore[override]
        self,
        save_dir: Any,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the state of training under `save_dir/tag`, by default `global_step<N>`. All ranks must call it."""
        if not save_dir:
            raise ValueError(f"save_checkpoint(save_dir={save_dir!r}): expected the name of a folder")
        if self.global_rank == 0:  # before the ranks meet in the save: then each of them finds the scripts
            from shardwell.compat.deepspeed_api.zero_to_fp32 import write_scripts

            write_scripts(save_dir)
        try:
            with returned_to(self.device, self.module):
                return super().save_checkpoint(
                    save_dir,
                    tag=tag,
                    client_state=dict(client_state or {}),
                    save_latest=save_latest,
                    exclude_frozen_parameters=exclude_frozen_parameters,
                )
        except CheckpointError as error:
            if "save_checkpoint: tag: rank" in str(error):
                raise TagError(str(error)) from None
            raise

    def load_checkpoint(  # type: ignore[override]
        self,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, Any]:
        """Resume; return the path and the client state, or (None, None) where there is no checkpoint."""
        if custom_load_fn is not None:
            raise ShardwellError(
                "load_checkpoint(custom_load_fn=...) is not supported: each rank reads only its own shards. Load with "
                "load_module_strict=False, and change weights afterwards inside zero.GatheredParameters."
            )
        if tag is None and self.load_universal_checkpoint():
            tag = latest_universal(load_dir)  # None if nothing was converted: the latest checkpoint is loaded then
        return super().load_checkpoint(
            load_dir,
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
        )

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the model's whole state on every rank. All ranks must call it."""
        self._check_whole("module_state_dict")
        with returned_to(self.device, self.module):
            found = self.state_dict(prefix=prefix)
        if exclude_frozen_parameters:
            frozen = {prefix + name for name, p in self._all_names() if not p.requires_grad}
            found = {name: value for name, value in found.items() if name not in frozen}
        if destination is not None:
            destination.update(found)
            return cast(dict[str, Any], destination)
        return found

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any] | None = None,
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        *,
        checkpoint: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Load a whole state dictionary, also as the entry `module` of a checkpoint. All ranks must pass the same."""
        given = checkpoint if state_dict is None else state_dict
        if given is None:
            raise ShardwellError(
                "load_module_state_dict needs a state dictionary, or a checkpoint with one as 'module'"
            )
        inner = given.get("module")
        values: Mapping[str, Any] = inner if isinstance(inner, Mapping) else given
        if custom_load_fn is not None:
            from shardwell.zero import GatheredParameters

            with GatheredParameters(list(self.module.parameters()), modifier_rank=0):
                custom_load_fn(src=values, dst=self.module)
            return
        self.load_state_dict(values, strict=strict)

    # The names of files in DeepSpeed's own layout, which `shardwell checkpoint export --format deepspeed` writes.

    def _get_ckpt_name(self, checkpoints_path: Any, tag: Any, mp_placeholder: str | None = None) -> str:
        folder, model = os.path.join(checkpoints_path, str(tag)), mp_placeholder or "00"
        if self.zero_optimization_stage() < 3:
            return names.get_model_ckpt_name_for_rank(folder, model)
        prefix = f"{names.ZERO_FILE_PREFIX}{self.global_rank}_{names.MODEL_FILE_PREFIX}{model}"
        return os.path.join(folder, prefix + names.MODEL_FILE_SUFFIX)

    def _get_zero_ckpt_name(self, checkpoints_path: Any, tag: Any) -> str:
        prefix = "bf16_" if self.settings.bf16.enabled else ""
        name = names.get_zero_ckpt_name_for_rank("", self.global_rank, 0)
        return os.path.join(checkpoints_path, str(tag), prefix + name)

    def _get_optimizer_ckpt_name(self, checkpoints_path: Any, tag: Any, expp_rank: int) -> str:
        name = f"expp_rank_{expp_rank}_{names.MODEL_FILE_PREFIX}00{names.OPTIM_FILE_SUFFIX}"
        return os.path.join(checkpoints_path, str(tag), name)

    def _change_recovery_script_permissions(self, dst: Any) -> None:
        from shardwell.compat.deepspeed_api.zero_to_fp32 import make_executable

        make_executable(dst)

    def _all_names(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters(remove_duplicate=False))

    # ---------------------------------------------------------------------------------------------- whole weights

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return the whole weights on rank 0 and None elsewhere, at stage 3. All ranks must call it."""
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return the whole weights on rank 0 and None elsewhere, at stage 3. All ranks must call it.

        The dictionary is a new one at every call, since clients empty it. Where it fails, the error is no ValueError,
        which clients take for "told not to gather".
        """
        self._check_whole("the consolidated state dict")
        if self.zero_optimization_stage() != 3:
            raise NotAtStage3Error(
                "only at ZeRO stage 3 weights are sharded; at the other stages model.state_dict() has them whole"
            )
        try:
            found = self.state_dict(rank0_only=True)
        except ValueError as error:
            raise CheckpointError(f"the weights could not be gathered: {type(error).__name__}: {error}") from error
        if self.global_rank != 0:
            return None
        if exclude_frozen_parameters:
            frozen = {name for name, parameter in self._all_names() if not parameter.requires_grad}
            found = {name: value for name, value in found.items() if name not in frozen}
        return OrderedDict(found)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return whether clients may gather the weights when they save: as the configuration says."""
        key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        return bool(self.settings.inert_keys.get(key, False))

    def save_16bit_model(
        self, save_dir: Any, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole weights to one file, which rank 0 does. All ranks must call it.

        Return False if the configuration forbids to gather them. A file name that ends with `.safetensors` is one.
        """
        self._check_whole("save_16bit_model")
        if self.zero_optimization_stage() == 3:
            if not self.zero_gather_16bit_weights_on_model_save():
                return False
            found = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        else:
            found = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        if self.global_rank == 0 and found is not None:
            os.makedirs(save_dir, exist_ok=True)
            _write(found, os.path.join(save_dir, save_filename))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        return True

    def _check_whole(self, what: str) -> None:
        """Refuse what is of the whole model where this rank has some stages of it."""
        if self._checkpoints.parts.is_divided:
            raise ShardwellError(
                f"{what} is of the whole model, and in a pipeline a rank has its own stages only: call "
                "save_checkpoint, and convert it by `shardwell checkpoint export` or zero_to_fp32.py; "
                "engine.state_dict() has this rank's layers"
            )

    def save_fp16_model(self, save_dir: Any, save_filename: str = "pytorch_model.bin") -> bool:
        """Do what `save_16bit_model` does, under its old name."""
        return self.save_16bit_model(save_dir, save_filename)

    # -------------------------------------------------------------------------------------------------------- data

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Return a loader of this rank's share of a data set; in the order of the data set unless for training."""
        if data_sampler is None and route in ("eval", "predict"):
            data_sampler = DistributedSampler(dataset, self.data_size, self.data_rank, shuffle=False)
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            pin_memory=pin_memory,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            tput_timer=None,
            collate_fn=collate_fn or getattr(self, "collate_fn", None),
            num_local_io_workers=num_local_io_workers,
            data_sampler=data_sampler,
            data_parallel_world_size=self.data_size,
            data_parallel_rank=self.data_rank,
        )


def _write(state: Mapping[str, Tensor], path: str) -> None:
    """Write weights in the format that the file name asks for."""
    if path.endswith(".safetensors"):
        from safetensors.torch import save_file

        save_file({name: value.contiguous() for name, value in state.items()}, path, metadata={"format": "pt"})
    else:
        torch.save(OrderedDict(state), path)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return nested containers with clones of their tensors, which hold no larger storage alive."""
    if isinstance(item, Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    if isinstance(item, dict):
        return type(item)({name: clone_tensors_for_torch_save(value, device) for name, value in item.items()})
    return item


__all__ = ["EngineFiles", "NotAtStage3Error", "clone_tensors_for_torch_save"]
