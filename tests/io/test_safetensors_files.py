"""Hostile and damaged safetensors files are refused before any payload; sound ones are read as the library does."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from microllm.errors import CheckpointError
from microllm.io.safetensors_files import (
    DTYPES,
    INDEX_FILE,
    MAX_HEADER_BYTES,
    SINGLE_FILE,
    SafetensorsSource,
    plan_shards,
    read_header,
    write_tensors,
)


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_raw(path, header, payload=b"", length=None):
    """Write a file whose header is any object, text or bytes, under any length."""
    data = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(data) if length is None else length) + data + payload)
    return path


GOOD = {"a": entry("F32", [2, 2], 0, 16), "b": entry("F32", [2], 16, 24)}

BAD_HEADERS = {
    "overlap": ({"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 8, 24)}, "overlaps"),
    "same place twice": ({"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 0, 16)}, "overlaps"),
    "gap": ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 16, 24)}, "gap"),
    "gap at the start": ({"a": entry("F32", [4], 8, 24)}, "gap"),
    "payload too long": ({"a": entry("F32", [2], 0, 8)}, "longer"),
    "payload too short": (GOOD | {"c": entry("F32", [2], 24, 32)}, "truncated"),
    "offsets and shape differ": ({"a": entry("F32", [5], 0, 24)}, "need 20 bytes"),
    "begin after end": ({"a": entry("F32", [6], 24, 0)}, "begin <= end"),
    "negative offset": ({"a": entry("F32", [6], -24, 0)}, "data_offsets"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24, 24]}}, "data_offsets"),
    "offset is a float": ({"a": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24.0]}}, "data_offsets"),
    "unknown dtype": ({"a": entry("F4", [6], 0, 24)}, "'F4'.*tensor 'a'"),
    "unsupported dtype": ({"a": entry("C64", [3], 0, 24)}, "C64"),
    "dtype is a list": ({"a": entry(["F32"], [6], 0, 24)}, "dtype"),
    "negative dimension": ({"a": entry("F32", [-6], 0, 24)}, "shape"),
    "dimension is a bool": ({"a": entry("U8", [24, True], 0, 24)}, "shape"),
    "dimension of 2**63": ({"a": entry("F32", [1 << 63, 0], 0, 0)}, "shape"),
    "product overflows to 24 bytes": ({"a": entry("F32", [(1 << 62) + 6], 0, 24)}, "need 18446744073709551640"),
    "too many dimensions": ({"a": entry("F32", [1 << 62] * 2000, 0, 24)}, "at most 64"),
    "shape is text": ({"a": entry("F32", "6", 0, 24)}, "shape"),
    "empty name": ({"": entry("F32", [6], 0, 24)}, "name"),
    "key missing": ({"a": {"dtype": "F32", "shape": [6]}}, "data_offsets"),
    "key too many": ({"a": entry("F32", [6], 0, 24) | {"stride": [1]}}, "need dtype"),
    "entry is a list": ({"a": [1, 2]}, "need dtype"),
    "no tensors": ({"__metadata__": {"format": "pt"}}, "no tensors"),
    "metadata not text": (GOOD | {"__metadata__": {"n": 1}}, "__metadata__"),
    "root is a list": ([1], "JSON list"),
    "not JSON": ("{a:}", "valid JSON"),
    "trailing data": (json.dumps(GOOD) + "}", "valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', "valid JSON"),
    "name is half a surrogate pair": ('{"\\ud800": {"dtype":"F32","shape":[6],"data_offsets":[0,24]}}', "name"),
    "nested too deep": ("[" * 100_000, "valid JSON"),
    "key twice": ('{"a": {"dtype":"F32","shape":[6],"data_offsets":[0,24]}, "a": {}}', "'a' twice"),
    "inner key twice": ('{"a": {"dtype":"F32","dtype":"F32","shape":[6],"data_offsets":[0,24]}}', "'dtype' twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_bad_header_is_refused(name, tmp_path):
    header, message = BAD_HEADERS[name]
    with pytest.raises(CheckpointError, match=message):
        read_header(write_raw(tmp_path / "x.safetensors", header, bytes(24)))


def test_a_key_twice_among_many_is_found_at_once(tmp_path):
    many = ",".join(f'"{number}": 0' for number in range(200_000))
    with pytest.raises(CheckpointError, match="'199999' twice"):  # comparing each with each would take minutes
        read_header(write_raw(tmp_path / "x.safetensors", f'{{{many}, "199999": 0}}'))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match="no plain file"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("length", [0, 1 << 60, (1 << 64) - 1, MAX_HEADER_BYTES + 1, 10_000])
def test_a_header_length_of_nonsense_size_is_refused(length, tmp_path):
    with pytest.raises(CheckpointError, match=f"header length {length} "):
        SafetensorsSource(write_raw(tmp_path / "x.safetensors", GOOD, bytes(24), length=length))


def test_a_header_above_the_limit_is_refused_even_when_the_file_has_it(tmp_path):
    path = write_raw(tmp_path / "x.safetensors", GOOD, length=MAX_HEADER_BYTES + 1)
    with path.open("r+b") as file:
        file.truncate(MAX_HEADER_BYTES * 2)  # sparse: no disk is used
    with pytest.raises(CheckpointError, match="header length"):
        read_header(path)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = write_raw(tmp_path / "whole.safetensors", GOOD, bytes(24)).read_bytes()
    assert len(read_header(tmp_path / "whole.safetensors")) == 2
    cut = tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="need"):
            read_header(cut)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(data=st.data())
def test_one_changed_header_byte_never_gives_another_layout(data, tmp_path):
    """Either the file is refused, or what we read is what the library reads."""
    whole = bytearray(write_raw(tmp_path / "x.safetensors", GOOD, bytes(range(24))).read_bytes())
    position = data.draw(st.integers(0, len(whole) - 25))
    whole[position] = data.draw(st.integers(0, 255))
    changed = tmp_path / "changed.safetensors"
    changed.write_bytes(whole)
    try:
        source = SafetensorsSource(changed)
    except CheckpointError:
        return
    expected = load_file(changed)
    assert set(source.infos) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(source.read(name), tensor)


def test_a_missing_file_and_a_directory_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match="no readable"):
        SafetensorsSource(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        SafetensorsSource(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="convert"):
        SafetensorsSource(tmp_path)


def test_every_dtype_is_read_as_the_library_reads_it(tmp_path):
    path = tmp_path / "all.safetensors"
    tensors = {name: torch.arange(6).view(2, 3).to(getattr(torch, name)) for name, _ in DTYPES.values()} | {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }
    save_file(tensors, path)
    source = SafetensorsSource(path)
    assert set(source.infos) == set(tensors)
    for name, tensor in tensors.items():
        info, read = source.infos[name], source.read(name)
        assert (info.dtype, info.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert info.num_bytes == tensor.numel() * tensor.element_size()
        assert read.dtype == tensor.dtype
        assert torch.equal(
            read.view(torch.uint8) if read.ndim else read, tensor.view(torch.uint8) if read.ndim else tensor
        )
    with pytest.raises(CheckpointError, match="no tensor 'x'"):
        source.read("x")


def test_a_file_that_shrinks_after_its_header_was_read_is_an_error(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(100), "b": torch.zeros(100)}, path)
    source = SafetensorsSource(path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="'b'"):
        source.read("b")


def shards(directory, weight_map=None, **changes):
    """Write two shards of two tensors each, and an index; ``changes`` replace index keys."""
    names = {"one.safetensors": ("a", "b"), "two.safetensors": ("c", "d")}
    for shard, keys in names.items():
        save_file({key: torch.full((3,), float(ord(key))) for key in keys}, directory / shard)
    if weight_map is None:
        weight_map = {key: shard for shard, keys in names.items() for key in keys}
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map} | changes))
    return directory


RIGHT = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors", "d": "two.safetensors"}


def test_shards_are_read_through_the_index(tmp_path):
    source = SafetensorsSource(shards(tmp_path))
    assert list(source.infos) == ["a", "b", "c", "d"]
    assert source.read("c").tolist() == [99.0] * 3


def test_shards_may_be_symbolic_links_as_in_the_hub_cache(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    shards(blobs)
    for number, path in enumerate(sorted(blobs.iterdir())):
        path.rename(blobs / f"blob{number}")
        (snapshot / path.name).symlink_to(blobs / f"blob{number}")
    assert SafetensorsSource(snapshot).read("d").tolist() == [100.0] * 3


@pytest.mark.parametrize(
    "path",
    ["../one.safetensors", "/etc/one.safetensors", "x/../../one.safetensors", "..\\one.safetensors", "", ".",
     "C:one.safetensors", "one.bin", "one\x00.safetensors", 7, None, ["one.safetensors"]],
)  # fmt: skip
def test_an_index_path_that_leaves_the_directory_is_refused(path, tmp_path):
    inside = tmp_path / "model"
    inside.mkdir()
    with pytest.raises(CheckpointError, match="shard path"):
        SafetensorsSource(shards(inside, RIGHT | {"a": path}))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (RIGHT | {"e": "two.safetensors"}, "indexed but in no shard: e"),
        ({"a": "one.safetensors", "c": "two.safetensors"}, "not indexed: b, d"),
        (RIGHT | {"a": "two.safetensors"}, "another shard than indexed: a"),
        (RIGHT | {"a": "three.safetensors"}, "no shard 'three.safetensors'"),
        ({}, "weight_map"),
        ([], "weight_map"),
        ("one.safetensors", "weight_map"),
    ],
)
def test_an_index_at_odds_with_its_shards_is_refused(weight_map, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        SafetensorsSource(shards(tmp_path, weight_map))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    shards(tmp_path)
    save_file({"c": torch.zeros(3), "d": torch.zeros(3), "a": torch.zeros(3)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"'a'.*once"):
        SafetensorsSource(tmp_path)


def test_a_damaged_index_is_refused(tmp_path):
    shards(tmp_path)
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}')
    with pytest.raises(CheckpointError, match="twice"):
        SafetensorsSource(tmp_path)
    (tmp_path / INDEX_FILE).write_text("{")
    with pytest.raises(CheckpointError, match="valid JSON"):
        SafetensorsSource(tmp_path)


def test_same_bytes(tmp_path):
    path = tmp_path / "x.safetensors"
    tensor = torch.randn(700_000)  # more than two pieces
    late = tensor.clone()
    late[-1] += 1
    save_file({"a": tensor, "b": tensor.clone(), "late": late, "flat": tensor.view(1000, 700).clone()}, path)
    source = SafetensorsSource(path)
    assert source.same_bytes("a", "b")
    assert not source.same_bytes("a", "late")
    assert not source.same_bytes("a", "flat")


def test_plan_shards():
    assert plan_shards({"a": 4, "b": 4, "c": 4}, 8) == [["a", "b"], ["c"]]
    assert plan_shards({"a": 20, "b": 1}, 8) == [["a"], ["b"]]
    with pytest.raises(CheckpointError, match="max_shard_bytes=0"):
        plan_shards({"a": 1}, 0)


def test_what_is_written_is_read_back(tmp_path):
    tensors = {name: torch.randn(10, 10) for name in "abc"} | {"t": torch.randn(4, 6).T}
    write_tensors(tmp_path, tensors, max_shard_bytes=900)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)),
        INDEX_FILE,
    ]
    assert json.loads((tmp_path / INDEX_FILE).read_text())["metadata"] == {"total_size": 1296}
    source = SafetensorsSource(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(source.read(name), tensor)
    assert all(path.stat().st_mode & 0o044 for path in tmp_path.iterdir())


def test_a_write_that_the_system_stops_is_an_error(tmp_path):
    """A file-size limit makes the library's own write fail, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=rf"File too large.*{SINGLE_FILE}"):
            write_tensors(tmp_path, {"a": torch.zeros(100_000)}, max_shard_bytes=1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


STREAM = """
import sys, torch
from pathlib import Path
from microllm.io.safetensors_files import SafetensorsSource

def peak():  # of this process alone; getrusage would count the process that started it
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

source = SafetensorsSource(sys.argv[1])
target = torch.zeros(4_000_000)
target.copy_(source.read("t0"))
for keep in (False, True):
    kept, before = [], peak()
    for name in source.infos:
        tensor = source.read(name)
        target.copy_(tensor)  # stands in for a device: one tensor's room, used again and again
        kept += [tensor] if keep else []
    assert source.same_bytes("t0", "t1")
    print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own account of the peak")
def test_reading_holds_one_tensor_at_a_time(tmp_path):
    save_file({f"t{i}": torch.zeros(4_000_000) for i in range(8)}, tmp_path / SINGLE_FILE)
    command = [sys.executable, "-c", STREAM, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    streamed, held = map(int, run.stdout.split())
    assert streamed < 1.5 * 16_000_000
    assert held > 5 * 16_000_000  # the measure sees tensors that are not let go
