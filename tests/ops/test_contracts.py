"""One test drives every operator's contract: values against an oracle in fp64, gradients, refusals, views, outputs.

Interpreted (conftest.py), it drives the kernels of the rows that have one.
"""

import itertools
import math
import os
import pathlib
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from microllm import ops
from microllm.errors import OperatorError

pytestmark = pytest.mark.interpreter
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROWS = [row for row in ops.CONTRACTS.values() if not INTERPRETED or "triton" in row.levels["cuda"]]
BY_NAME = {"ids": lambda row: row.name}
whole_table = pytest.mark.skipif(INTERPRETED, reason="says nothing about kernels, or something about all rows")


def dtypes_of(tolerances):
    return [dtype for dtype in tolerances if not (INTERPRETED and dtype == torch.bfloat16)]


def cases(dtypes):
    return [
        pytest.param(row, sizes, dtype, id=f"{row.name}-{number}-{str(dtype)[6:]}")
        for row in ROWS
        for number, sizes in enumerate(row.sizes)
        for dtype in dtypes_of(dtypes(row))
    ]


# ---- oracles: the formula in fp64 (inputs widened, draws and codes as they are), written a second way


def rope_oracle(q, k, cos, sin, positions, interleaved, inverse):
    turn = torch.complex(cos.double(), (-sin if inverse else sin).double()).unsqueeze(2)

    def rotate(x):
        half = cos.shape[-1]
        z = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
        return torch.cat((z.real, z.imag, x[..., 2 * half :]), dim=-1)

    return rotate(q), rotate(k)


def norm(x, w, eps):
    return x if w is None else F.rms_norm(x, w.shape, w, eps)


def norm_gradient(dy, x, w, addend, eps):
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    dx, dw = torch.autograd.grad(norm(x, w, eps), (x, w), dy)
    return dx if addend is None else dx + addend, dw


def gradient_of(function):
    def oracle(dy, *inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*leaves), leaves, dy)

    return oracle


def attention_oracle(q, k, v, positions, scale):
    repeats = q.shape[2] // k.shape[2]
    visible = torch.arange(k.shape[1]) <= positions[:, None, :, None]
    k, v = (t.repeat_interleave(repeats, 2).transpose(1, 2) for t in (k, v))
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=visible, scale=scale).transpose(1, 2)


def full_oracle(q, k, v, scale):
    return attention_oracle(q, k, v, torch.arange(q.shape[1]).expand(q.shape[:2]), scale)


def varlen_oracle(q, k, v, starts, max_length, scale):
    ends = starts.tolist()
    return torch.cat([
        full_oracle(q[None, a:b], k[None, a:b], v[None, a:b], scale)[0]
        for a, b in itertools.pairwise(ends) if b > a
    ])  # fmt: skip


def paged_oracle(q, k_pages, v_pages, page_table, positions, scale, split):
    out = torch.zeros_like(q)
    for a in range(q.shape[0]):
        k, v = (pages[page_table[a].long()].flatten(0, 1)[None].to(q.dtype) for pages in (k_pages, v_pages))
        for t in range(q.shape[1]):
            if positions[a, t] >= 0:
                out[a, t] = attention_oracle(q[a, t][None, None], k, v, positions[a, t].view(1, 1), scale)[0, 0]
    return out


def step_oracle(q, k, v, cos, sin, k_pages, v_pages, table, positions, q_weight, k_weight, scale, eps, split):
    at = positions.clamp(min=0)
    q, k = rope_oracle(norm(q, q_weight, eps), norm(k, k_weight, eps), cos[at], sin[at], None, False, False)
    for a, t in (positions >= 0).nonzero().tolist():
        page, slot = divmod(int(positions[a, t]), k_pages.shape[1])
        k_pages[table[a, page], slot], v_pages[table[a, page], slot] = k[a, t], v[a, t]
    return paged_oracle(q, k_pages, v_pages, table, positions, scale, split)


def store_oracle(cache, values, positions):
    for b, t in torch.cartesian_prod(*(torch.arange(n) for n in positions.shape)).view(-1, 2).tolist():
        cache[b, int(positions[b, t])] = values[b, t]


def store_paged_oracle(k_pages, v_pages, k, v, page_table, positions):
    for a, row in enumerate(positions.tolist()):
        for t, position in enumerate(row):
            page, slot = int(page_table[a, position // k_pages.shape[1]]), position % k_pages.shape[1]
            k_pages[page, slot], v_pages[page, slot] = k[a, t], v[a, t]


def dequantised(codes, scale, minimum=None):
    if minimum is not None:
        block = torch.arange(2 * codes.shape[1]) // 32
        place = torch.arange(2 * codes.shape[1]) % 32
        codes = codes[:, block * 16 + place % 16].int() >> 4 * (place // 16) & 15
    repeats = codes.shape[1] // scale.shape[1]
    w = codes.double() * scale.double().repeat_interleave(repeats, 1)
    return w if minimum is None else w + minimum.double().repeat_interleave(repeats, 1)


def quantised(low, high, dtype):
    """Round x / scale in fp32, as the operator does: in fp64 a tie may fall elsewhere."""

    def oracle(x, scale):
        ratio = x.float() / scale.float().repeat_interleave(x.shape[1] // scale.shape[1], 1)
        return (ratio if dtype.is_floating_point else ratio.round()).clamp(low, high).to(dtype)

    return oracle


def quantised_int4(x, scale, minimum):
    repeats = x.shape[1] // scale.shape[1]
    scale, minimum = (t.float().repeat_interleave(repeats, 1) for t in (scale, minimum))
    codes = ((x.float() - minimum) / scale).round().clamp(0, 15).to(torch.uint8)
    packed = [codes[:, 32 * b + j] + 16 * codes[:, 32 * b + 16 + j] for b in range(x.shape[1] // 32) for j in range(16)]
    return torch.stack(packed, 1)


def with_bias(y, bias):
    return y if bias is None else y + bias


def linear_oracle(x, w, bias=None):
    return with_bias(torch.einsum("...k,nk->...n", x, w), bias)


def norm_swiglu_oracle(x, norm_weight, w, bias, eps):
    gate, up = linear_oracle(norm(x, norm_weight, eps), w, bias).tensor_split(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def any_codes(codes, scale, minimum):
    """Dequantise codes of any format, with or without minima."""
    if codes.dtype == torch.uint8:
        return dequantised(codes, scale, torch.zeros_like(scale) if minimum is None else minimum)
    w = dequantised(codes, scale)
    return w if minimum is None else w + minimum.double().repeat_interleave(w.shape[1] // scale.shape[1], 1)


def losses_oracle(logits, targets, ignore_index, need_valid=False):
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="none")


def linear_losses_oracle(h, w, targets, ignore_index, need_valid):
    return losses_oracle(h @ w.T, targets, ignore_index)


def linear_gradients_oracle(h, w, targets, weights, ignore_index, need_valid):
    with torch.enable_grad():
        leaves = [t if t.requires_grad else t.detach().requires_grad_() for t in (h, w)]
        total = (linear_losses_oracle(*leaves, targets, ignore_index, need_valid) * weights).sum()
        return total, *torch.autograd.grad(total, leaves, retain_graph=True)


def adamw_oracle(params, grads, ms, vs, lr, beta1, beta2, eps, weight_decay, step, seed):
    for p, g, m, v in zip(params, grads, ms, vs, strict=True):
        m.copy_(beta1 * m + (1 - beta1) * g)
        v.copy_(beta2 * v + (1 - beta2) * g * g)
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
        p.copy_(p - lr * weight_decay * p - lr * update)


def advance_oracle(token, token_ids, positions, last, history, step):
    for a, (t, p, end) in enumerate(zip(token.tolist(), positions.tolist(), last.tolist(), strict=True)):
        history[int(step), a] = t if p >= 0 else -2
        token_ids[a], positions[a] = (t, p + 1) if 0 <= p < end and t >= 0 else (0, -1)
    step += 1


def penalise_oracle(logits, seen, counts, repetition, presence, frequency):
    out = logits.clone()
    for a, j in torch.cartesian_prod(*(torch.arange(n) for n in logits.shape)).view(-1, 2).tolist():
        if seen[a, j]:
            out[a, j] = out[a, j] / repetition[a] if out[a, j] > 0 else out[a, j] * repetition[a]
        out[a, j] -= frequency[a] * counts[a, j] + (presence[a] if counts[a, j] else 0)
    return out


def sample_oracle(logits, *parameters):
    columns = [p.tolist() for p in parameters]
    return torch.tensor([draw_row(row, *p) for row, *p in zip(logits.tolist(), *columns, strict=True)])


def draw_row(values, temperature, top_k, top_p, min_p, seed, choice, position):
    """Draw one row's token with Python numbers alone."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    order = order[: top_k or None]
    scores = {i: values[i] / temperature for i in order}
    total = math.fsum(math.exp(s - scores[order[0]]) for s in scores.values())
    mass, kept = 0.0, []
    for i in order:
        probability = math.exp(scores[i] - scores[order[0]]) / total
        if (mass < top_p or not kept) and probability >= min_p / total:
            kept.append(i)
        mass += probability
    return max(kept, key=lambda i: scores[i] + gumbel(i, position, choice, seed))


def gumbel(token, position, choice, seed):
    c, k = [token, position, choice, 0], [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        high0, low0 = divmod(c[0] * 0xD2511F53, 1 << 32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return -math.log(-math.log1p(-(c[0] + 0.5) / 2.0**32))


ORACLES = {
    "embedding": lambda ids, w: w[ids],
    "rms_norm": norm,
    "add_rms_norm": lambda x, residual, w, eps: (x + residual, norm(x + residual, w, eps)),
    "rms_norm_backward": norm_gradient,
    "linear": linear_oracle,
    "linear_one_tiling": linear_oracle,
    "linear_residual": lambda x, w, residual, bias: residual + linear_oracle(x, w, bias),
    "norm_linear": lambda x, g, w, bias, eps: linear_oracle(norm(x, g, eps), w, bias),
    "norm_linear_swiglu": norm_swiglu_oracle,
    "quantise_int8": quantised(-127, 127, torch.int8),
    "quantise_fp8": quantised(-448, 448, torch.float8_e4m3fn),
    "quantise_fp8_fnuz": quantised(-240, 240, torch.float8_e4m3fnuz),
    "quantise_int4": quantised_int4,
    "dequantise_int8": dequantised,
    "dequantise_fp8": dequantised,
    "dequantise_int4": dequantised,
    "linear_int8": lambda x, codes, scale, bias: linear_oracle(x, dequantised(codes, scale), bias),
    "linear_fp8": lambda x, codes, scale, bias: linear_oracle(x, dequantised(codes, scale), bias),
    "linear_int4": lambda x, codes, scale, low, bias: linear_oracle(x, dequantised(codes, scale, low), bias),
    "norm_linear_codes": lambda x, g, codes, scale, low, bias, eps: linear_oracle(
        norm(x, g, eps), any_codes(codes, scale, low), bias
    ),
    "linear_residual_codes": lambda x, codes, scale, low, residual, bias: (
        residual + linear_oracle(x, any_codes(codes, scale, low), bias)
    ),
    "norm_linear_swiglu_codes": lambda x, g, codes, scale, low, bias, eps: norm_swiglu_oracle(
        x, g, any_codes(codes, scale, low), bias, eps
    ),
    "rope": rope_oracle,
    "qk_norm_rope": lambda q, k, cos, sin, positions, wq, wk, eps, interleaved: rope_oracle(
        norm(q, wq, eps), norm(k, wk, eps), cos, sin, positions, interleaved, False
    ),
    "kv_store": store_oracle,
    "kv_store_paged": store_paged_oracle,
    "attention": attention_oracle,
    "attention_full": full_oracle,
    "attention_varlen": varlen_oracle,
    "attention_decode": paged_oracle,
    "attention_prefill": paged_oracle,
    "attention_step": step_oracle,
    "swiglu": lambda gate, up: gate * torch.sigmoid(gate) * up,
    "swiglu_backward": gradient_of(lambda gate, up: gate * torch.sigmoid(gate) * up),
    "argmax": lambda logits: torch.tensor([row.index(max(row)) for row in logits.tolist()], dtype=torch.int64),
    "lm_head_argmax": lambda x, w: ORACLES["argmax"](x @ w.T),
    "sample": sample_oracle,
    "penalise": penalise_oracle,
    "cross_entropy": lambda logits, *rest: (losses_oracle(logits, *rest), logits.logsumexp(1)),
    "cross_entropy_backward": lambda grad, logits, targets, lse, ignore: (
        ((logits - lse[:, None]).exp() - F.one_hot(targets.clamp(min=0), logits.shape[1]))
        * (grad * (targets != ignore))[:, None]
    ),
    "linear_cross_entropy": linear_losses_oracle,
    "linear_cross_entropy_gradients": linear_gradients_oracle,
    "adamw": adamw_oracle,
    "advance_rows": advance_oracle,
    "add": torch.add,
    "multiply": torch.mul,
    "add_bias": torch.add,
    "matmul": torch.matmul,
    "softmax": partial(torch.softmax, dim=-1),
    "causal_softmax": lambda x: torch.softmax(x + torch.full_like(x, -math.inf).triu(1), -1),
}


# ---- calls


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def copied(value):
    return [v.clone() for v in value] if isinstance(value, list) else value.clone() if torch.is_tensor(value) else value


def widened(value):
    if isinstance(value, list):
        return [widened(v) for v in value]
    floats = (torch.float32, torch.bfloat16, torch.float16)
    return value.double() if torch.is_tensor(value) and value.dtype in floats else value


def outcome(row, function, values):
    """Call with copies; return the results, or what was mutated where the operator returns nothing."""
    values = [copied(v) for v in values]
    results = function(*values)
    mutated = [v for arg, v in zip(row.args, values, strict=False) if arg.mutated]
    given = as_tuple(results) if row.results else ()
    return (*given, *(t for v in mutated for t in (v if isinstance(v, list) else [v])))


def assert_close(got, want, tolerance):
    for a, r in zip(got, want, strict=True):
        assert a.shape == r.shape
        a, r = (t.double() if t.is_floating_point() else t for t in (a, r))
        torch.testing.assert_close(a, r, atol=tolerance.atol, rtol=tolerance.rtol, equal_nan=False)


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def call_of(row, sizes=None, dtype=torch.float32, seed=0):
    return list(row.example(row.sizes[0] if sizes is None else sizes, dtype, seed).values())


# ---- the one test, by aspect


@pytest.mark.parametrize(("row", "sizes", "dtype"), cases(lambda row: row.forward))
def test_values_agree_with_the_oracle_in_fp64(row, sizes, dtype):
    values = call_of(row, sizes, dtype, seed=1)
    want = outcome(row, ORACLES[row.name], [widened(v) for v in values])
    for level in ("triton",) if INTERPRETED else row.levels["cpu"]:
        with ops.use(level, row.name), ops.ledger() as ran:
            try:
                got = outcome(row, ops.OPERATORS[row.name], values)
            except OperatorError as error:
                assert level != "reference", error  # noqa: PT017
                assert f"not {level}: " in str(error)  # noqa: PT017
                continue
        assert_close(got, want, row.forward[dtype])
        assert [(entry.op, entry.level) for entry in ran] == [(row.name, level)]


@pytest.mark.parametrize(("row", "sizes", "dtype"), cases(lambda row: row.backward))
def test_gradients_agree_with_the_oracle_in_fp64(row, sizes, dtype):
    values = call_of(row, sizes, dtype, seed=2)
    floats = [i for i, arg in enumerate(row.args) if not arg.dtypes and values[i] is not None]
    gradients = []
    for function, wide in ((ops.OPERATORS[row.name], False), (ORACLES[row.name], True)):
        inputs = [widened(v) if wide else copied(v) for v in values]
        for i in floats:
            inputs[i].requires_grad_()
        outputs = [o for o in as_tuple(function(*inputs)) if o.requires_grad]
        if "cross_entropy" in row.name:
            outputs = outputs[:1]
        weights = [torch.linspace(-1, 1, o.numel()).to(dtype).to(o.dtype).view(o.shape) for o in outputs]
        loss = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
        gradients.append(torch.autograd.grad(loss, [inputs[i] for i in floats]))
    assert [g.dtype for g in gradients[0]] == [dtype] * len(floats)
    assert_close(*gradients, row.backward[dtype])


def breaks(row):
    """Yield every kind of input that axes, dtypes, devices, layouts and rules refuse: the reason and the change."""
    drawn = [arg for arg in row.args if arg.draw is not None and not arg.many]
    letters = [letter for arg in drawn for letter, _ in arg.forms[0]]

    def longer(t, axis):
        return torch.cat((t, t.narrow(axis, 0, 1)), dim=axis)

    for arg in drawn:
        spread = arg.forms[0][:1] == (("...", 1),)
        wrong = torch.float64 if torch.float32 in (arg.dtypes or (torch.float32,)) else torch.float32  # as others are
        ways = {"another dtype": lambda t, dtype=wrong: t.to(dtype)}
        if not arg.dtypes and sum(not a.dtypes for a in drawn) > 1:
            ways["a mixed dtype"] = lambda t: t.to(torch.float16)
        if not spread:
            ways["another axis"] = lambda t: t[None]
        for axis, (letter, _) in enumerate(arg.forms[0][spread:], start=spread - len(arg.forms[0])):
            if letters.count(letter) > 1:
                ways[f"another {letter}"] = partial(longer, axis=axis)
        if arg.layout == "rows" and arg.forms[0]:
            ways["a strided last axis"] = lambda t: torch.stack((t, t), dim=-1)[..., 0]
        if len(drawn) > 1:
            ways["another device"] = lambda t: t.to("meta")
        for how, change in ways.items():
            yield f"{arg.name} with {how}", {arg.name: lambda call, n=arg.name, f=change: f(call[n])}
    for rule in row.rules:
        assert rule.breaks, f"{row.name}: nothing breaks {rule.need!r}"
        for number, change in enumerate(rule.breaks):
            yield f"not {rule.need} {number}", change


REFUSED = [pytest.param(row, change, id=f"{row.name}: {why}") for row in ROWS for why, change in breaks(row)]


@pytest.mark.parametrize(("row", "change"), REFUSED)
def test_refuses(row, change):
    call = row.example(row.sizes[0])
    bad = call | {name: value(call) if callable(value) else value for name, value in change.items()}
    with pytest.raises(OperatorError, match=rf"(?s)^{row.name}: got .*; need "):
        ops.OPERATORS[row.name](*bad.values())


@pytest.mark.parametrize("row", ROWS, **BY_NAME)
def test_views_are_read_through_strides_and_offsets(row):
    """A view with room before it and between its rows gives the same bits as its copy."""
    values = call_of(row, seed=3)
    views = list(values)
    for i in range(len(row.args)):
        x = values[i]
        if torch.is_tensor(x) and x.dim() >= 2:
            views[i] = torch.cat((x[..., :1], x, x[..., :1]), dim=-1)[..., 1:-1]
            assert not views[i].is_contiguous() or x.shape[-2] == 1
            assert views[i].storage_offset() == 1
    want = outcome(row, ops.OPERATORS[row.name], values)
    got = ops.OPERATORS[row.name](*views)
    changed = (t for arg, v in zip(row.args, views, strict=False) if arg.mutated for t in (v if arg.many else [v]))
    got = (*(as_tuple(got) if row.results else ()), *changed)
    assert_close(got, want, row.forward[torch.float32])


WITH_OUT = [row for row in ROWS if row.results]


@pytest.mark.parametrize("row", WITH_OUT, **BY_NAME)
def test_out_is_filled_where_it_lies(row):
    for dtype in dtypes_of(row.forward):
        values = call_of(row, dtype=dtype, seed=4)
        want = outcome(row, ops.OPERATORS[row.name], values)[: len(row.results)]
        outs = tuple(torch.full_like(t, 7) for t in want)
        addresses = [t.data_ptr() for t in outs]
        got = as_tuple(ops.OPERATORS[row.name](*values, out=outs if len(outs) > 1 else outs[0]))
        assert all(a is b for a, b in zip(got, outs, strict=True))
        assert [t.data_ptr() for t in outs] == addresses
        assert_close(outs, want, row.forward[dtype])


@pytest.mark.parametrize("row", WITH_OUT, **BY_NAME)
def test_out_is_refused_when_it_does_not_fit(row):
    operator, values = ops.OPERATORS[row.name], call_of(row)
    good = [torch.empty_like(t) for t in as_tuple(operator(*values))]

    def refused(what, *outs):
        with pytest.raises(OperatorError, match=rf"{row.name}: got .*need out= {what}"):
            operator(*values, out=outs)

    first, rest = good[0], good[1:]
    refused("of", *good, first)
    refused("of", torch.empty_like(first, dtype=torch.float64), *rest)
    refused("of", first[None], *rest)
    refused("of", first.to("meta"), *rest)
    if first.dim() and first.shape[-1] > 1:
        refused("of", torch.stack((first, first), -1)[..., 0], *rest)
    if first.is_floating_point():
        refused("that does not require", torch.empty_like(first).requires_grad_(), *rest)
    same = [i for i, arg in enumerate(row.args) if torch.is_tensor(values[i]) and values[i].shape == first.shape
            and values[i].dtype == first.dtype]  # fmt: skip
    if same:
        refused("that shares no memory", values[same[0]], *rest)
    if rest and rest[0].shape == first.shape:
        refused("that shares no memory", first, first, *rest[1:])
    grads = [v.requires_grad_() if torch.is_tensor(v) and v.is_floating_point() else v for v in values]
    if not all(arg.dtypes for arg in row.args):
        with pytest.raises(OperatorError, match="no input that requires grad"):
            operator(*grads, out=tuple(good))
        with torch.no_grad():
            operator(*grads, out=tuple(good) if rest else first)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.takes_grad], **BY_NAME)
def test_what_has_no_gradient_refuses_to_look_as_if(row):
    values = call_of(row)
    floats = [v for v in values if torch.is_tensor(v) and v.is_floating_point() and v.element_size() > 1]
    for v in floats[:1]:
        v.requires_grad_()
        with pytest.raises(OperatorError, match=r"no input that requires grad here; call it under torch.no_grad"):
            ops.OPERATORS[row.name](*values)


@pytest.mark.parametrize("row", [row for row in ROWS if any(arg.optional for arg in row.args)], **BY_NAME)
def test_optional_arguments_may_be_absent(row):
    values = call_of(row)
    for i, arg in enumerate(row.args):
        if arg.optional:
            values[i] = None
    want = outcome(row, ORACLES[row.name], [widened(v) for v in values])
    assert_close(outcome(row, ops.OPERATORS[row.name], values), want, row.forward[torch.float32])


@pytest.mark.parametrize("row", [row for row in ROWS if row.sink], **BY_NAME)
def test_the_diagnostic_form_gives_the_same_bits_and_its_intermediates(row):
    values, sink = call_of(row, seed=5), {}
    want = outcome(row, ops.OPERATORS[row.name], values)
    with ops.use("triton" if INTERPRETED else "reference", row.name):
        plain = outcome(row, ops.OPERATORS[row.name], values)
        got = as_tuple(ops.OPERATORS[row.name](*values, sink=sink))
    assert_same(got, plain)
    assert_close(got, want, row.forward[torch.float32])
    assert tuple(sink) == row.sink
    assert all(torch.is_tensor(t) for t in sink.values())


@pytest.mark.parametrize("row", ROWS, **BY_NAME)
def test_opcheck(row):
    """Schema, autograd registration, fake against real, and AOT dispatch with dynamic shapes: torch's own checks."""
    operator, values = ops.OPERATORS[row.name], call_of(row)
    grads = [v.requires_grad_() if row.backward and not arg.dtypes and v is not None else v
             for arg, v in zip(row.args, values, strict=False)] + values[len(row.args) :]  # fmt: skip
    fp8 = any(
        t.dtype.itemsize == 1 and t.is_floating_point()
        for t in (*values, *outcome(row, operator, values))
        if torch.is_tensor(t)
    )
    tests = (
        ("test_faketensor",)
        if INTERPRETED
        else ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    )
    torch.library.opcheck(operator.call, tuple(grads), test_utils=tests if fp8 else ("test_schema", *tests))
    if row.results:
        values = call_of(row)
        outs = [torch.empty_like(t) for t in as_tuple(operator(*values))]
        tests = ("test_faketensor",) if fp8 else ("test_schema", "test_faketensor")
        torch.library.opcheck(operator.call_out, (*values, *outs), test_utils=tests)


@whole_table
@pytest.mark.parametrize("row", ROWS, **BY_NAME)
def test_compiles_without_a_graph_break(row):
    torch.compiler.reset()
    operator, values = ops.OPERATORS[row.name], call_of(row)
    want = outcome(row, operator, values)
    assert_same(outcome(row, torch.compile(operator, backend="aot_eager", fullgraph=True), values), want)
    if row.results:
        outs = tuple(torch.empty_like(t) for t in want[: len(row.results)])

        def fill(*values):
            operator(*values, out=outs)

        torch.compile(fill, backend="eager", fullgraph=True)(*values)
        assert_same(outs, want[: len(outs)])


INVARIANT = [
    pytest.param(row, level, id=f"{row.name}-{level}")
    for row in ROWS
    for level in row.invariant
    if (level == "triton") == INTERPRETED
]


@pytest.mark.parametrize(("row", "level"), INVARIANT)
def test_a_row_has_the_same_bits_whatever_stands_beside_it(row, level):
    """Bitwise: row i alone, first, last and among 2, 7, 16, 64, 65 and 256 others."""
    batch = row.args[0].forms[0][0][0]
    most = 20 if INTERPRETED and batch == "A" else 256  # an interpreted program takes milliseconds
    sizes = dict(row.sizes[0]) | {batch: (most,) if batch == "..." else most}
    if batch == "A":
        sizes |= {"P": most * 9, "V": 101, "N": 3 if INTERPRETED else 9} | ({"T": 3} if "T" in sizes else {})
    elif batch == "B":
        sizes["T"] = 1
    call = row.example(sizes, seed=6)
    row_args = [arg.name for arg in row.args if arg.forms[0][0][0] == batch and call[arg.name] is not None]

    def run(index):
        part = {name: call[name][index].contiguous() for name in row_args}
        return as_tuple(ops.OPERATORS[row.name](*(call | part).values()))

    with ops.use(level, row.name), ops.batch_invariant():
        whole = run(torch.arange(most))
        for i in (most // 2,) if INTERPRETED else (0, 100, 255):
            for count in (n for n in (1, 2, 7, 16, 64, 65) if n < most):
                others = [j for j in range(count) if j != i][: count - 1]
                for place in {0, len(others) // 2, len(others)}:
                    index = torch.tensor([*others[:place], i, *others[place:]])
                    assert_same([t[place] for t in run(index)], [t[i] for t in whole])


@pytest.mark.gpu
@pytest.mark.parametrize(("row", "sizes", "dtype"), cases(lambda row: row.forward))
def test_values_on_a_gpu_at_every_level_on_a_side_stream(row, sizes, dtype):
    def moved(value):
        return (
            [moved(v) for v in value] if isinstance(value, list) else value.cuda() if torch.is_tensor(value) else value
        )

    values = call_of(row, sizes, dtype, seed=1)
    want = outcome(row, ORACLES[row.name], [widened(v) for v in values])
    stream = torch.cuda.Stream()
    for level in row.levels["cuda"]:
        with ops.use(level, row.name), torch.cuda.stream(stream):
            try:
                got = outcome(row, ops.OPERATORS[row.name], [moved(v) for v in values])
            except OperatorError as error:
                assert level != "reference", error  # noqa: PT017
                continue
        stream.synchronize()
        assert_close([t.cpu() for t in got], want, row.forward[dtype])


# ---- the table


def lacking():
    """Return what registered operators lack: a row, an oracle, a refusal, a fake."""
    names = torch._C._dispatch_get_all_op_names()
    registered = {n.removeprefix("microllm::") for n in names if n.startswith("microllm::")}
    listed = {row.name for row in ROWS} | {f"{row.name}_out" for row in WITH_OUT}
    refused = {parameters.values[0].name for parameters in REFUSED}
    keys = ("Meta", "CompositeImplicitAutograd")
    found = {f"{name}: row" for name in registered ^ listed}
    found |= {f"{row.name}: oracle" for row in ROWS if row.name not in ORACLES}
    found |= {f"{row.name}: refusal" for row in ROWS if row.name not in refused}
    return found | {
        f"{name}: fake"
        for name in registered
        if not any(torch._C._dispatch_has_kernel_for_dispatch_key(f"microllm::{name}", key) for key in keys)
    }


@whole_table
def test_every_torch_operator_has_a_row_an_oracle_a_refusal_and_a_fake():
    assert lacking() == set()
    with torch.library._scoped_library("microllm", "FRAGMENT") as library:
        library.define("planted(Tensor x) -> Tensor")
        library.impl("planted", torch.neg, "CPU")
        assert lacking() == {"planted: row", "planted: fake"}
    assert lacking() == set()


@whole_table
def test_every_row_has_costs_levels_and_a_public_function():
    files = {p.stem for p in pathlib.Path(ops.__file__).parent.glob("*.py")}
    assert {f"microllm.ops.{f}" for f in files} >= {row.reference.__module__ for row in ROWS}
    internal = {"rms_norm_backward", "swiglu_backward", "cross_entropy_backward", "quantise_fp8_fnuz"}
    assert set(ops.CONTRACTS) - internal <= set(ops.__all__)
    for row in ROWS:
        assert row.num_bytes(row.sizes[0], 4) > 0, row.name
        assert row.num_flops(row.sizes[0]) >= 0, row.name
        assert set(row.levels) == {"cpu", "cuda"}, row.name
        assert all(levels[-1] == "reference" for levels in row.levels.values()), row.name
        assert (row.vendor is not None) == any("vendor" in levels for levels in row.levels.values()), row.name
        assert bool(row.backward) == (row.composite or row.autograd is not None), row.name
        assert not (row.composite and any(rule.by_value for rule in row.rules)), row.name
        assert torch.float32 in row.forward, row.name
