"""Models and tokenizers of a recipe: from a Hugging Face folder, or new; with an adapter for method lora."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwell.errors import ConfigError, ShardwellError
from shardwell.train.recipe import Recipe

END, PAD = "<|end|>", "<|pad|>"
# For new models: a chat is turns, each of them marked with its role and ended.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def transformers() -> Any:
    """Return the package transformers, or say how to install it."""
    try:
        found: Any = importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise ShardwellError("shardwell train needs transformers and peft: pip install 'shardwell[train]'") from None
    found.utils.logging.disable_progress_bar()
    return found


def make_tokenizer(recipe: Recipe) -> Any:
    """Return the tokenizer of a folder, or of bytes; it has a token for padding."""
    source = recipe.tokenizer or recipe.model
    if source is None:
        tokenizer = byte_tokenizer()
    else:
        read = transformers().AutoTokenizer.from_pretrained
        tokenizer = _read("tokenizer", source, partial(read, source, trust_remote_code=False))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def byte_tokenizer() -> Any:
    """Return a tokenizer whose tokens are the 256 bytes, the end of a document, and padding."""
    hf = transformers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def model_config(recipe: Recipe, tokenizer: Any) -> Any:
    """Return the configuration of the model."""
    hf = transformers()
    if recipe.model is not None:
        read = hf.AutoConfig.from_pretrained
        return _read("model", recipe.model, partial(read, recipe.model, trust_remote_code=False))
    given = recipe.model_config_file
    content = dict(given) if isinstance(given, dict) else _config_file(str(given))
    kind = content.pop("model_type", None)
    if kind is None:
        raise ConfigError('new_model: has no "model_type", such as "llama"')
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    given = {**tokens, "pad_token_id": tokenizer.pad_token_id, **content}
    return _read("new_model", str(kind), partial(hf.AutoConfig.for_model, kind, **given))


def _read(what: str, source: str, read: Callable[[], Any]) -> Any:
    """Return what Transformers makes of files; whatever it raises about them is one sentence. Their code is not run."""
    try:
        return read()
    except Exception as error:
        words = " ".join(str(error).split())
        raise ConfigError(f"{what}: '{source}' cannot be used ({type(error).__name__}: {words[:500]})") from error


def _config_file(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"new_model: '{path}' cannot be read as JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"new_model: '{path}' holds a {type(found).__name__}, expected the content of a config.json")
    return found


def empty_model(recipe: Recipe, config: Any) -> Any:
    """Return the model without memory, to count its parameters."""
    with torch.device("meta"):
        return _adapted(transformers().AutoModelForCausalLM.from_config(config), recipe)


def make_model(recipe: Recipe, config: Any, dtype: torch.dtype) -> Any:
    """Return the model; inside `zero.Init` its parameters are sharded as they are made or read.

    Weights that are trained are read in fp32. Those below an adapter are frozen, and stay in the dtype of computation.
    """
    hf = transformers()
    torch.manual_seed(recipe.seed)
    if recipe.model is None:
        model = hf.AutoModelForCausalLM.from_config(config)
    else:
        read = dtype if recipe.method == "lora" else torch.float32
        load = hf.AutoModelForCausalLM.from_pretrained
        try:
            model = load(recipe.model, dtype=read, trust_remote_code=False)
        except Exception as error:
            if not isinstance(error, OSError | ValueError) and type(error).__name__ != "SafetensorError":
                raise  # what is wrong is not the files
            words = " ".join(str(error).split())
            raise ConfigError(f"model: '{recipe.model}' cannot be read ({words[:500]})") from error
    model.config.use_cache = False
    return model


def _adapted(model: Any, recipe: Recipe) -> Any:
    if recipe.method != "lora":
        return model
    try:
        peft: Any = importlib.import_module("peft")
    except ModuleNotFoundError:
        raise ShardwellError("method lora needs peft: pip install 'shardwell[train]'") from None
    options = recipe.lora
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=options.target_modules,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


def adapt(model: Any, recipe: Recipe, *, recomputes: bool) -> Any:
    """Return the model with its adapter, if it is to have one, and with recomputation of its blocks."""
    adapted = _adapted(model, recipe)
    if recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return adapted
