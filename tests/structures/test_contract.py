"""What holds while a plan is in place: forms, fallbacks, refusals, state, and the exact way back."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from microllm import structures
from microllm.errors import GuardRefused, StructureError
from microllm.structures.guard import RESTORED_AFTER
from tiny_hosts import FAMILIES, assert_same_state, make_host, state_of


def seats(plan, structure):
    return [seat for seat in plan.seats if seat.structure == structure]


def own(module, *args, **kwargs):
    """What the class itself gives, whatever is in the module's way."""
    return type(module).forward(module, *args, **kwargs)


@pytest.fixture
def model():
    return make_host("qwen2")


@pytest.fixture
def plan(model, attached):
    plan = attached(model)
    yield plan
    plan.detach()


OUTSIDE = {
    "dtype": lambda x: x.bfloat16(),
    "double": lambda x: x.double(),
    "one axis": lambda x: x[0, 0],
    "strides": lambda x: x.expand(5, 4, 64).reshape(4, 5, 64)[:, ::2],
    "columns apart": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "nothing": lambda x: x[:, :0],
}  # fmt: skip


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("path", ["input_layernorm", "self_attn.q_proj", pytest.param("mlp", marks=pytest.mark.slow)])
def test_outside_its_form_the_host_runs_bit_for_bit_and_is_counted(model, plan, outside, path):
    module = model.model.layers[1].get_submodule(path)
    x = OUTSIDE[outside](torch.randn(1, 4, 64))
    kind = {"mlp": "decoder_ffn", "input_layernorm": "residual_norm", "self_attn.q_proj": "qkv_pack"}[path]
    (seat,) = [s for s in seats(plan, kind) if f"layers.1.{path.split('.')[0]}" in s.path]
    if x.dtype != torch.float32 and path != "input_layernorm":  # the host's own code refuses it too
        with pytest.warns(RuntimeWarning, match="runs the host's own code"), pytest.raises(RuntimeError):
            module(x)
        assert seat.ledger.fallbacks == 1
        return
    with pytest.warns(RuntimeWarning, match="runs the host's own code") as told:
        first, second = module(x), module(x)
    assert torch.equal(first, own(module, x))
    assert torch.equal(second, first)
    assert len(told) == 1
    assert (seat.ledger.calls, seat.ledger.fallbacks, len(seat.ledger.reasons)) == (0, 2, 1)
    assert not plan.summary()["clean"]
    with pytest.raises(GuardRefused, match="fell back"):
        plan.raise_on_fallback()


def test_rows_that_a_view_joins_are_within_the_form(model, plan):
    x = torch.randn(3, 5, 64)
    for rows in (x[:, -1:], x[1:], x[:, :1], x.expand(3, 5, 64)):
        assert torch.allclose(model.model.layers[0].mlp(rows), own(model.model.layers[0].mlp, rows), atol=1e-5)
    assert plan.summary()["fallbacks"] == 0


def test_after_32_fallbacks_in_a_row_the_host_is_restored_for_good(model, plan):
    mlp, x = model.model.layers[0].mlp, torch.randn(1, 2, 64, dtype=torch.float64)
    norm = model.model.layers[0].input_layernorm
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(RESTORED_AFTER - 1):
            norm(x)
        norm(x.float())  # one good call begins the count anew
        for _ in range(RESTORED_AFTER):
            assert "forward" in vars(norm)
            norm(x)
    assert "forward" not in vars(norm)
    assert "forward" in vars(mlp)
    assert plan.summary()["restored"] == 1
    assert plan.report()["residual_norm|model.layers.0.input_layernorm"]["restored"]
    model(torch.arange(5)[None])  # the others go on
    assert plan.report()["residual_norm|model.layers.1.input_layernorm"]["calls"] == 1
    plan.detach()
    plan.activate()
    assert "forward" not in vars(norm)


def test_raise_refuses_instead_of_falling_back(model, attached):
    plan = attached(model, on_guard_fail="raise")
    with pytest.raises(GuardRefused, match="detach"):
        model.model.layers[0].mlp(torch.randn(1, 2, 64).double())
    assert plan.summary()["fallbacks"] == 0
    assert plan.report()["decoder_ffn|model.layers.0.mlp"]["last_reason"] == "dtype float64, bound for float32"
    plan.detach()


def test_a_gradient_that_is_wanted_goes_through_the_host(model, plan):
    x = torch.randn(1, 2, 64, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="gradient"):
        model.model.layers[0].mlp(x).sum().backward()
    assert x.grad is not None


PARTS = {"model": lambda m: m, "stack": lambda m: m.model, "leaf": lambda m: m.model.layers[0].mlp.gate_proj}
REFUSED = {
    "train": lambda m: m.train(), "move bf16": lambda m: m.to(torch.bfloat16), "move half": lambda m: m.half(),
    "move double": lambda m: m.double(), "move to cpu": lambda m: m.to("cpu", torch.float16),
    "move back": lambda m: m.cpu(),
    "move empty": lambda m: m.to_empty(device="cpu"), "load_state_dict empty": lambda m: m.load_state_dict({}),
    "load_state_dict own": lambda m: m.load_state_dict(m.state_dict(), strict=False), "deepcopy": copy.deepcopy,
    "deepcopy in a list": lambda m: copy.deepcopy([m]), "deepcopy wrapped": lambda m: copy.deepcopy(nn.Sequential(m)),
    "pickle": pickle.dumps, "pickle by torch": lambda m: torch.save(m, io.BytesIO()),
    "train wrapped": lambda m: nn.Sequential(m).train(), "move wrapped": lambda m: nn.Sequential(m).bfloat16(),
}  # fmt: skip


@pytest.mark.parametrize("part", ["model", *(pytest.param(p, marks=pytest.mark.slow) for p in ("stack", "leaf"))])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_while_attached_names_detach_and_changes_nothing(model, plan, part, name):
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(GuardRefused, match=f"{name.split()[0]}.*detach"):
        REFUSED[name](PARTS[part](model))
    assert not any(module.training for module in model.modules())
    assert all(t.dtype == torch.float32 and torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_eval_is_allowed_and_training_set_by_hand_is_refused_at_the_call(model, plan):
    assert model.eval() is model
    model.model.layers[0].mlp.training = True
    with pytest.raises(GuardRefused, match="training"):
        model(torch.arange(4)[None])
    model.model.layers[0].mlp.training = False
    model(torch.arange(4)[None])


def test_a_second_thread_at_once_is_refused_and_one_after_another_is_not(model, plan):
    inside, go, errors = threading.Event(), threading.Event(), []

    def wait(*_):
        inside.set()
        go.wait(10)

    hook = model.model.layers[1].register_forward_pre_hook(wait)
    first = threading.Thread(target=lambda: model(torch.arange(4)[None]))
    first.start()
    assert inside.wait(10)
    for call in (lambda: model(torch.arange(4)[None]), lambda: model.model.layers[0].mlp(torch.zeros(1, 1, 64))):
        with pytest.raises(GuardRefused, match="second thread"):
            call()
    go.set()
    first.join()
    hook.remove()

    def later():
        try:
            model(torch.arange(4)[None])
        except GuardRefused as error:
            errors.append(error)

    for _ in range(2):
        thread = threading.Thread(target=later)
        thread.start()
        thread.join()
    assert errors == []
    model(torch.arange(4)[None])


def test_an_exception_inside_lets_the_next_call_in(model, plan):
    with pytest.raises(IndexError):
        model(torch.tensor([[5000]]))
    model(torch.arange(4)[None])
    thread = threading.Thread(target=lambda: model(torch.arange(4)[None]))
    thread.start()
    thread.join()
    assert plan.summary()["fallbacks"] == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", ["w8a16_decode", pytest.param("bf16_structural", marks=pytest.mark.slow)])
def test_state_and_saved_files_are_the_hosts(family, scheme, attached, tmp_path):
    model = make_host(family)
    wanted = {name: t.clone() for name, t in model.state_dict().items()}
    model.save_pretrained(tmp_path / "before")
    plan = attached(model, scheme)
    state = model.state_dict()
    assert list(state) == list(wanted)
    assert all(torch.equal(t, wanted[name]) for name, t in state.items())
    if family == "qwen2":
        assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "while")
    files = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "while").iterdir())
    for name in files:
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "while" / name).read_bytes()
    again = type(model).from_pretrained(tmp_path / "while").eval()
    ids = torch.arange(6)[None]
    assert torch.equal(again(ids).logits, make_host(family)(ids).logits)
    plan.detach()


def test_every_tensor_that_a_host_keeps_stays_as_it_was(attached):
    model = make_host("qwen3")
    kept = []
    with_seats = attached(model)

    def keep(_, __, output):
        found = output if isinstance(output, tuple) else (output,)
        kept.extend((t, t.clone()) for t in found if isinstance(t, torch.Tensor))

    hooks = [
        m.register_forward_hook(keep) for n, m in model.named_modules() if n.endswith(("proj", "norm", "mlp", "head"))
    ]
    with structures.decode_loop(model, max_len=96) as loop:
        loop.generate(list(range(10)), max_new_tokens=64)
    for hook in hooks:
        hook.remove()
    assert len(kept) > 1000
    assert all(torch.equal(t, values) for t, values in kept)
    with_seats.detach()


def test_a_sibling_called_alone_or_with_another_input_is_the_hosts(model, plan):
    attention = model.model.layers[0].self_attn
    x, y = torch.randn(1, 3, 64), torch.randn(1, 3, 64)
    assert torch.equal(attention.k_proj(x), own(attention.k_proj, x))
    attention.q_proj(x)
    with pytest.warns(RuntimeWarning, match="sibling"):
        assert torch.equal(attention.k_proj(y), own(attention.k_proj, y))
    attention.q_proj(x)
    x.add_(1)
    with warnings.catch_warnings():  # the reason has been told
        warnings.simplefilter("error")
        assert torch.equal(attention.v_proj(x), own(attention.v_proj, x))
    (seat,) = [s for s in seats(plan, "qkv_pack") if "layers.0" in s.path]
    assert seat.ledger.fallbacks == 2


def test_masks_of_key_ranges_are_taken_and_others_refused_by_form(attached):
    model = make_host("llama")
    ids = torch.arange(1, 7)[None].repeat(2, 1)
    padded = torch.ones_like(ids)
    padded[1, :3] = 0
    wanted = model(ids, attention_mask=padded).logits
    plan = attached(model)
    assert torch.allclose(model(ids, attention_mask=padded).logits[0], wanted[0], atol=1e-4)
    assert torch.allclose(model(ids, attention_mask=padded).logits[1, 3:], wanted[1, 3:], atol=1e-4)
    assert plan.summary()["fallbacks"] == 0
    holes = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
    holes[..., ::2] = True
    with pytest.warns(RuntimeWarning, match="more than two ranges"):
        found = model(ids[:1], attention_mask=holes).logits
    ledger = plan.report()["attention_core|model.layers.0.self_attn"]
    assert ledger["fallbacks"] == 1
    plan.detach()
    assert torch.allclose(found, model(ids[:1], attention_mask=holes).logits, atol=1e-4)


def test_attention_weights_that_are_asked_for_come_from_the_host(attached):
    model = make_host("llama")
    model.set_attn_implementation("eager")
    ids = torch.arange(6)[None]
    wanted = model(ids, output_attentions=True).attentions
    plan = attached(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model(ids, output_attentions=True).attentions
    assert [a.shape for a in found] == [a.shape for a in wanted]
    assert model.config._attn_implementation == "eager"
    plan.detach()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_of_generating_gives_the_hosts_tokens(family, attached):
    model, ids = make_host(family), torch.arange(1, 13)[None]
    ways = [
        {"num_beams": 3, "pad_token_id": 0}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}, {},
        {"cache_implementation": "static", "num_beams": 2, "pad_token_id": 0}, {"use_cache": False},
    ]  # fmt: skip
    wanted = [model.generate(ids, max_new_tokens=8, do_sample=False, **way) for way in ways]
    model._cache = None  # a static cache that generation keeps
    plan = attached(model)
    for way, tokens in zip(ways, wanted, strict=True):
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, **way), tokens), way
    assert plan.summary()["fallbacks"] == 0
    plan.detach()


def test_left_padded_batches_generate_what_the_host_generates(attached):
    model = make_host("qwen3")
    ids = torch.randint(97, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, :1] = 0
    wanted = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False, pad_token_id=0)
    plan = attached(model)
    assert torch.equal(
        model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False, pad_token_id=0), wanted
    )
    assert plan.summary()["fallbacks"] == 0
    plan.detach()


# ---- hosts that are refused, or of which a part is


def test_a_network_with_bias_keeps_its_host_and_the_rest_is_bound(config):
    model = make_host("llama", mlp_bias=True)
    ids = torch.arange(8)[None]
    plan = structures.auto_swaps(model, lambda: model(ids), scheme="bf16_structural", config=config)
    assert {r.structure for r in plan.build.refused} == {"decoder_ffn", "decoder_block"}
    assert all("gate_proj.bias (128,)" in r.reason for r in plan.build.refused)
    assert Counter(seat.structure for seat in plan.seats)["qkv_pack"] == 2
    assert "decoder_ffn x 2 (model.layers.0.mlp): got gate_proj.bias (128,)" in structures.explain(plan)


def test_another_activation_or_norm_is_seen_by_what_it_computes(config):
    model = make_host("llama", hidden_act="gelu")
    ids = torch.arange(8)[None]
    plan = structures.auto_swaps(model, lambda: model(ids), scheme="bf16_structural", config=config)
    assert any(r.structure == "decoder_ffn" and "computes something else" in r.reason for r in plan.build.refused)
    model = make_host("llama")
    norm = model.model.layers[1].post_attention_layernorm
    norm.variance_epsilon = 10.0  # the structure takes it as it finds it; a chain has one for all its norms
    plan = structures.auto_swaps(model, lambda: model(ids), scheme="bf16_structural", config=config)
    assert any(r.structure == "decoder_block" and "need one" in r.reason for r in plan.build.refused)
    wanted = model(ids).logits
    plan.activate()
    assert torch.allclose(model(ids).logits, wanted, atol=1e-4)
    plan.detach()


def test_a_norm_with_another_reader_is_no_part_of_a_chain(config):
    model = make_host("llama")
    ids, kept = torch.arange(8)[None], {}
    layer = model.model.layers[1]
    layer.post_attention_layernorm.register_forward_hook(lambda _, __, y: kept.update(y=y))
    layer.mlp.register_forward_hook(lambda _, __, y: y + 0.1 * kept["y"])
    chained = replace(config, pins={"decoder_layer_decode": "chain"})
    plan = structures.auto_swaps(model, lambda: model(ids), scheme="bf16_structural", config=chained)
    refused = {(r.structure, r.path): r.reason for r in plan.build.refused}
    assert (
        "flow" in refused["decoder_block", "model.layers.1"]
        or "host's own module" in refused["decoder_block", "model.layers.1"]
    )
    assert "something else" in refused["decoder_ffn", "model.layers.1.mlp"]


def test_an_odd_head_is_refused_what_turns_pairs(config):
    model = make_host("qwen3", head_dim=16)
    ids = torch.arange(4)[None]
    plan = structures.auto_swaps(model, lambda: model(ids), scheme="bf16_structural", config=config)
    assert any("rope" in seat.structure for seat in plan.seats)
    for layer in model.model.layers:  # seven heads of nine elements, by a rotary table of eight
        layer.self_attn.head_dim = 9
    hook = model.model.layers[0].self_attn.register_forward_pre_hook
    assert hook is not None
    with pytest.raises(RuntimeError):
        model(ids)


SPOILED = {
    "training mode": lambda m: m.train(),
    "training mode of a part": lambda m: setattr(m.model.layers[0].mlp, "training", True),
    "forward of its own": lambda m: setattr(m.model.layers[0].mlp, "forward", lambda x: x),
    "meta tensors": lambda m: m.model.layers[0].mlp.to("meta"),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_hosts_that_may_not_be_attached_to(config, spoiled):
    model, words = make_host("llama"), spoiled.removesuffix(" of a part")
    SPOILED[spoiled](model)
    with pytest.raises(StructureError, match=words):
        structures.auto_swaps(model, lambda: model(torch.arange(4)[None]), scheme="none", config=config)


def test_hooks_of_accelerate_are_refused_and_removable(config):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    model, ids = make_host("llama"), torch.arange(4)[None]
    add_hook_to_module(model.model.layers[0], AlignDevicesHook(execution_device="cpu"), append=True)
    with pytest.raises(StructureError, match="accelerate"):
        structures.auto_swaps(model, lambda: model(ids), scheme="none", config=config)
    remove_hook_from_module(model, recurse=True)
    structures.auto_swaps(model, lambda: model(ids), scheme="none", config=config)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_and_tokenless_attributes_stay(family, attached):
    model = make_host(family)
    before = state_of(model)
    plan = attached(model)
    assert model.config.to_dict() | {"attention": model.config._attn_implementation} == before["config"]
    assert {name: id(m) for name, m in model.named_modules()} == {n: i for n, (i, _) in before["modules"].items()}
    assert repr(model) == repr(make_host(family))
    plan.detach()
    assert_same_state(state_of(model), before)


# ---- weights given up


def test_consume_frees_what_seats_hold_and_a_checkpoint_brings_it_back(attached, tmp_path):
    model = make_host("qwen2", torch.bfloat16)
    model.save_pretrained(tmp_path)
    before, ids = state_of(model), torch.arange(20)[None]
    own_logits = model(ids).logits
    plan = attached(model, "w8a16_decode")
    decode_logits = model(ids[:, :4]).logits
    freed = plan.consume(tmp_path)
    assert freed["kept_bytes"] == model.model.embed_tokens.weight.numel() * 2
    assert freed["freed_bytes"] == 2 * sum(
        p.numel() for n, p in before["parameters"].items() for p in [p[2]] if "proj.weight" in n
    )
    weight = model.model.layers[0].mlp.gate_proj.weight
    assert weight.shape == (128, 64)
    assert weight.untyped_storage().nbytes() == 2
    assert torch.equal(model(ids[:, :4]).logits, decode_logits)
    prefill = model(ids).logits
    assert (prefill.argmax(-1) == own_logits.argmax(-1)).float().mean() > 0.85
    with pytest.raises(GuardRefused, match="state_dict"):
        model.state_dict()
    with pytest.raises(GuardRefused):
        model.model.layers[0].mlp(torch.zeros(1, 1, 64, dtype=torch.float64))
    plan.detach()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before["parameters"][name][2])
        assert id(parameter) == before["parameters"][name][0]
    assert torch.equal(model(ids).logits, own_logits)


def test_consume_without_or_with_another_checkpoint(attached, tmp_path):
    model, other = make_host("llama", torch.bfloat16), make_host("llama", torch.bfloat16, seed=1)
    other.save_pretrained(tmp_path)
    plan = attached(model, "w8a16_decode")
    with pytest.raises(StructureError, match="is not the model's"):
        plan.consume(tmp_path)
    assert model.model.layers[0].mlp.gate_proj.weight.untyped_storage().nbytes() > 2
    plan.consume()
    with pytest.raises(GuardRefused, match="reload"):
        plan.detach()
    model(torch.arange(20)[None])
    assert plan.summary()["clean"]


def test_finalize_is_one_way(attached):
    model = make_host("llama", torch.bfloat16)
    plan = attached(model, "w8a16_decode")
    assert plan.finalize()["freed_bytes"] > 0
    with pytest.raises(GuardRefused, match="reload"):
        plan.detach()
    with pytest.raises(StructureError, match="final"):
        plan.activate()
    with pytest.raises(GuardRefused):
        model.model.layers[0].input_layernorm(torch.zeros(1, 1, 64))
