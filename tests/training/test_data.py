"""Packed data: what was written is read again, damage is refused, and the order is arithmetic."""

from __future__ import annotations

import json

import numpy as np
import pytest

from microllm.errors import DataError, TextError
from microllm.ops.cross_entropy import IGNORE
from microllm.training import PackConfig, pack_data
from microllm.training.dataset import Dataset, _order, open_index
from microllm.training.pack import MASKED, START, open_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def documents(data):
    found = []
    for token in (int(t) for t in data._read(0, data.num_tokens)):
        if token & START:
            found.append([])
        found[-1].append(token & (MASKED - 1))
    return found


def test_documents_come_back_as_text(packed, text):
    index = open_index(packed)
    tokenizer = open_tokenizer(str(packed))
    found = [
        tokenizer.decode(ids).strip()
        for split in ("train", "validation")
        for ids in documents(Dataset(index, split, 32))
    ]
    assert sorted(found) == sorted(text.read_text().strip().split("\n\n"))
    assert len(index.content["splits"]["train"]) > 1  # several shards
    assert index.content["splits"]["validation"]


def test_every_document_ends_with_the_end_and_has_it_as_a_target(packed):
    data = Dataset(open_index(packed), "train", 32)
    (end,) = data_eos = open_index(packed).content["eos_ids"]
    assert all(ids[-1] == end and ids.count(end) == 1 for ids in documents(data))
    assert data_eos
    batch = data.batch(list(range(data.num_rows)), data.num_rows)
    assert (batch.targets_N == end).sum() == sum(len(ids) > 1 for ids in documents(data))


def test_a_batch_says_where_documents_begin(packed):
    data = Dataset(open_index(packed), "train", 32)
    rows = data.batch([0, data.num_rows - 1], 3)
    N = rows.token_ids_N.numel()
    assert N == 3 * 32
    assert rows.starts_E[0] == 0
    assert rows.starts_E[-1] == N
    assert (rows.starts_E.diff() >= 0).all()
    begins = set(rows.starts_E.tolist()) - {N}
    assert {0, 32, 64} <= begins  # a row is never joined to the one before
    assert {i for i, p in enumerate(rows.positions_N.tolist()) if p == 0} == begins
    last = [s - 1 for s in begins if s] + [N - 1]
    assert (rows.targets_N[sorted(last)] == IGNORE).sum() >= len(last) - 3  # but for documents that a row's end cuts
    assert (rows.targets_N[64:] == IGNORE).all()  # the third row is padding
    assert rows.weights_N.equal((rows.targets_N != IGNORE).float())


def test_rows_cover_every_token_once(packed):
    index = open_index(packed)
    for whole in (False, True):
        data = Dataset(index, "train", 32, whole=whole)
        assert sum(data.length(row) for row in range(data.num_rows)) == data.num_tokens
        assert max(data.length(row) for row in range(data.num_rows)) <= 32
    cut = Dataset(index, "train", 128, whole=True)
    starts = set(np.cumsum([0] + [len(ids) for ids in documents(cut)]).tolist())
    lengths = {len(ids) for ids in documents(cut)}
    assert max(lengths) <= 128  # none of these documents is longer than a row
    assert {int(b) for b in cut._bounds} <= starts


def test_order_is_a_function_of_seed_and_place(packed):
    data = Dataset(open_index(packed), "train", 32)
    epoch = [row for step in range(data.num_rows) for row in data.rows_of_step(step, 1, 3)]
    assert sorted(epoch) == list(range(data.num_rows))
    assert data.rows_of_step(2, 4, 3) == epoch[8:12]  # any batch size walks the same order
    assert data.rows_of_step(0, data.num_rows, 4) != epoch
    following = data.rows_of_step(1, data.num_rows, 3)
    assert sorted(following) == sorted(epoch) != following != epoch
    # Fixed for good: numpy promises the raw stream of its bit generators, and a stable sort has one answer.
    assert _order(3, 1, 8).tolist() == [7, 3, 5, 6, 4, 0, 2, 1]


def chat_tokenizer(tokenizer, tmp_path):
    (tmp_path / "chat").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "chat" / name).write_bytes((tokenizer / name).read_bytes())
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tmp_path / "chat" / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return tmp_path / "chat"


def test_conversations_train_on_answers_alone(tokenizer, tmp_path):
    chats = [
        [{"role": "user", "content": "the king"}, {"role": "assistant", "content": "said unto them"},
         {"role": "user", "content": "water"}, {"role": "assistant", "content": "and stone"}],
        [{"role": "user", "content": "a day"}],
    ]  # fmt: skip
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    where = chat_tokenizer(tokenizer, tmp_path)
    pack_data(PackConfig(input=(path,), output=tmp_path / "data", tokenizer=str(where), validation_fraction=0))
    data = Dataset(open_index(tmp_path / "data"), "train", 64)
    rows = data.batch([0], 1)
    said = rows.targets_N[rows.targets_N != IGNORE].tolist()
    assert open_tokenizer(str(where)).decode(said) == "said unto them</>and stone</>"


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, tmp_path):
    where = chat_tokenizer(tokenizer, tmp_path)
    config = json.loads((where / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages|length }}" + TEMPLATE
    (where / "tokenizer_config.json").write_text(json.dumps(config))
    path = tmp_path / "chats.jsonl"
    turns = [{"role": r, "content": "day"} for r in ("user", "assistant", "user", "assistant")]
    path.write_text(json.dumps({"messages": turns}))
    with pytest.raises(DataError, match="writes otherwise"):
        pack_data(PackConfig(input=(path,), output=tmp_path / "data", tokenizer=str(where)))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("name", "content", "need"),
    [
        ("a.jsonl", b'{"text": 3}\n', "a.jsonl:1"),
        ("a.jsonl", b'{"text": "day"}\n{"text"\n', "a.jsonl:2"),
        ("a.jsonl", b"[" * 100_000, "need JSON"),
        ("a.jsonl", b'{"messages": [{"content": "x"}]}\n', "role"),
        ("a.txt", b"day \xff\n", "UTF-8"),
        ("a.txt", b" \n\n", "no document"),
        ("a.txt", None, "need that file"),
    ],
)
def test_odd_input_is_refused_by_place(name, content, need, tokenizer, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((DataError, TextError), match=need):
        pack_data(PackConfig(
            input=(tmp_path / name,), output=tmp_path / "data", tokenizer=str(tokenizer), documents="paragraph",
            validation_fraction=0,
        ))  # fmt: skip
    assert not (tmp_path / "data").exists()
    assert not list(tmp_path.glob(".data*"))


def test_output_that_is_not_empty_is_refused(text, tokenizer, packed):
    with pytest.raises(DataError, match="not empty"):
        pack_data(PackConfig(input=(text,), output=packed, tokenizer=str(tokenizer)))


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "tokenizer", "version", "index"])
def test_damaged_data_is_refused(damage, packed, tmp_path):
    copy = tmp_path / "data"
    copy.mkdir()
    for path in packed.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    shard = copy / "train-00000.tokens"
    match damage:
        case "flip":
            data = bytearray(shard.read_bytes())
            data[9] ^= 1
            shard.write_bytes(data)
        case "cut":
            shard.write_bytes(shard.read_bytes()[:-4])
        case "gone":
            shard.unlink()
        case "tokenizer":
            (copy / "tokenizer.json").write_text("{}")
        case "version":
            index = json.loads((copy / "index.json").read_text())
            (copy / "index.json").write_text(json.dumps(index | {"format_version": 2}))
        case "index":
            (copy / "index.json").write_text('{"format_version": 1, "splits": 3}')
    with pytest.raises(DataError, match="pack"):
        open_index(copy)
