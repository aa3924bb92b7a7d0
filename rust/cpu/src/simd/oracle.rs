//! What AMX computes, in portable code, for tests on any machine.

use std::slice;
use std::sync::LazyLock;

use super::portable::flushed;
use super::{Isa, Kernel, PairProducts, PieceProducts, ScaledProducts, Simd, TILE};
use crate::block_type::BLOCK;

/// Computes [`ScaledProducts`] as AMX does, to the bit.
pub(super) struct Oracle<'a> {
    pub(super) products: ScaledProducts<'a>,
    /// Columns of the panel.
    pub(super) width: usize,
}

impl Kernel for Oracle<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let ScaledProducts { height, digits, stride, group, rows, weights, scales, shifted, sums, .. } = self.products;
        let width = self.width;
        for (at, sums) in sums.as_chunks_mut::<TILE>().0.iter_mut().enumerate() {
            let (row, column) = (at * TILE / width, at * TILE % width);
            let (tile, row) = (row / height * stride, row % height);
            for (g, scales) in scales.chunks_exact(2 * width).enumerate() {
                let mut product = [0.0; TILE];
                let first = g * group;
                let weights = &weights[first * width / 2 + column * group / 2..][..group / 2 * TILE];
                for digit in 0..digits {
                    let at = (((tile + first / BLOCK) * digits + digit) * height + row) * BLOCK / 2 + first % BLOCK / 2;
                    add(&mut product, &rows[at..at + group / 2], weights);
                }
                for lane in (0..TILE).step_by(S::LANES) {
                    // SAFETY: the arrays and slices have a register's lanes from these places on.
                    unsafe {
                        let (factor, shift) = (s.load(&raw const scales[column + lane]), s.load(&raw const scales[width + column + lane]));
                        let mut sum = s.fma(factor, s.load(&raw const product[lane]), s.load(&raw const sums[lane]));
                        sum = s.fma(shift, s.splat(shifted[(tile * BLOCK / group + g) * height + row]), sum);
                        s.store(&raw mut sums[lane], sum);
                    }
                }
            }
        }
    }
}

/// Computes [`PieceProducts`] as AMX does, to the bit. A panel has `width` columns.
pub(super) fn piece_products(products: PieceProducts<'_>, width: usize) {
    let PieceProducts { height, pieces, blocks, stride, weights, rows, sums, fresh, .. } = products;
    let pairs = BLOCK / 2;
    if fresh {
        sums.fill(0.0);
    }
    for (tile, sums) in sums.as_chunks_mut::<TILE>().0.chunks_exact_mut(width).enumerate() {
        for (block, weights) in weights.chunks_exact(width * pairs).enumerate().take(blocks) {
            for piece in 0..pieces {
                let mut numbers = [0; BLOCK / 2 * TILE];
                let first = ((tile * stride + block) * pieces + piece) * pairs * height;
                for (numbers, rows) in numbers.chunks_exact_mut(TILE).zip(rows[first..].chunks_exact(height)) {
                    numbers[..height].copy_from_slice(rows);
                }
                for (sums, weights) in sums.iter_mut().zip(weights.chunks_exact(pairs)) {
                    add(sums, weights, &numbers);
                }
            }
        }
    }
}

/// Computes [`PairProducts`] as AMX does: 16 pairs at a time.
///
/// # Safety
///
/// As for [`PairTiles::multiply`](super::PairTiles::multiply).
pub(super) unsafe fn pair_products(products: PairProducts, rows: *const f32, columns: &[*const u32], out: *mut f32) {
    let PairProducts { height, pairs, row_stride, column_stride, out_stride, add: adds } = products;
    for row in 0..height {
        for (tile, &columns) in columns.iter().enumerate() {
            // SAFETY: the caller guarantees it.
            let to = unsafe { out.add(row * out_stride + tile * TILE).cast::<[f32; TILE]>() };
            // SAFETY: as above.
            let mut sums = if adds { unsafe { to.read_unaligned() } } else { [0.0; TILE] };
            for first in (0..pairs).step_by(TILE) {
                let pairs = first..pairs.min(first + TILE);
                let mut weights = Vec::new();
                // SAFETY: the caller guarantees it.
                let numbers = unsafe {
                    for pair in pairs.clone() {
                        weights.extend_from_slice(slice::from_raw_parts(columns.add(pair * column_stride), TILE));
                    }
                    slice::from_raw_parts(rows.add(row * row_stride + first).cast::<u32>(), pairs.len())
                };
                add(&mut sums, numbers, &weights);
            }
            // SAFETY: as above.
            unsafe { to.write_unaligned(sums) };
        }
    }
}

/// Adds the products of a row and a tile of weights, \[pairs of inputs\]\[16 columns\], to the row's sums.
///
/// The instruction `tdpbf16ps` sums even and odd inputs in two chains of fused multiply-adds, adds the chains, and adds the result to the
/// accumulator. It rounds to nearest, and reads and writes denormal numbers as zeros. This is the definition of Intel's manual. It was
/// compared with a processor in 512,000 cells. Every instruction set gives the same bits; portable code calls a function for each of the
/// fused multiply-adds, so the fastest vectors compute them for all.
pub(super) fn add(sums: &mut [f32; TILE], row: &[u32], weights: &[u32]) {
    static FASTEST: LazyLock<Isa> = LazyLock::new(Isa::best);
    FASTEST.run(Add { sums, row, weights });
}

/// See [`add`].
struct Add<'a> {
    sums: &'a mut [f32; TILE],
    row: &'a [u32],
    weights: &'a [u32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (mut even, mut odd) = ([0.0; TILE], [0.0; TILE]);
        for (x, weights) in self.row.iter().zip(self.weights.as_chunks::<TILE>().0) {
            for ((even, odd), &w) in even.iter_mut().zip(&mut odd).zip(weights) {
                *even = flushed(number(x << 16).mul_add(number(w << 16), *even));
                *odd = flushed(number(*x).mul_add(number(w), *odd));
            }
        }
        for (sum, (even, odd)) in self.sums.iter_mut().zip(even.into_iter().zip(odd)) {
            *sum = flushed(*sum + flushed(even + odd));
        }
    }
}

/// The number in the upper half of a word.
#[inline(always)]
fn number(word: u32) -> f32 {
    flushed(f32::from_bits(word & 0xffff_0000))
}
