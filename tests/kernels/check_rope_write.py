import pytest
import torch
from interpreted import DTYPES, assert_close

from chairlift.kernels.rope_write import rope_write, rope_write_reference
from chairlift.kernels.write_kv import write_kv
from chairlift.kernels.write_kv_reference import write_kv_reference

# (heads, kv_heads, D, block size): heads that do not fill a program, or fill more than one; halves that are no power of two.
SHAPES = [(6, 2, 16, 4), (7, 7, 8, 16), (3, 1, 80, 2), (12, 6, 256, 8)]
SLOTS = [13, -1, 4, 5, 0]


def caches(kv_heads: int, dims: tuple[int, int], block_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values as views of one allocation full of NaN, with something before, between and after them."""
    blocks = -(-(max(SLOTS) + 1) // block_size)
    sizes = [kv_heads * block_size * dim for dim in dims]
    memory = torch.full((blocks, sum(sizes) + 48), float("nan")).to(dtype)
    _, keys, _, values, _ = memory.split([16, sizes[0], 16, sizes[1], 16], 1)
    keys, values = (part.unflatten(1, (kv_heads, block_size, dim)) for part, dim in zip((keys, values), dims, strict=True))
    return memory, keys, values


def rotation(tokens: int, half: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(tokens, half, generator=generator) * 9
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("normed", "rotated_first"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), SHAPES)
def test_heads_are_turned_and_stored(heads, kv_heads, dim, block_size, normed, rotated_first, dtype):
    generator = torch.Generator().manual_seed(0)
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    # Strided along the tokens.
    wide = torch.randn(len(SLOTS), heads + 2 * kv_heads + 1, dim, generator=generator).to(dtype)
    norms = torch.randn(2, dim, generator=generator).unbind(0) if normed else None
    results = []
    cosines, sines = rotation(len(SLOTS), dim // 2, generator)
    for function in (rope_write, rope_write_reference):
        memory, keys, values = caches(kv_heads, (dim, dim), block_size, dtype)
        qkv = wide.clone()
        queries = function(qkv[:, :-1], cosines, sines, keys, values, slots, norms=norms, rotated_first=rotated_first, eps=1e-5)
        assert queries.data_ptr() == qkv.data_ptr()
        results.append((qkv, memory))
    (found, stored), (expected, right) = results
    assert_close(found, expected)
    assert_close(stored, right)
    assert stored.isnan().sum() == stored.numel() - 4 * 2 * kv_heads * dim
    # The reference itself: a head keeps its length, and its first pair is turned by its angle.
    if not normed:
        head, turned = wide[2, 0].float(), expected[2, 0].float()
        torch.testing.assert_close(head.norm(), turned.norm(), rtol=1e-3, atol=0)
        pair = torch.complex(head[0], head[dim // 2]) * torch.complex(cosines[2, 0], sines[2, 0])
        torch.testing.assert_close(torch.complex(turned[0], turned[dim // 2]), pair, rtol=2e-3, atol=2e-3)


def test_a_token_has_the_same_bits_alone():
    generator = torch.Generator().manual_seed(1)
    qkv, norms = torch.randn(5, 10, 16, generator=generator), torch.randn(2, 16, generator=generator).unbind(0)
    cosines, sines = rotation(5, 8, generator)
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    together, keys, values = caches(2, (16, 16), 4, torch.float32)
    queries = rope_write(qkv.clone(), cosines, sines, keys, values, slots, norms=norms, eps=1e-5)
    alone, keys, values = caches(2, (16, 16), 4, torch.float32)
    for token in range(5):
        one = slice(token, token + 1)
        query = rope_write(qkv[one].clone(), cosines[one], sines[one], keys, values, slots[one], norms=norms, eps=1e-5)
        assert torch.equal(query[0], queries[token])
    torch.testing.assert_close(alone, together, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kv_heads", "key_dim", "value_dim", "block_size"), [(2, 16, 16, 4), (5, 24, 8, 16), (1, 80, 128, 2), (1, 40, 0, 4)]
)
def test_keys_and_values_are_stored_as_they_are(kv_heads, key_dim, value_dim, block_size, dtype):
    generator = torch.Generator().manual_seed(2)
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    # As transformers hands them over: heads before tokens.
    k, v = (torch.randn(kv_heads, len(SLOTS), dim, generator=generator).to(dtype).transpose(0, 1) for dim in (key_dim, value_dim))
    results = []
    for function in (write_kv, write_kv_reference):
        memory, keys, values = caches(kv_heads, (key_dim, value_dim), block_size, dtype)
        function(k, v, keys, values, slots)
        results.append(memory)
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(keys[13 // block_size, :, 13 % block_size], k[0])
    assert torch.equal(values[5 // block_size, :, 5 % block_size], v[3])


@pytest.mark.parametrize("scaled", [False, True])
def test_eight_bits_hold_numbers_divided_by_scales_and_clamped(scaled):
    # The interpreter rounds to this form wrongly, so every number here is one that it can hold, or too large.
    numbers = torch.tensor([0.0, 0.5, -1.75, 448.0, 480.0, -1e30, float("inf"), 2.0**-6])
    scales = (torch.tensor([0.5, 4.0]), torch.tensor([2.0, 0.25])) if scaled else None
    k = numbers.expand(5, 2, 8).contiguous()
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    results = []
    for function in (write_kv, write_kv_reference):
        memory, keys, values = caches(2, (8, 8), 4, torch.float8_e4m3fn)
        function(k, k.flip(-1), keys, values, slots, scales)
        results.append(memory.view(torch.uint8))
    assert torch.equal(*results)
    held = numbers / (4.0 if scaled else 1.0)
    assert torch.equal(keys[1, 1, 0].float(), held.clamp(-448, 448))
