"""The target decides what a kernel may use: a faked gfx942 gets what a gfx942 has, with no GPU at all."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from microllm import ops
from microllm.ops.kernels import launch
from microllm.ops.kernels.pages import AS_IT_IS, E4M3FN_BYTES, E4M3FNUZ_BYTES, as_stored
from microllm.ops.target import TARGETS, target_of

GPU = torch.device("cuda", 0)


def test_a_gfx942_has_64_wide_waves_64_kib_no_pdl_and_fnuz_codes():
    target = TARGETS["gfx942"]
    assert (target.backend, target.warp_size, target.shared_bytes) == ("hip", 64, 65536)
    assert (target.pdl, target.wgmma) == (False, False)
    assert target.fp8_dtype == torch.float8_e4m3fnuz
    codes = torch.arange(256, dtype=torch.uint8).view(target.fp8_dtype).float()
    assert codes[128].isnan()
    assert codes.isnan().sum() == 1
    assert codes.nan_to_num(0).abs().max() == 240


def test_only_hopper_has_wgmma_and_only_from_sm_90_on_is_there_pdl():
    assert [name for name, target in TARGETS.items() if target.wgmma] == ["sm_90"]
    assert [name for name, target in TARGETS.items() if target.pdl] == ["sm_90", "sm_100"]
    assert [target.fp8 for target in TARGETS.values()] == ["none", "e4m3fn", "e4m3fn", "e4m3fnuz", "e4m3fn"]


@pytest.mark.parametrize(
    ("name", "fn", "fnuz"),
    [
        ("sm_80", E4M3FN_BYTES, E4M3FNUZ_BYTES),
        ("sm_90", AS_IT_IS, E4M3FNUZ_BYTES),
        ("gfx942", E4M3FN_BYTES, AS_IT_IS),
        ("gfx950", AS_IT_IS, E4M3FNUZ_BYTES),
    ],
)
def test_fp8_that_a_target_does_not_load_is_read_as_bytes(name, fn, fnuz):
    for dtype, form in ((torch.float8_e4m3fn, fn), (torch.float8_e4m3fnuz, fnuz), (torch.bfloat16, AS_IT_IS)):
        pages = torch.zeros(2, 4, 1, 8).to(dtype)
        stored, found = as_stored(pages, TARGETS[name])
        assert found == form
        assert stored.dtype == (dtype if form == AS_IT_IS else torch.uint8)
        assert stored.data_ptr() == pages.data_ptr()


def live(monkeypatch, *, hip=None, **properties):
    """Return the target of a device with these properties."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    return target_of.__wrapped__(GPU)


def test_a_live_device_is_its_table_entry(monkeypatch):
    hopper = {"major": 9, "minor": 0, "shared_memory_per_block_optin": 232448}
    assert live(monkeypatch, **hopper) == TARGETS["sm_90"]
    mi300 = {"gcnArchName": "gfx942:sramecc+:xnack-"}
    assert live(monkeypatch, hip="7.0", **mi300) == TARGETS["gfx942"]
    ada = live(monkeypatch, major=8, minor=9, shared_memory_per_block_optin=101376)
    assert (ada.name, ada.fp8, ada.pdl, ada.shared_bytes) == ("sm_89", "e4m3fn", False, 101376)
    old = live(monkeypatch, hip="7.0", gcnArchName="gfx90a", warp_size=64, shared_memory_per_block=65536)
    assert (old.name, old.fp8, old.warp_size) == ("gfx90a", "none", 64)
    assert target_of(torch.device("cpu")).fp8 == "none"


@pytest.mark.parametrize(("name", "overlaps"), [("sm_90", True), ("sm_80", False), ("gfx942", False)])
def test_launches_overlap_only_where_the_target_can(monkeypatch, name, overlaps):
    monkeypatch.setattr(launch, "target_of", lambda device: TARGETS[name])
    assert not launch.pdl(GPU)
    with ops.overlapped():
        assert launch.pdl(GPU) == overlaps
    assert not launch.pdl(GPU)


def test_a_launch_that_does_not_overlap_names_no_option_that_amds_compiler_does_not_know():
    assert launch.overlapping(True) == {"launch_pdl": True}
    assert launch.overlapping(False) == {}
    files = list(Path(launch.__file__).parent.glob("*.py"))
    assert [path.name for path in files if "launch_pdl" in path.read_text()] == ["launch.py"]
