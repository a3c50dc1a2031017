"""Generation: prompts in, text out."""

from microllm.inference.completion import Completion, FinishReason, Score, StreamPiece, Timings
from microllm.inference.engine import Engine, RequestStream
from microllm.inference.engine_config import EngineConfig
from microllm.inference.engine_report import EngineMemory, EngineReport
from microllm.inference.llm import LLM, CompletionStream, load
from microllm.inference.request import Request

__all__ = [
    "LLM", "Completion", "CompletionStream", "Engine", "EngineConfig", "EngineMemory", "EngineReport",
    "FinishReason", "Request", "RequestStream", "Score", "StreamPiece", "Timings", "load",
]  # fmt: skip
