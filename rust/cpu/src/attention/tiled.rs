//! Attention over keys and values in bfloat16 by matrix tiles.
//!
//! The cache keeps pairs of numbers as tiles need them. A tile has 16 keys, or 16 dimensions of the values of 32 tokens.

use std::ops::Range;

use super::{Attend, TILE, Tile};
use crate::cache::Cell;
pub(super) use crate::simd::TILE as COLUMNS;
use crate::simd::{PairProducts, Simd};

/// Maximum rows that are computed at once.
pub(super) const ROWS: usize = COLUMNS;

/// Maximum tiles of columns that one call multiplies.
const MOST_COLUMNS: usize = 16;

impl<C: Cell> Attend<'_, C> {
    /// Whether matrix tiles multiply the keys and values.
    #[inline(always)]
    pub(super) fn tiled(&self) -> bool {
        C::NUMBERS == 2 && self.isa.has_tiles()
    }

    /// Copies the pairs of values, \[pairs of tokens\]\[head dim, padded\]. Tokens that are not visible become zeros.
    #[inline(always)]
    pub(super) fn gather_values(&mut self, tile: &Tile<C>) {
        let padded = self.of.pages.padded();
        let visible = tile.tokens.start / 2..tile.tokens.end.div_ceil(2);
        for (pair, to) in self.scratch.values[..TILE / 2 * padded].chunks_exact_mut(padded).enumerate() {
            if visible.contains(&pair) {
                // SAFETY: `fill` set the pointer for the pairs of all dimensions, and they are 32 bits wide.
                unsafe { tile.values[pair].cast::<u32>().copy_to_nonoverlapping(to.as_mut_ptr(), padded) };
            } else {
                to.fill(0);
            }
        }
    }

    /// Processes up to [`ROWS`] rows of the tile. Returns at once if they attend to none of its tokens.
    #[inline(always)]
    pub(super) fn look_tiled<S: Simd>(&mut self, s: S, tile: &Tile<C>, rows: Range<usize>) {
        let (head_dim, padded, height) = (self.of.pages.shape.head_dim, self.of.pages.padded(), rows.len());
        if self.visible(tile, &rows).is_empty() {
            return;
        }
        let mut scores = [[0.0; TILE]; ROWS];
        let keys: [*const u32; TILE / COLUMNS] = std::array::from_fn(|column| tile.keys[column * COLUMNS / S::LANES].cast());
        let products = PairProducts { height, pairs: head_dim / 2, row_stride: head_dim, column_stride: tile.step, out_stride: TILE };
        // SAFETY: `begin` sized the scratch memory for all rows, and `fill` set the addresses of all keys. The process may use the tiles.
        unsafe {
            let query = self.scratch.query.as_ptr().add(rows.start * head_dim);
            products.run(self.isa, query, &keys, scores.as_mut_ptr().cast());
            let mut factors = [[0.0; 16]; ROWS];
            for (r, row) in rows.clone().enumerate() {
                let factor = self.weigh(s, tile, row, 0..TILE / S::LANES, &mut scores[r]);
                s.store(factors[r].as_mut_ptr(), factor);
            }
            let values = self.scratch.values.as_ptr();
            let out = self.scratch.products.as_mut_ptr();
            let products = PairProducts { height, pairs: TILE / 2, row_stride: TILE, column_stride: padded, out_stride: padded };
            for first in (0..padded).step_by(MOST_COLUMNS * COLUMNS) {
                let count = MOST_COLUMNS.min((padded - first) / COLUMNS);
                let columns: [*const u32; MOST_COLUMNS] = std::array::from_fn(|column| values.wrapping_add(first + column * COLUMNS));
                products.run(self.isa, scores.as_ptr().cast(), &columns[..count], out.add(first));
            }
            let sums = self.scratch.sums.as_mut_ptr().add(rows.start * padded);
            for (r, factor) in factors[..height].iter().enumerate() {
                for at in (r * padded..(r + 1) * padded).step_by(S::LANES) {
                    let sum = s.fma(s.load(sums.add(at)), s.load(factor.as_ptr()), s.load(out.add(at)));
                    s.store(sums.add(at), sum);
                }
            }
        }
    }
}
