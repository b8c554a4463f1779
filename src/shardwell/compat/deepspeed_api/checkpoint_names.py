"""`deepspeed.checkpoint.constants`: the names of files and of entries in DeepSpeed's own layout of a checkpoint.

Engines write shardwell's own layout. These names are of DeepSpeed's, which `shardwell checkpoint export --format
deepspeed` writes and `load_checkpoint` reads.
"""

from __future__ import annotations

import os

# entries of a file of optimizer states
OPTIMIZER_STATE_DICT, FP32_GROUPS, FP32_FLAT_GROUPS = "optimizer_state_dict", "fp32_groups", "fp32_flat_groups"
BASE_OPTIMIZER_STATE, BASE_OPTIMIZER_STATE_STEP = "base_optimizer_state", "base_optimizer_state_step"
SINGLE_PARTITION_OF_FP32_GROUPS, PARAM_GROUPS = "single_partition_of_fp32_groups", "param_groups"
GROUP_PADDINGS, PARTITION_COUNT, ZERO_STAGE = "group_paddings", "partition_count", "zero_stage"
PARAM_ALIGNMENT_PADDINGS = "param_alignment_paddings"
CLIP_GRAD, FP32_WEIGHT_KEY, LOSS_SCALER = "clip_grad", "fp32", "loss_scaler"

# entries of a file of model states
PARAM, PARAM_SHAPES, BUFFER_NAMES = "param", "param_shapes", "buffer_names"
FROZEN_PARAM_SHAPES, FROZEN_PARAM_FRAGMENTS = "frozen_param_shapes", "frozen_param_fragments"
DS_VERSION = "ds_version"
CHECKPOINT_PARALLEL_DIMS, CHECKPOINT_PP_DEGREE = "checkpoint_parallel_dimensions", "pp_degree"
CHECKPOINT_TP_DEGREE = "tp_degree"

# names of files
MODEL_FILE_PREFIX, MODEL_FILE_SUFFIX = "mp_rank_", "_model_states.pt"
ZERO_FILE_PREFIX, OPTIM_FILE_SUFFIX = "zero_pp_rank_", "_optim_states.pt"
BF16_ZERO_FILE_PREFIX, FP16_ZERO_FILE_PREFIX = "bf16_zero_pp_rank_", "fp16_zero_pp_rank_"
LAYER_FILE_PREFIX = "layer_"

# entries of the universal format
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY, UNIVERSAL_CHECKPOINT_VERSION_VALUE = "universal_checkpoint_version", 0.4
VOCAB_TENSOR, PADDED_VOCAB_SIZE, ORIGINAL_VOCAB_SIZE = "vocab_tensor", "padded_vocab_size", "original_vocab_size"
PARAM_SLICE_MAPPINGS, CAT_DIM, PARAM_N_SUB_PARAMS = "param_slice_mappings", "cat_dim", "param_n_sub_params"
SUB_PARAM_SHAPE, SUB_PARAMS_SHAPE = "sub_param_shape", "sub_params_shape"
VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"
PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
PARAMETER_TO_AVERAGE_PATTERNS = "parameter_to_average_patterns"
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"
PARAMETER_WITH_SUB_PARAMS = "parameter_with_sub_params"


def get_model_ckpt_name_for_rank(base_folder: str | os.PathLike[str], mp_rank_str: str) -> str:
    """Return the file of model states at stages 0 to 2."""
    return os.path.join(base_folder, f"{MODEL_FILE_PREFIX}{mp_rank_str}{MODEL_FILE_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: str | os.PathLike[str], dp_rank: int, mp_rank: int) -> str:
    """Return the file of a rank's optimizer states."""
    return os.path.join(base_folder, f"{ZERO_FILE_PREFIX}{dp_rank}_{MODEL_FILE_PREFIX}{mp_rank:02d}{OPTIM_FILE_SUFFIX}")


def get_layer_ckpt_name_for_rank(base_folder: str | os.PathLike[str], layer_id: str, tp_rank: int) -> str:
    """Return the file of a layer of a pipeline."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}{MODEL_FILE_SUFFIX}")
