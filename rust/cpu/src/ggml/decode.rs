//! Decodes blocks to fp32 weights in registers. The weights are multiplied there, or written out for several tiles.
//!
//! A code becomes a number without a conversion: its bits are set in the mantissa of a power of two, and the power is subtracted.

use std::ops::Range;

use super::BlockPanels;
use super::grid::GridCodes;
use super::panels::{CodeOrder, Unit};
use super::scales::Scales;
use crate::block_type::{BLOCK, BlockType, CodeBits};
use crate::simd::{Int8, Isa, Kernel, prefetch_ahead};

/// Registers of a panel's columns, in all instruction sets with products of bytes or with tiles.
pub(super) const V: usize = 2;
/// Maximum columns of a panel.
pub(super) const WIDTH: usize = 32;
/// Maximum rows for which [`multiply`] is faster than expanding the weights first.
const FUSED_ROWS: usize = 4;

/// The bits at which code i of a word of 4-bit codes starts after [`SHIFTS`], so that few shifts align all of them.
const AT: [i32; 8] = [8, 12, 8, 12, 16, 8, 12, 16];
const SHIFTS: [i32; 8] = [-8, -8, 0, 0, 0, 12, 12, 12];

/// The bits of 2^(23 - `at`). Setting bits of the mantissa from bit `at` on adds a code to this number.
const fn exponent(at: i32) -> i32 {
    (127 + 23 - at) << 23
}

/// The ways to convert codes to values, as const parameters of the kernels: by a table of 16 values, or by subtracting an offset.
pub(super) const TABLE: u8 = 0;
pub(super) const FOUR: u8 = 1;
pub(super) const FIVE: u8 = 2;
pub(super) const SIX: u8 = 3;
pub(super) const EIGHT: u8 = 4;
pub(super) const TWO: u8 = 5;
pub(super) const THREE: u8 = 6;
/// Looked up in a grid. The codes have 8 bits.
pub(super) const GRID: u8 = 7;

/// The number of scales of 32 weights.
pub(super) const fn scales_of(decoding: u8) -> usize {
    if matches!(decoding, SIX | TWO | THREE | GRID) { 2 } else { 1 }
}

/// Whether [`multiply`] should compute a tile with this number of rows. Portable code always expands first: its many unrolled variants
/// would be half of the crate's compile time.
pub(crate) fn fused_rows(isa: Isa, rows: usize) -> bool {
    !isa.is_portable() && rows <= FUSED_ROWS
}

/// Multiplies a tile of `rows` rows `a` \[ins\]\[rows\] by a panel. Writes the result to `sums` \[rows\]\[columns\].
///
/// Each sum uses fused multiply-adds over ascending inputs. Expanded weights are summed in the same way, so the results have the same bits.
pub(crate) fn multiply(isa: Isa, panels: &BlockPanels, panel: usize, rows: usize, a: &[f32], sums: &mut [f32]) {
    assert!(a.len() == rows * panels.ins && sums.len() == rows * panels.width && panels.width == isa.panel());
    isa.run(Multiply { from: Units::new(panels, panel), rows, a, sums });
}

/// Writes a panel's weights for `inputs` to `to` \[inputs\]\[columns\]. `inputs` must start and end at unit boundaries.
pub(crate) fn expand(isa: Isa, panels: &BlockPanels, panel: usize, inputs: Range<usize>, to: &mut [f32]) {
    let from = Units::of(isa, panels, panel, &inputs);
    assert_eq!(to.len(), inputs.len() * panels.width);
    isa.run(Expand { from, to });
}

/// The units of one panel.
pub(super) struct Units<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) kind: BlockType,
    pub(super) unit: Unit,
    pub(super) order: CodeOrder,
}

impl<'a> Units<'a> {
    pub(super) fn new(panels: &'a BlockPanels, panel: usize) -> Self {
        Self { bytes: panels.panel(panel), kind: panels.kind, unit: Unit::new(panels.kind, panels.width), order: panels.order }
    }

    /// The units of `inputs`, which must start and end at unit boundaries.
    pub(super) fn of(isa: Isa, panels: &'a BlockPanels, panel: usize, inputs: &Range<usize>) -> Self {
        let (each, mut units) = (panels.unit_inputs(), Self::new(panels, panel));
        assert!(inputs.start.is_multiple_of(each) && inputs.end.is_multiple_of(each) && panels.width == isa.panel());
        units.bytes = &units.bytes[inputs.start / each * units.unit.bytes..inputs.end / each * units.unit.bytes];
        units
    }

    /// The decoding constant of the kernel.
    pub(super) fn decoding<S: Int8>(&self) -> u8 {
        match self.kind.code_bits() {
            CodeBits::Two => TWO,
            CodeBits::Three => THREE,
            CodeBits::Four if S::LOOKUP || self.kind.table().is_some() => TABLE,
            CodeBits::Four => FOUR,
            CodeBits::Five => FIVE,
            CodeBits::Six => SIX,
            CodeBits::Eight if matches!(self.kind, BlockType::Grid(_)) => GRID,
            CodeBits::Eight => EIGHT,
        }
    }

    /// Where the codes of a unit are, and the bytes of those of 32 weights: `grid`, if they are looked up there.
    ///
    /// # Safety
    ///
    /// `V` registers are as wide as the panel.
    #[inline(always)]
    pub(super) unsafe fn codes<S: Int8, const V: usize>(&self, s: S, unit: &[u8], grid: &mut GridCodes) -> (*const u8, usize) {
        // SAFETY: a unit has all parts of its layout, and the caller guarantees the rest.
        unsafe {
            match self.kind {
                BlockType::Grid(kind) => (grid.fill::<S, V>(s, self, kind, unit), GridCodes::block(V * S::LANES)),
                _ => (unit.as_ptr().add(self.unit.codes), self.unit.block),
            }
        }
    }

    /// Passes each input's index and weights to `sink`, in ascending order.
    ///
    /// # Safety
    ///
    /// `V` registers are as wide as the panel, and `D` is the result of [`Units::decoding`].
    #[inline(always)]
    pub(super) unsafe fn each<S: Int8, const D: u8, const V: usize, K: Sink<S, V>>(&self, s: S, sink: &mut K) {
        let (width, blocks) = (V * S::LANES, self.kind.block() / BLOCK);
        // Not a constant: the compiler would unroll the loops over blocks and run out of registers.
        let size = self.unit.bytes;
        let per_block = scales_of(D) * width;
        let constants = Constants::new(s, self.kind);
        let (mut scales, mut grid) = (Scales::new(), GridCodes::new());
        for (u, unit) in self.bytes.chunks_exact(size).enumerate() {
            // SAFETY: a unit has all parts of its layout, and a panel is at most as wide as the arrays.
            unsafe {
                scales.fill::<S, V>(s, self.kind, self.unit, unit, blocks * per_block / width);
                prefetch_ahead(unit.as_ptr(), self.unit.codes);
                let (mut p, block_bytes) = self.codes::<S, V>(s, unit, &mut grid);
                for b in 0..blocks {
                    prefetch_ahead(p, block_bytes);
                    let k = (u * blocks + b) * BLOCK;
                    let (factors, shifts) = (scales.factors().add(b * per_block), scales.shifts().add(b * per_block));
                    // A loop, because a half is hundreds of instructions, and there are 88 versions of this function.
                    for part in 0..2 {
                        half::<S, D, V>(s, &constants, p, factors, shifts, k, part, sink);
                    }
                    p = p.add(block_bytes);
                }
            }
        }
    }
}

/// A kernel for matrix tiles, with a version for each number of bits of a code. Values of a table are codes of 4 bits.
pub(super) trait ByCodeBits {
    fn expand<S: Int8, const D: u8>(self, s: S);
}

/// Runs the version of `kernel` for the result of [`Units::decoding`].
#[inline(always)]
pub(super) fn by_code_bits<S: Int8>(s: S, decoding: u8, kernel: impl ByCodeBits) {
    if !S::DIGITS || S::VECTORS != V {
        unreachable!("this instruction set has no tiles");
    }
    match decoding {
        TABLE | FOUR => kernel.expand::<S, FOUR>(s),
        FIVE => kernel.expand::<S, FIVE>(s),
        SIX => kernel.expand::<S, SIX>(s),
        EIGHT => kernel.expand::<S, EIGHT>(s),
        TWO => kernel.expand::<S, TWO>(s),
        THREE => kernel.expand::<S, THREE>(s),
        GRID => kernel.expand::<S, GRID>(s),
        _ => unreachable!("there are eight ways"),
    }
}

/// Receives weights as they are decoded. This is a trait because closures that are not inlined lack the kernel's target features.
pub(super) trait Sink<S: Int8, const V: usize> {
    /// Receives the weights of input `k` in all columns of the panel.
    unsafe fn take(&mut self, s: S, k: usize, weights: [S::F; V]);
}

/// Constants that convert codes to values.
struct Constants<S: Int8> {
    table: S::Table,
    offset: f32,
    /// For codes at bits 8, 12 and 16.
    offsets: [S::F; 3],
}

impl<S: Int8> Constants<S> {
    #[inline(always)]
    fn new(s: S, kind: BlockType) -> Self {
        let offset = kind.offset();
        let values = kind.table().unwrap_or_else(|| std::array::from_fn(|code| code as f32 - offset));
        let offsets = [8, 12, 16].map(|at| f32::from_bits(exponent(at) as u32) + offset);
        Self { table: s.table(&values), offset, offsets: [s.splat(offsets[0]), s.splat(offsets[1]), s.splat(offsets[2])] }
    }
}

/// Repeats a block with each of the given constants bound to `$i`.
macro_rules! unrolled {
    ($i:ident in $($n:literal)* => $body:block) => { $({ const $i: usize = $n; $body })* };
}

/// Loads word `word` of a plane for each column.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
pub(super) unsafe fn plane<S: Int8, const V: usize>(s: S, p: *const u8, word: usize) -> [S::I; V] {
    let mut words = [s.splat_i32(0); V];
    for v in 0..V {
        // SAFETY: the caller guarantees it.
        words[v] = unsafe { s.words(p.add(4 * (word * V + v) * S::LANES)) };
    }
    words
}

/// Decodes code `i` of 2 to 6 bits in each column, that of weight `place` of 16. `low` is the word with the low 4 or 2 bits. `high` is the
/// word with the high bits, if there are any.
#[inline(always)]
fn value<S: Int8, const D: u8>(s: S, constants: &Constants<S>, low: S::I, high: S::I, i: usize, place: usize) -> S::F {
    if D == TABLE {
        return s.lookup(low, 4 * i as i32, constants.table);
    }
    if D == TWO || D == THREE {
        let mut code = s.field(low, 2 * place as i32 - 8, 3 << 8);
        if D == THREE {
            code = s.or(code, s.field(high, place as i32 - 10, 1 << 10));
        }
        return s.sub(s.with_bits(code, exponent(8)), constants.offsets[0]);
    }
    let at = AT[i];
    let mut code = s.field(low, SHIFTS[i], 15 << at);
    if D != FOUR {
        // The high bits follow the low bits.
        let (from, mask) = if D == FIVE { (place + 4, 1) } else { (2 * place + 4, 3) };
        code = s.or(code, s.field(high, from as i32 % 32 - at - 4, mask << (at + 4)));
    }
    s.sub(s.with_bits(code, exponent(at)), constants.offsets[(at as usize - 8) / 4])
}

/// Passes the first (`part` = 0) or second 16 of 32 weights to `sink`. The codes are at `p`. The first of the 32 weights is that of input
/// `k`.
#[inline(always)]
#[allow(clippy::needless_range_loop, clippy::too_many_arguments)]
unsafe fn half<S: Int8, const D: u8, const V: usize>(
    s: S,
    constants: &Constants<S>,
    p: *const u8,
    factors: *const f32,
    shifts: *const f32,
    k: usize,
    part: usize,
    sink: &mut impl Sink<S, V>,
) {
    let (width, k) = (V * S::LANES, k + 16 * part);
    let group = (scales_of(D) - 1) * part * width;
    let (mut factor, mut shift, mut weights) = ([s.splat(0.0); V], [s.splat(0.0); V], [s.splat(0.0); V]);
    // SAFETY: the caller guarantees that the whole block is valid.
    unsafe {
        for v in 0..V {
            factor[v] = s.load(factors.add(group + v * S::LANES));
            shift[v] = s.load(shifts.add(group + v * S::LANES));
        }
        if D == EIGHT || D == GRID {
            // `(code - offset) * scale` is `(2^n + code) * scale - (2^n + offset) * scale`. For these n, 19 and 11, both products and the
            // difference have at most 24 bits where they are rounded, so one fused operation computes the exact weight. Scales of grids have
            // more bits than those in half precision.
            let biases = [524_288.0 + constants.offset, 2_048.0 + constants.offset];
            let mut fused = [[s.splat(0.0); V]; 2];
            for v in 0..V {
                fused[0][v] = s.mul(factor[v], s.splat(-biases[0]));
                fused[1][v] = s.mul(factor[v], s.splat(-biases[1]));
            }
            for word in 0..4 {
                let codes = plane::<S, V>(s, p, 4 * part + word);
                unrolled!(I in 0 1 2 3 => {
                    const HIGH: usize = I % 2;
                    const PLACE: i32 = 4 + 8 * HIGH as i32;
                    for v in 0..V {
                        let code = s.with_bits(s.field(codes[v], if I < 2 { -4 } else { 12 }, 255 << PLACE), exponent(PLACE));
                        weights[v] = if S::FUSED && D == EIGHT {
                            s.fma(code, factor[v], fused[HIGH][v])
                        } else {
                            s.fma(s.sub(code, s.splat(biases[HIGH])), factor[v], shift[v])
                        };
                    }
                    sink.take(s, k + 4 * word + I, weights);
                });
            }
            return;
        }
        let high_word = match D {
            FIVE => 4,
            SIX => 4 + part,
            THREE => 2,
            _ => 0,
        };
        let mut high = plane::<S, V>(s, p, high_word);
        if (D == FIVE || D == THREE) && part == 1 {
            // The word has the bits of both halves. Now those of this one are where those of the first are.
            for v in 0..V {
                high[v] = s.or(s.field(high[v], 16, 0xffff), s.field(high[v], -16, -1 << 16));
            }
        }
        unrolled!(WORD in 0 1 => {
            let low = plane::<S, V>(s, p, if D == TWO || D == THREE { part } else { 2 * part + WORD });
            unrolled!(I in 0 1 2 3 4 5 6 7 => {
                const PLACE: usize = 8 * WORD + I;
                for v in 0..V {
                    let value = value::<S, D>(s, constants, low[v], high[v], I, PLACE);
                    weights[v] = s.fma(value, factor[v], shift[v]);
                }
                sink.take(s, k + PLACE, weights);
            });
        });
    }
}

struct Expand<'a> {
    from: Units<'a>,
    to: &'a mut [f32],
}

impl Kernel for Expand<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Int8>(self, s: S) {
        macro_rules! by_decoding {
            ($($d:ident)*) => {
                match (self.from.decoding::<S>(), S::VECTORS) {
                    $(($d, 2) => self.expand::<S, $d, 2>(s),
                      ($d, 4) => if S::VECTORS == 4 { self.expand::<S, $d, 4>(s) },)*
                    _ => unreachable!("panels are 2 or 4 registers wide"),
                }
            };
        }
        by_decoding!(TABLE FOUR FIVE SIX EIGHT TWO THREE GRID);
    }
}

impl Expand<'_> {
    #[inline(always)]
    fn expand<S: Int8, const D: u8, const V: usize>(self, s: S) {
        if D == FOUR && S::LOOKUP {
            return;
        }
        // SAFETY: the function `expand` has checked that there is room for the weights of all units.
        unsafe { self.from.each::<S, D, V, _>(s, &mut Store(self.to.as_mut_ptr())) }
    }
}

/// Writes weights, \[inputs\]\[columns\].
struct Store(*mut f32);

impl<S: Int8, const V: usize> Sink<S, V> for Store {
    #[inline(always)]
    #[allow(clippy::needless_range_loop)]
    unsafe fn take(&mut self, s: S, k: usize, weights: [S::F; V]) {
        for v in 0..V {
            // SAFETY: the caller guarantees that there is room.
            unsafe { s.store(self.0.add((k * V + v) * S::LANES), weights[v]) }
        }
    }
}

struct Multiply<'a> {
    from: Units<'a>,
    rows: usize,
    a: &'a [f32],
    sums: &'a mut [f32],
}

impl Kernel for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Int8>(self, s: S) {
        // See `fused_rows`.
        if !S::FUSED {
            unreachable!("portable code expands the weights first");
        }
        macro_rules! by_decoding {
            ($r:literal $($d:ident)*) => {
                match (self.from.decoding::<S>(), S::VECTORS) {
                    $(($d, 2) => self.multiply::<S, $d, $r, 2>(s),
                      ($d, 4) => if S::VECTORS == 4 { self.multiply::<S, $d, $r, 4>(s) },)*
                    _ => unreachable!("panels are 2 or 4 registers wide"),
                }
            };
        }
        match self.rows {
            1 => by_decoding!(1 TABLE FOUR FIVE SIX EIGHT TWO THREE GRID),
            2 => by_decoding!(2 TABLE FOUR FIVE SIX EIGHT TWO THREE GRID),
            3 => by_decoding!(3 TABLE FOUR FIVE SIX EIGHT TWO THREE GRID),
            4 => by_decoding!(4 TABLE FOUR FIVE SIX EIGHT TWO THREE GRID),
            rows => unreachable!("a tile of {rows} rows is not fused"),
        }
    }
}

impl Multiply<'_> {
    #[inline(always)]
    #[allow(clippy::needless_range_loop)]
    fn multiply<S: Int8, const D: u8, const R: usize, const V: usize>(self, s: S) {
        // Instruction sets with a fast lookup use `TABLE` for 4-bit codes. This return keeps the compiler from generating `FOUR` for them.
        if D == FOUR && S::LOOKUP {
            return;
        }
        let mut sums = Sums::<S, R, V> { a: self.a.as_ptr(), sums: [[s.splat(0.0); V]; R] };
        // SAFETY: the function `multiply` has checked the number of inputs and of sums.
        unsafe {
            self.from.each::<S, D, V, _>(s, &mut sums);
            let to = self.sums.as_mut_ptr();
            for r in 0..R {
                for v in 0..V {
                    s.store(to.add((r * V + v) * S::LANES), sums.sums[r][v]);
                }
            }
        }
    }
}

/// Accumulators of weights times rows `a` \[inputs\]\[rows\].
struct Sums<S: Int8, const R: usize, const V: usize> {
    a: *const f32,
    sums: [[S::F; V]; R],
}

impl<S: Int8, const R: usize, const V: usize> Sink<S, V> for Sums<S, R, V> {
    #[inline(always)]
    #[allow(clippy::needless_range_loop)]
    unsafe fn take(&mut self, s: S, k: usize, weights: [S::F; V]) {
        for r in 0..R {
            // SAFETY: the caller guarantees that `a` has this input.
            let x = s.splat(unsafe { *self.a.add(k * R + r) });
            for v in 0..V {
                self.sums[r][v] = s.fma(x, weights[v], self.sums[r][v]);
            }
        }
    }
}
