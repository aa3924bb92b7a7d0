//! What AMX computes, in portable code, for tests on any machine.

use std::slice;

use super::portable::flushed;
use super::{Kernel, PairProducts, Simd, TILE, TileProducts};
use crate::block_type::BLOCK;

/// Computes products of tiles as `tdpbf16ps` does, to the bit.
///
/// The instruction sums even and odd inputs in two chains of fused multiply-adds, adds the chains, and adds the result to the accumulator.
/// It rounds to nearest, and reads and writes denormal numbers as zeros. This is the definition of Intel's manual. It was compared with a
/// processor in 512,000 cells.
pub(super) struct Oracle<'a> {
    pub(super) products: TileProducts<'a>,
    /// Tiles of a panel.
    pub(super) tiles: usize,
    /// Pieces of a row.
    pub(super) pieces: usize,
}

impl Kernel for Oracle<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (TileProducts { height, group, rows, weights, out }, tiles, pieces) = (self.products, self.tiles, self.pieces);
        for (at, sums) in out.as_chunks_mut::<TILE>().0.iter_mut().enumerate() {
            let (row, tile, g) = (at % height, at / height % tiles, at / height / tiles);
            let (block, first) = (g * group / BLOCK, g * group % BLOCK);
            let weights = &weights[(g * tiles + tile) * group / 2 * TILE..][..group / 2 * TILE];
            *sums = [0.0; TILE];
            for piece in 0..pieces {
                let row = &rows[((block * pieces + piece) * height + row) * BLOCK + first..][..group];
                add(sums, row, weights);
            }
        }
    }
}

/// Computes [`PairProducts`] as AMX does: 16 pairs at a time.
///
/// # Safety
///
/// As for [`PairProducts::run`].
pub(super) unsafe fn pair_products(products: PairProducts, rows: *const f32, columns: &[*const u32], out: *mut f32) {
    let PairProducts { height, pairs, row_stride, column_stride, out_stride } = products;
    for row in 0..height {
        for (tile, &columns) in columns.iter().enumerate() {
            let mut sums = [0.0; TILE];
            for first in (0..pairs).step_by(TILE) {
                let pairs = first..pairs.min(first + TILE);
                let mut weights = Vec::new();
                // SAFETY: the caller guarantees it.
                let numbers = unsafe {
                    for pair in pairs.clone() {
                        weights.extend_from_slice(slice::from_raw_parts(columns.add(pair * column_stride), TILE));
                    }
                    slice::from_raw_parts(rows.add(row * row_stride + first).cast::<u16>(), 2 * pairs.len())
                };
                add(&mut sums, numbers, &weights);
            }
            // SAFETY: as above.
            unsafe { out.add(row * out_stride + tile * TILE).cast::<[f32; TILE]>().write_unaligned(sums) };
        }
    }
}

/// Adds the products of a row and a tile of weights, \[pairs of inputs\]\[16 columns\], to the row's sums.
#[inline(always)]
pub(super) fn add(sums: &mut [f32; TILE], row: &[u16], weights: &[u32]) {
    let (mut even, mut odd) = ([0.0; TILE], [0.0; TILE]);
    for (x, weights) in row.as_chunks::<2>().0.iter().zip(weights.as_chunks::<TILE>().0) {
        for ((even, odd), &w) in even.iter_mut().zip(&mut odd).zip(weights) {
            *even = flushed(number(x[0]).mul_add(number(w as u16), *even));
            *odd = flushed(number(x[1]).mul_add(number((w >> 16) as u16), *odd));
        }
    }
    for (sum, (even, odd)) in sums.iter_mut().zip(even.into_iter().zip(odd)) {
        *sum = flushed(*sum + flushed(even + odd));
    }
}

/// The fp32 number of a bfloat16 number.
#[inline(always)]
fn number(x: u16) -> f32 {
    flushed(f32::from_bits(u32::from(x) << 16))
}
