"""What a step is made of: caches, pages, page tables, rows; shared by the engine and by structures."""

from microllm.step.decode_rows import DecodeRow, DecodeRows, TokenReader
from microllm.step.dense_cache import DenseCache
from microllm.step.graphs import Graphs
from microllm.step.matrix import Matrix
from microllm.step.page_pool import PagePool, PageTables, PoolUse, count_pages, layer_dtypes, page_bytes
from microllm.step.pages import PageAllocator
from microllm.step.row_group import RowGroup, bucket

__all__ = [
    "DecodeRow", "DecodeRows", "DenseCache", "Graphs", "Matrix", "PageAllocator", "PagePool", "PageTables", "PoolUse",
    "RowGroup", "TokenReader", "bucket", "count_pages", "layer_dtypes", "page_bytes",
]  # fmt: skip
