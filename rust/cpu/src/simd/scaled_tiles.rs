//! Products of rows in digits and weights with scales, by matrix tiles.

use std::ops::Range;

use super::{Isa, Matrices, TILE};
use crate::block_type::BLOCK;

/// Multiplies tiles of rows by a panel's weights, and adds the products times their scales to the rows' sums.
pub(crate) struct ScaledProducts<'a> {
    /// Number of rows in each tile, at most [`TILE`].
    pub(crate) height: usize,
    /// Digits of a number of a row: 2 or 3.
    pub(crate) digits: usize,
    /// Blocks from a tile's first block to that of the next tile.
    pub(crate) stride: usize,
    /// Inputs that share a scale: 16 or 32.
    pub(crate) group: usize,
    /// Pairs of the rows' digits in bfloat16, \[blocks of 32 inputs\]\[digits\]\[rows\]\[16\] for each tile.
    pub(crate) rows: &'a [u32],
    /// Pairs of weights in bfloat16, \[groups\]\[tiles\]\[pairs of inputs\]\[16 columns\].
    pub(crate) weights: &'a [u32],
    /// The groups' scales, and then their shifts, \[groups\]\[2\]\[columns\].
    pub(crate) scales: &'a [f32],
    /// The rows' sums of each group, \[groups\]\[rows\] for each tile.
    pub(crate) shifted: &'a [f32],
    /// \[tiles\]\[rows\]\[columns\].
    pub(crate) sums: &'a mut [f32],
    /// What is read after these products, to be prefetched. The addresses need not be valid.
    pub(crate) ahead: Range<*const u8>,
}

impl ScaledProducts<'_> {
    /// Computes the products with the tiles of `isa`. A group's product adds the products of the digits, in their order. Then it is
    /// multiplied by its scale and added to the sum, and the group's sum times the shift is added.
    pub(crate) fn run(self, isa: Isa) {
        let (width, height) = (isa.panel(), self.height);
        let groups = self.scales.len() / (2 * width);
        let (blocks, tiles) = (groups * self.group / BLOCK, self.sums.len() / (height * width));
        let all = (tiles - 1) * self.stride + blocks;
        assert!(
            (1..=TILE).contains(&height)
                && matches!(self.digits, 2 | 3)
                && groups > 0
                && self.stride >= blocks
                && width.is_multiple_of(TILE)
        );
        assert!(self.ahead.start <= self.ahead.end);
        assert!(matches!(self.group, 16 | BLOCK) && groups * self.group == blocks * BLOCK);
        assert!(self.scales.len() == 2 * groups * width && self.sums.len() == tiles * height * width);
        assert!(self.rows.len() == all * height * self.digits * BLOCK / 2 && self.weights.len() == blocks * BLOCK / 2 * width);
        assert!(self.shifted.len() == all * BLOCK / self.group * height);
        match isa.matrices {
            Matrices::Vectors | Matrices::Digits => unreachable!("this instruction set has no tiles"),
            #[cfg(target_arch = "x86_64")]
            Matrices::Amx => {
                assert_eq!(width, 2 * TILE, "panels are as wide as two tiles");
                // SAFETY: only `Isa::available` creates this value, and it has checked the processor. The lengths are asserted above.
                unsafe { amx::run(self, tiles, groups) }
            }
            #[cfg(test)]
            Matrices::Oracle => isa.run(super::oracle::Oracle { products: self, width }),
        }
    }
}

/// The place of a pair of weights in a panel `width` columns wide, if `each` pairs of a column are in one tile.
#[inline(always)]
pub(crate) fn pair_place(width: usize, each: usize, pair: usize, column: usize) -> usize {
    ((pair / each * (width / TILE) + column / TILE) * each + pair % each) * TILE + column % TILE
}

#[cfg(target_arch = "x86_64")]
mod amx {
    use std::arch::asm;
    use std::mem::{MaybeUninit, offset_of};

    use super::super::tiles::amx::{Config, LINE};
    use super::{BLOCK, ScaledProducts, TILE};

    /// What the assembly reads from memory, because there are not enough registers.
    #[repr(C, align(64))]
    struct Job {
        config: Config,
        /// A group's products, for each of two tiles of columns.
        products: MaybeUninit<[[f32; TILE * TILE]; 2]>,
        /// Bytes of the lines in a tile of products of which the sums are written while the next digit is multiplied.
        until: [usize; 3],
        steps: Steps,
        turns: Turns,
        /// Whether rows have a third digit.
        third: usize,
        /// The next cache line to prefetch, and the number of lines for each turn.
        ahead: *const u8,
        lines: usize,
    }

    /// Bytes from one thing to the next.
    #[repr(C)]
    struct Steps {
        /// From the end of a group's digits to those of the next group, which is in the same block or in the next one in turn.
        next_rows: [isize; 2],
        /// From the end of a tile's digits to those of the next tile, and the same of its sums of rows.
        next_tile: usize,
        next_row_sums: usize,
        /// The size of a digit of a block, of a tile of weights, of all weights, of all scales, and of the sums of a tile.
        digit: usize,
        tile: usize,
        weights: usize,
        scales: usize,
        sums: usize,
    }

    /// What is left to do.
    #[repr(C)]
    struct Turns {
        /// Groups of a tile, and how many of them are not multiplied yet, and not added yet.
        groups: usize,
        to_multiply: usize,
        to_add: usize,
        /// Groups of all tiles that are not multiplied yet.
        left: usize,
        /// Bytes of the lines that the first turn skips, because no products were stored yet. Then 0.
        first_row: usize,
    }

    /// Multiplies the next digit of the rows by two tiles of weights, in registers 6 and 7.
    macro_rules! digit {
        ($register:literal) => {
            concat!(
                "tileloadd ",
                $register,
                ", [{rows} + {line}]\n",
                "tdpbf16ps tmm0, ",
                $register,
                ", tmm6\n",
                "tdpbf16ps tmm1, ",
                $register,
                ", tmm7\n",
                "add {rows}, [{job} + {digit}]\n",
            )
        };
    }

    /// Loads the next two tiles of weights.
    macro_rules! weights {
        () => {
            concat!(
                "tileloadd tmm6, [{weights} + {line}]\n add {weights}, [{job} + {tile}]\n",
                "tileloadd tmm7, [{weights} + {line}]\n add {weights}, [{job} + {tile}]\n",
            )
        };
    }

    /// Prefetches what is read after these products, in turns.
    macro_rules! prefetch {
        () => {
            concat!(
                "mov {count}, [{job} + {ahead}]\n",
                "mov {row}, [{job} + {lines}]\n",
                "61:\n",
                "prefetcht1 [{count}]\n",
                "add {count}, 64\n",
                "dec {row}\n",
                "jnz 61b\n",
                "mov [{job} + {ahead}], {count}\n",
            )
        };
    }

    /// Adds the last group's products of rows to their sums, until a certain row.
    macro_rules! add {
        ($label:literal, $until:literal) => {
            concat!(
                "cmp {row}, [{job} + {until} + ",
                $until,
                "]\n",
                "jae 5",
                $label,
                "f\n",
                "4",
                $label,
                ":\n",
                "vmovups zmm4, [{sums} + 2*{row}]\n",
                "vmovups zmm5, [{sums} + 2*{row} + 64]\n",
                "vbroadcastss zmm6, [{row_sums}]\n",
                "add {row_sums}, 4\n",
                "vfmadd231ps zmm4, zmm0, [{job} + {row} + {products}]\n",
                "vfmadd231ps zmm5, zmm1, [{job} + {row} + {products} + 1024]\n",
                "vfmadd231ps zmm4, zmm2, zmm6\n",
                "vfmadd231ps zmm5, zmm3, zmm6\n",
                "vmovups [{sums} + 2*{row}], zmm4\n",
                "vmovups [{sums} + 2*{row} + 64], zmm5\n",
                "add {row}, 64\n",
                "cmp {row}, [{job} + {until} + ",
                $until,
                "]\n",
                "jb 4",
                $label,
                "b\n",
                "5",
                $label,
                ":\n",
            )
        };
    }

    impl Job {
        #[inline(always)]
        fn new(of: &ScaledProducts<'_>, tiles: usize, groups: usize) -> Self {
            const { assert!(TILE * size_of::<f32>() == LINE && BLOCK / 2 * size_of::<u32>() == LINE) }
            let (height, group, digits) = (of.height, of.group, of.digits);
            let all = height * LINE;
            // Groups of 16 inputs are the first and the second half of each line.
            let (half, back) = ((LINE / 2) as isize, (digits * all) as isize);
            // The rows are spread over the digits, so that neither the tiles nor the vectors wait.
            let share = |n: usize| (height * n.min(digits)).div_ceil(digits) * LINE;
            let more_blocks = of.stride - groups * group / BLOCK;
            let steps = Steps {
                next_rows: if group < BLOCK { [half - back, -half] } else { [0; 2] },
                next_tile: more_blocks * digits * all,
                next_row_sums: more_blocks * BLOCK / group * height * size_of::<f32>(),
                digit: all,
                tile: group / 2 * LINE,
                weights: size_of_val(of.weights),
                scales: size_of_val(of.scales),
                sums: 2 * all,
            };
            // The loop adds what the turn before has multiplied.
            let (to_multiply, to_add, left) = (groups, groups + 1, tiles * groups);
            let turns = Turns { groups, to_multiply, to_add, left, first_row: all };
            let bytes_ahead = of.ahead.end.addr() - of.ahead.start.addr();
            let mut job = Self {
                config: Config::new(),
                products: MaybeUninit::uninit(),
                until: [share(1), share(2), share(3)],
                steps,
                turns,
                third: usize::from(digits == 3),
                ahead: of.ahead.start,
                lines: bytes_ahead.div_ceil(left * LINE).max(1),
            };
            for register in [0, 1, 4, 5] {
                // Registers 0 and 1 have products, 4 and 5 digits of the rows, and 6 and 7 weights.
                job.config.set(register, height, if register < 4 { LINE } else { 2 * group });
            }
            for register in [6, 7] {
                job.config.set(register, group / 2, LINE);
            }
            job
        }
    }

    /// Computes [`ScaledProducts`].
    ///
    /// # Safety
    ///
    /// The process may use the tiles, and all lengths are checked.
    #[allow(clippy::needless_pass_by_value)] // The sums are borrowed mutably.
    pub(super) unsafe fn run(of: ScaledProducts<'_>, tiles: usize, groups: usize) {
        let mut job = Job::new(&of, tiles, groups);
        // SAFETY: the caller guarantees it. The tile registers are configured, used and released within the assembly, which has no other
        // effect than to write `job` and `sums`.
        unsafe {
            asm!(
                "ldtilecfg [{job}]",
                "jmp 3f",
                "2:",
                "xor {odd}, 8",
                "vmovups zmm0, [{scales}]",
                "vmovups zmm1, [{scales} + 64]",
                "vmovups zmm2, [{scales} + 128]",
                "vmovups zmm3, [{scales} + 192]",
                "add {scales}, 256",
                "3:",
                "tilezero tmm0",
                "tilezero tmm1",
                "mov {row}, [{job} + {first_row}]",
                "mov qword ptr [{job} + {first_row}], 0",
                weights!(),
                digit!("tmm4"),
                add!(1, 0),
                digit!("tmm5"),
                add!(2, 8),
                "cmp qword ptr [{job} + {third}], 0",
                "je 7f",
                digit!("tmm4"),
                add!(3, 16),
                "7:",
                "add {rows}, [{job} + {odd} + {next_rows}]",
                "tilestored [{job} + {line} + {products}], tmm0",
                "tilestored [{job} + {line} + {products} + 1024], tmm1",
                prefetch!(),
                "mov {count}, [{job} + {groups}]",
                "dec qword ptr [{job} + {to_multiply}]",
                "jnz 8f",
                "mov [{job} + {to_multiply}], {count}",
                "add {rows}, [{job} + {next_tile}]",
                "sub {weights}, [{job} + {weights_of_tile}]",
                "8:",
                "dec qword ptr [{job} + {to_add}]",
                "jnz 9f",
                "mov [{job} + {to_add}], {count}",
                "sub {scales}, [{job} + {scales_of_tile}]",
                "add {sums}, [{job} + {sums_of_tile}]",
                "add {row_sums}, [{job} + {next_row_sums}]",
                "9:",
                "dec qword ptr [{job} + {left}]",
                "jnz 2b",
                "vmovups zmm0, [{scales}]",
                "vmovups zmm1, [{scales} + 64]",
                "vmovups zmm2, [{scales} + 128]",
                "vmovups zmm3, [{scales} + 192]",
                "xor {row:e}, {row:e}",
                add!(3, 16),
                "tilerelease",
                job = in(reg) &raw mut job,
                line = in(reg) LINE,
                rows = inout(reg) of.rows.as_ptr() => _,
                weights = inout(reg) of.weights.as_ptr() => _,
                scales = inout(reg) of.scales.as_ptr() => _,
                sums = inout(reg) of.sums.as_mut_ptr() => _,
                odd = inout(reg) 0_usize => _,
                row = out(reg) _,
                count = out(reg) _,
                next_rows = const offset_of!(Job, steps.next_rows),
                products = const offset_of!(Job, products),
                until = const offset_of!(Job, until),
                digit = const offset_of!(Job, steps.digit),
                next_row_sums = const offset_of!(Job, steps.next_row_sums),
                row_sums = inout(reg) of.shifted.as_ptr() => _,
                first_row = const offset_of!(Job, turns.first_row),
                groups = const offset_of!(Job, turns.groups),
                third = const offset_of!(Job, third),
                ahead = const offset_of!(Job, ahead),
                lines = const offset_of!(Job, lines),
                tile = const offset_of!(Job, steps.tile),
                to_multiply = const offset_of!(Job, turns.to_multiply),
                to_add = const offset_of!(Job, turns.to_add),
                left = const offset_of!(Job, turns.left),
                next_tile = const offset_of!(Job, steps.next_tile),
                weights_of_tile = const offset_of!(Job, steps.weights),
                scales_of_tile = const offset_of!(Job, steps.scales),
                sums_of_tile = const offset_of!(Job, steps.sums),
                out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _,
                options(nostack),
            );
        }
    }
}
