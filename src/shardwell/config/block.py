"""The base of all blocks of the configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ConfigBlock(BaseModel):
    """One JSON object of the configuration; it is frozen, and refuses keys that it does not list."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
