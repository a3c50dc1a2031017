"""Generation: prompts in, text out."""

from microllm.inference.completion import Completion, FinishReason, Score, StreamPiece, Timings
from microllm.inference.llm import LLM, CompletionStream, load

__all__ = ["LLM", "Completion", "CompletionStream", "FinishReason", "Score", "StreamPiece", "Timings", "load"]
