"""The Transformer and how a checkpoint becomes one."""

from microllm.model.loading import load_model, load_weights
from microllm.model.transformer import Transformer

__all__ = ["Transformer", "load_model", "load_weights"]
