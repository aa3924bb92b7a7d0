//! Arrays, which the compiler maps to the target's baseline registers.

use super::{Int8, Simd};
use crate::half;

/// Lanes of the widest register of any instruction set.
const WIDEST: usize = 16;

/// An array of eight numbers.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn each(a: [f32; 8], b: [f32; 8], f: impl Fn(f32, f32) -> f32) -> [f32; 8] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

// SAFETY of all blocks below: the caller guarantees that the pointers are valid for eight numbers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Portable {
    const LANES: usize = 8;
    const VECTORS: usize = 2;
    const ROWS: usize = 4;
    const FUSED: bool = false;

    type F = [f32; 8];

    functions! {
        fn splat(x: f32) -> [f32; 8] = [x; 8];
        /// Multiplies and adds with two roundings. Without a processor instruction, a fused multiply-add is a slow function call.
        fn fma(a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] = std::array::from_fn(|i| a[i] * b[i] + c[i]);
        fn add(a: [f32; 8], b: [f32; 8]) -> [f32; 8] = each(a, b, |a, b| a + b);
        fn sub(a: [f32; 8], b: [f32; 8]) -> [f32; 8] = each(a, b, |a, b| a - b);
        fn mul(a: [f32; 8], b: [f32; 8]) -> [f32; 8] = each(a, b, |a, b| a * b);
        fn div(a: [f32; 8], b: [f32; 8]) -> [f32; 8] = each(a, b, |a, b| a / b);
        fn max(a: [f32; 8], b: [f32; 8]) -> [f32; 8] = each(a, b, |a, b| if a > b { a } else { b });
        fn min(a: [f32; 8], b: [f32; 8]) -> [f32; 8] = each(a, b, |a, b| if a < b { a } else { b });
        fn sum(x: [f32; 8]) -> f32 = ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
        fn largest(x: [f32; 8]) -> f32 = x.into_iter().fold(f32::NEG_INFINITY, f32::max);
        fn any_above(a: [f32; 8], b: [f32; 8]) -> bool = a.into_iter().zip(b).any(|(a, b)| a > b);
        fn round(x: [f32; 8]) -> [f32; 8] = x.map(f32::round_ties_even);
        fn power_of_two(n: [f32; 8]) -> [f32; 8] = n.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23));
    }
    instructions! {
        unsafe fn load(p: *const f32) -> [f32; 8] = p.cast::<[f32; 8]>().read_unaligned();
        unsafe fn store(p: *mut f32, x: [f32; 8]) = p.cast::<[f32; 8]>().write_unaligned(x);
        unsafe fn load_f16(p: *const u16) -> [f32; 8] = p.cast::<[u16; 8]>().read_unaligned().map(half::to_f32);
        unsafe fn load_bf16(p: *const u16) -> [f32; 8] = p.cast::<[u16; 8]>().read_unaligned().map(|x| f32::from_bits(u32::from(x) << 16));
        unsafe fn load_i8(p: *const i8) -> [f32; 8] = p.cast::<[i8; 8]>().read_unaligned().map(f32::from);
    }
}

// SAFETY of all blocks below: the caller guarantees that the pointers are valid.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Int8 for Portable {
    type I = [i32; 8];
    type Table = [f32; 16];
    const LOOKUP: bool = false;
    const GROUP: usize = 4;
    const OFFSET: i32 = 0;
    const DIGITS: bool = cfg!(test);

    functions! {
        fn splat_i32(x: i32) -> [i32; 8] = [x; 8];
        fn dot8(sum: [i32; 8], w: [i32; 8], x: [i32; 8]) -> [i32; 8] = {
            let product = |w: i32, x: i32, byte: usize| i32::from((w >> (8 * byte)) as i8) * i32::from((x >> (8 * byte)) as i8);
            std::array::from_fn(|i| sum[i] + (0..4).map(|byte| product(w[i], x[i], byte)).sum::<i32>())
        };
        fn to_f32(x: [i32; 8]) -> [f32; 8] = x.map(|x| x as f32);
        fn to_integers(x: [f32; 8]) -> [i32; 8] = x.map(|x| x.round_ties_even() as i32);
        fn sign_bytes(x: [i32; 8], signs: [i32; 8], shift: i32, offset: [i32; 8]) -> [i32; 8] =
            std::array::from_fn(|i| signed_bytes(x[i] as u32, signs[i] as u32 >> shift, offset[i] as u32) as i32);
        fn field(x: [i32; 8], shift: i32, mask: i32) -> [i32; 8] =
            x.map(|x| (if shift < 0 { x << -shift } else { (x as u32 >> shift) as i32 }) & mask);
        fn or(a: [i32; 8], b: [i32; 8]) -> [i32; 8] = std::array::from_fn(|i| a[i] | b[i]);
        fn with_bits(x: [i32; 8], bits: i32) -> [f32; 8] = x.map(|x| f32::from_bits((x | bits) as u32));
        fn table(values: &[f32; 16]) -> [f32; 16] = *values;
        fn lookup(x: [i32; 8], shift: i32, table: [f32; 16]) -> [f32; 8] = x.map(|x| table[(x as u32 >> shift & 15) as usize]);
        fn dot_digits(sum: [i32; 8], w: [i32; 8], x: [i32; 8]) -> [i32; 8] = {
            let product = |w: i32, x: i32, byte: usize| i32::from((w >> (8 * byte)) as u8) * i32::from((x >> (8 * byte)) as i8);
            std::array::from_fn(|i| sum[i] + (0..4).map(|byte| product(w[i], x[i], byte)).sum::<i32>())
        };
        fn lookup_halves(x: [i32; 8], shift: i32, values: &[u16; 64], wide: bool) -> [f32; 8] = {
            let value = |half: i32| u32::from(values[(half >> shift) as usize & if wide { 63 } else { 31 }]);
            x.map(|x| f32::from_bits(value(x & 0xffff) | value((x >> 16) & 0xffff) << 16))
        };
        fn pick_bf16(x: [i32; 8], shift: i32, table: [[f32; 8]; 2]) -> [f32; 8] = {
            let bits = |index: i32| table.as_flattened()[(index & 15) as usize].to_bits();
            x.map(|x| f32::from_bits(bits(x >> shift) >> 16 | bits(x >> (16 + shift)) & 0xffff_0000))
        };
        fn round_upper_halves(x: [f32; 8]) -> [f32; 8] = x.map(|x| f32::from_bits(x.to_bits().wrapping_add(0x8000)));
        fn lookup_bytes(x: [i32; 8], table: &[u8; 16]) -> [i32; 8] =
            x.map(|x| i32::from_ne_bytes(x.to_ne_bytes().map(|code| table[usize::from(code)])));
    }
    instructions! {
        unsafe fn bytes(p: *const u8) -> [i32; 8] = p.cast::<[[u8; 4]; 8]>().read_unaligned().map(i32::from_ne_bytes);
        unsafe fn words(p: *const u8) -> [i32; 8] = p.cast::<[i32; 8]>().read_unaligned();
        unsafe fn store_words(p: *mut u32, x: [i32; 8]) = p.cast::<[i32; 8]>().write_unaligned(x);
        unsafe fn gather(table: *const u32, index: [i32; 8]) -> [i32; 8] = index.map(|index| *table.add(index as usize) as i32);
        unsafe fn store_bytes(p: *mut i8, x: [f32; 8]) = p.cast::<[i8; 8]>().write_unaligned(x.map(|x| x.round_ties_even() as i8));
    }
    #[inline(always)]
    unsafe fn nibbles(self, p: *const u8, half: usize) -> [i32; 8] {
        unsafe { self.bytes(p) }.map(|x| (x >> (4 * half)) & 0x0f0f_0f0f)
    }
}

/// [`Int8::sign_bytes`] of a word, with the lowest four bits of `signs`.
#[inline(always)]
fn signed_bytes(x: u32, signs: u32, offset: u32) -> u32 {
    // The product has bit i at bit 8 i. No byte carries.
    let negative = ((signs & 15).wrapping_mul(0x0020_4081) & 0x0101_0101) * 255;
    offset + (x & !negative) - (x & negative)
}

/// [`Simd::round_bf16_pairs`] in scalar code.
#[inline(always)]
pub(super) fn round_bf16_pairs<S: Simd>(s: S, low: S::F, high: S::F) -> S::F {
    let mut numbers = [0.0; 2 * WIDEST];
    let mut pairs = [0.0; WIDEST];
    // SAFETY: the arrays have as many numbers as one or two of the widest registers.
    unsafe {
        s.store(numbers.as_mut_ptr(), low);
        s.store(numbers.as_mut_ptr().add(S::LANES), high);
        for (pair, numbers) in pairs.iter_mut().zip(numbers.as_chunks::<2>().0) {
            let [low, high] = numbers.map(|x| half::bf16_from_f32(flushed(x)));
            *pair = f32::from_bits(u32::from(low) | u32::from(high) << 16);
        }
        s.load(pairs.as_ptr())
    }
}

/// [`Simd::dot_bf16_pairs`] in scalar code, to the bit of the instruction `vdpbf16ps`: two fused multiply-adds, that of the odd numbers first.
#[inline(always)]
pub(super) fn dot_bf16_pairs<S: Simd>(s: S, a: S::F, b: S::F, c: S::F) -> S::F {
    let mut lanes = [[0.0; WIDEST]; 3];
    for (lanes, register) in lanes.iter_mut().zip([a, b, c]) {
        // SAFETY: the array has as many numbers as the widest register.
        unsafe { s.store(lanes.as_mut_ptr(), register) };
    }
    let [a, b, mut c] = lanes;
    let numbers = |x: f32| [x.to_bits() & 0xffff_0000, x.to_bits() << 16].map(|bits| flushed(f32::from_bits(bits)));
    for lane in 0..S::LANES {
        for (a, b) in numbers(a[lane]).into_iter().zip(numbers(b[lane])) {
            c[lane] = flushed(a.mul_add(b, flushed(c[lane])));
        }
    }
    // SAFETY: as above.
    unsafe { s.load(c.as_ptr()) }
}

/// Zero for a denormal number.
#[inline(always)]
pub(super) fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0_f32.copysign(x) } else { x }
}
