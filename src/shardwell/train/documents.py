"""Documents from files: tokens, and which of them are trained on.

Plain text is trained on entirely. Of prompts and chats only the answers are: every token of a model's turn, with the
one that ends it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardwell.errors import ShardwellError

SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet")
_PAIRS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer"))
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # as JSON escapes halves of pairs
_CHATS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant"}  # of another common spelling of chats


@dataclass(frozen=True)
class Document:
    """The tokens of a document, and for each whether it is trained on."""

    tokens: list[int]
    is_trained: list[bool]
    is_text: bool = False  # it may be cut anywhere


def files_of(paths: list[str]) -> list[Path]:
    """Return the files that are named, and those in folders that are named, in order of their names."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES) if path.is_dir() else [path]
        found += (file for file in inside if not file.is_dir())
    if not found:
        raise ShardwellError(f"there are no {', '.join(SUFFIXES)} files in {', '.join(paths)}")
    if strange := [file for file in found if not file.is_file()]:
        raise ShardwellError(f"{strange[0]}: is no file, but a link to nothing, a pipe or a device; remove it")
    return found


def records_of(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the records of a file, each with its place: text as it is, objects of JSON lines, rows of parquet."""
    try:
        yield from _records(file)
    except UnicodeDecodeError as error:
        words = f"{error.reason} at byte {error.start} of a line or of the file"
        raise ShardwellError(f"{file}: not text in UTF-8 ({words})") from None
    except OSError as error:
        raise ShardwellError(f"{file}: cannot be read ({error.strerror or error})") from None


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    match file.suffix:
        case ".parquet":
            yield from _parquet(file)
        case ".jsonl":
            with file.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield f"{file}, line {number}", _json(line, f"{file}, line {number}")
        case ".json":
            content = _json(file.read_text(encoding="utf-8"), str(file))
            records = content if isinstance(content, list) else [content]
            yield from ((f"{file}, record {number}", one) for number, one in enumerate(records, start=1))
        case _:
            yield str(file), file.read_text(encoding="utf-8")


def document(record: Any, tokenizer: Any, where: str, text_field: str = "text") -> Document:
    """Return the document of a record: text, a prompt with its response, or messages of a chat."""
    if isinstance(record, str):
        return _text(record, tokenizer)
    if not isinstance(record, Mapping):
        raise ShardwellError(f"{where}: expected text or an object, found a {type(record).__name__}")
    for name in _CHATS:
        if isinstance(record.get(name), list):
            return _chat([_message(one, where) for one in record[name]], tokenizer, where)
    for asked, answered in _PAIRS:
        if isinstance(record.get(asked), str) and isinstance(record.get(answered), str):
            prompt = record[asked] + (f"\n\n{record['input']}" if record.get("input") else "")
            return _pair(prompt, record[answered], tokenizer, where)
    if isinstance(record.get(text_field), str):
        return _text(record[text_field], tokenizer)
    pairs = ", ".join(f"{asked}/{answered}" for asked, answered in _PAIRS)
    raise ShardwellError(
        f"{where}: found the keys {', '.join(map(str, record))}, expected messages, {pairs} or {text_field!r} "
        "(--set text_field=KEY names another one)"
    )


def _text(text: str, tokenizer: Any) -> Document:
    tokens = [*tokenizer(text, add_special_tokens=True)["input_ids"]]
    end = tokenizer.eos_token_id
    if end is not None and (not tokens or tokens[-1] != end):
        tokens.append(end)
    return Document(tokens, [True] * len(tokens), is_text=True)


def _pair(prompt: str, response: str, tokenizer: Any, where: str) -> Document:
    """Return a prompt and its response: as a chat of two messages if the tokenizer has a chat template."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return _chat(messages, tokenizer, where)
    asked = [*tokenizer(prompt, add_special_tokens=True)["input_ids"]]
    end = tokenizer.eos_token_id
    if asked and asked[-1] == end:
        asked.pop()
    answered = [*tokenizer(response, add_special_tokens=False)["input_ids"], *([] if end is None else [end])]
    return Document([*asked, *answered], [*[False] * len(asked), *[True] * len(answered)])


def _message(one: Any, where: str) -> dict[str, str]:
    role = one.get("role", one.get("from")) if isinstance(one, Mapping) else None
    content = one.get("content", one.get("value")) if isinstance(one, Mapping) else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise ShardwellError(f"{where}: expected messages with a role and a content, found {one!r}")
    return {"role": _ROLES.get(role, role), "content": content}


def _chat(messages: list[dict[str, str]], tokenizer: Any, where: str) -> Document:
    """Return a chat as the model's template writes it; trained are the tokens that each answer adds to its question.

    The template is applied to the chat before an answer, with the start of an answer, and to the chat with the answer.
    What the second has more is what the model must write.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ShardwellError(
            f"{where}: has messages, but the tokenizer has no chat template; give a tokenizer that has one "
            "(--set tokenizer=FOLDER), or write prompt and response"
        )
    answers = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
    if not answers:
        raise ShardwellError(f"{where}: no message has the role assistant, so there is nothing to train on")
    tokens = _applied(tokenizer, messages[: answers[-1] + 1], adds_start=False)
    is_trained = [False] * len(tokens)
    for number in answers:
        before = _applied(tokenizer, messages[:number], adds_start=True)
        upto = _applied(tokenizer, messages[: number + 1], adds_start=False)
        for part, whole in pairwise((before, upto, tokens)):
            if whole[: len(part)] != part:
                raise ShardwellError(
                    f"{where}: the chat template does not write a chat as the beginning of a longer one, so answers "
                    "cannot be told from questions; write prompt and response"
                )
        is_trained[len(before) : len(upto)] = [True] * (len(upto) - len(before))
    return Document(tokens, is_trained)


def _applied(tokenizer: Any, messages: list[dict[str, str]], *, adds_start: bool) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=adds_start)
    return [*tokenizer(text, add_special_tokens=False)["input_ids"]]


def _json(text: str, where: str) -> Any:
    try:
        found = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError:
        raise ShardwellError(f"{where}: has half of a surrogate pair, which is no character") from None
    except (ValueError, RecursionError) as error:
        words = "nested too deeply" if isinstance(error, RecursionError) else f"not JSON: {error}"
        raise ShardwellError(f"{where}: {words}") from None


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ModuleNotFoundError:
        raise ShardwellError("parquet needs the package pyarrow: pip install pyarrow") from None
    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", row
    except ArrowException as error:
        raise ShardwellError(f"{file}: cannot be read as parquet ({' '.join(str(error).split())})") from None
