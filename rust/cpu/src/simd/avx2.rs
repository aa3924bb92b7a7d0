//! AVX2 with FMA and F16C.

use std::arch::x86_64::*;

use super::{Int8, Kernel, Simd};

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

/// Runs a kernel. The processor must have these instructions.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2(()))
}

// SAFETY of all blocks below: `self` proves that the processor has the instructions, and the caller guarantees that pointers are valid.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx2 {
    const LANES: usize = 8;
    const VECTORS: usize = 2;
    const ROWS: usize = 6;
    const FUSED: bool = true;

    type F = __m256;

    instructions! {
        unsafe fn load(p: *const f32) -> __m256 = _mm256_loadu_ps(p);
        unsafe fn store(p: *mut f32, x: __m256) = _mm256_storeu_ps(p, x);
        unsafe fn load_f16(p: *const u16) -> __m256 = _mm256_cvtph_ps(_mm_loadu_si128(p.cast()));
        unsafe fn load_i8(p: *const i8) -> __m256 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())));
        unsafe fn load_bf16(p: *const u16) -> __m256 = {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        };
    }
    instructions! {
        fn splat(x: f32) -> __m256 = _mm256_set1_ps(x);
        fn fma(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        fn add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
        fn sub(a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
        fn mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        fn div(a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
        fn max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
        fn min(a: __m256, b: __m256) -> __m256 = _mm256_min_ps(a, b);
        fn any_above(a: __m256, b: __m256) -> bool = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b)) != 0;
        fn round(x: __m256) -> __m256 = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
        fn sum(x: __m256) -> f32 = {
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        };
        fn largest(x: __m256) -> f32 = {
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        };
        fn power_of_two(n: __m256) -> __m256 = {
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
        };
    }
}

// SAFETY of all blocks below: as above.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Int8 for Avx2 {
    type I = __m256i;
    type Table = [__m256; 2];
    const LOOKUP: bool = false;
    // AVX2 multiplies signed bytes only by unsigned bytes and adds the products in pairs. The sums overflow 16 bits unless one factor
    // is small.
    const GROUP: usize = 2;
    const OFFSET: i32 = 0;

    instructions! {
        unsafe fn bytes(p: *const u8) -> __m256i = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()));
        unsafe fn words(p: *const u8) -> __m256i = _mm256_loadu_si256(p.cast());
        unsafe fn store_words(p: *mut u32, x: __m256i) = _mm256_storeu_si256(p.cast(), x);
        unsafe fn gather(table: *const u32, index: __m256i) -> __m256i = _mm256_i32gather_epi32::<4>(table.cast(), index);
        unsafe fn nibbles(p: *const u8, half: usize) -> __m256i = {
            let w = _mm256_loadu_si256(p.cast());
            _mm256_and_si256(if half == 0 { w } else { _mm256_srli_epi16::<4>(w) }, _mm256_set1_epi8(15))
        };
        unsafe fn store_bytes(p: *mut i8, x: __m256) = {
            let wide = _mm256_cvtps_epi32(x);
            let halves = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256::<1>(wide));
            _mm_storel_epi64(p.cast(), _mm_packs_epi16(halves, halves));
        };
    }
    instructions! {
        fn splat_i32(x: i32) -> __m256i = _mm256_set1_epi32(x);
        fn dot8(sum: __m256i, w: __m256i, x: __m256i) -> __m256i = _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
        fn total4(sum: __m256i) -> __m256i = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
        fn to_f32(x: __m256i) -> __m256 = _mm256_cvtepi32_ps(x);
        fn to_integers(x: __m256) -> __m256i = _mm256_cvtps_epi32(x);
        fn or(a: __m256i, b: __m256i) -> __m256i = _mm256_or_si256(a, b);
        fn with_bits(x: __m256i, bits: i32) -> __m256 = _mm256_castsi256_ps(_mm256_or_si256(x, _mm256_set1_epi32(bits)));
        fn table(values: &[f32; 16]) -> [__m256; 2] = [_mm256_loadu_ps(values.as_ptr()), _mm256_loadu_ps(values.as_ptr().add(8))];
        // 16 bits can hold the sum of 16 products of 15 and 127.
        fn dot4(sum: __m256i, w: __m256i, x: __m256i) -> __m256i = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
        fn sign_bytes(x: __m256i, signs: __m256i, shift: i32, offset: __m256i) -> __m256i = {
            // The product has bit i at bit 8 i.
            let signs = _mm256_and_si256(_mm256_srl_epi32(signs, _mm_cvtsi32_si128(shift)), _mm256_set1_epi32(15));
            let ones = _mm256_and_si256(_mm256_mullo_epi32(signs, _mm256_set1_epi32(0x0020_4081)), _mm256_set1_epi32(0x0101_0101));
            let negative = _mm256_sub_epi8(_mm256_setzero_si256(), ones);
            _mm256_add_epi8(_mm256_xor_si256(x, negative), _mm256_add_epi8(ones, offset))
        };
        fn field(x: __m256i, shift: i32, mask: i32) -> __m256i = {
            let count = _mm_cvtsi32_si128(shift.abs());
            let shifted = if shift < 0 { _mm256_sll_epi32(x, count) } else { _mm256_srl_epi32(x, count) };
            _mm256_and_si256(shifted, _mm256_set1_epi32(mask))
        };
        fn lookup(x: __m256i, shift: i32, table: [__m256; 2]) -> __m256 = {
            // The permutation uses the lowest three bits of each word, and the blend uses the highest bit.
            let index = _mm256_srl_epi32(x, _mm_cvtsi32_si128(shift));
            let [low, high] = table.map(|half| _mm256_permutevar8x32_ps(half, index));
            _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index)))
        };
    }
}
