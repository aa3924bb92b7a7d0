//! AVX-512 with VNNI, and with products of bfloat16 where the processor has them.

use std::arch::x86_64::*;

use super::{Kernel, Simd, portable};

/// Proof that the processor has AVX-512 with VNNI and, with `BF16`, products of bfloat16.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const BF16: bool>(());

/// Runs a kernel. The processor must have these instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::<false>(()))
}

/// Runs a kernel. The processor must have these instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn run_bf16<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::<true>(()))
}

// SAFETY of all blocks below: `self` proves that the processor has the instructions, and the caller guarantees that pointers are valid.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<const BF16: bool> Simd for Avx512<BF16> {
    const LANES: usize = 16;
    const VECTORS: usize = 2;
    const ROWS: usize = 13;
    const FUSED: bool = true;

    type F = __m512;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: __m512) {
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_bf16_pairs(self, p: *mut u32, low: __m512, high: __m512) {
        unsafe {
            let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(low));
            _mm512_storeu_si512(p.cast(), _mm512_mask_blend_epi16(0xaaaa_aaaa, low, _mm512_castps_si512(high)));
        }
    }
    #[inline(always)]
    unsafe fn round_bf16_pairs(self, p: *const f32) -> __m512 {
        if !BF16 {
            return unsafe { portable::round_bf16_pairs(self, p) };
        }
        unsafe { std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(p.add(16)), _mm512_loadu_ps(p))) }
    }
    #[inline(always)]
    fn dot_bf16_pairs(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        if !BF16 {
            return portable::dot_bf16_pairs(self, a, b, c);
        }
        // The registers have the same bits.
        unsafe { _mm512_dpbf16_ps(c, std::mem::transmute::<__m512, __m512bh>(a), std::mem::transmute::<__m512, __m512bh>(b)) }
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn sum(self, x: __m512) -> f32 {
        unsafe { _mm512_reduce_add_ps(x) }
    }
    #[inline(always)]
    fn largest(self, x: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(x) }
    }
    #[inline(always)]
    fn round(self, x: __m512) -> __m512 {
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x) }
    }
    #[inline(always)]
    fn power_of_two(self, n: __m512) -> __m512 {
        unsafe {
            let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent))
        }
    }
}
