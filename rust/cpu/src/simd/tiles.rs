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
    /// Whether the products are added to what is there.
    pub(crate) add: bool,
}

/// Products of pairs in tile registers, which stay configured from one product to the next.
pub(crate) struct PairTiles {
    isa: Isa,
    /// The height that the registers are configured for. 0 if they are not.
    height: usize,
    /// The number of pairs modulo [`TILE`] that the registers are configured for.
    rest: usize,
}

impl PairTiles {
    /// Begins to use the tiles of `isa`.
    ///
    /// # Safety
    ///
    /// No other code uses tiles on this thread before [`PairTiles::end`].
    pub(crate) unsafe fn begin(isa: Isa) -> Self {
        Self { isa, height: 0, rest: 0 }
    }

    /// Multiplies `rows` by tiles of 16 columns, which begin at `columns`. Writes \[rows\]\[tiles\]\[16\] to `out`.
    ///
    /// # Safety
    ///
    /// As for [`PairTiles::begin`], and all addresses are valid for these sizes.
    pub(crate) unsafe fn multiply(&mut self, products: PairProducts, rows: *const f32, columns: &[*const u32], out: *mut f32) {
        assert!((1..=TILE).contains(&products.height));
        match self.isa.matrices {
            Matrices::Vectors | Matrices::Digits => unreachable!("this instruction set has no tiles"),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: only `Isa::available` creates this value, and it has checked the processor. The caller guarantees the rest.
            Matrices::Amx => unsafe {
                let rest = products.pairs % TILE;
                if self.height != products.height || (rest > 0 && rest != self.rest) {
                    amx::configure(products.height, rest);
                    (self.height, self.rest) = (products.height, rest);
                }
                amx::pair_products(products, rows, columns, out);
            },
            #[cfg(test)]
            // SAFETY: the caller guarantees it.
            Matrices::Oracle => unsafe { super::oracle::pair_products(products, rows, columns, out) },
        }
    }

    /// Releases the registers.
    ///
    /// # Safety
    ///
    /// As for [`PairTiles::begin`].
    pub(crate) unsafe fn end(self) {
        #[cfg(target_arch = "x86_64")]
        if self.height > 0 && self.isa.matrices == Matrices::Amx {
            // SAFETY: `multiply` has configured the registers.
            unsafe { amx::release() };
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

        /// Configures the registers, which become zero.
        ///
        /// # Safety
        ///
        /// The process may use the tiles.
        pub(in crate::simd) unsafe fn load(&self) {
            // SAFETY: sizes are set within the registers' bounds. Compiled code does not use tiles.
            unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const *self, options(nostack, readonly, preserves_flags)) };
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

    /// Configures the registers for [`pair_products`]. Registers 0 to 3 have sums, 4 and 5 have 16 pairs of the rows and of the columns, and
    /// 6 and 7 `rest` pairs.
    pub(super) unsafe fn configure(height: usize, rest: usize) {
        let mut config = Config::new();
        for register in 0..8 {
            let pairs = if register < 6 { TILE } else { rest };
            match register {
                // A register that is not used has neither rows nor columns.
                6 | 7 if rest == 0 => {}
                5 | 7 => config.set(register, pairs, LINE),
                _ => config.set(register, height, 4 * pairs),
            }
        }
        // SAFETY: the caller guarantees it.
        unsafe { config.load() };
    }

    /// Releases the registers.
    pub(in crate::simd) unsafe fn release() {
        // SAFETY: compiled code does not use tiles.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
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
        /// Whether to add.
        add: usize,
    }

    /// Multiplies tiles of columns, as many as there are registers with sums: `$at` and `$sums` for each.
    macro_rules! multiply {
        ($counts:ident, $rows:ident, $row_stride:ident, $column_stride:ident, $out:ident, $out_stride:ident,
         $(($sums:literal, $at:literal, $column:ident, $start:expr)),+) => {
            asm!(
                "cmp qword ptr [{counts} + 24], 0",
                "je 2f",
                $(concat!("tileloadd ", $sums, ", [{out} + {out_stride} + ", $at, "]"),)+
                "jmp 3f",
                "2:",
                $(concat!("tilezero ", $sums),)+
                "3:",
                "mov {left}, [{counts}]",
                "test {left}, {left}",
                "jz 5f",
                "4:",
                "tileloadd tmm4, [{row} + {row_stride}]",
                $(
                    concat!("tileloadd tmm5, [{", stringify!($column), "} + {column_stride}]"),
                    concat!("tdpbf16ps ", $sums, ", tmm4, tmm5"),
                    concat!("add {", stringify!($column), "}, [{counts} + 16]"),
                )+
                "add {row}, {line}",
                "dec {left}",
                "jnz 4b",
                "5:",
                "cmp qword ptr [{counts} + 8], 0",
                "je 6f",
                "tileloadd tmm6, [{row} + {row_stride}]",
                $(
                    concat!("tileloadd tmm7, [{", stringify!($column), "} + {column_stride}]"),
                    concat!("tdpbf16ps ", $sums, ", tmm6, tmm7"),
                )+
                "6:",
                $(concat!("tilestored [{out} + {out_stride} + ", $at, "], ", $sums),)+
                line = const LINE,
                counts = in(reg) &raw const $counts,
                left = out(reg) _,
                row = inout(reg) $rows => _,
                row_stride = in(reg) 4 * $row_stride,
                column_stride = in(reg) 4 * $column_stride,
                $($column = inout(reg) $start => _,)+
                out = in(reg) $out,
                out_stride = in(reg) 4 * $out_stride,
                options(nostack),
            )
        };
    }

    /// Computes [`PairProducts`].
    ///
    /// # Safety
    ///
    /// The registers are configured for the height and the rest of the pairs, and all addresses are valid for the sizes.
    pub(super) unsafe fn pair_products(products: PairProducts, rows: *const f32, columns: &[*const u32], out: *mut f32) {
        let PairProducts { pairs, row_stride, column_stride, out_stride, add, .. } = products;
        let counts = Counts { tiles: pairs / TILE, rest: pairs % TILE, step: TILE * 4 * column_stride, add: usize::from(add) };
        let (fours, others) = columns.as_chunks::<4>();
        // SAFETY: the caller guarantees it. The assembly has no other effect than to write `out`, and compiled code does not use tiles.
        unsafe {
            for (i, four) in fours.iter().enumerate() {
                let out = out.add(4 * TILE * i);
                multiply!(
                    counts,
                    rows,
                    row_stride,
                    column_stride,
                    out,
                    out_stride,
                    ("tmm0", 0, a, four[0]),
                    ("tmm1", 64, b, four[1]),
                    ("tmm2", 128, c, four[2]),
                    ("tmm3", 192, d, four[3])
                );
            }
            for (i, &one) in others.iter().enumerate() {
                let out = out.add(4 * TILE * fours.len() + TILE * i);
                multiply!(counts, rows, row_stride, column_stride, out, out_stride, ("tmm0", 0, a, one));
            }
        }
    }
}
