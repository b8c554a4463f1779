"""Rows of tokens from files: answers alone are labels, and documents of a row do not see each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.train.documents import Document, document, files_of, records_of
from shardwell.train.models import byte_tokenizer
from shardwell.train.rows import IGNORED, Rows, opened, pack, prepare

hf = pytest.importorskip("transformers")

CHAT = {
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One and one?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "And one?"},
        {"role": "assistant", "content": "Three."},
        {"role": "user", "content": "Thanks"},
    ]
}


def trained_text(one: Document, tokenizer: Any) -> list[str]:
    """The stretches of a document that are trained on."""
    found, before = [""], False
    for token, is_trained in zip(one.tokens, one.is_trained, strict=True):
        if is_trained:
            found[-1] += tokenizer.decode([token])
        elif before:
            found.append("")
        before = is_trained
    return [text for text in found if text]


def test_of_a_chat_the_answers_are_trained_with_their_ends() -> None:
    tokenizer = byte_tokenizer()
    one = document(CHAT, tokenizer, "here")
    assert trained_text(one, tokenizer) == ["Two.<|end|>\n", "Three.<|end|>\n"]
    assert tokenizer.decode(one.tokens).startswith("<|system|>\nBe short.<|end|>\n<|user|>\nOne and one?")


def test_the_mask_is_that_of_a_template_that_marks_generations() -> None:
    tokenizer = byte_tokenizer()
    one = document(CHAT, tokenizer, "here")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] + '<|end|>\n' }}{% endgeneration %}{% else %}{{ m['content'] + '<|end|>\n' }}{% endif %}"
        "{% endfor %}"
    )
    found = tokenizer.apply_chat_template(
        CHAT["messages"][:-1], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert one.tokens == found["input_ids"]
    assert [int(flag) for flag in one.is_trained] == found["assistant_masks"]


@pytest.mark.parametrize("with_template", [True, False])
def test_of_a_prompt_the_response_is_trained(with_template: bool) -> None:
    tokenizer = byte_tokenizer()
    if not with_template:
        tokenizer.chat_template = None
    one = document({"instruction": "Say", "input": "hi", "output": "hi!"}, tokenizer, "here")
    assert trained_text(one, tokenizer) == ["hi!<|end|>\n" if with_template else "hi!<|end|>"]
    assert "Say\n\nhi" in tokenizer.decode(one.tokens)


def test_a_record_that_nobody_understands_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"words": 1}\n')
    records = list(records_of(tmp_path / "a.jsonl"))
    with pytest.raises(ShardwellError, match=r"a.jsonl, line 2: found the keys words, expected messages, prompt/resp"):
        document(records[1][1], byte_tokenizer(), records[1][0])
    with pytest.raises(ShardwellError, match="no message has the role assistant"):
        document({"messages": [{"role": "user", "content": "x"}]}, byte_tokenizer(), "here")
    (tmp_path / "b.jsonl").write_text("{x")
    with pytest.raises(ShardwellError, match=r"b\.jsonl, line 1: not JSON"):
        list(records_of(tmp_path / "b.jsonl"))


def test_all_kinds_of_files_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "two"}) + "\n\n" + json.dumps({"text": "three"}))
    (tmp_path / "c.json").write_text(json.dumps([{"text": "four"}]))
    parquet.write_table(pyarrow.table({"text": ["five", "six"]}), tmp_path / "d.parquet")
    (tmp_path / "e.png").write_text("no")
    found = [one for file in files_of([str(tmp_path)]) for _, one in records_of(file)]
    assert [one if isinstance(one, str) else one["text"] for one in found] == [
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
    ]


def answer(tokens: list[int], num_asked: int = 1) -> Document:
    return Document(tokens, [place >= num_asked for place in range(len(tokens))])


def test_documents_stay_whole_and_text_is_cut() -> None:
    arrays = pack([answer([1, 2, 3]), answer([4, 5]), answer([6, 7, 8, 9]), answer([1] * 9)], 6, packing=True)
    assert arrays["rows"].tolist() == [[0, 5], [5, 9], [9, 15]]  # the last one is longer than a row: cut off
    text = Document(list(range(14)), [True] * 14, is_text=True)
    assert pack([text], 6, packing=True)["rows"].tolist() == [[0, 6], [6, 12], [12, 14]]
    assert pack([answer([1, 2]), answer([3, 4])], 6, packing=False)["rows"].tolist() == [[0, 2], [2, 4]]
    assert pack([answer([1, 2], num_asked=2)], 6, packing=True)["rows"].tolist() == []  # nothing to learn


def test_a_row_has_positions_and_labels_of_each_document() -> None:
    row = Rows(pack([answer([1, 2, 3]), answer([4, 5], 0)], 7, packing=True), 7, pad=0)[0]
    assert row["input_ids"].tolist() == [1, 2, 3, 4, 5, 0, 0]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert row["labels"].tolist() == [IGNORED, 2, 3, IGNORED, 5, IGNORED, IGNORED]


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, num_items_in_batch=torch.ones((), dtype=torch.float64)).loss


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_a_packed_row_has_the_loss_of_its_documents(kind: str) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    more = {} if kind == "gpt2" else {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8}
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **sizes, **more)).double().eval()
    model.config.use_cache = False  # with a cache, Transformers does not look for documents in a row
    documents = [answer([1, 2, 3, 4], 2), answer([5, 6, 7]), answer([8, 9, 10, 11, 12], 3)]
    together = Rows(pack(documents, 16, packing=True), 16, pad=0)
    apart = Rows(pack(documents, 16, packing=False), 16, pad=0)
    packed = loss_of(model, {name: value[None] for name, value in together[0].items()})
    single = sum(
        loss_of(
            model,
            {
                "input_ids": torch.tensor([one.tokens]),
                "labels": torch.tensor(
                    [[t if flag else IGNORED for t, flag in zip(one.tokens, one.is_trained, strict=True)]]
                ),
            },
        )
        for one in documents
    )
    padded = loss_of(model, {name: torch.stack([row[name] for row in apart]) for name in apart[0]})
    torch.testing.assert_close(packed, single)
    torch.testing.assert_close(padded, single)


def test_tokens_are_made_once_for_the_same_files_and_options(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world")
    tokenizer = byte_tokenizer()
    options: dict[str, Any] = {"packing": True, "text_field": "text"}
    first = prepare([str(tmp_path / "a.txt")], tokenizer, tmp_path / "out", 8, **options, writes=True)
    stamp = first.stat().st_mtime_ns
    again = prepare([str(tmp_path / "a.txt")], tokenizer, tmp_path / "out", 8, **options, writes=True)
    assert (again, again.stat().st_mtime_ns) == (first, stamp)
    assert prepare([str(tmp_path / "a.txt")], tokenizer, tmp_path / "out", 4, **options, writes=False) != first
    rows = opened(first, 8, tokenizer.pad_token_id)
    assert tokenizer.decode(rows[0]["input_ids"]) == "hello wo"
