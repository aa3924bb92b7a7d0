//! NEON, which every 64-bit ARM processor has.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Int8, Kernel, Simd};

/// Proof that the processor has NEON.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

/// Runs a kernel. The processor must have these instructions.
#[target_feature(enable = "neon")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon(()))
}

// SAFETY of all blocks below: `self` proves that the processor has the instructions, and the caller guarantees that pointers are valid.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Neon {
    const LANES: usize = 4;
    const VECTORS: usize = 4;
    const ROWS: usize = 6;
    const FUSED: bool = true;

    type F = float32x4_t;

    instructions! {
        unsafe fn load(p: *const f32) -> float32x4_t = vld1q_f32(p);
        unsafe fn store(p: *mut f32, x: float32x4_t) = vst1q_f32(p, x);
        unsafe fn load_bf16(p: *const u16) -> float32x4_t = vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p)));
        unsafe fn load_f16(p: *const u16) -> float32x4_t = {
            let wide;
            // The intrinsics for half precision are stable only since Rust 1.94.
            asm!("fcvtl {:v}.4s, {:v}.4h", lateout(vreg) wide, in(vreg) vld1_u16(p), options(pure, nomem, nostack, preserves_flags));
            wide
        };
        unsafe fn load_i8(p: *const i8) -> float32x4_t = {
            let bytes = vcreate_s8(u64::from(p.cast::<u32>().read_unaligned()));
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))))
        };
    }
    instructions! {
        fn splat(x: f32) -> float32x4_t = vdupq_n_f32(x);
        fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t = vfmaq_f32(c, a, b);
        fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t = vaddq_f32(a, b);
        fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t = vsubq_f32(a, b);
        fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t = vmulq_f32(a, b);
        fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t = vdivq_f32(a, b);
        /// Compares and selects, because the maximum instruction returns NaN if either operand is NaN.
        fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t = vbslq_f32(vcgtq_f32(a, b), a, b);
        fn min(a: float32x4_t, b: float32x4_t) -> float32x4_t = vbslq_f32(vcltq_f32(a, b), a, b);
        fn sum(x: float32x4_t) -> f32 = vaddvq_f32(x);
        fn largest(x: float32x4_t) -> f32 = vmaxvq_f32(x);
        fn any_above(a: float32x4_t, b: float32x4_t) -> bool = vmaxvq_u32(vcgtq_f32(a, b)) != 0;
        fn round(x: float32x4_t) -> float32x4_t = vrndnq_f32(x);
        fn power_of_two(n: float32x4_t) -> float32x4_t = {
            let exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent))
        };
    }
}

// SAFETY of all blocks below: as above.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Int8 for Neon {
    type I = int32x4_t;
    type Table = [f32; 16];
    const LOOKUP: bool = false;
    const GROUP: usize = 4;
    const OFFSET: i32 = 0;

    instructions! {
        unsafe fn bytes(p: *const u8) -> int32x4_t = vreinterpretq_s32_u8(vld1q_u8(p));
        unsafe fn words(p: *const u8) -> int32x4_t = vreinterpretq_s32_u8(vld1q_u8(p));
        unsafe fn store_words(p: *mut u32, x: int32x4_t) = vst1q_u32(p, vreinterpretq_u32_s32(x));
        unsafe fn nibbles(p: *const u8, half: usize) -> int32x4_t = {
            let w = vld1q_u8(p);
            vreinterpretq_s32_u8(if half == 0 { vandq_u8(w, vdupq_n_u8(15)) } else { vshrq_n_u8::<4>(w) })
        };
        unsafe fn gather(table: *const u32, index: int32x4_t) -> int32x4_t = {
            let mut indexes = [0_u32; 4];
            vst1q_u32(indexes.as_mut_ptr(), vreinterpretq_u32_s32(index));
            vreinterpretq_s32_u32(vld1q_u32(indexes.map(|index| *table.add(index as usize)).as_ptr()))
        };
        unsafe fn store_bytes(p: *mut i8, x: float32x4_t) = {
            let halves = vqmovn_s32(vcvtnq_s32_f32(x));
            let bytes = vqmovn_s16(vcombine_s16(halves, halves));
            p.cast::<i32>().write_unaligned(vget_lane_s32::<0>(vreinterpret_s32_s8(bytes)));
        };
    }
    instructions! {
        fn splat_i32(x: i32) -> int32x4_t = vdupq_n_s32(x);
        fn to_f32(x: int32x4_t) -> float32x4_t = vcvtq_f32_s32(x);
        fn to_integers(x: float32x4_t) -> int32x4_t = vcvtnq_s32_f32(x);
        fn or(a: int32x4_t, b: int32x4_t) -> int32x4_t = vorrq_s32(a, b);
        fn with_bits(x: int32x4_t, bits: i32) -> float32x4_t = vreinterpretq_f32_s32(vorrq_s32(x, vdupq_n_s32(bits)));
        fn dot8(sum: int32x4_t, w: int32x4_t, x: int32x4_t) -> int32x4_t = {
            let (w, x) = (vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x));
            let low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
            // 16 bits can hold the sum of two products of -128 and 127.
            vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(w, x)))
        };
        fn sign_bytes(x: int32x4_t, signs: int32x4_t, shift: i32, offset: int32x4_t) -> int32x4_t = {
            // The product has bit i at bit 8 i.
            let signs = vandq_u32(vshlq_u32(vreinterpretq_u32_s32(signs), vdupq_n_s32(-shift)), vdupq_n_u32(15));
            let ones = vandq_u32(vmulq_n_u32(signs, 0x0020_4081), vdupq_n_u32(0x0101_0101));
            let negative = vmulq_n_u32(ones, 255);
            let signed = vaddq_u8(vreinterpretq_u8_u32(veorq_u32(vreinterpretq_u32_s32(x), negative)), vreinterpretq_u8_u32(ones));
            vreinterpretq_s32_u8(vaddq_u8(signed, vreinterpretq_u8_s32(offset)))
        };
        fn field(x: int32x4_t, shift: i32, mask: i32) -> int32x4_t = {
            let shifted = vshlq_u32(vreinterpretq_u32_s32(x), vdupq_n_s32(-shift));
            vreinterpretq_s32_u32(vandq_u32(shifted, vdupq_n_u32(mask as u32)))
        };
        fn lookup(x: int32x4_t, shift: i32, table: [f32; 16]) -> float32x4_t = {
            let mut words = [0_u32; 4];
            vst1q_u32(words.as_mut_ptr(), vreinterpretq_u32_s32(x));
            vld1q_f32(words.map(|word| table[(word >> shift & 15) as usize]).as_ptr())
        };
    }
    functions! {
        fn table(values: &[f32; 16]) -> [f32; 16] = *values;
    }
}
