"""Feed every block of a candidate what the reference's same block got, so that errors do not pile up.

Place: opened around a forward pass together with ``trace.record``; the error at a site is then that block's own.
Does not replace token ids, masks or positions: only the main tensor of each call (``trace.main_input``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from microllm.errors import EvidenceError
from microllm.evidence.trace import FORCING, Sites, Trace, main_input, site_matcher, site_name

FORCED_SITES = ("layers.*", "norm", "lm_head")
"""Blocks, final norm and head: what is fed the reference's input unless said otherwise."""


@contextmanager
def teacher_forced(
    candidate: nn.Module, reference: Trace, *, blocks: Sites = FORCED_SITES, prefix_strip: str = "model."
) -> Iterator[tuple[str, ...]]:
    """Replace the main input of each matching module by the reference's record; yield the forced sites.

    Numbers: the record is cast to the dtype of the tensor it replaces, and moved to its device
    Raises:
        EvidenceError: no module matches, or (during the pass) the record is absent, incomplete or of another shape.
    """
    matches, calls = site_matcher(blocks), Counter[str]()
    inputs = {(r.site, r.occurrence): r for r in reference.records if r.kind == "input"}

    def force(site: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found, calls[site] = main_input(args, kwargs), calls[site] + 1
        record = inputs.get((site, calls[site] - 1))
        if found is None or record is None or record.values is None or not record.complete:
            raise EvidenceError(
                f"got no whole input of {site!r} (call {calls[site]}) in the reference; "
                "record it with keep='whole' on the same tokens"
            )
        at, value = found[0], _in_place_of(found[1], record.values, site)
        return (args, {**kwargs, at: value}) if isinstance(at, str) else ((*args[:at], value, *args[at + 1 :]), kwargs)

    with ExitStack() as stack:
        sites: list[str] = []
        for name, module in candidate.named_modules():
            site = site_name(name, prefix_strip)
            if matches(site):
                sites.append(site)
                hook = module.register_forward_pre_hook(
                    lambda _, args, kwargs, site=site: force(site, args, kwargs), prepend=True, with_kwargs=True
                )  # prepended: a recorder sees what the block really got
                stack.callback(hook.remove)
        if not sites:
            raise EvidenceError(f"got blocks {blocks!r}, which match no module; need names such as 'layers.*'")
        stack.callback(FORCING.reset, FORCING.set(True))
        yield tuple(sites)


def _in_place_of(tensor: Tensor, values: Tensor, site: str) -> Tensor:
    if values.shape != tensor.shape:
        raise EvidenceError(
            f"got input {tuple(tensor.shape)} at {site!r}; need the reference's {tuple(values.shape)}; "
            "run both on the same tokens"
        )
    return values.to(device=tensor.device, dtype=tensor.dtype)
