//! Products of weights in bfloat16 and rows in bfloat16 pieces, summed by matrix tiles.

use super::{Isa, Matrices, TILE};
use crate::block_type::BLOCK;

/// Pairs of a block.
const PAIRS: usize = BLOCK / 2;

/// Multiplies a panel's weights for some inputs by tiles of rows, and adds the products to sums.
///
/// The weights are the left factor, so that the inputs of a column are next to each other. A block's products with the pieces of a row are
/// added in the order of the pieces, and the blocks in theirs. So a sum does not depend on the other rows, or on how inputs are cut.
pub(crate) struct PieceProducts<'a> {
    /// Number of rows in each tile, at most [`TILE`].
    pub(crate) height: usize,
    /// Bfloat16 numbers whose sum is a number of a row.
    pub(crate) pieces: usize,
    /// Blocks of 32 inputs.
    pub(crate) blocks: usize,
    /// Blocks from a tile's first block to that of the next tile.
    pub(crate) stride: usize,
    /// Pairs of inputs, \[blocks\]\[columns\]\[16 pairs\].
    pub(crate) weights: &'a [u32],
    /// Pairs of inputs, \[blocks\]\[pieces\]\[16 pairs\]\[rows\] for each tile.
    pub(crate) rows: &'a [u32],
    /// \[tiles\]\[columns\]\[16 rows\].
    pub(crate) sums: &'a mut [f32],
    /// Whether the sums begin with these products. Otherwise the products are added to them.
    pub(crate) fresh: bool,
    /// Whether the weights come from memory, so that those that follow are prefetched.
    pub(crate) prefetch: bool,
}

impl PieceProducts<'_> {
    /// Computes the products with the tiles of `isa`.
    pub(crate) fn run(self, isa: Isa) {
        let tiles = self.check(isa);
        match isa.matrices {
            Matrices::Vectors | Matrices::Digits => unreachable!("this instruction set has no tiles"),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: only `Isa::available` creates this value, and it has checked the processor. The lengths are checked.
            Matrices::Amx => unsafe { amx::run(self, tiles) },
            #[cfg(test)]
            Matrices::Oracle => super::oracle::piece_products(self, isa.panel()),
        }
    }

    /// Checks all lengths and returns the number of tiles.
    fn check(&self, isa: Isa) -> usize {
        let &Self { height, pieces, blocks, stride, .. } = self;
        let width = isa.panel();
        let tiles = self.sums.len() / (width * TILE);
        assert!((1..=TILE).contains(&height) && pieces > 0 && blocks > 0 && stride >= blocks && width.is_multiple_of(TILE));
        assert!(tiles > 0 && self.sums.len() == tiles * width * TILE && self.weights.len() == blocks * width * PAIRS);
        assert!(self.rows.len() == ((tiles - 1) * stride + blocks) * pieces * PAIRS * height);
        tiles
    }
}

/// Products with one or two tiles of rows whose sums stay in the tile registers, so that vectors can decode a block of weights while the
/// products of the last one are computed. The results are those of [`PieceProducts`].
pub(crate) struct RegisterProducts<'a> {
    isa: Isa,
    /// Number of rows in each tile. 1 for a tile that does not exist.
    heights: [usize; 2],
    pieces: usize,
    /// Of each tile, the numbers from the next block on.
    rows: [&'a [u32]; 2],
    tiles: usize,
    sums: &'a mut [f32],
}

impl<'a> RegisterProducts<'a> {
    /// Begins with all blocks of one or two tiles, which have `heights` rows. Sizes are those of [`PieceProducts`].
    ///
    /// # Safety
    ///
    /// No other code uses tiles on this thread before [`RegisterProducts::end`].
    pub(crate) unsafe fn begin(
        isa: Isa,
        heights: impl Iterator<Item = usize>,
        pieces: usize,
        rows: &'a [u32],
        sums: &'a mut [f32],
    ) -> Self {
        let (mut tiles, mut all) = (0, [1; 2]);
        for height in heights {
            (all[tiles], tiles) = (height, tiles + 1);
        }
        let height = all[..tiles].iter().sum::<usize>();
        assert!(tiles > 0 && sums.len() == tiles * isa.panel() * TILE && all.iter().all(|height| (1..=TILE).contains(height)));
        assert!(rows.len().is_multiple_of(pieces * PAIRS * height));
        let (first, second) = rows.split_at(rows.len() / height * all[0]);
        sums.fill(0.0);
        #[cfg(target_arch = "x86_64")]
        if isa.matrices == Matrices::Amx {
            // SAFETY: only `Isa::available` creates this value, and it has checked the processor.
            unsafe { amx::begin(all) };
        }
        Self { isa, heights: all, pieces, rows: [first, second], tiles, sums }
    }

    /// Multiplies the next block of each tile by these weights, \[columns\]\[16 pairs\], and adds the products.
    ///
    /// # Safety
    ///
    /// As for [`RegisterProducts::begin`].
    #[inline(always)]
    pub(crate) unsafe fn add(&mut self, weights: &[u32]) {
        let [first_size, second_size] = self.heights.map(|height| self.pieces * PAIRS * height);
        let first = self.rows[0].split_at(first_size);
        let second = if self.tiles == 1 { Default::default() } else { self.rows[1].split_at(second_size) };
        self.rows = [first.1, second.1];
        match self.isa.matrices {
            Matrices::Vectors | Matrices::Digits => unreachable!("this instruction set has no tiles"),
            #[cfg(target_arch = "x86_64")]
            Matrices::Amx => {
                assert!(weights.len() == 2 * TILE * PAIRS);
                // SAFETY: `begin` configured the registers, and the lengths are checked.
                unsafe {
                    if self.tiles == 1 {
                        amx::add_one(weights.as_ptr(), first.0.as_ptr(), self.heights[0], self.pieces);
                    } else {
                        amx::add_two(weights.as_ptr(), [first.0.as_ptr(), second.0.as_ptr()], self.heights, self.pieces);
                    }
                }
            }
            #[cfg(test)]
            Matrices::Oracle => {
                let pieces = self.pieces;
                let tile_sums = self.sums.len() / self.tiles;
                for ((rows, height), sums) in [first.0, second.0].into_iter().zip(self.heights).zip(self.sums.chunks_exact_mut(tile_sums)) {
                    PieceProducts { height, pieces, blocks: 1, stride: 1, weights, rows, sums, fresh: false, prefetch: false }
                        .run(self.isa);
                }
            }
        }
    }

    /// Writes the sums.
    ///
    /// # Safety
    ///
    /// As for [`RegisterProducts::begin`].
    pub(crate) unsafe fn end(self) {
        #[cfg(target_arch = "x86_64")]
        if self.isa.matrices == Matrices::Amx {
            // SAFETY: `begin` configured the registers and checked the length of the sums.
            unsafe { amx::end(self.sums.as_mut_ptr(), self.tiles) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod amx {
    use std::arch::asm;

    use super::super::prefetch_twice;
    use super::super::tiles::amx::{Config, LINE, release};
    use super::{PAIRS, PieceProducts, TILE};

    /// Computes [`PieceProducts`]. Registers 0 to 3 have sums, 4 and 5 weights, 6 and 7 rows.
    ///
    /// # Safety
    ///
    /// The process may use the tiles, and all lengths are checked.
    #[allow(clippy::needless_pass_by_value)] // The sums are borrowed mutably.
    pub(super) unsafe fn run(of: PieceProducts<'_>, tiles: usize) {
        let PieceProducts { height, pieces, blocks, stride, .. } = of;
        // SAFETY: the registers are configured here and released below. All addresses are within the slices, as the caller has checked.
        unsafe {
            begin([height; 2]);
            for tile in (0..tiles).step_by(2) {
                let rows = |tile: usize| of.rows.as_ptr().wrapping_add(tile * stride * pieces * PAIRS * height);
                let sums = of.sums.as_mut_ptr().add(tile * 2 * TILE * TILE);
                let count = (tiles - tile).min(2);
                if tile > 0 || !of.fresh {
                    load(sums, count, of.fresh);
                }
                let (weights, rows, step) = (of.weights.as_ptr(), [rows(tile), rows(tile + 1)], pieces * PAIRS * height);
                for block in 0..blocks {
                    let (weights, rows) = (weights.add(block * 2 * TILE * PAIRS), rows.map(|rows| rows.wrapping_add(block * step)));
                    if of.prefetch && tile == 0 {
                        prefetch_twice::<8192>(weights.cast(), 2 * TILE * LINE);
                    }
                    if count == 2 {
                        add_two(weights, rows, [height; 2], pieces);
                    } else {
                        add_one(weights, rows[0], height, pieces);
                    }
                }
                store(sums, count);
            }
            release();
        }
    }

    /// Configures the registers for two tiles of rows with these heights. The registers become zero.
    pub(super) unsafe fn begin(heights: [usize; 2]) {
        let mut config = Config::new();
        for (register, line) in [(4, LINE), (5, LINE)]
            .into_iter()
            .chain([0, 1, 6].map(|register| (register, 4 * heights[0])))
            .chain([2, 3, 7].map(|register| (register, 4 * heights[1])))
        {
            config.set(register, TILE, line);
        }
        // SAFETY: the caller guarantees it.
        unsafe { config.load() };
    }

    /// Loads the sums of one or two tiles, or zeros.
    unsafe fn load(sums: *const f32, tiles: usize, zeros: bool) {
        // SAFETY: the caller has configured the registers and checked the lengths.
        unsafe {
            if zeros {
                asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem, preserves_flags));
                return;
            }
            asm!(
                "tileloadd tmm0, [{sums} + {line}]",
                "tileloadd tmm1, [{sums} + {line} + 1024]",
                sums = in(reg) sums, line = in(reg) LINE, options(nostack, readonly, preserves_flags),
            );
            if tiles == 2 {
                asm!(
                    "tileloadd tmm2, [{sums} + {line} + 2048]",
                    "tileloadd tmm3, [{sums} + {line} + 3072]",
                    sums = in(reg) sums, line = in(reg) LINE, options(nostack, readonly, preserves_flags),
                );
            }
        }
    }

    /// Stores the sums of one or two tiles.
    unsafe fn store(sums: *mut f32, tiles: usize) {
        // SAFETY: as above.
        unsafe {
            asm!(
                "tilestored [{sums} + {line}], tmm0",
                "tilestored [{sums} + {line} + 1024], tmm1",
                sums = in(reg) sums, line = in(reg) LINE, options(nostack, preserves_flags),
            );
            if tiles == 2 {
                asm!(
                    "tilestored [{sums} + {line} + 2048], tmm2",
                    "tilestored [{sums} + {line} + 3072], tmm3",
                    sums = in(reg) sums, line = in(reg) LINE, options(nostack, preserves_flags),
                );
            }
        }
    }

    /// Stores the sums and releases the registers.
    pub(super) unsafe fn end(sums: *mut f32, tiles: usize) {
        // SAFETY: as above.
        unsafe {
            store(sums, tiles);
            release();
        }
    }

    /// Multiplies a block of a tile of rows.
    #[inline(always)]
    pub(super) unsafe fn add_one(weights: *const u32, rows: *const u32, height: usize, pieces: usize) {
        // SAFETY: as above. The sums stay in the registers, which compiled code does not use.
        unsafe {
            asm!(
                "tileloadd tmm4, [{weights} + {line}]",
                "tileloadd tmm5, [{weights} + {line} + 1024]",
                "2:",
                "tileloadd tmm6, [{rows} + {row_line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm5, tmm6",
                "add {rows}, {step}",
                "dec {pieces}",
                "jnz 2b",
                weights = in(reg) weights, line = in(reg) LINE, rows = inout(reg) rows => _, row_line = in(reg) 4 * height,
                step = in(reg) 4 * height * PAIRS, pieces = inout(reg) pieces => _, options(nostack, readonly),
            );
        }
    }

    /// Multiplies a block of two tiles of rows.
    #[inline(always)]
    pub(super) unsafe fn add_two(weights: *const u32, rows: [*const u32; 2], heights: [usize; 2], pieces: usize) {
        let lines = heights.map(|height| 4 * height);
        // SAFETY: as above.
        unsafe {
            asm!(
                "tileloadd tmm4, [{weights} + {line}]",
                "tileloadd tmm5, [{weights} + {line} + 1024]",
                "2:",
                "tileloadd tmm6, [{first} + {first_line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm5, tmm6",
                "tileloadd tmm7, [{second} + {second_line}]",
                "tdpbf16ps tmm2, tmm4, tmm7",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {first}, {first_step}",
                "add {second}, {second_step}",
                "dec {pieces}",
                "jnz 2b",
                weights = in(reg) weights, line = in(reg) LINE, first = inout(reg) rows[0] => _, second = inout(reg) rows[1] => _,
                first_line = in(reg) lines[0], first_step = in(reg) lines[0] * PAIRS,
                second_line = in(reg) lines[1], second_step = in(reg) lines[1] * PAIRS, pieces = inout(reg) pieces => _,
                options(nostack, readonly),
            );
        }
    }
}
