"""The decode loop: what it generates, when it ends, what it leaves behind."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from microllm import structures
from microllm.errors import RequestError, StructureError
from microllm.sampling import SamplingParams
from tiny_hosts import FAMILIES, assert_same_state, make_host, state_of


def host_tokens(model, prompt, count):
    ids = torch.tensor([prompt])
    return model.generate(ids, max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()


@pytest.fixture
def prompts():
    return [torch.randint(97, (n,)).tolist() for n in (5, 13, 1, 9)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "region", ["chain", *(pytest.param(r, marks=pytest.mark.slow) for r in ("seats", "nothing attached"))]
)
def test_tokens_are_the_hosts_alone_and_in_a_batch_of_unequal_prompts(family, region, prompts, ids, config):
    model = make_host(family)
    wanted = [host_tokens(model, prompt, 20) for prompt in prompts]
    plan = None
    if region != "nothing attached":
        pinned = replace(config, pins={"decoder_layer_decode": region})
        plan = structures.attach(model, lambda: model(ids), scheme="bf16_structural", min_speedup=0, config=pinned)
        assert plan.notes["region"]["winner"] == region
        assert ("decoder_block" in {seat.structure for seat in plan.seats}) == (region == "chain")
    with structures.decode_loop(model, max_len=64) as loop:
        assert loop.generate(prompts, max_new_tokens=20) == wanted
        assert [loop.generate(prompt, max_new_tokens=20)[0] for prompt in prompts] == wanted
        assert list(loop.stream(prompts[1], max_new_tokens=20)) == wanted[1]
        assert loop.generate(torch.tensor([prompts[0]]), max_new_tokens=20) == [wanted[0]]
        if plan is not None:
            chained = {name: e for name, e in plan.report().items() if name.startswith("decoder_block")}
            assert all(entry["calls"] >= 5 * 19 for entry in chained.values())
            assert plan.summary()["clean"]
            plan.detach()
            assert loop.generate(prompts, max_new_tokens=20) == wanted  # what is attached is asked anew each time
    assert host_tokens(model, prompts[0], 20) == wanted[0]


def test_close_leaves_the_host_as_it_was(prompts):
    model = make_host("llama")
    before = state_of(model)
    loop = structures.decode_loop(model, max_len=64)
    loop.generate(prompts, max_new_tokens=4)
    loop.close()
    loop.close()
    assert_same_state(state_of(model), before)
    with pytest.raises(StructureError, match="closed"):
        loop.generate(prompts, max_new_tokens=4)


def test_a_sequence_ends_at_its_end_token_and_others_go_on(prompts):
    model = make_host("qwen3")
    with structures.decode_loop(model, max_len=64) as loop:
        whole = loop.generate(prompts, max_new_tokens=20)
        end = whole[1][4]
        model.generation_config.eos_token_id = [end]
        cut = loop.generate(prompts, max_new_tokens=20)
        for row, found in zip(whole, cut, strict=True):
            assert found == (row[: row.index(end) + 1] if end in row else row)
        assert list(loop.stream(prompts[1], max_new_tokens=20)) == cut[1]
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        assert loop.generate(prompts, params) == whole
        late = loop.generate(prompts[1], SamplingParams(temperature=0.0, max_tokens=20, min_tokens=12))[0]
        assert end not in late[:11]
        assert loop.generate(prompts[1], replace(params, stop_token_ids=(whole[1][2],)))[0] == whole[1][:3]


def test_sampling_follows_its_seed_whatever_the_batch(prompts):
    model = make_host("llama")
    params = SamplingParams(temperature=1.3, top_p=0.9, seed=7, max_tokens=12)
    with structures.decode_loop(model, max_len=64) as loop:
        first = loop.generate(prompts, params)
        assert loop.generate(prompts, params) == first
        assert loop.generate(prompts[2], params)[0] == first[2]
        assert list(loop.stream(prompts[2], params)) == first[2]
        assert loop.generate(prompts, replace(params, seed=8)) != first
        biased = replace(params, logit_bias={5: 100.0})
        assert loop.generate(prompts[0], biased)[0] == [5] * 12


def test_a_stream_that_is_left_lets_the_next_begin(prompts):
    with structures.decode_loop(make_host("llama"), max_len=64) as loop:
        whole = loop.generate(prompts[0], max_new_tokens=9)[0]
        stream = loop.stream(prompts[0], max_new_tokens=9)
        assert [next(stream), next(stream)] == whole[:2]
        with pytest.raises(StructureError, match="second generation"):
            loop.generate(prompts[1], max_new_tokens=3)
        stream.close()
        assert loop.generate(prompts[0], max_new_tokens=9)[0] == whole


@pytest.mark.parametrize(
    "prompt", [[], [[]], [1] * 64, [97], [-1], [[1], []]], ids=["none", "empty", "long", "id", "negative", "one empty"]
)
def test_prompts_that_do_not_fit_are_refused(prompt):
    with structures.decode_loop(make_host("llama"), max_len=64) as loop, pytest.raises(RequestError, match="got"):
        loop.generate(prompt, max_new_tokens=3)


def test_the_room_ends_a_sequence_and_stop_texts_are_refused():
    with structures.decode_loop(make_host("llama"), max_len=16) as loop:
        assert len(loop.generate([1, 2, 3], max_new_tokens=100)[0]) == 13
        with pytest.raises(RequestError, match="token ids alone"):
            loop.generate([1], SamplingParams(stop="x"))


def test_hosts_whose_forward_is_more_than_their_stack_are_refused():
    model = make_host("llama")
    model.lm_head.register_forward_hook(lambda _, __, y: y)
    structures.decode_loop(model, max_len=16).close()
    own = type(model).forward
    try:
        type(model).forward = lambda self, *args, **kwargs: -own(self, *args, **kwargs).logits
        with pytest.raises(StructureError, match="more than its stack"):
            structures.decode_loop(model, max_len=16)
    finally:
        type(model).forward = own
    with pytest.raises(StructureError, match="training"):
        structures.decode_loop(model.train(), max_len=16)


def test_our_own_model_loops_too(prompts):
    from microllm.config import ModelConfig
    from microllm.model import Transformer

    shape = ModelConfig(
        family="llama", vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = Transformer(shape).initialise(0, std=0.2).eval().requires_grad_(False)
    wanted = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(8):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        wanted.append(tokens[len(prompt) :])
    with structures.decode_loop(model, max_len=64) as loop:
        assert loop.generate(prompts, max_new_tokens=8) == wanted
    plan = structures.auto_swaps(
        model, lambda: model(torch.arange(9)[None]), scheme="bf16_structural",
        config=structures.AttachConfig(pins={"decoder_layer_decode": "chain"}),
    ).activate()  # fmt: skip
    with structures.decode_loop(model, max_len=64) as loop:
        assert loop.generate(prompts, max_new_tokens=8) == wanted
    assert plan.summary()["clean"]
    plan.detach()


# ---- speculation


def mtp_head(path, model, seed=0):
    torch.manual_seed(seed)
    D = model.config.hidden_size
    shapes = {
        "pre_fc_norm_hidden.weight": (D,), "pre_fc_norm_embedding.weight": (D,), "fc.weight": (D, 2 * D),
        "norm.weight": (D,), "layers.0.post_attention_layernorm.weight": (D,), "layers.0.mlp.gate_proj.weight": (32, D),
        "layers.0.mlp.up_proj.weight": (32, D), "layers.0.mlp.down_proj.weight": (D, 32),
    }  # fmt: skip
    save_file({f"mtp.{name}": torch.randn(shape) * 0.2 for name, shape in shapes.items()}, path / "mtp.safetensors")
    return path


@pytest.mark.parametrize(
    "draft", ["ngram", "itself", *(pytest.param(d, marks=pytest.mark.slow) for d in ("another", "mtp"))]
)
def test_speculation_changes_no_token_on_fifty_prompts(draft, tmp_path):
    model = make_host("qwen2")
    drafts = {
        "ngram": lambda: "ngram", "itself": lambda: model, "another": lambda: make_host("qwen2", seed=1),
        "mtp": lambda: mtp_head(tmp_path, model),
    }  # fmt: skip
    count = 50 if draft == "ngram" else 6
    prompts = [torch.randint(97, (n % 11 + 1,)).tolist() for n in range(count)]
    with structures.decode_loop(model, max_len=64) as loop:
        loop.enable_draft(drafts[draft](), k=4)
        rates = []
        for prompt in prompts:
            assert loop.generate_speculative(prompt, 24) == loop.generate(prompt, max_new_tokens=24)[0]
            rates.append(loop.last_acceptance)
        assert all(rate >= 1 for rate in rates)
        if draft == "itself":
            assert min(rates) > 3
        model.generation_config.eos_token_id = loop.generate(prompts[3], max_new_tokens=9)[0][6]
        assert loop.generate_speculative(prompts[3], 24) == loop.generate(prompts[3], max_new_tokens=24)[0]


def test_drafts_that_do_not_fit_are_refused(tmp_path):
    model = make_host("llama")
    with structures.decode_loop(model, max_len=64) as loop:
        with pytest.raises(StructureError, match="no draft"):
            loop.generate_speculative([1], 4)
        for draft, words in [
            ("oracle", "ngram"), (tmp_path, "mtp"), ("mtp", "directory"),
            (make_host("llama", vocab_size=50), "vocabulary"),
        ]:  # fmt: skip
            with pytest.raises(StructureError, match=words):
                loop.enable_draft(draft)
        with pytest.raises(StructureError, match="k=9"):
            loop.enable_draft("ngram", k=9)
        save_file({"mtp.fc.weight": torch.zeros(2, 2)}, tmp_path / "mtp.safetensors")
        with pytest.raises(StructureError, match=r"norm\.weight"):
            loop.enable_draft(tmp_path)


def test_a_loop_in_another_thread_than_its_maker(prompts):
    model = make_host("llama")
    loop, found = structures.decode_loop(model, max_len=64), []
    wanted = loop.generate(prompts[0], max_new_tokens=5)
    thread = threading.Thread(target=lambda: found.append(loop.generate(prompts[0], max_new_tokens=5)))
    thread.start()
    thread.join()
    assert found == [wanted]
