"""The trained model as files that `from_pretrained` reads."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from shardwell.checkpoint.export import to_safetensors
from shardwell.checkpoint.sources import open_source
from shardwell.train.recipe import Recipe


def export(recipe: Recipe, output: Path, tokenizer: Any, *, is_first: bool) -> Path:
    """Write output/model from the last checkpoint, on rank 0; return the folder.

    An adapter is written as peft reads it, unless the recipe merges it into its base model.
    """
    place = output / "model"
    if is_first:
        if place.exists():
            shutil.rmtree(place)  # an export of an earlier run of this recipe
        with tempfile.TemporaryDirectory() as folder, closing(open_source(output / "checkpoints")) as source:
            tokenizer.save_pretrained(folder)
            to_safetensors(source, place, merges=recipe.merge, tokenizer=folder)
    return place
