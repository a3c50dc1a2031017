"""Capture a fixed computation once, and replay it in one launch; on a CPU it is simply called again.

Place: what a captured step stands on. The computation reads and writes buffers that stay where they are, and neither
allocates, nor copies to or from the host, nor waits; whoever captures sees to that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Graphs:
    """Captures on one device, on one stream and from one memory pool, since their replays never overlap.

    ``num_captured`` counts them: flat over any mix of lengths, once every shape was seen.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self.device = device
        self.num_captured = 0
        self._enabled = enabled and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._enabled else None
        self._pool = torch.cuda.graph_pool_handle() if self._enabled else None

    def capture(self, function: Callable[[], object]) -> Callable[[], object]:
        """Run ``function`` once, so that its kernels are compiled, then capture it; return what runs it again."""
        if self._stream is None:
            return function
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                function()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                function()
            torch.cuda.current_stream().wait_stream(self._stream)
        self.num_captured += 1
        return graph.replay
