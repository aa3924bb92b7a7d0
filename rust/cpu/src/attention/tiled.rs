//! Attention over keys and values in bfloat16 by matrix tiles.
//!
//! The cache keeps pairs of numbers as tiles need them. A tile has 16 keys, or 16 dimensions of the values of 32 tokens.

use std::ops::Range;

use super::{Attend, TILE, Tile};
use crate::cache::Cell;
use crate::gemm::Tiling;
pub(super) use crate::simd::TILE as COLUMNS;
use crate::simd::{PairProducts, PairTiles, Simd};

/// Maximum rows that are computed at once.
const ROWS: usize = COLUMNS;

/// Scores of some rows.
type Scores = [[f32; TILE]; ROWS];

/// Scores of some rows and of the next ones.
pub(super) const SCORES: usize = 2 * ROWS * TILE;

/// Maximum tiles of columns that one call multiplies.
const MAX_COLUMNS: usize = 16;

impl<C: Cell> Attend<'_, C> {
    /// Whether matrix tiles multiply the keys and values.
    #[inline(always)]
    pub(super) fn tiled(&self) -> bool {
        C::NUMBERS == 2 && self.isa.has_tiles()
    }

    /// Copies the pairs of values, \[pairs of tokens\]\[value dim, padded\]. Tokens that are not visible become zeros.
    #[inline(always)]
    pub(super) fn gather_values<S: Simd>(&mut self, s: S, tile: &Tile<C>) {
        let padded = self.of.pages.padded_value();
        let visible = tile.tokens.start / 2..tile.tokens.end.div_ceil(2);
        let values = &mut self.scratch.values[..TILE / 2 * padded];
        values[..visible.start * padded].fill(0);
        values[visible.end * padded..].fill(0);
        for pair in visible {
            let (from, to) = (tile.values[pair].cast::<f32>(), &mut values[pair * padded..(pair + 1) * padded]);
            for (at, to) in to.chunks_exact_mut(S::LANES).enumerate() {
                // SAFETY: `fill` set the pointer for the pairs of all dimensions, and they are 32 bits wide.
                unsafe { s.store(to.as_mut_ptr().cast(), s.load(from.add(at * S::LANES))) };
            }
        }
    }

    /// Processes some rows of the tile, up to [`ROWS`] at once.
    ///
    /// # Safety
    ///
    /// As for [`PairTiles::begin`].
    #[inline(always)]
    pub(super) unsafe fn look_tiled<S: Simd>(&mut self, s: S, tile: &Tile<C>, rows: &Range<usize>, tiles: &mut PairTiles) {
        let chunks = Tiling::new(0..rows.len(), ROWS);
        let scores = self.scratch.scores.as_mut_ptr().cast::<Scores>();
        let mut last: Option<Range<usize>> = None;
        for chunk in 0..=chunks.tiles() {
            let rows = (chunk < chunks.tiles()).then(|| chunks.range(chunk)).map(|chunk| rows.start + chunk.start..rows.start + chunk.end);
            let rows = rows.filter(|rows| !self.visible(tile, rows).is_empty());
            // The tiles multiply the next rows while vectors compute the exponentials of the last ones.
            // SAFETY: the caller guarantees it. `begin` sized the memory for the scores, and nothing else uses it.
            unsafe {
                if let Some(rows) = &rows {
                    self.score::<S>(tile, rows, tiles, &mut *scores.add(chunk % 2));
                }
                if let Some(last) = last {
                    self.add_values(s, tile, last, tiles, &mut *scores.add((chunk + 1) % 2));
                }
            }
            last = rows;
        }
    }

    /// Computes the scores of some rows and all keys of the tile.
    ///
    /// # Safety
    ///
    /// As for [`PairTiles::begin`].
    #[inline(always)]
    unsafe fn score<S: Simd>(&self, tile: &Tile<C>, rows: &Range<usize>, tiles: &mut PairTiles, scores: &mut Scores) {
        let head_dim = self.of.pages.shape.head_dim;
        let keys: [*const u32; TILE / COLUMNS] = std::array::from_fn(|column| tile.keys[column * COLUMNS / S::LANES].cast());
        let (row_stride, column_stride) = (head_dim, tile.step);
        let products = PairProducts { height: rows.len(), pairs: head_dim / 2, row_stride, column_stride, out_stride: TILE, add: false };
        // SAFETY: `begin` sized the scratch memory for all rows, and `fill` set the addresses of all keys. The caller guarantees the rest.
        unsafe {
            let query = self.scratch.query.as_ptr().add(rows.start * head_dim);
            tiles.multiply(products, query, &keys, scores.as_mut_ptr().cast());
        }
    }

    /// Replaces the scores of some rows by weights, and adds the weighted values to the rows' sums.
    ///
    /// # Safety
    ///
    /// As for [`PairTiles::begin`].
    #[inline(always)]
    unsafe fn add_values<S: Simd>(&mut self, s: S, tile: &Tile<C>, rows: Range<usize>, tiles: &mut PairTiles, scores: &mut Scores) {
        let (padded, height, first_row) = (self.of.pages.padded_value(), rows.len(), rows.start);
        // SAFETY: `begin` sized the scratch memory for all rows. The caller guarantees the rest.
        unsafe {
            for (row, scores) in rows.zip(scores.iter_mut()) {
                if let Some(factor) = self.weigh(s, tile, row, 0..TILE / S::LANES, scores) {
                    for at in (row * padded..(row + 1) * padded).step_by(S::LANES) {
                        let sum = self.scratch.sums.as_mut_ptr().add(at);
                        s.store(sum, s.mul(s.load(sum), factor));
                    }
                }
            }
            let (values, sums) = (self.scratch.values.as_ptr(), self.scratch.sums.as_mut_ptr().add(first_row * padded));
            let products = PairProducts { height, pairs: TILE / 2, row_stride: TILE, column_stride: padded, out_stride: padded, add: true };
            for first in (0..padded).step_by(MAX_COLUMNS * COLUMNS) {
                let count = MAX_COLUMNS.min((padded - first) / COLUMNS);
                let columns: [*const u32; MAX_COLUMNS] = std::array::from_fn(|column| values.wrapping_add(first + column * COLUMNS));
                tiles.multiply(products, scores.as_ptr().cast(), &columns[..count], sums.add(first));
            }
        }
    }
}
