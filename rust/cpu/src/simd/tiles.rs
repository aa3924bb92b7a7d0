//! Matrix tiles: products of bfloat16 tiles, by the processor's AMX unit or by its portable oracle.

use super::{Isa, Matrices};
use crate::block_type::BLOCK;

/// Maximum rows of a tile, and columns of a tile of sums.
pub(crate) const TILE: usize = 16;

/// How exactly the tiles multiply fp32 rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Math {
    /// An fp32 number is split into three bfloat16 numbers whose sum it is.
    Exact,
    /// An fp32 number is rounded to bfloat16.
    Fast,
}

impl Math {
    /// Number of bfloat16 numbers for an fp32 number.
    pub(crate) fn pieces(self) -> usize {
        match self {
            Self::Exact => 3,
            Self::Fast => 1,
        }
    }
}

/// Multiplies a tile of rows by a panel's weights, a group of inputs at a time: 32, or 16 where weights have a scale for each 16.
pub(crate) struct TileProducts<'a> {
    /// Number of rows, at most [`TILE`].
    pub(crate) height: usize,
    /// Inputs of a group: 16 or 32.
    pub(crate) group: usize,
    /// The rows' pieces in bfloat16, \[blocks\]\[pieces\]\[rows\]\[32 inputs\].
    pub(crate) rows: &'a [u16],
    /// Pairs of weights in bfloat16, \[groups\]\[tiles\]\[pairs of inputs\]\[16 columns\].
    pub(crate) weights: &'a [u32],
    /// The results: the sum of each group's products, \[groups\]\[tiles\]\[rows\]\[16 columns\].
    pub(crate) out: &'a mut [f32],
}

impl TileProducts<'_> {
    /// Computes the products with the tiles of `isa`. Each result adds the products of the pieces, the last piece first.
    pub(crate) fn run(self, isa: Isa) {
        let pieces = isa.math().pieces();
        let blocks = self.rows.len() / (pieces * self.height * BLOCK);
        let groups = blocks * BLOCK / self.group;
        assert!((1..=TILE).contains(&self.height) && (self.group == BLOCK || self.group == BLOCK / 2));
        assert_eq!(self.rows.len(), blocks * pieces * self.height * BLOCK);
        let tiles = self.weights.len() / (groups * self.group / 2 * TILE).max(1);
        assert_eq!(self.weights.len(), groups * tiles * self.group / 2 * TILE);
        assert_eq!(self.out.len(), groups * tiles * self.height * TILE);
        match isa.matrices {
            Matrices::Vectors | Matrices::Digits => unreachable!("this instruction set has no tiles"),
            #[cfg(target_arch = "x86_64")]
            Matrices::Amx(_) => {
                assert_eq!(tiles, 2, "panels are as wide as two tiles");
                // SAFETY: only `Isa::available` creates this value, and it has checked the processor. The lengths are asserted above.
                unsafe { amx::run(self, blocks, pieces) }
            }
            #[cfg(test)]
            Matrices::Oracle(_) => isa.run(super::oracle::Oracle { products: self, tiles, pieces }),
        }
    }
}

/// Sizes of a product of rows of bfloat16 pairs and columns of pairs. Strides are numbers of 32 bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairProducts {
    /// Number of rows, at most [`TILE`].
    pub(crate) height: usize,
    /// Pairs of a row, which are next to each other.
    pub(crate) pairs: usize,
    pub(crate) row_stride: usize,
    /// From a pair of a column to the next one.
    pub(crate) column_stride: usize,
    pub(crate) out_stride: usize,
}

impl PairProducts {
    /// Multiplies `rows` by tiles of 16 columns, which begin at `columns`, with the tiles of `isa`. Writes \[rows\]\[tiles\]\[16\] to `out`.
    ///
    /// # Safety
    ///
    /// All addresses are valid for these sizes.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    pub(crate) unsafe fn run(self, isa: Isa, rows: *const f32, columns: &[*const u32], out: *mut f32) {
        assert!((1..=TILE).contains(&self.height));
        match isa.matrices {
            Matrices::Vectors | Matrices::Digits => unreachable!("this instruction set has no tiles"),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: only `Isa::available` creates this value, and it has checked the processor. The caller guarantees the rest.
            Matrices::Amx(_) => unsafe { amx::pair_products(self, rows, columns, out) },
            #[cfg(test)]
            // SAFETY: the caller guarantees it.
            Matrices::Oracle(_) => unsafe { super::oracle::pair_products(self, rows, columns, out) },
        }
    }
}

/// Whether this process can use the tiles, and if not, why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileSupport {
    /// The processor or the instruction set of its vectors has none.
    Absent,
    /// The operating system refuses them to this process.
    Refused,
    /// They can be used.
    Usable,
}

impl TileSupport {
    /// Looks for AMX and asks the operating system for permission, once for the process.
    pub fn detect() -> Self {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        {
            static FOUND: std::sync::OnceLock<TileSupport> = std::sync::OnceLock::new();
            *FOUND.get_or_init(amx::detect)
        }
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        Self::Absent
    }
}

#[cfg(target_arch = "x86_64")]
mod amx {
    use std::arch::asm;

    use super::{PairProducts, TILE, TileProducts, TileSupport};
    use crate::block_type::BLOCK;

    /// Bytes of a row of a tile.
    const LINE: usize = 64;

    /// The operand of `ldtilecfg`: bytes in a row, and rows, of each tile register.
    #[repr(C, align(64))]
    struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    /// Bits 22 (bfloat16) and 24 (tiles) of EDX in CPUID's leaf 7, and Linux's `arch_prctl` call for the tiles' state.
    #[cfg(target_os = "linux")]
    pub(super) fn detect() -> TileSupport {
        const NEEDED: u32 = 1 << 22 | 1 << 24;
        const ARCH_PRCTL: usize = 158;
        const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
        const TILE_DATA: usize = 18;
        let leaf = std::arch::x86_64::__cpuid_count(7, 0);
        if leaf.edx & NEEDED != NEEDED {
            return TileSupport::Absent;
        }
        let result: isize;
        // SAFETY: the call changes only which instructions the process may use, and the system writes rax, rcx and r11.
        unsafe {
            asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") TILE_DATA,
                lateout("rcx") _, lateout("r11") _, options(nostack));
        }
        if result == 0 { TileSupport::Usable } else { TileSupport::Refused }
    }

    /// Computes the products of rows and a panel of two tiles.
    ///
    /// # Safety
    ///
    /// The process may use the tiles, and all lengths are checked.
    pub(super) unsafe fn run(products: TileProducts<'_>, blocks: usize, pieces: usize) {
        let TileProducts { height, group, rows, weights, out } = products;
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for register in 0..5 {
            // Registers 0 and 1 have sums, 2 and 3 weights, and 4 a piece of the rows.
            config.row_bytes[register] = if register < 4 { LINE as u16 } else { 2 * group as u16 };
            config.rows[register] = if matches!(register, 2 | 3) { group as u8 / 2 } else { height as u8 };
        }
        // Groups of a block. Each turn computes the same group of all blocks.
        let turns = BLOCK / group;
        // A tile of sums is as large as a piece of a block of rows.
        let (weight_tile, row_tile) = (group / 2 * LINE, height * LINE);
        for turn in 0..turns {
            // SAFETY: the caller guarantees it. The tile registers are configured, used and released within the assembly, which has no
            // other effect than to write `out`.
            unsafe {
                asm!(
                    "ldtilecfg [{config}]",
                    "2:",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tileloadd tmm2, [{weights} + {line}]",
                    "add {weights}, {weight_tile}",
                    "tileloadd tmm3, [{weights} + {line}]",
                    "add {weights}, {weight_rest}",
                    "mov {left}, {pieces}",
                    "3:",
                    "tileloadd tmm4, [{rows} + {line}]",
                    "add {rows}, {row_tile}",
                    "tdpbf16ps tmm0, tmm4, tmm2",
                    "tdpbf16ps tmm1, tmm4, tmm3",
                    "dec {left}",
                    "jnz 3b",
                    "tilestored [{out} + {line}], tmm0",
                    "add {out}, {row_tile}",
                    "tilestored [{out} + {line}], tmm1",
                    "add {out}, {sum_rest}",
                    "dec {count}",
                    "jnz 2b",
                    "tilerelease",
                    config = in(reg) &raw const config,
                    line = in(reg) LINE,
                    rows = inout(reg) rows.as_ptr().cast::<u8>().add(turn * 2 * group) => _,
                    row_tile = in(reg) row_tile,
                    pieces = in(reg) pieces,
                    left = out(reg) _,
                    weights = inout(reg) weights.as_ptr().cast::<u8>().add(turn * 2 * weight_tile) => _,
                    weight_tile = in(reg) weight_tile,
                    weight_rest = in(reg) (2 * turns - 1) * weight_tile,
                    out = inout(reg) out.as_mut_ptr().cast::<u8>().add(turn * 2 * row_tile) => _,
                    sum_rest = in(reg) (2 * turns - 1) * row_tile,
                    count = inout(reg) blocks => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _,
                    options(nostack),
                );
            }
        }
        const { assert!(TILE * size_of::<f32>() == LINE && BLOCK * size_of::<u16>() == LINE) }
    }

    /// What the assembly of [`pair_products`] reads from memory, because there are not enough registers.
    #[repr(C)]
    struct Counts {
        /// Tiles of 16 pairs.
        tiles: usize,
        /// Pairs beyond them.
        rest: usize,
        /// Bytes from 16 pairs of a column to the next 16.
        step: usize,
    }

    /// Computes [`PairProducts`].
    ///
    /// # Safety
    ///
    /// The process may use the tiles, and all addresses are valid for the sizes.
    pub(super) unsafe fn pair_products(products: PairProducts, rows: *const f32, columns: &[*const u32], out: *mut f32) {
        let PairProducts { height, pairs, row_stride, column_stride, out_stride } = products;
        let counts = Counts { tiles: pairs / TILE, rest: pairs % TILE, step: TILE * 4 * column_stride };
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        // Register 0 has sums, 1 and 2 have 16 pairs of the rows and of the columns, and 3 and 4 the rest of the pairs.
        for (register, pairs) in [(0, TILE), (1, TILE), (2, TILE), (3, counts.rest), (4, counts.rest)] {
            let is_column = register % 2 == 0 && register > 0;
            config.row_bytes[register] = if is_column { LINE as u16 } else { 4 * pairs as u16 };
            config.rows[register] = if is_column { pairs as u8 } else { height as u8 };
        }
        if counts.rest == 0 {
            // A register that is not used has neither rows nor columns.
            (config.row_bytes[4], config.rows[3]) = (0, 0);
        }
        // SAFETY: the caller guarantees it. The tile registers are configured, used and released within the assembly, which has no other
        // effect than to write `out`.
        unsafe {
            asm!(
                "ldtilecfg [{left}]",
                "2:",
                "mov {column}, [{columns}]",
                "add {columns}, 8",
                "mov {row}, {rows}",
                "tilezero tmm0",
                "mov {left}, [{counts}]",
                "test {left}, {left}",
                "jz 4f",
                "3:",
                "tileloadd tmm1, [{row} + {row_stride}]",
                "tileloadd tmm2, [{column} + {column_stride}]",
                "tdpbf16ps tmm0, tmm1, tmm2",
                "add {row}, {line}",
                "add {column}, [{counts} + 16]",
                "dec {left}",
                "jnz 3b",
                "4:",
                "cmp qword ptr [{counts} + 8], 0",
                "je 5f",
                "tileloadd tmm3, [{row} + {row_stride}]",
                "tileloadd tmm4, [{column} + {column_stride}]",
                "tdpbf16ps tmm0, tmm3, tmm4",
                "5:",
                "tilestored [{out} + {out_stride}], tmm0",
                "add {out}, {line}",
                "dec {tiles}",
                "jnz 2b",
                "tilerelease",
                line = const LINE,
                left = inout(reg) &raw const config => _,
                counts = in(reg) &raw const counts,
                rows = in(reg) rows,
                row = out(reg) _,
                row_stride = in(reg) 4 * row_stride,
                columns = inout(reg) columns.as_ptr() => _,
                column = out(reg) _,
                column_stride = in(reg) 4 * column_stride,
                out = inout(reg) out => _,
                out_stride = in(reg) 4 * out_stride,
                tiles = inout(reg) columns.len() => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                options(nostack),
            );
        }
    }
}
