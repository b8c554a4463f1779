"""Layouts in which large models were trained, as their authors published them: `shardwell plan NAME --as-published`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwell.errors import ConfigError


@dataclass(frozen=True)
class PublishedLayout:
    """The GPUs and the axes of a training run; what is left of the ranks shards optimizer state (stage 1)."""

    gpu: str
    gpus: int
    nodes: int
    tensor: int
    pipe: int
    micro_batch: int
    accumulation: int
    sequence: int
    source: str

    def config(self) -> dict[str, Any]:
        """Return the configuration of this layout."""
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 1},
            "tensor_parallel": {"autotp_size": self.tensor},
            **({"pipeline": {"stages": self.pipe, "partition": "uniform"}} if self.pipe > 1 else {}),
        }


LAYOUTS: dict[str, PublishedLayout] = {
    "turing-nlg-17b": PublishedLayout(
        "v100-32gb", 256, 16, 4, 1, 8, 1, 1024, "arXiv 1910.02054 and Microsoft's post on Turing-NLG, 2020"
    ),
    "bloom-176b": PublishedLayout("a100-80gb", 384, 48, 4, 12, 2, 128, 2048, "arXiv 2211.05100, section 3.4"),
    "mt-nlg-530b": PublishedLayout("a100-80gb", 2240, 280, 8, 35, 1, 240, 2048, "arXiv 2201.11990, section 2.3"),
}


def layout_of(model: str) -> PublishedLayout:
    """Return the layout of a preset."""
    if model.lower() not in LAYOUTS:
        raise ConfigError(f"--as-published: no layout of {model!r} is known. Known are {', '.join(LAYOUTS)}.")
    return LAYOUTS[model.lower()]
