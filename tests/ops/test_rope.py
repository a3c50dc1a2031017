"""RoPE's other forms: side by side, part of a head, by positions in a table, and back."""

import pytest
import torch

from microllm import ops

pytestmark = pytest.mark.interpreter


def angles(num_positions, pairs):
    turns = torch.arange(num_positions)[:, None] * torch.logspace(0, -2, pairs)
    return turns.cos(), turns.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [3, 8])
def test_positions_in_a_table_are_the_angles_they_name(interleaved, pairs):
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
    cos, sin = angles(30, pairs)
    positions = torch.randint(30, (2, 5))
    by_table = ops.rope(q, k, cos, sin, positions=positions, interleaved=interleaved)
    by_angles = ops.rope(q, k, cos[positions], sin[positions], interleaved=interleaved)
    for a, b in zip(by_table, by_angles, strict=True):
        assert torch.equal(a, b)
    weight = torch.rand(16) + 0.5
    fused = ops.qk_norm_rope(q, k, weight, weight, cos, sin, positions=positions, eps=1e-6, interleaved=interleaved)
    normed = [ops.rms_norm(x, weight, eps=1e-6) for x in (q, k)]
    for a, b in zip(fused, ops.rope(*normed, cos, sin, positions=positions, interleaved=interleaved), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("pairs", [3, 8])
def test_side_by_side_is_the_split_form_of_reordered_heads(pairs):
    q = torch.randn(1, 5, 2, 16)
    cos, sin = (t[None] for t in angles(5, pairs))
    side_by_side, _ = ops.rope(q, q, cos, sin, interleaved=True)
    order = torch.cat((torch.arange(0, 2 * pairs, 2), torch.arange(1, 2 * pairs, 2), torch.arange(2 * pairs, 16)))
    split, _ = ops.rope(q[..., order].contiguous(), q, cos, sin)
    assert torch.equal(side_by_side[..., order], split)
    assert torch.equal(split[..., 2 * pairs :], q[..., 2 * pairs :])
    turn = torch.complex(cos.double(), sin.double()).unsqueeze(2)
    z = torch.view_as_complex(q[..., : 2 * pairs].double().unflatten(-1, (-1, 2))) * turn
    torch.testing.assert_close(side_by_side[..., : 2 * pairs], torch.view_as_real(z).flatten(-2).float())


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradient_turns_back(interleaved):
    q = torch.randn(1, 5, 2, 16, requires_grad=True)
    cos, sin = (t[None] for t in angles(5, 8))
    turned, _ = ops.rope(q, q.detach(), cos, sin, interleaved=interleaved)
    (back,) = torch.autograd.grad(turned, q, turned.detach())
    torch.testing.assert_close(back, q.detach(), atol=1e-6, rtol=1e-5)
