"""The same model as ``transformers`` builds it from the same files: what ``align`` measures ours against.

Place: ``align`` loads, casts and runs it. Directories and GGUF files go through ``transformers``' own readers, so that
ours are checked too. Needs the extra [hf]; never runs code that a model's directory brings.
"""

from __future__ import annotations

import copy
import importlib.util
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import Any, Literal

import torch
from torch import Tensor, nn

from microllm.config import ModelConfig
from microllm.errors import CheckpointError, MissingExtraError
from microllm.io.hf_config import to_hf_config
from microllm.io.names import HEAD, file_name
from microllm.io.resolve import ModelSource

Attention = Literal["sdpa", "eager"]
_PURPOSE = "comparing with transformers"


def load_twin(
    source: ModelSource, *, dtype: torch.dtype = torch.float32, device: str = "cpu", attention: Attention = "sdpa"
) -> Any:  # noqa: ANN401  a class that only transformers names
    """Return the ``transformers`` model at ``source``, ready for inference and without sampling defaults.

    Raises:
        MissingExtraError: transformers, or for a GGUF file its reader, is not installed.
        CheckpointError: transformers does not load it; its own words are kept.
    """
    transformers = _transformers()
    is_gguf = source.kind == "gguf"
    if is_gguf and importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("gguf", "hf", "reading a GGUF file with transformers")
    with _quiet(transformers):
        try:
            twin = transformers.AutoModelForCausalLM.from_pretrained(
                source.path.parent if is_gguf else source.path, gguf_file=source.path.name if is_gguf else None,
                dtype=dtype, attn_implementation=attention, local_files_only=True,
            )  # fmt: skip
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"got {source.path}, which transformers does not load ({error}); need a model that it supports"
            ) from error
        twin.generation_config = transformers.GenerationConfig()
    return twin.to(device).eval()


def make_twin(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    device: str,
    attention: Attention = "sdpa",
) -> Any:  # noqa: ANN401
    """Return ``transformers``' model of a config, with our weights (by run-time name).

    Raises:
        MissingExtraError: transformers is not installed.
    """
    transformers = _transformers()
    written = to_hf_config(config)
    shape = transformers.AutoConfig.for_model(**written)
    twin = transformers.AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa")
    missing, unexpected = twin.load_state_dict({file_name(name): t for name, t in weights.items()}, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {HEAD}, missing
    return twin.to(device)


def cast_twin(twin: nn.Module, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """Return a copy with its parameters in ``dtype``: what loading in ``dtype`` gives.

    Buffers stay: ``module.to(dtype)`` would round the rotary frequencies, which ``transformers`` keeps in fp32.
    """
    twin = copy.deepcopy(twin)
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(dtype)
    return twin


def generate_greedily(twin: Any, token_ids: list[int], num_tokens: int) -> tuple[list[int], Tensor]:  # noqa: ANN401
    """Return exactly ``num_tokens`` tokens of ``transformers``' greedy generation, and the logits they come from.

    Shapes:  logits [num_tokens, V] fp32
    """
    transformers = _transformers()
    prompt_BT = torch.tensor([token_ids], device=twin.device)
    settings = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=num_tokens, return_dict_in_generate=True, output_logits=True
    )
    with _quiet(transformers), torch.no_grad():
        answer = twin.generate(prompt_BT, attention_mask=torch.ones_like(prompt_BT), generation_config=settings)
    tokens = answer.sequences[0, len(token_ids) :].tolist()
    return tokens, torch.cat(list(answer.logits)).float()


def twin_version() -> str:
    """Return the name and version of the reference implementation."""
    return f"transformers {_transformers().__version__}"


def _transformers() -> Any:  # noqa: ANN401
    try:
        import transformers  # noqa: PLC0415  an optional extra
    except ImportError as error:
        raise MissingExtraError("transformers", "hf", _PURPOSE) from error
    return transformers


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:  # noqa: ANN401
    """Keep progress bars and advice off the terminal while the context is open; errors are raised as ever."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the GGUF reader's bar asks no setting
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
