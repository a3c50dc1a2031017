"""Receipts: any change of any field is caught, the chain holds, a kill leaves whole lines."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from dataclasses import replace

import pytest

from microllm.errors import EvidenceError
from microllm.evidence.environment import capture_environment, command_line, environment_drift, read_commit
from microllm.evidence.journal import append_line, canonical_json, finite_json, read_lines, write_atomic
from microllm.evidence.receipt import GENESIS, append_receipt, make_receipt, parse_receipt, read_receipts, verify_chain

BODY = {
    "verdict": {"status": "keep", "effect": 0.0125, "processes": 6, "confirmed": True},
    "metrics": [0.1, {"kl": 1e-9, "nan": math.nan, "inf": -math.inf}, None, "text", ["ünïcode", []]],
    "empty": {},
}


@pytest.fixture(scope="module")
def environment():
    return capture_environment("cpu", seed=11, command=("microllm", "lab", "run"))


@pytest.fixture(scope="module")
def chain(environment, tmp_path_factory):
    path = tmp_path_factory.mktemp("chain") / "receipts.jsonl"
    for number in range(3):
        append_receipt(path, "session", {**BODY, "number": number}, environment, genesis="a" * 64)
    return path


def leaves(value, path=()):
    """Yield the path of every leaf, and of every container, in JSON data."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))


def changed(value):
    """Return something else of the same type: one character, one unit, one bit."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return math.nextafter(value, math.inf)
    if isinstance(value, str):
        return value[:-1] + ("x" if value[-1:] != "x" else "y")
    if isinstance(value, dict):
        return {**value, "added": 0}
    if isinstance(value, list):
        return [*value, 0]
    return 0


def put(document, path, value):
    copied = json.loads(json.dumps(document))
    if not path:
        return value
    at = copied
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return copied


def test_an_untouched_chain_verifies(chain):
    assert verify_chain(read_lines(chain), "a" * 64) == []
    receipts = read_receipts(chain)
    assert [receipt.body["number"] for receipt in receipts] == [0, 1, 2]
    assert [receipt.previous for receipt in receipts] == ["a" * 64, receipts[0].digest, receipts[1].digest]
    assert receipts[0].body["metrics"][1] == {"kl": 1e-9, "nan": "nan", "inf": "-inf"}
    assert receipts[0].environment.seed == 11


def test_every_field_flipped_is_caught(chain):
    lines = read_lines(chain)
    document = json.loads(lines[1])
    paths = list(leaves(document))
    assert len(paths) > 40
    for path in paths:
        at = document
        for step in path:
            at = at[step]
        tampered = canonical_json(put(document, path, changed(at)))
        assert tampered != lines[1]
        assert verify_chain([lines[0], tampered, lines[2]], "a" * 64), path


def test_every_byte_flipped_is_caught(chain):
    lines = read_lines(chain)
    data = lines[1].encode()
    for position in range(len(data)):
        tampered = bytearray(data)
        tampered[position] ^= 1
        text = tampered.decode("utf-8", errors="replace")
        assert verify_chain([lines[0], text, lines[2]], "a" * 64), (position, text[position - 20 : position + 20])


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda line: line.replace(":", ": ", 1),  # a space that JSON does not mind
        lambda line: line.replace("{", '{"kind":"session",', 1),  # a key twice
        lambda line: json.dumps(dict(reversed(json.loads(line).items())), separators=(",", ":"), ensure_ascii=False),
        lambda line: line.replace("0.0125", "1.25e-2"),
        lambda line: line + " ",
    ],
    ids=["space", "key twice", "keys in another order", "number written otherwise", "space at the end"],
)
def test_text_that_means_the_same_is_caught_too(chain, rewrite):
    lines = read_lines(chain)
    assert rewrite(lines[1]) != lines[1]
    assert verify_chain([lines[0], rewrite(lines[1]), lines[2]], "a" * 64)


@pytest.mark.parametrize("order", [(0, 2), (1, 0, 2), (0, 0, 1, 2), (1, 2)])
def test_a_chain_that_is_cut_or_shuffled_is_caught(chain, order):
    lines = read_lines(chain)
    assert verify_chain([lines[i] for i in order], "a" * 64)


def test_a_resealed_receipt_breaks_the_chain(chain):
    lines = read_lines(chain)
    forged = parse_receipt(lines[1]).model_copy(update={"body": {"number": 99}})
    forged = forged.model_copy(update={"digest": forged.compute_digest()})
    problems = verify_chain([lines[0], forged.line(), lines[2]], "a" * 64)
    assert problems == ["receipt 3: it does not follow the receipt before it"]


def test_another_genesis_is_caught(chain):
    assert verify_chain(read_lines(chain), GENESIS) == ["receipt 1: it does not follow the receipt before it"]


def test_not_a_receipt():
    with pytest.raises(EvidenceError, match="no receipt"):
        parse_receipt('{"kind":"session"}')
    assert verify_chain(["not json"]) == [verify_chain(["not json"])[0]]


def test_body_must_be_data(environment):
    with pytest.raises(EvidenceError, match="got a object in a record"):
        make_receipt("session", {"x": object()}, environment)


# ---- environment


def test_environment_says_where_we_are(environment):
    assert environment.device_name
    assert environment.torch
    assert environment.packages["numpy"]
    commit, _ = read_commit(os.path.dirname(__file__))
    assert environment.commit == commit
    assert len(commit) == 40


def test_no_repository_is_unknown_and_counts_as_changed(tmp_path):
    assert read_commit(tmp_path) == ("unknown", True)


def test_drift_is_listed_and_intent_is_not(environment):
    assert environment_drift(environment, environment) == ()
    other = replace(
        environment, driver="570.1", torch="9.9", commit="x", dirty=True, seed=5, command=(),
        packages={**environment.packages, "numpy": "0.1", "triton": "9"} | {"microllm": "x"},
    )  # fmt: skip
    found = environment_drift(environment, other)
    assert sorted(text.split(":")[0] for text in found) == ["driver", "numpy", "torch", "triton"]
    assert any("'9.9'" in text and repr(environment.torch) in text for text in found)


def test_command_line_hides_where_programs_lie(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/opt/x/python", "/srv/y/microllm", "bench", "--out", "lab"])
    assert command_line() == ("python", "microllm", "bench", "--out", "lab")


# ---- files


def test_a_torn_line_is_skipped_and_then_cut(tmp_path):
    path = tmp_path / "log.jsonl"
    append_line(path, lambda last: f"first after {last}")
    with path.open("a") as file:
        file.write("torn by a ki")
    assert read_lines(path) == ["first after None"]
    append_line(path, lambda last: f"second after {last}")
    assert path.read_text() == "first after None\nsecond after first after None\n"


def test_a_line_break_is_refused_and_nothing_is_written(tmp_path):
    path = tmp_path / "log.jsonl"
    with pytest.raises(EvidenceError, match="line break"):
        append_line(path, lambda last: "a\nb")
    assert read_lines(path) == []


def test_writers_at_once_never_fork_the_chain(tmp_path):
    path = tmp_path / "count.jsonl"

    def append_forty():
        for _ in range(40):
            append_line(path, lambda last: str(int(last or 0) + 1))

    writers = [threading.Thread(target=append_forty) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert read_lines(path) == [str(i) for i in range(1, 121)]


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "verdict.json"
    write_atomic(path, "old")

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_canonical_json():
    assert canonical_json({"b": (1, 2.0), "a": math.nan}) == '{"a":"nan","b":[1,2.0]}'
    assert finite_json({1: [math.inf]}) == {"1": ["inf"]}
