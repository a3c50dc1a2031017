"""The Transformer and how a checkpoint becomes one."""

from microllm.model.loading import load_model
from microllm.model.transformer import Transformer

__all__ = ["Transformer", "load_model"]
