//! Multiplication of a tile.

use std::ops::Range;

use super::rows::Block;
use super::weights::block_bytes;
use super::{BLOCK, Bits, QuantWeights, SharedRows};
use crate::simd::{Int8, Isa, Kernel, prefetch_twice};

/// Multiplies the tile `range` of `rows` by a panel of weights. Writes the result to `out` [rows of the tile, columns of the panel].
///
/// # Safety
///
/// The tile's rows are packed and have the weights' number of inputs. No thread packs rows of this tile meanwhile.
pub(crate) unsafe fn tile(isa: Isa, weights: &QuantWeights, panel: usize, rows: SharedRows<'_>, range: Range<usize>, out: &mut [f32]) {
    assert_eq!(isa, weights.isa());
    // SAFETY: the caller guarantees it.
    let (blocks, wide) = unsafe { rows.tile(isa, range.clone(), weights.blocks()) };
    isa.run(Tile { bits: weights.bits(), weights: weights.panel(panel), rows: range.len(), blocks, wide, out });
}

/// The kernel of [`tile`].
struct Tile<'a> {
    bits: Bits,
    weights: &'a [u8],
    rows: usize,
    blocks: &'a [Block],
    wide: &'a [i16],
    out: &'a mut [f32],
}

impl Kernel for Tile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Int8>(self, s: S) {
        macro_rules! by_rows {
            // Constants, so that versions that would never run are not compiled.
            ($($rows:literal)*) => {
                match (self.rows, S::VECTORS) {
                    $(($rows, 2) => if const { $rows <= S::ROWS } { self.by_bits::<S, $rows, 2>(s) },
                      ($rows, 4) => if const { $rows <= S::ROWS && S::VECTORS == 4 } { self.by_bits::<S, $rows, 4>(s) },)*
                    _ => unreachable!("tiles have at most as many rows as registers allow"),
                }
            };
        }
        by_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13);
    }
}

impl Tile<'_> {
    #[inline(always)]
    fn by_bits<S: Int8, const R: usize, const V: usize>(self, s: S) {
        let count = self.blocks.len() / R;
        assert!(self.blocks.len() == count * R && (S::GROUP != 2 || self.wide.len() == self.blocks.len() * BLOCK));
        assert!(self.weights.len() == count * block_bytes(V * S::LANES, self.bits) && self.out.len() == R * V * S::LANES);
        // SAFETY: the lengths are asserted above.
        unsafe {
            match self.bits {
                Bits::Eight => self.multiply::<S, R, V, false>(s, count),
                Bits::Four => self.multiply::<S, R, V, true>(s, count),
            }
        }
    }

    /// Sums `count` blocks for `R` rows and `V` registers of columns.
    ///
    /// Registers hold the integer sums of a block. The fp32 sums over blocks stay in `out`, which is in the L1 cache.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)]
    unsafe fn multiply<S: Int8, const R: usize, const V: usize, const FOUR: bool>(self, s: S, count: usize) {
        let width = V * S::LANES;
        // Not a constant: the compiler would unroll the loop over groups and run out of registers.
        let size = self.weights.len() / count.max(1);
        let out = self.out.as_mut_ptr();
        // SAFETY: the caller has checked all lengths.
        unsafe {
            for at in 0..R * V {
                s.store(out.add(at * S::LANES), s.splat(0.0));
            }
            for b in 0..count {
                let weights = self.weights.as_ptr().add(b * size);
                prefetch_twice::<8192>(weights, size);
                let scales = weights.cast::<u16>();
                let blocks = self.blocks.as_ptr().add(b * R);

                let mut sums = [[s.splat_i32(0); V]; R];
                if !FOUR && S::OFFSET != 0 {
                    for r in 0..R {
                        sums[r] = [s.splat_i32((*blocks.add(r)).start); V];
                    }
                }
                let codes = weights.add(width * if FOUR { 4 } else { 2 })..weights.add(size);
                let x = blocks.cast::<u8>();
                if FOUR {
                    let apart = size_of::<Block>();
                    add::<S, R, V>(s, &mut sums, codes.clone(), 4, |p| s.nibbles(p, 0), x, apart, S::dot4);
                    add::<S, R, V>(s, &mut sums, codes, 4, |p| s.nibbles(p, 1), x.add(BLOCK / 2), apart, S::dot4);
                } else if S::GROUP == 2 {
                    let x = self.wide.as_ptr().add(b * R * BLOCK).cast();
                    add::<S, R, V>(s, &mut sums, codes, 2, |p| s.bytes(p), x, 2 * BLOCK, S::dot8);
                } else {
                    add::<S, R, V>(s, &mut sums, codes, 4, |p| s.bytes(p), x, size_of::<Block>(), S::dot8);
                }

                // Without `black_box` the compiler would keep these sums in registers too, and run out of them.
                let out = std::hint::black_box(out);
                for v in 0..V {
                    let scale = s.load_f16(scales.add(v * S::LANES));
                    let shift = if FOUR { s.load_f16(scales.add(width + v * S::LANES)) } else { scale };
                    for r in 0..R {
                        let block = &*blocks.add(r);
                        let to = out.add((r * V + v) * S::LANES);
                        let sum = s.to_f32(if FOUR { s.total4(sums[r][v]) } else { sums[r][v] });
                        let mut total = s.fma(sum, s.mul(scale, s.splat(block.scale)), s.load(to));
                        if FOUR {
                            total = s.fma(shift, s.splat(block.scaled_sum), total);
                        }
                        s.store(to, total);
                    }
                }
            }
        }
    }
}

/// Adds the products of a block. It multiplies the weights `codes`, `group` of a column at a time, by the same number of activations `x` of
/// each row. These are 32 bits, and `apart` bytes from those of the previous row.
#[inline(always)]
#[allow(clippy::needless_range_loop, clippy::too_many_arguments)]
unsafe fn add<S: Int8, const R: usize, const V: usize>(
    s: S,
    sums: &mut [[S::I; V]; R],
    codes: Range<*const u8>,
    group: usize,
    load: impl Fn(*const u8) -> S::I,
    mut x: *const u8,
    apart: usize,
    dot: impl Fn(S, S::I, S::I, S::I) -> S::I,
) {
    let mut p = codes.start;
    while p < codes.end {
        // SAFETY: the caller has checked all lengths.
        unsafe {
            let mut w = [s.splat_i32(0); V];
            for v in 0..V {
                w[v] = load(p.add(v * S::LANES * group));
            }
            for r in 0..R {
                let x = s.splat_i32(x.add(r * apart).cast::<i32>().read_unaligned());
                for v in 0..V {
                    sums[r][v] = dot(s, sums[r][v], w[v], x);
                }
            }
            p = p.add(V * S::LANES * group);
            x = x.add(4);
        }
    }
}
