"""Steps of random sequences over a paged cache with shuffled blocks, and attention over them written out."""

import numpy as np
import torch


class AttentionStep:
    """Sequences (queries, context): the cache holds all of their keys and values but those of the queries, which are `new_k` and `new_v`.

    Whatever nobody wrote in the cache is NaN.
    """

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        value_dim: int,
        block_size: int,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.block_size = lengths, block_size
        widths = [-(-context // block_size) for _, context in lengths]
        blocks = np.random.default_rng(seed).permutation(np.arange(1, sum(widths) + 2))
        self.tables = np.zeros((len(lengths), max(1, *widths)), dtype=np.int32)
        self.keys = torch.full((sum(widths) + 2, kv_heads, block_size, dim), float("nan"))
        self.values = torch.full((sum(widths) + 2, kv_heads, block_size, value_dim), float("nan"))
        self.contexts, slots, new = [], [], []
        for i, (queries, context) in enumerate(lengths):
            used, blocks = np.split(blocks, [widths[i]])
            self.tables[i, : len(used)] = used
            places = used.repeat(block_size)[:context] * block_size + np.arange(context) % block_size
            k = torch.randn(context, kv_heads, dim, generator=generator)
            v = torch.randn(context, kv_heads, value_dim, generator=generator)
            old = torch.from_numpy(places[: max(0, context - queries)])
            self.keys[old // block_size, :, old % block_size] = k[: len(old)]
            self.values[old // block_size, :, old % block_size] = v[: len(old)]
            self.contexts.append((k, v))
            new.append(
                (k[len(old) :], v[len(old) :]) if context else (k.new_zeros(queries, *k.shape[1:]), v.new_zeros(queries, *v.shape[1:]))
            )
            slots += places[len(old) :].tolist() if context else [-1] * queries
        self.slots = np.array(slots, dtype=np.int32)
        self.new_k, self.new_v = (torch.cat(parts) for parts in zip(*new, strict=True))
        self.query = torch.randn(len(slots), heads, dim, generator=generator)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Slots, query starts, context lengths and block tables, as plan_attention wants them."""
        starts = np.cumsum([0] + [queries for queries, _ in self.lengths], dtype=np.int32)
        return self.slots, starts, np.array([context for _, context in self.lengths], dtype=np.int32), self.tables

    def write(self, scales: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Puts the new keys and values where they go, for those who test reading alone."""
        slots = torch.from_numpy(self.slots.astype(np.int64))
        real = slots >= 0
        blocks, offsets = slots[real] // self.block_size, slots[real] % self.block_size
        for new, cache, scale in zip((self.new_k, self.new_v), (self.keys, self.values), scales or (None, None), strict=True):
            cache[blocks, :, offsets] = (new if scale is None else new / scale[:, None])[real].to(cache.dtype)

    def round_to_8_bits(self, scales: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Makes the cache one of 8 bits, and all keys and values such as these 8 bits hold."""

        def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

        by_token = [scale[:, None] for scale in scales]
        self.keys, self.values = rounded(self.keys, scales[0][:, None, None]), rounded(self.values, scales[1][:, None, None])
        self.new_k, self.new_v = (rounded(x, scale).float() * scale for x, scale in zip((self.new_k, self.new_v), by_token, strict=True))
        self.contexts = [tuple(rounded(x, scale).float() * scale for x, scale in zip(kv, by_token, strict=True)) for kv in self.contexts]


def dense(
    step: AttentionStep,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What attention of the step is, query by query, in fp64: [T, heads, value_dim]; zero for padding."""
    outputs = []
    scale = step.query.shape[-1] ** -0.5 if scale is None else scale
    for (queries, context), (k, v) in zip(step.lengths, step.contexts, strict=True):
        for i in range(queries):
            query = step.query[len(outputs)].double()
            position = context - queries + i
            low = 0 if window is None else max(0, position - window + 1)
            if not context:
                outputs.append(query.new_zeros(len(query), v.shape[-1]))
                continue
            seen_k, seen_v = (part[low : position + 1].double().repeat_interleave(len(query) // k.shape[1], 1) for part in (k, v))
            scores = torch.einsum("hd,khd->hk", query, seen_k) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), 1)
            outputs.append(torch.einsum("hk,khd->hd", scores.softmax(-1)[:, : len(seen_k)], seen_v))
    return torch.stack(outputs).float()
