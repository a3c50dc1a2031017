"""Sampling: parameters, the sampler, stop handling; shared by the engine and by structures."""
