//! NEON, which every 64-bit ARM processor has.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Kernel, Simd};

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

    #[inline(always)]
    fn splat(self, x: f32) -> float32x4_t {
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> float32x4_t {
        unsafe { vld1q_f32(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: float32x4_t) {
        unsafe { vst1q_f32(p, x) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> float32x4_t {
        let wide;
        // The intrinsics for half precision are stable only since Rust 1.94.
        unsafe {
            asm!("fcvtl {:v}.4s, {:v}.4h", lateout(vreg) wide, in(vreg) vld1_u16(p), options(pure, nomem, nostack, preserves_flags));
        }
        wide
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> float32x4_t {
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p))) }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> float32x4_t {
        unsafe {
            let bytes = vcreate_s8(u64::from(p.cast::<u32>().read_unaligned()));
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))))
        }
    }
    #[inline(always)]
    fn fma(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    fn div(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vdivq_f32(a, b) }
    }
    /// Compares and selects, because the maximum instruction returns NaN if either operand is NaN.
    #[inline(always)]
    fn max(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
    }
    #[inline(always)]
    fn min(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
    }
    #[inline(always)]
    fn sum(self, x: float32x4_t) -> f32 {
        unsafe { vaddvq_f32(x) }
    }
    #[inline(always)]
    fn largest(self, x: float32x4_t) -> f32 {
        unsafe { vmaxvq_f32(x) }
    }
    #[inline(always)]
    fn any_above(self, a: float32x4_t, b: float32x4_t) -> bool {
        unsafe { vmaxvq_u32(vcgtq_f32(a, b)) != 0 }
    }
    #[inline(always)]
    fn round(self, x: float32x4_t) -> float32x4_t {
        unsafe { vrndnq_f32(x) }
    }
    #[inline(always)]
    fn power_of_two(self, n: float32x4_t) -> float32x4_t {
        unsafe {
            let exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent))
        }
    }
}
