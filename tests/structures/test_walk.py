"""A block in one call: what its seats count, what it gives, and what sends it back to its modules."""

from __future__ import annotations

import pytest
import torch

from microllm import ops, structures
from microllm.errors import GuardRefused
from microllm.structures import guard
from microllm.structures.walk import LayerSite
from tiny_hosts import FAMILIES, make_host

pytestmark = pytest.mark.slow


def walks(plan):
    return [site for site in plan.build.attachment.sites if isinstance(site, LayerSite)]


def without_walks(plan):
    """Leave the seats their modules, asked one by one."""
    for site in walks(plan):
        site.remove()


@pytest.mark.parametrize("scheme", ["none", "bf16_structural", "w8a16_decode"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_walk_gives_what_its_seats_give_and_counts_as_they_do(family, scheme, attached, ids):
    model = make_host(family, torch.bfloat16)
    plan = attached(model, scheme)
    assert len(walks(plan)) == 2
    assert "walked   2 blocks" in structures.explain(plan)
    found, counts = [], []
    for prepare in (lambda: None, lambda: without_walks(plan)):
        prepare()
        before = {key: (e["calls"], e["by_band"]) for key, e in plan.report().items()}
        with torch.no_grad():
            found.append([model(ids).logits, model(ids[:, :4]).logits])
        counts.append({
            key: (e["calls"] - before[key][0], e["by_band"] - before[key][1]) for key, e in plan.report().items()
        })  # fmt: skip
    for walked, asked in zip(*found, strict=True):
        torch.testing.assert_close(walked, asked, atol=2e-2, rtol=2e-2)
    assert counts[0] == counts[1]
    assert {sum(each) for each in counts[0].values()} == {2}
    assert plan.summary()["clean"]


def test_modules_between_are_not_called_unless_somebody_watches(attached, ids, monkeypatch):
    model = make_host("llama")
    plan, mlp = attached(model), model.model.layers[0].mlp
    asked = []
    site = next(s for s in plan.build.attachment.sites if s.places[0][0] is mlp)
    forward = vars(mlp)["forward"]
    monkeypatch.setitem(vars(mlp), "forward", lambda x: (asked.append(1), forward(x))[1])
    model(ids)
    assert not asked
    seen = []
    hook = mlp.register_forward_hook(lambda *_: seen.append(1))
    model(ids)
    hook.remove()
    assert asked == seen == [1]
    assert site.seats[0].ledger.calls == 2
    assert len(model(ids, output_hidden_states=True).hidden_states) == 3


def test_a_gradient_that_is_wanted_goes_to_the_modules(attached, ids):
    model = make_host("llama")
    plan = attached(model)
    model.requires_grad_(True)
    with pytest.warns(RuntimeWarning, match="a gradient is wanted"):
        model(ids).logits.sum().backward()
    assert model.model.layers[0].mlp.down_proj.weight.grad is not None
    assert plan.summary()["fallbacks"] > 0


def test_padding_walks_and_a_graded_mask_does_not(attached, ids):
    model = make_host("qwen2")
    own = [model(ids, attention_mask=(torch.arange(16) > 2).long()[None]).logits]
    graded = torch.full((1, 1, 16, 16), -1.0)
    own.append(model(ids, attention_mask={"full_attention": graded}).logits)
    plan = attached(model)
    padded = model(ids, attention_mask=(torch.arange(16) > 2).long()[None]).logits
    torch.testing.assert_close(padded[:, 3:], own[0][:, 3:], atol=1e-3, rtol=1e-3)
    assert plan.summary()["clean"]
    with pytest.warns(RuntimeWarning, match="graded values"):
        other = model(ids, attention_mask={"full_attention": graded}).logits
    torch.testing.assert_close(other, own[1], atol=1e-3, rtol=1e-3)
    assert {seat.structure for seat in plan.seats if seat.ledger.fallbacks} == {"attention_core"}


def test_training_mode_of_one_module_refuses_the_walk(attached, ids):
    model = make_host("llama")
    attached(model)
    vars(model.model.layers[1].self_attn.o_proj)["training"] = True
    with pytest.raises(GuardRefused, match=r"o_proj: got training mode"):
        model(ids)


def test_a_seat_that_is_off_leaves_its_module_to_the_host(attached, ids):
    model = make_host("llama")
    plan = attached(model)
    wanted = model(ids).logits
    for seat in plan.seats:
        seat.active &= seat.structure not in ("decoder_ffn", "attention_core", "qkv_pack")
    before = [seat.ledger.calls for seat in plan.seats]
    torch.testing.assert_close(model(ids).logits, wanted, atol=1e-3, rtol=1e-3)
    ran = {s.structure for s, calls in zip(plan.seats, before, strict=True) if s.ledger.calls > calls}
    assert ran == {"residual_norm", "qkv_rope", "linear_proj", "lm_head"}


def test_bytes_are_counted_once_whoever_shares_them(attached, ids, config):
    sums = {}
    for region in ("seats", "chain"):
        model = make_host("qwen2", torch.bfloat16)
        pinned = structures.AttachConfig(store=config.store, pins={"decoder_layer_decode": region})
        plan = structures.auto_swaps(model, lambda: model(ids), scheme="w8a16_decode", config=pinned)  # noqa: B023
        host_bytes = plan.notes["memory"]["host_bytes"]
        assert plan.held_bytes() == host_bytes + plan.bound_bytes()
        freed = plan.activate().consume()
        sums[region] = freed["held_bytes"]
        hollow = 2 * 7 * 2  # one element of each of a block's seven matrices stays
        assert freed["held_bytes"] == host_bytes - freed["freed_bytes"] + plan.bound_bytes() + hollow
        assert freed["held_bytes"] < host_bytes
    assert sums["seats"] == sums["chain"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_prompt_takes_torchs_own_calls_and_gives_what_ours_give(family, attached, ids, monkeypatch):
    model = make_host(family)
    plan = attached(model)
    taken = []
    for seat in plan.seats:
        if seat.prompt is not seat.bound:
            plain = seat.prompt
            seat.prompt = lambda *given, plain=plain, seat=seat: (taken.append(seat.structure), plain(*given))[1]
    by_torch = model(ids).logits
    assert set(taken) == {seat.structure for seat in plan.seats} - {"attention_core"}
    assert len(taken) == len([seat for seat in plan.seats if seat.structure != "attention_core"])
    with ops.ledger() as counts:  # somebody counts: ours
        torch.testing.assert_close(model(ids).logits, by_torch, atol=1e-4, rtol=1e-4)
    assert {ran.op for ran in counts} >= {"add_rms_norm", "linear"}
    before = len(taken)
    model(ids[:, :8])
    monkeypatch.setattr(guard, "PROMPT_ELEMENTS", 16 * 64 - 1)
    model(ids)
    assert len(taken) == before
    assert "by torch's own calls" in structures.explain(plan)
