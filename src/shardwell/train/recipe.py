"""The options of `shardwell train`, as frozen types: from a YAML or JSON file, and from the command line."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, ValidationInfo, field_validator

from shardwell.config.source import text_of
from shardwell.config.text import Object, parse
from shardwell.errors import ConfigError

Method = Literal["full", "lora"]
_MOST_VALUES = 1_000_000  # in a file
_MOST = 2**31 - 1  # of a count


Count = Annotated[int, Field(ge=1, le=_MOST)]


class RecipeBlock(BaseModel):
    """A part of a recipe; it is frozen, and refuses keys that it does not list."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where an option is no flag: they would be 1 and 0."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and kind is not bool and bool not in get_args(kind):
            raise ValueError(f"expected no flag, found {str(value).lower()}")
        return value


class LoraOptions(RecipeBlock):
    """The adapter that `method: lora` trains."""

    rank: Count = Field(default=16, description="Rank of the two factors.")
    alpha: PositiveFloat = Field(default=32.0, description="The update is scaled by alpha / rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout before the first factor.")
    target_modules: str | list[str] = Field(
        default="all-linear", description="Names of the modules that get an adapter, or all-linear."
    )


class Recipe(RecipeBlock):
    """One training run."""

    model: str | None = Field(default=None, description="Folder of a Hugging Face model to start from.")
    model_config_file: str | dict[str, Any] | None = Field(
        default=None,
        alias="new_model",
        description="Configuration of a new model to pre-train: a config.json, or its content.",
    )
    tokenizer: str | None = Field(
        default=None, description="Folder of the tokenizer; null = the model's, or bytes for a new model."
    )
    data: list[str] = Field(default=[], description="Files or folders: .txt, .jsonl, .json, .parquet.")
    eval_data: list[str] = Field(default=[], description="Files to evaluate on, like data.")
    text_field: str = Field(default="text", description="The key of plain text in jsonl and parquet.")
    sequence_length: int = Field(default=1024, ge=2, le=_MOST, description="Tokens in a row of a batch.")
    packing: bool = Field(default=True, description="Put several documents into a row, each blind to the others.")
    method: Method = Field(default="full", description="full: train all weights; lora: train an adapter.")
    lora: LoraOptions = Field(default=LoraOptions(), description="The adapter of method lora.")
    epochs: PositiveFloat = Field(default=1.0, le=1e9, description="Passes over the data, unless steps is given.")
    steps: Count | None = Field(default=None, description="Optimizer steps.")
    micro_batch: Count = Field(default=1, description="Rows of a rank in one forward.")
    accumulation: Count = Field(default=1, description="Micro-batches of a step.")
    learning_rate: PositiveFloat | None = Field(
        default=None, description="Highest rate; null = 1e-5 for full, 2e-4 for lora, 3e-4 for a new model."
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="How the rate falls.")
    warmup_steps: int | None = Field(
        default=None, ge=0, le=_MOST, description="Steps to the highest rate; null = 3% of all."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Of AdamW.")
    clip: float = Field(default=1.0, ge=0, description="Largest norm of the gradients; 0 = no clipping.")
    precision: Literal["auto", "bf16", "fp32"] = Field(
        default="auto", description="auto = bf16 on a GPU, fp32 on the CPU."
    )
    checkpoint_activations: bool | None = Field(
        default=None, description="Recompute blocks in backward; null = if memory asks for it."
    )
    config: str | dict[str, Any] | None = Field(
        default=None, description="shardwell's JSON configuration, a file or its content; it takes precedence."
    )
    memory: str | None = Field(
        default=None, description="Memory of each device, such as 24GB: stage and offloading are chosen to fit."
    )
    nvme_path: str | None = Field(default=None, description="Folder on an NVMe disk that memory may choose.")
    seed: int = Field(default=0, ge=-(2**63), le=2**63 - 1, description="Of new weights and of the order of the data.")
    log_every: Count = Field(default=10, description="Steps between two lines of progress.")
    eval_every: Count | None = Field(default=None, description="Steps between evaluations; null = at the end.")
    save_every: Count | None = Field(
        default=500, description="Steps between checkpoints, from which an interrupted run goes on; null = at the end."
    )
    keep_last: Count = Field(default=2, description="Checkpoints to keep.")
    output: str = Field(default="shardwell-train", description="Folder of checkpoints, data and the exported model.")
    resume: bool = Field(default=True, description="Go on from the last checkpoint in output.")
    export: bool = Field(default=True, description="Write output/model at the end, for from_pretrained.")
    merge: bool = Field(default=False, description="Export the adapter merged into its base model.")
    prompts: list[str] = Field(default=[], description="Print what the model writes after these, before and after.")
    sample_tokens: Count = Field(default=64, description="Tokens of such a sample.")

    @property
    def is_new(self) -> bool:
        """Whether a new model is trained."""
        return self.model is None

    @property
    def rate(self) -> float:
        """The highest learning rate."""
        return self.learning_rate or (2e-4 if self.method == "lora" else 3e-4 if self.is_new else 1e-5)

    def to_dict(self) -> dict[str, Any]:
        """Return all options as plain values, by the names that a file has."""
        return self.model_dump(by_alias=True)


_WHAT_IS_TRAINED = ("model", "new_model", "tokenizer", "method", "lora")


def check_same_run(recipe: Recipe, output: Path) -> None:
    """Raise if a folder has the run of another model or method: its checkpoints would not fit."""
    place = output / "recipe.json"
    if not recipe.resume or not place.is_file():
        return
    try:
        before, now = parse(text_of(place), str(place)), recipe.to_dict()
    except ConfigError as error:
        raise ConfigError(f"{error}: it is not the recipe of a run; choose another --output") from None
    differing = [name for name in _WHAT_IS_TRAINED if _place(before.get(name)) != _place(now[name])]
    if differing:
        raise ConfigError(
            f"--output {output}: has a run with another {' and '.join(differing)}; choose another folder, or delete it "
            "to begin anew"
        )


def _place(value: object) -> object:
    """Return what a path leads to, however it is written; other values as they are."""
    return os.path.abspath(value) if isinstance(value, str) else value


def keep_recipe(recipe: Recipe, output: Path) -> None:
    """Write the recipe of a run into its folder."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "recipe.json").write_text(json.dumps(recipe.to_dict(), indent=1), encoding="utf-8")


def read_recipe(path: str | None, given: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a file with options of the command line over it. Every problem comes in one error."""
    content = {} if path is None else _read(Path(path))
    try:
        recipe = Recipe.model_validate({**content, **given})
    except ValidationError as error:
        known = ", ".join(name for name, _ in described())
        problems = [
            f"{'.'.join(map(str, one['loc']))}: "
            + (f"unknown option; the options are: {known}" if one["type"] == "extra_forbidden" else one["msg"])
            for one in error.errors()
        ]
        raise ConfigError(f"{path or 'shardwell train'}: {'; '.join(problems)}") from None
    _check(recipe)
    return recipe


def described() -> list[tuple[str, str]]:
    """Return every option with its description, by the names that a file has."""
    fields = Recipe.model_fields.items()
    return [(field.alias or name, field.description or "") for name, field in fields]


def as_yaml(recipe: Recipe) -> str:
    """Return a recipe as text that can be edited: YAML in which every option has its description."""
    lines = []
    words = dict(described())
    for name, value in recipe.to_dict().items():
        lines.append(f"# {words[name]}\n{name}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


_HUB = ": a model is a folder here; `hf download OWNER/NAME --local-dir FOLDER` gets one from the Hugging Face Hub"


def _check(recipe: Recipe) -> None:
    if (recipe.model is None) == (recipe.model_config_file is None):
        raise ConfigError(
            "a run needs either --model, the folder of a Hugging Face model, or --new-model, the config.json of a new "
            "one. To see a run first: shardwell train --demo"
        )
    if not recipe.data:
        raise ConfigError("a run needs data: --data FILE, with text (.txt), .jsonl, .json or .parquet files")
    if recipe.is_new and recipe.method == "lora":
        raise ConfigError("method lora trains an adapter of a model that exists: give --model, or use method full")
    if recipe.config is not None and recipe.memory is not None:
        raise ConfigError("--config and --memory both say where states are stored: give one of them")
    for path in [*recipe.data, *recipe.eval_data, *([recipe.model] if recipe.model is not None else [])]:
        hub = _HUB if path == recipe.model else ""
        try:
            kind = stat.S_IFMT(os.stat(path).st_mode)
        except FileNotFoundError:
            raise ConfigError(f"there is no file or folder '{path}'{hub}") from None
        except (OSError, ValueError) as error:  # NUL, or a character that no file system has
            raise ConfigError(f"'{path}' cannot be read ({getattr(error, 'strerror', None) or error})") from None
        if kind not in (stat.S_IFREG, stat.S_IFDIR):
            raise ConfigError(f"'{path}' is neither a file nor a folder")


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON or YAML file. YAML is read without tags, so that it can only hold values."""
    text = text_of(path)
    if path.suffix == ".json":
        found: Any = parse(text, str(path))
    else:
        yaml = _yaml()
        try:
            found = yaml.load(text, Loader=_loader(yaml))
        except RecursionError:
            raise ConfigError(f"{path}: nested too deeply to be a recipe") from None
        except (yaml.YAMLError, ValueError) as error:  # a date that no calendar has is a ValueError
            raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected options by name, found a {type(found).__name__}")
    _check_values(found, path)
    return dict(found)


def _loader(yaml: Any) -> Any:
    """Return a loader of plain values whose objects remember the keys that are written more than once."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """YAML's plain values."""

    def mapping(loader: Any, node: Any) -> Iterator[Object]:
        found = Object([])
        yield found  # before its values, which may refer to it
        names = Counter((key.tag, key.value) for key, _ in node.value if isinstance(key.value, str))
        found.repeated = {name: times for (_, name), times in names.items() if times > 1}
        found.update(loader.construct_mapping(node))

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return Loader


def _check_values(found: dict[str, Any], path: Path) -> None:
    """Refuse keys that are written twice, and references of YAML that stand for more values than a recipe has."""
    left: list[Any] = [found]
    number = 0
    while left:
        one, number = left.pop(), number + 1
        if number > _MOST_VALUES:
            raise ConfigError(f"{path}: more than {_MOST_VALUES:,} values, too many to be a recipe")
        for name, times in getattr(one, "repeated", {}).items():
            raise ConfigError(f"{path}: {name} is written {times} times in the same object; keep one")
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()


def _yaml() -> Any:
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ModuleNotFoundError:
        raise ConfigError("YAML needs the package pyyaml: pip install pyyaml, or write the recipe as JSON") from None
    return yaml
