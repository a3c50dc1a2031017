"""The dense cache: its byte formula, its borders, its reset."""

import pytest
import torch

from microllm.config import preset
from microllm.errors import RequestError, UnavailableError
from microllm.step import DenseCache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_follow_the_formula(dtype):
    config = preset("tiny")
    cache = DenseCache(config, 3, 17, dtype=dtype)
    per_token = config.kv_bytes_per_token("float32" if dtype == torch.float32 else "bfloat16")
    assert cache.num_bytes == 3 * 17 * per_token == cache.keys.nbytes + cache.values.nbytes


def test_reset_forgets_and_keeps_the_buffers():
    cache = DenseCache(preset("tiny"), 2, 8)
    address = cache.keys.data_ptr()
    cache.advance(torch.tensor([3, 5]), 5)
    assert cache.reserve(2).tolist() == [[3, 4], [5, 6]]
    with pytest.raises(RequestError, match="got 5 cached tokens and 4 new ones; need at most 8"):
        cache.reserve(4)
    cache.reset()
    assert cache.reserve(8).tolist() == [list(range(8))] * 2
    assert cache.keys.data_ptr() == address


@pytest.mark.parametrize(("rows", "capacity"), [(0, 4), (1, 0), (-1, 4)])
def test_a_cache_without_room_is_refused(rows, capacity):
    with pytest.raises(RequestError, match="need both at least 1"):
        DenseCache(preset("tiny"), rows, capacity)


def test_rows_are_copied_moved_and_left_out():
    config = preset("tiny")
    cache = DenseCache(config, 5, 8)
    numbers = torch.arange(5.0)[:, None, None, None].expand(5, 4, config.num_key_value_heads, config.head_dim)
    cache.take(range(3))
    assert cache.reserve(4).shape == (3, 4)
    for layer in range(config.num_hidden_layers):
        cache.store(layer, numbers[:3], -numbers[:3], cache.reserve(4))
    cache.advance(torch.tensor([2, 4, 3]), 4)
    for rows, lengths, next_token in [
        ([2, 0, 0, 1, 1], [3, 2, 2, 4, 4], [2, 0, 0, 1, 1]),
        ([0, 4, 2], [3, 4, 2], [2, 1, 0]),
        ([2, 0], [2, 3], [0, 2]),  # the longest row is gone: its room is free again
    ]:
        cache.take(rows)
        assert cache.lengths.tolist() == lengths
        for layer in (0, config.num_hidden_layers - 1):
            filled = max(lengths)
            assert cache.keys[layer, :, :filled, 0, 0].tolist() == [[float(n)] * filled for n in next_token]
            assert cache.values[layer, :, :filled, 1, 3].tolist() == [[-float(n)] * filled for n in next_token]
    assert cache.reserve(5).tolist() == [list(range(2, 7)), list(range(3, 8))]
    assert cache.num_bytes == 5 * 8 * config.kv_bytes_per_token("float32")
    with pytest.raises(AssertionError, match="more rows"):
        cache.take([0] * 6)


@pytest.mark.parametrize("capacity", [1 << 50, 1 << 62])  # more than there is; more than can be counted
def test_a_cache_that_no_memory_holds_is_refused_with_its_size(capacity):
    with pytest.raises(UnavailableError, match=rf"2 rows of {capacity} tokens.*lower max_tokens"):
        DenseCache(preset("tiny"), 2, capacity)
