"""Sampling: parameters, the sampler, stop handling; shared by the engine and by structures."""

from microllm.sampling.grammar import Grammar, grammar_of
from microllm.sampling.params import SamplingParams
from microllm.sampling.sampler import Sampler, TokenLogprob, choose_tokens, token_logprobs
from microllm.sampling.stop import StopChecker

__all__ = [
    "Grammar", "Sampler", "SamplingParams", "StopChecker", "TokenLogprob", "choose_tokens", "grammar_of",
    "token_logprobs",
]  # fmt: skip
