"""What a call may be given: one prompt or a list of them, and parameters; what is neither is refused."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import cast

import numpy as np
from torch import Tensor

from microllm.errors import RequestError
from microllm.sampling import SamplingParams

Prompt = str | Sequence[int]


def as_batch(prompts: Prompt | Sequence[Prompt]) -> tuple[Sequence[Prompt], bool]:
    """Return prompts as a list, and whether it was one alone: a text, or a list of numbers."""
    if not is_list(prompts) or isinstance(prompts, str) or len(prompts) == 0 or isinstance(prompts[0], Integral):
        return [cast("Prompt", prompts)], True
    return cast("Sequence[Prompt]", prompts), False


def is_list(value: object) -> bool:
    """Return whether a value is a list of something, and not bytes."""
    return isinstance(value, Sequence | np.ndarray | Tensor) and not isinstance(value, bytes | bytearray | memoryview)


def checked_params(params: SamplingParams | None) -> SamplingParams:
    """Return the parameters, or their defaults for None.

    Raises:
        RequestError: they are of another type.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"got params of type {type(params).__name__}; need SamplingParams; SamplingParams.from_dict() takes a dict"
        )
    return params


def one_choice(params: SamplingParams) -> SamplingParams:
    """Return the parameters, of one choice.

    Raises:
        RequestError: they ask for several.
    """
    if params.n > 1:
        raise RequestError(f"got n={params.n} for one prompt; need n=1; pass [prompt] to get a list of completions")
    return params
