//! A tile of the cache: where its keys and values are, in the cache or gathered from it.

use std::ops::Range;
use std::ptr::null;

use super::{Attend, TILE, tiled};
use crate::cache::{Cell, Parts};
use crate::simd::Simd;

/// Minimum lanes of a register.
const LANES: usize = 4;

/// Pointers to the keys and values of the tokens from `start` on.
pub(super) struct Tile<C> {
    pub(super) start: usize,
    /// Tokens of the tile that at least one of the rows attends to, relative to `start`.
    pub(super) tokens: Range<usize>,
    /// For each register of tokens, the address of the cells of their first dimensions. The next cells are `step` further.
    pub(super) keys: [*const C; TILE / LANES],
    pub(super) step: usize,
    /// One pointer for the cells of each token, or of each pair of tokens.
    pub(super) values: [*const C; TILE],
    pub(super) key_scales: [f32; TILE],
    pub(super) value_scales: [f32; TILE],
}

impl<C> Tile<C> {
    /// A tile without tokens.
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self {
            start: 0,
            tokens: 0..0,
            keys: [null(); TILE / LANES],
            step: 0,
            values: [null(); TILE],
            key_scales: [0.0; TILE],
            value_scales: [0.0; TILE],
        }
    }
}

impl<C: Cell> Attend<'_, C> {
    /// Finds the addresses of the tile's keys and values in the blocks of `sequence`.
    #[inline(always)]
    pub(super) fn fill<S: Simd>(&mut self, s: S, tile: &mut Tile<C>, sequence: usize) {
        let (pages, padded) = (self.of.pages, self.of.pages.padded());
        let (size, head_dim) = (pages.shape.block_size, pages.shape.head_dim);
        let latent = pages.shape.latent.is_some();
        // Matrix tiles read 16 keys of a block at once.
        let direct = !latent && size % if self.tiled() { tiled::COLUMNS } else { S::LANES } == 0;
        tile.step = if direct { size } else { TILE };
        let gathered = self.scratch.keys.as_mut_ptr().cast::<C>();
        let mut token = tile.tokens.start;
        while token < tile.tokens.end {
            let offset = (tile.start + token) % size;
            let end = tile.tokens.end.min(token + size - offset);
            let block = self.of.plan.block(sequence, tile.start + token);
            // SAFETY: all offsets are within the page, or within `gathered`, which has room for cells of 4 bytes.
            unsafe {
                // There can be several tasks for a KV head.
                let Parts { scales, values, keys } = pages.page::<C>(self.of.layer, block, self.task.kv_head % pages.shape.kv_heads);
                for (i, t) in (token..end).enumerate() {
                    tile.values[t / C::NUMBERS] = values.add((offset + i) / C::NUMBERS * padded);
                }
                if C::SCALED {
                    for (i, t) in (token..end).enumerate() {
                        tile.key_scales[t] = *scales.add(offset + i);
                        tile.value_scales[t] = *scales.add(size + offset + i);
                    }
                }
                if direct {
                    if token == tile.tokens.start {
                        // Some registers have no visible token. They need a valid address, whose keys are not used.
                        tile.keys.fill(keys);
                    }
                    // `token` can be in the middle of a block, or of a register, only in the first block of a window.
                    for vector in token / S::LANES..end.div_ceil(S::LANES) {
                        tile.keys[vector] = keys.add((tile.start + vector * S::LANES) % size);
                    }
                } else if !latent {
                    for d in 0..head_dim / C::NUMBERS {
                        keys.add(d * size + offset).copy_to_nonoverlapping(gathered.add(d * TILE + token), end - token);
                    }
                }
            }
            token = end;
        }
        if latent {
            self.gather_latents(s, tile);
        }
        if !direct {
            for (vector, keys) in tile.keys[..TILE / S::LANES].iter_mut().enumerate() {
                *keys = if self.widens() {
                    gathered.cast::<f32>().wrapping_add(vector * S::LANES).cast()
                } else {
                    gathered.wrapping_add(vector * S::LANES)
                };
            }
        }
        if C::NUMBERS == 2 {
            self.hide(tile);
        }
    }

    /// Whether gathered keys are in fp32: those that are values too, but for pairs of bfloat16.
    #[inline(always)]
    pub(super) fn widens(&self) -> bool {
        C::NUMBERS == 1 && self.of.pages.shape.latent.is_some()
    }

    /// Transposes the tile's values, which are its keys too.
    #[inline(always)]
    fn gather_latents<S: Simd>(&mut self, s: S, tile: &Tile<C>) {
        let (padded, gathered) = (self.of.pages.padded(), self.scratch.keys.as_mut_ptr());
        if C::NUMBERS == 2 {
            let to = gathered.cast::<C::Number>();
            for token in tile.tokens.clone() {
                let from = tile.values[token / 2].cast::<C::Number>();
                for d in 0..padded {
                    // SAFETY: `fill` set the pointer for the pairs of all dimensions, and there is room for those of the whole tile.
                    unsafe { to.add((d / 2 * TILE + token) * 2 + d % 2).write(*from.add(d * 2 + token % 2)) };
                }
            }
            return;
        }
        let mut square = [0.0; 16 * 16];
        for first in (tile.tokens.start / S::LANES * S::LANES..tile.tokens.end).step_by(S::LANES) {
            let tokens = tile.tokens.start.max(first)..tile.tokens.end.min(first + S::LANES);
            for d in (0..padded).step_by(S::LANES) {
                // SAFETY: as above. The values are padded to whole registers, and the square has the lanes of the widest ones.
                unsafe {
                    for token in tokens.clone() {
                        s.store(square.as_mut_ptr().add((token - first) * S::LANES), C::load(s, tile.values[token].add(d)));
                    }
                    s.transpose(square.as_ptr(), S::LANES, gathered.cast::<f32>().add(d * TILE + first), TILE, S::LANES);
                }
            }
        }
    }

    /// Replaces the pairs of values of which only one token is visible by copies with zeros for the other token, which may not be written.
    #[inline(always)]
    fn hide(&mut self, tile: &mut Tile<C>) {
        let padded = self.of.pages.padded_value();
        let edges = self.scratch.edges[..2 * padded].chunks_exact_mut(padded);
        let hidden = [(tile.tokens.start, 0xffff_0000), (tile.tokens.end, 0x0000_ffff)];
        for ((token, mask), edge) in hidden.into_iter().zip(edges).filter(|((token, _), _)| token % 2 == 1) {
            let values = &mut tile.values[token / 2];
            for (d, pair) in edge.iter_mut().enumerate() {
                // SAFETY: `fill` set the pointer for the cells of all dimensions, and they are 32 bits wide.
                *pair = unsafe { values.cast::<u32>().add(d).read() } & mask;
            }
            *values = edge.as_ptr().cast();
        }
    }
}
