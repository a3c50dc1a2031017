"""The dense cache: its byte formula, its borders, its reset."""

import pytest
import torch

from microllm.config import preset
from microllm.errors import RequestError
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
