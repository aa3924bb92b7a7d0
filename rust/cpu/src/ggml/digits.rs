//! Products of codes and the digits of fp32 rows, in bytes.
//!
//! 32 numbers of a row are integers of 24 or 16 bits times a power of two. Such an integer has three or two signed digits of 8 bits, and the
//! sums of codes times digits are exact integers. They are added in fp32, the lowest digit's first, and the fp32 sums over blocks are added
//! in ascending order. So a row's results do not depend on the other rows.
//!
//! Matrix tiles compute the same results to the bit. bfloat16 holds each digit times its power of two, and each code. The tiles add the
//! products of a digit exactly, and those of the digits in the same order.

use super::BlockPanels;
use super::decode::{EIGHT, FIVE, FOUR, GRID, SIX, TABLE, THREE, TWO, Units, V, plane, scales_of};
use super::grid::GridCodes;
use super::panels::BYTE_ORDER;
use super::scales::Scales;
use crate::block_type::BLOCK;
use crate::pod::Pod;
use crate::simd::{Int8, Isa, Kernel, prefetch_twice};

/// Added to an integer, it makes each byte the digit plus 128.
const OFFSET: i32 = 0x80_8080;
/// The largest integer of three digits. That of two digits has its upper bits.
const LARGEST: u32 = 0x7f_7f7f;
/// Smallest exponent of a block, as stored in fp32. Blocks of smaller numbers keep fewer of their bits, so that scales of weights times those
/// of rows are not denormal.
const MIN_EXPONENT: u32 = 49;
/// The bits of 2^112. The sums of codes times larger numbers could be infinite.
const MOST: u32 = (127 + 112) << 23;

/// 32 numbers of a row, in `N` digits each: 3 or 2.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Digits<const N: usize> {
    /// The lowest digits first, in the order of the codes' bytes.
    bytes: [[i8; BLOCK]; N],
    /// A power of two. NaN if a number is not finite, or too large, so that all results of the block are NaN.
    scale: f32,
    /// The sum of the numbers.
    sum: f32,
    /// The sums of the first and of the second 16 numbers.
    halves: [f32; 2],
}

// SAFETY: the fields have 1 and 4 bytes, 16 more than the digits in total without padding, and every bit pattern is valid.
unsafe impl<const N: usize> Pod for Digits<N> {}

impl<const N: usize> Digits<N> {
    /// Splits numbers. An error is at most 2^-23 of the largest number with three digits, and 2^-15 with two.
    ///
    /// All loops are plain: closures would lack the kernel's target features, and would not become vector instructions.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)]
    pub(crate) fn new<S: Int8>(s: S, numbers: &[f32; BLOCK]) -> Self {
        let Some((scale, inverse)) = scale_of::<N>(numbers) else {
            return Self { bytes: [[0; BLOCK]; N], scale: f32::NAN, sum: f32::NAN, halves: [f32::NAN; 2] };
        };
        let integers = integers(s, numbers, inverse);
        // The order keeps the first 16 numbers before the others.
        let mut bytes = [[0; BLOCK]; N];
        for at in 0..BLOCK {
            let digits = digits(integers[BYTE_ORDER[at]]);
            for digit in 0..N {
                bytes[digit][at] = (digits >> (8 * digit)) as i8;
            }
        }
        let (sum, halves) = sums(&integers, scale);
        Self { bytes, scale, sum, halves }
    }
}

/// The digits of 32 numbers for matrix tiles.
pub(crate) struct TileDigits<const N: usize> {
    /// Pairs of digits times their powers of two in bfloat16, those of numbers p and p + 8 in each half. The lowest digits come first.
    pub(crate) pairs: [[u32; BLOCK / 2]; N],
    /// As for [`Digits`].
    pub(crate) sum: f32,
    pub(crate) halves: [f32; 2],
}

impl<const N: usize> TileDigits<N> {
    /// Splits numbers as [`Digits::new`] does.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)]
    pub(crate) fn new<S: Int8>(s: S, numbers: &[f32; BLOCK]) -> Self {
        let Some((scale, inverse)) = scale_of::<N>(numbers) else {
            let nan = f32::NAN.to_bits();
            return Self { pairs: [[nan >> 16 | nan; BLOCK / 2]; N], sum: f32::NAN, halves: [f32::NAN; 2] };
        };
        let integers = integers(s, numbers, inverse);
        let (mut low, mut high) = ([0; BLOCK / 2], [0; BLOCK / 2]);
        for at in 0..BLOCK / 2 {
            let first = at / 8 * 16 + at % 8;
            (low[at], high[at]) = (digits(integers[first]), digits(integers[first + 8]));
        }
        let (mut pairs, mut power) = ([[0; BLOCK / 2]; N], scale);
        for digit in 0..N {
            for at in 0..BLOCK / 2 {
                let (low, high) = (f32::from((low[at] >> (8 * digit)) as i8), f32::from((high[at] >> (8 * digit)) as i8));
                pairs[digit][at] = (low * power).to_bits() >> 16 | (high * power).to_bits();
            }
            power *= 256.0;
        }
        let (sum, halves) = sums(&integers, scale);
        Self { pairs, sum, halves }
    }
}

/// The power of two that makes integers of `N` digits of 32 numbers, and its inverse. None if a number is too large, infinite or NaN.
#[inline(always)]
fn scale_of<const N: usize>(numbers: &[f32; BLOCK]) -> Option<(f32, f32)> {
    const { assert!(N == 2 || N == 3) };
    // Integers have up to `bits` bits, and a mantissa has 24.
    let bits = 8 * N as u32 - 1;
    let fewer = 24 - bits;
    // Added to the bits of a number that rounds to an integer above the largest one, and to no smaller one's, it reaches the next exponent.
    let carry = (1 << 24) - (LARGEST >> (23 - bits) << fewer) - (1 << (fewer - 1));
    // Magnitudes have the same order as their bits, and NaN is the largest.
    let mut largest = 0;
    for x in numbers {
        largest = largest.max(x.to_bits() & 0x7fff_ffff);
    }
    if largest >= MOST {
        return None;
    }
    let exponent = ((largest + carry) >> 23).max(MIN_EXPONENT);
    Some((f32::from_bits((exponent + 1 - bits) << 23), f32::from_bits((253 + bits - exponent) << 23)))
}

/// Rounds numbers times `inverse` to integers, in registers: plain code would check each conversion for overflow.
#[inline(always)]
fn integers<S: Int8>(s: S, numbers: &[f32; BLOCK], inverse: f32) -> [i32; BLOCK] {
    let mut integers = [0; BLOCK];
    for (numbers, integers) in numbers.chunks_exact(S::LANES).zip(integers.chunks_exact_mut(S::LANES)) {
        // SAFETY: both slices have a register's lanes.
        unsafe {
            let scaled = s.mul(s.load(numbers.as_ptr()), s.splat(inverse));
            s.store(integers.as_mut_ptr().cast(), s.with_bits(s.to_integers(scaled), 0));
        }
    }
    integers
}

/// The sum of integers times `scale`, and those of their halves.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
fn sums(integers: &[i32; BLOCK], scale: f32) -> (f32, [f32; 2]) {
    let (mut low, mut high) = (0, 0);
    for at in 0..BLOCK / 2 {
        low += integers[at];
        high += integers[BLOCK / 2 + at];
    }
    (scale * (low + high) as f32, [scale * low as f32, scale * high as f32])
}

/// The signed digits of an integer, one in each byte.
#[inline(always)]
fn digits(integer: i32) -> i32 {
    (integer + OFFSET) ^ OFFSET
}

/// Multiplies rows \[blocks\]\[rows\] by a panel. Writes the result to `sums` \[rows\]\[columns\].
pub(crate) fn multiply_digits<const N: usize>(isa: Isa, panels: &BlockPanels, panel: usize, rows: &[Digits<N>], sums: &mut [f32]) {
    let height = sums.len() / panels.width;
    assert!(isa.has_digits() && panels.width == isa.panel());
    assert!(sums.len() == height * panels.width && rows.len() == height * panels.ins / BLOCK);
    isa.run(Multiply { from: Units::new(panels, panel), rows, height, sums });
}

struct Multiply<'a, const N: usize> {
    from: Units<'a>,
    rows: &'a [Digits<N>],
    height: usize,
    sums: &'a mut [f32],
}

impl<const N: usize> Kernel for Multiply<'_, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Int8>(self, s: S) {
        if !S::DIGITS || S::VECTORS != V {
            unreachable!("this instruction set has no products of bytes");
        }
        match self.from.decoding::<S>() {
            // Tables are looked up by bytes here.
            TABLE | FOUR if self.from.kind.table().is_some() => self.multiply::<S, TABLE>(s),
            TABLE | FOUR => self.multiply::<S, FOUR>(s),
            FIVE => self.multiply::<S, FIVE>(s),
            SIX => self.multiply::<S, SIX>(s),
            EIGHT => self.multiply::<S, EIGHT>(s),
            TWO => self.multiply::<S, TWO>(s),
            THREE => self.multiply::<S, THREE>(s),
            GRID => self.multiply::<S, GRID>(s),
            _ => unreachable!("there are eight ways"),
        }
    }
}

impl<const N: usize> Multiply<'_, N> {
    #[inline(always)]
    fn multiply<S: Int8, const D: u8>(self, s: S) {
        let Self { from, rows, height, sums } = self;
        let (width, blocks) = (V * S::LANES, from.kind.block() / BLOCK);
        let groups = scales_of(D);
        let table = from.kind.table().map_or([0; 16], |values| values.map(|value| (value + from.kind.byte_offset()) as u8));
        let (mut scales, mut grid) = (Scales::new(), GridCodes::new());
        let sums = sums.as_mut_ptr();
        // SAFETY: `multiply_digits` has checked the lengths. A unit has all parts of its layout.
        unsafe {
            for at in (0..height * width).step_by(S::LANES) {
                s.store(sums.add(at), s.splat(0.0));
            }
            for (u, unit) in from.bytes.chunks_exact(from.unit.bytes).enumerate() {
                scales.fill::<S, V>(s, from.kind, from.unit, unit, blocks * groups);
                scales.subtract(s, from.kind.byte_offset(), blocks * groups * width);
                prefetch_twice::<8192>(unit.as_ptr(), from.unit.codes);
                let (start, block) = from.codes::<S, V>(s, unit, &mut grid);
                for b in 0..blocks {
                    prefetch_twice::<8192>(unit.as_ptr().add(from.unit.codes + b * from.unit.block), from.unit.block);
                    let p = start.add(b * block);
                    let rows = &rows[(u * blocks + b) * height..][..height];
                    let codes = codes::<S, D>(s, p, &table);
                    let first = scales.load(s, b * groups * width);
                    if groups == 2 {
                        let second = scales.load(s, (b * groups + 1) * width);
                        add_halves(s, codes, [first, second], rows, sums);
                    } else {
                        add(s, codes, first, rows, sums);
                    }
                }
            }
        }
    }
}

/// Reads the codes of 32 weights in each column. They are in the order of the digits, four to a register.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // An iterator's closures would lack the kernel's target features.
pub(super) unsafe fn codes<S: Int8, const D: u8>(s: S, p: *const u8, table: &[u8; 16]) -> [[S::I; V]; 8] {
    let mut codes = [[s.splat_i32(0); V]; 8];
    for g in 0..8 {
        // SAFETY: the caller guarantees that there are as many words as the codes need.
        codes[g] = unsafe {
            plane::<S, V>(
                s,
                p,
                match D {
                    EIGHT | GRID => g,
                    TWO | THREE => g / 4,
                    _ => g / 2,
                },
            )
        };
        if D == EIGHT || D == GRID {
            continue;
        }
        let high_word = match D {
            FIVE => 4,
            SIX => 4 + g / 4,
            THREE => 2,
            _ => 0,
        };
        // SAFETY: as above.
        let high = unsafe { plane::<S, V>(s, p, high_word) };
        for v in 0..V {
            if D == TWO || D == THREE {
                let low = s.field(codes[g][v], 2 * (g % 4) as i32, 0x0303_0303);
                codes[g][v] = if D == TWO { low } else { s.or(low, s.field(high[v], g as i32 - 2, 0x0404_0404)) };
                continue;
            }
            let low = s.field(codes[g][v], 4 * (g % 2) as i32, 0x0f0f_0f0f);
            codes[g][v] = match D {
                TABLE => s.lookup_bytes(low, table),
                FIVE => s.or(low, s.field(high[v], g as i32 - 4, 0x1010_1010)),
                SIX => s.or(low, s.field(high[v], 2 * (g % 4) as i32 - 4, 0x3030_3030)),
                _ => low,
            };
        }
    }
    codes
}

/// Adds the products of 32 weights in each column to each row's sums.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn add<S: Int8, const N: usize>(s: S, codes: [[S::I; V]; 8], scales: [(S::F, S::F); V], rows: &[Digits<N>], to: *mut f32) {
    for (r, row) in rows.iter().enumerate() {
        let products = products::<S, 8, N>(s, codes, row, 0);
        for v in 0..V {
            let (factor, shift) = scales[v];
            // SAFETY: the caller guarantees that there are sums of each row.
            unsafe {
                let to = to.add((r * V + v) * S::LANES);
                let sum = s.fma(products[v], s.mul(factor, s.splat(row.scale)), s.load(to));
                s.store(to, s.fma(s.splat(row.sum), shift, sum));
            }
        }
    }
}

/// Like [`add`], for weights with a scale for each 16.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn add_halves<S: Int8, const N: usize>(
    s: S,
    codes: [[S::I; V]; 8],
    scales: [[(S::F, S::F); V]; 2],
    rows: &[Digits<N>],
    to: *mut f32,
) {
    let [a, b, c, d, e, f, g, h] = codes;
    for (r, row) in rows.iter().enumerate() {
        let products = [products::<S, 4, N>(s, [a, b, c, d], row, 0), products::<S, 4, N>(s, [e, f, g, h], row, BLOCK / 2)];
        for v in 0..V {
            // SAFETY: the caller guarantees that there are sums of each row.
            unsafe {
                let to = to.add((r * V + v) * S::LANES);
                let mut sum = s.load(to);
                for half in 0..2 {
                    let (factor, shift) = scales[half][v];
                    sum = s.fma(products[half][v], s.mul(factor, s.splat(row.scale)), sum);
                    sum = s.fma(s.splat(row.halves[half]), shift, sum);
                }
                s.store(to, sum);
            }
        }
    }
}

/// The sums of codes times a row's integers, of which the first is that at `start`, in each column.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
fn products<S: Int8, const G: usize, const N: usize>(s: S, codes: [[S::I; V]; G], row: &Digits<N>, start: usize) -> [S::F; V] {
    let none = [s.splat_i32(0); V];
    // The sum of the two lower digits is one integer, which is rounded to fp32 once. With 32 codes of up to 255 and digits down to -128 it is
    // at most 32 * 255 * 128 * 257, which is below 2^28.
    let mut low = dot(s, none, codes, &row.bytes[1], start);
    for v in 0..V {
        low[v] = s.field(low[v], -8, -1);
    }
    low = dot(s, low, codes, &row.bytes[0], start);
    let mut products = [s.splat(0.0); V];
    for v in 0..V {
        products[v] = s.to_f32(low[v]);
    }
    for digit in 2..N {
        let high = dot(s, none, codes, &row.bytes[digit], start);
        for v in 0..V {
            products[v] = s.fma(s.to_f32(high[v]), s.splat((1 << (8 * digit)) as f32), products[v]);
        }
    }
    products
}

/// Adds the products of codes and a row's digits, of which the first is that at `start`. A digit is loaded once for all columns.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
fn dot<S: Int8, const G: usize>(s: S, mut sums: [S::I; V], codes: [[S::I; V]; G], digits: &[i8; BLOCK], start: usize) -> [S::I; V] {
    assert!(start + 4 * G <= BLOCK);
    for g in 0..G {
        // SAFETY: asserted above.
        let four = s.splat_i32(unsafe { digits.as_ptr().add(start + 4 * g).cast::<i32>().read_unaligned() });
        for v in 0..V {
            sums[v] = s.dot_digits(sums[v], codes[g][v], four);
        }
    }
    sums
}
