"""What a step is made of: caches, positions, page tables; shared by the engine and by structures."""

from microllm.step.dense_cache import DenseCache

__all__ = ["DenseCache"]
