"""The memory of a paged key-value cache, and the page tables through which a step reads it.

Place: ``pages.py`` says who holds which page, the runner writes and reads. A page number stands for the same page of
every layer. Layers of one dtype lie in one buffer. Knows no model.

Axes:    P = pages, S = tokens a page, G = KV heads, D = head dim, R = slots (rows of the table), N = pages a row
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from microllm.config import ModelConfig
from microllm.errors import ConfigError, UnavailableError

KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
"""What keys and values may be stored as, by the names that options use."""

_SHARE_OF_FREE = {"cuda": 0.8, "cpu": 0.125}
_PROC_MEMORY, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """Where a pool's bytes are: all of it, pages that sequences hold, and slots of those that hold no token."""

    allocated_bytes: int
    active_bytes: int
    wasted_bytes: int


def page_bytes(config: ModelConfig, page_tokens: int, layer_dtypes: Sequence[torch.dtype]) -> int:
    """Return the bytes of one page in all layers: the sum over layers of 2 * page tokens * KV heads * D * itemsize."""
    width = config.num_key_value_heads * config.head_dim
    return sum(2 * page_tokens * width * dtype.itemsize for dtype in layer_dtypes)


def layer_dtypes(config: ModelConfig, names: str | Sequence[str], default: torch.dtype) -> list[torch.dtype]:
    """Return each layer's dtype, from one name for all or one a layer; "auto" is ``default``.

    Raises:
        ConfigError: an unknown name, or another number of names than layers.
    """
    each = [names] * config.num_hidden_layers if isinstance(names, str) else list(names)
    if len(each) != config.num_hidden_layers:
        raise ConfigError(f"got {len(each)} KV dtypes; need one, or one for each of {config.num_hidden_layers} layers")
    unknown = [name for name in each if name not in ("auto", *KV_DTYPES)]
    if unknown:
        raise ConfigError(f"got KV dtype {unknown[0]!r}; need auto or one of {', '.join(KV_DTYPES)}")
    return [KV_DTYPES.get(name, default) for name in each]


def count_pages(one_page_bytes: int, *, wanted: int, limit_bytes: int | None, device: torch.device) -> int:
    """Return how many pages a pool gets: at most ``wanted``, ``limit_bytes``, and a share of the device's free memory.

    Raises:
        ConfigError: the limit is below one page.
    """
    if limit_bytes is None:
        limit_bytes = int(_free_bytes(device) * _SHARE_OF_FREE.get(device.type, 0.125))
    count = min(wanted, limit_bytes // one_page_bytes)
    if count < 1:
        raise ConfigError(
            f"got room for {limit_bytes:,} bytes of KV cache; need at least one page, {one_page_bytes:,} bytes; "
            "raise kv_bytes or lower page_tokens"
        )
    return count


def _free_bytes(device: torch.device) -> int:
    """Return what a device, or the machine within this process's cgroup, can still give."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _number_after("MemAvailable:", _PROC_MEMORY)
    free = _physical_bytes() if available is None else 1024 * available
    limit, used = (_number_after("", _CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:  # no cgroup, or one without a limit ("max")
        return free
    dropped_first = _number_after("inactive_file ", _CGROUP / "memory.stat") or 0
    return max(min(free, limit - used + dropped_first), 0)


def _physical_bytes() -> int:
    """Return all of the memory, for systems that do not say what of it is free."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _number_after(name: str, path: Path) -> int | None:
    """Return the number that follows a name at the beginning of a line."""
    try:
        found = re.search(rf"^{name}\s*(\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


class PagePool:
    """Pages of keys and values for every layer: ``k_pages[layer]`` and ``v_pages[layer]``, each [P, S, G, D].

    Units:   ``num_bytes`` in bytes allocated: pages * ``page_bytes``
    Raises:
        ConfigError: ``page_tokens`` is no power of two.
        UnavailableError: the device has no memory for it.
    """

    def __init__(
        self, config: ModelConfig, num_pages: int, *, page_tokens: int, dtypes: Sequence[torch.dtype],
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        if page_tokens < 1 or page_tokens & (page_tokens - 1):
            raise ConfigError(f"got page_tokens={page_tokens}; need a power of two")
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self.page_bytes = page_bytes(config, page_tokens, dtypes)
        shape = num_pages, page_tokens, config.num_key_value_heads, config.head_dim
        buffers: dict[torch.dtype, list[Tensor]] = {}
        for dtype in set(dtypes):
            count = 2 * sum(each == dtype for each in dtypes)
            try:
                buffers[dtype] = list(torch.zeros((count, *shape), dtype=dtype, device=device))
            except RuntimeError as error:  # torch's own out-of-memory error is one of them
                raise UnavailableError(
                    f"got no memory on {device} for a KV cache of {num_pages * self.page_bytes:,} bytes ({num_pages} "
                    f"pages of {page_tokens} tokens); need that much free; lower kv_bytes"
                ) from error
        pairs = [(buffers[dtype].pop(), buffers[dtype].pop()) for dtype in dtypes]
        self.k_pages, self.v_pages = [k for k, _ in pairs], [v for _, v in pairs]

    @property
    def num_bytes(self) -> int:
        """Return the bytes allocated."""
        return self.num_pages * self.page_bytes

    def use(self, num_held: int, num_idle_tokens: int) -> PoolUse:
        """Return where the bytes are, given the pages held and the slots of those that hold no token."""
        return PoolUse(
            allocated_bytes=self.num_bytes,
            active_bytes=num_held * self.page_bytes,
            wasted_bytes=num_idle_tokens * (self.page_bytes // self.page_tokens),
        )


class PageTables:
    """Each running sequence's pages, in a slot of its own, where the device can read them.

    The buffer keeps its address and shape, so that a captured step reads it; what changed on the host since the last
    step goes over in one copy.
    """

    def __init__(self, num_slots: int, pages_a_row: int, device: torch.device | str = "cpu") -> None:
        on_gpu = torch.device(device).type == "cuda"
        self._host_RN = torch.zeros(num_slots, pages_a_row, dtype=torch.int32, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._device_RN = self._host_RN.to(device)
        self._changed = False

    @property
    def num_bytes(self) -> int:
        """Return the bytes on the device."""
        return self._device_RN.nbytes

    def write(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Set a slot's entries from number ``first`` on."""
        if pages:
            if self._copied is not None and not self._changed:
                self._copied.synchronize()  # the last copy may still read the host's side
            self._host_RN[slot, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int32)
            self._changed = True

    def rows(self, slots_A: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the tables of some slots.

        Shapes:  slots [A] int64 on the device -> [A, N] int32
        """
        if self._changed:
            self._device_RN.copy_(self._host_RN, non_blocking=True)
            if self._copied is not None:
                self._copied.record(torch.cuda.current_stream(self._device_RN.device))
            self._changed = False
        return torch.index_select(self._device_RN, 0, slots_A, out=out)
