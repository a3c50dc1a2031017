"""microLLM: run, serve, train and speed up small language models, with the evidence for every number."""

from microllm.config import ModelConfig, preset
from microllm.errors import MicroLLMError
from microllm.inference import LLM, Completion, CompletionStream, Engine, EngineConfig, Score, load
from microllm.model import Transformer
from microllm.sampling import SamplingParams

__all__ = [  # noqa: RUF022  (sorted by letter)
    "Completion", "CompletionStream", "Engine", "EngineConfig", "LLM", "load", "MicroLLMError", "ModelConfig", "preset",
    "SamplingParams", "Score", "Transformer",
]  # fmt: skip
