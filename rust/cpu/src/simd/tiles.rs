//! Matrix tiles: products of bfloat16 tiles, by the processor's AMX unit or by its portable oracle.

use super::{Isa, Matrices};

/// Maximum rows of a tile, and columns of a tile of sums.
pub(crate) const TILE: usize = 16;

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
            Matrices::Amx => unsafe { amx::pair_products(self, rows, columns, out) },
            #[cfg(test)]
            // SAFETY: the caller guarantees it.
            Matrices::Oracle => unsafe { super::oracle::pair_products(self, rows, columns, out) },
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
pub(super) mod amx {
    use std::arch::asm;

    use super::{PairProducts, TILE, TileSupport};

    /// Bytes of a row of a tile.
    pub(in crate::simd) const LINE: usize = 64;

    /// The operand of `ldtilecfg`: bytes in a row, and rows, of each tile register.
    #[repr(C, align(64))]
    pub(in crate::simd) struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    impl Config {
        pub(in crate::simd) fn new() -> Self {
            Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] }
        }

        /// Sets the size of a register.
        pub(in crate::simd) fn set(&mut self, register: usize, rows: usize, row_bytes: usize) {
            (self.rows[register], self.row_bytes[register]) = (rows as u8, row_bytes as u16);
        }
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
        let mut config = Config::new();
        // Register 0 has sums, 1 and 2 have 16 pairs of the rows and of the columns, and 3 and 4 the rest of the pairs.
        for (register, pairs) in [(0, TILE), (1, TILE), (2, TILE), (3, counts.rest), (4, counts.rest)] {
            // A register that is not used has neither rows nor columns.
            if pairs > 0 {
                let is_column = register % 2 == 0 && register > 0;
                let (rows, line) = if is_column { (pairs, LINE) } else { (height, 4 * pairs) };
                config.set(register, rows, line);
            }
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
