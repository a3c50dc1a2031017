"""The pool's bytes are what the formula says, whatever its dtypes; tables and rows keep their place in memory."""

import pytest
import torch

from microllm.config import preset
from microllm.errors import ConfigError, UnavailableError
from microllm.step import PagePool, PageTables, RowGroup, bucket, count_pages, layer_dtypes, page_bytes, page_pool

CONFIG = preset("tiny")  # 2 layers of 2 KV heads of 32


@pytest.mark.parametrize("page_tokens", [1, 16, 64, 256])
@pytest.mark.parametrize(("kv", "itemsizes"), [("fp32", 8), ("bf16", 4), ("fp8", 2), (("fp8", "fp32"), 5)])
def test_bytes_follow_the_formula(page_tokens, kv, itemsizes):
    dtypes = layer_dtypes(CONFIG, kv, torch.float32)
    pool = PagePool(CONFIG, 3, page_tokens=page_tokens, dtypes=dtypes)
    assert pool.num_bytes == 3 * 2 * page_tokens * 2 * 32 * itemsizes
    assert pool.num_bytes == sum(t.nbytes for t in (*pool.k_pages, *pool.v_pages))
    assert [t.dtype for t in pool.k_pages] == [t.dtype for t in pool.v_pages] == dtypes
    assert len({t.data_ptr() for t in (*pool.k_pages, *pool.v_pages)}) == 4, "two buffers are one"
    use = pool.use(num_held=2, num_idle_tokens=page_tokens // 2)
    assert use.allocated_bytes == pool.num_bytes
    assert use.active_bytes == 2 * pool.page_bytes
    assert use.wasted_bytes == (page_tokens // 2) * (pool.page_bytes // page_tokens)


def test_auto_is_the_models_own_dtype_and_names_are_checked():
    assert layer_dtypes(CONFIG, "auto", torch.bfloat16) == [torch.bfloat16] * 2
    assert layer_dtypes(CONFIG, ("auto", "fp8"), torch.float32) == [torch.float32, torch.float8_e4m3fn]
    with pytest.raises(ConfigError, match="got KV dtype 'int8'; need auto or one of fp32"):
        layer_dtypes(CONFIG, "int8", torch.float32)
    with pytest.raises(ConfigError, match="got 3 KV dtypes; need one, or one for each of 2 layers"):
        layer_dtypes(CONFIG, ("fp8",) * 3, torch.float32)


def test_the_pool_is_as_large_as_wanted_within_an_absolute_limit():
    one = page_bytes(CONFIG, 16, [torch.float32] * 2)
    device = torch.device("cpu")
    assert count_pages(one, wanted=7, limit_bytes=None, device=device) == 7
    assert count_pages(one, wanted=7, limit_bytes=5 * one - 1, device=device) == 4
    assert count_pages(one, wanted=7, limit_bytes=100 * one, device=device) == 7
    share = count_pages(one, wanted=2**60, limit_bytes=None, device=device)
    assert 1 <= share * one <= 2**50
    with pytest.raises(ConfigError, match=rf"got room for {one - 1:,} bytes of KV cache; need at least one page"):
        count_pages(one, wanted=7, limit_bytes=one - 1, device=device)


@pytest.mark.parametrize(
    ("meminfo", "limit", "room"),
    [
        ("MemTotal: 9 kB\nMemAvailable:   4000 kB\n", "max", 4_096_000),
        ("MemAvailable: 4000 kB\n", "1000000", 1_000_000 - 600_000 + 200_000),
        ("MemAvailable: 4000 kB\n", "100000", 0),
        ("MemAvailable: 100 kB\n", "1000000", 102_400),
        (None, None, 8_192_000),  # neither: a system that says only how much there is
    ],
)
def test_free_memory_is_what_the_machine_and_the_cgroup_leave(monkeypatch, tmp_path, meminfo, limit, room):
    (tmp_path / "group").mkdir()
    if limit is not None:
        (tmp_path / "meminfo").write_text(meminfo)
        (tmp_path / "group/memory.max").write_text(limit + "\n")
        (tmp_path / "group/memory.current").write_text("600000\n")
        (tmp_path / "group/memory.stat").write_text("anon 5\nactive_file 300000\ninactive_file 200000\n")
    monkeypatch.setattr(page_pool, "_PROC_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(page_pool, "_CGROUP", tmp_path / "group")
    monkeypatch.setattr(page_pool, "_physical_bytes", lambda: 8_192_000)
    want = room // 8 // 1000
    if want:
        assert count_pages(1000, wanted=10_000, limit_bytes=None, device=torch.device("cpu")) == want
    else:
        with pytest.raises(ConfigError, match="got room for 0 bytes"):
            count_pages(1000, wanted=10_000, limit_bytes=None, device=torch.device("cpu"))
    monkeypatch.setattr(page_pool, "_free_bytes", lambda device: pytest.fail("a limit needs no look at free memory"))
    assert count_pages(1000, wanted=10_000, limit_bytes=3500, device=torch.device("cpu")) == 3


@pytest.mark.parametrize("page_tokens", [0, 3, 48])
def test_page_sizes_that_are_no_power_of_two_are_refused(page_tokens):
    with pytest.raises(ConfigError, match="need a power of two"):
        PagePool(CONFIG, 1, page_tokens=page_tokens, dtypes=[torch.float32] * 2)


def test_a_pool_that_no_memory_holds_is_refused_with_its_size():
    with pytest.raises(UnavailableError, match=r"got no memory on cpu for a KV cache of .* bytes .*lower kv_bytes"):
        PagePool(CONFIG, 1 << 45, page_tokens=16, dtypes=[torch.float32] * 2)


def test_tables_keep_their_address_and_show_what_was_written():
    tables = PageTables(3, 4)
    tables.write(1, 0, [7, 8])
    first = tables.rows(torch.tensor([1, 2]))
    assert first.tolist() == [[7, 8, 0, 0], [0, 0, 0, 0]]
    address = tables._device_RN.data_ptr()
    tables.write(1, 2, [9])
    tables.write(2, 0, [])
    assert tables.rows(torch.tensor([1])).tolist() == [[7, 8, 9, 0]]
    assert tables._device_RN.data_ptr() == address


def test_a_groups_rows_lie_where_they_lay_and_idle_ones_say_so():
    group = RowGroup(4, 3, decodes=True)
    addresses = [t.data_ptr() for t in (group.token_ids, group.positions, group.slots)]
    group.fill([(5, 10, [1, 2, 3]), (6, 0, [4, 5, 6]), (7, 2, [8]), (1, 1, [1, 1])])
    group.fill([(2, 7, [11, 12]), (3, 0, [13])])
    assert group.token_ids.tolist() == [[11, 12, 0], [13, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert group.positions.tolist() == [[7, 8, -1], [0, -1, -1], [-1] * 3, [-1] * 3]
    assert group.slots.tolist() == [2, 3, 0, 0]
    assert [t.data_ptr() for t in (group.token_ids, group.positions, group.slots)] == addresses


def test_buckets_are_few():
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 63, 64)] == [1, 2, 4, 4, 8, 8, 16, 64, 64]
    assert len({bucket(n) for n in range(1, 65)}) == 11
