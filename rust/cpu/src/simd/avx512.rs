//! AVX-512 with VNNI, and with products of bfloat16 where the processor has them.

use std::arch::x86_64::*;

use super::{Int8, Kernel, Simd, exp_parts, portable};

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

    instructions! {
        unsafe fn load(p: *const f32) -> __m512 = _mm512_loadu_ps(p);
        unsafe fn store(p: *mut f32, x: __m512) = _mm512_storeu_ps(p, x);
        unsafe fn load_f16(p: *const u16) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()));
        unsafe fn load_i8(p: *const i8) -> __m512 = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())));
        unsafe fn load_bf16(p: *const u16) -> __m512 = {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        };
        unsafe fn store_bf16_pairs(p: *mut u32, low: __m512, high: __m512) = {
            let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(low));
            _mm512_storeu_si512(p.cast(), _mm512_mask_blend_epi16(0xaaaa_aaaa, low, _mm512_castps_si512(high)));
        };
    }
    instructions! {
        fn splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fn add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        fn sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        fn mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fn div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        fn max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        fn min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        fn sum(x: __m512) -> f32 = _mm512_reduce_add_ps(x);
        fn largest(x: __m512) -> f32 = _mm512_reduce_max_ps(x);
        fn any_above(a: __m512, b: __m512) -> bool = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b) != 0;
        fn round(x: __m512) -> __m512 = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
        /// One instruction finds the distance to the next lower integer, and another one multiplies by two to the power of that integer.
        fn exp_13_bits(x: __m512, base: __m512) -> __m512 = {
            // 2^r between 0 and 1, with a relative error of 2^-13.
            const COEFFICIENTS: [f32; 4] = [0.999_925_2, 0.695_833_56, 0.226_067_16, 0.078_024_52];
            let log2e = _mm512_set1_ps(std::f32::consts::LOG2_E);
            let x = _mm512_fmsub_ps(x, log2e, _mm512_mul_ps(base, log2e));
            let kept = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-126.0));
            let r = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(x);
            let [c0, c1, c2, c3] = COEFFICIENTS.map(|c| _mm512_set1_ps(c));
            let p = _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_fmadd_ps(c3, r, c2), r, c1), r, c0);
            _mm512_maskz_scalef_ps(kept, p, x)
        };
        fn power_of_two(n: __m512) -> __m512 = {
            let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent))
        };
    }
    #[inline(always)]
    fn round_bf16_pairs(self, low: __m512, high: __m512) -> __m512 {
        if !BF16 {
            return portable::round_bf16_pairs(self, low, high);
        }
        unsafe { std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(high, low)) }
    }
    /// Four numbers of each of four rows fill a register, which is then transposed within its quarters.
    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, apart: usize, to: *mut f32, to_apart: usize, count: usize) {
        let four = |row: usize, column: usize| {
            let at = |row: usize| unsafe { _mm_loadu_ps(from.add(row * apart + column)) };
            let first = unsafe { _mm512_castps128_ps512(at(row)) };
            unsafe {
                let two = _mm512_mask_broadcast_f32x4(first, 0x00f0, at(row + 4));
                let three = _mm512_mask_broadcast_f32x4(two, 0x0f00, at(row + 8));
                _mm512_mask_broadcast_f32x4(three, 0xf000, at(row + 12))
            }
        };
        for column in (0..count).step_by(4) {
            unsafe {
                let rows = [four(0, column), four(1, column), four(2, column), four(3, column)];
                let low = [0, 2].map(|row| _mm512_castps_pd(_mm512_unpacklo_ps(rows[row], rows[row + 1])));
                let high = [0, 2].map(|row| _mm512_castps_pd(_mm512_unpackhi_ps(rows[row], rows[row + 1])));
                let columns = [
                    _mm512_unpacklo_pd(low[0], low[1]),
                    _mm512_unpackhi_pd(low[0], low[1]),
                    _mm512_unpacklo_pd(high[0], high[1]),
                    _mm512_unpackhi_pd(high[0], high[1]),
                ];
                for (i, x) in columns.into_iter().enumerate().take(count - column) {
                    _mm512_storeu_ps(to.add((column + i) * to_apart), _mm512_castpd_ps(x));
                }
            }
        }
    }
    #[inline(always)]
    fn dot_bf16_pairs(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        if !BF16 {
            return portable::dot_bf16_pairs(self, a, b, c);
        }
        // The registers have the same bits.
        unsafe { _mm512_dpbf16_ps(c, std::mem::transmute::<__m512, __m512bh>(a), std::mem::transmute::<__m512, __m512bh>(b)) }
    }
    /// The numbers of the portable function. One instruction multiplies by the power of two.
    #[inline(always)]
    fn exp(self, x: __m512) -> __m512 {
        unsafe {
            let x = _mm512_min_ps(_mm512_set1_ps(88.0), x);
            let kept = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-87.3));
            let (n, r, p) = exp_parts(self, x);
            let p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, _mm512_set1_ps(1.0)));
            _mm512_maskz_scalef_ps(kept, p, n)
        }
    }
}

// SAFETY of all blocks below: as above.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<const BF16: bool> Int8 for Avx512<BF16> {
    type I = __m512i;
    type Table = __m512;
    const LOOKUP: bool = true;
    const GROUP: usize = 4;
    const OFFSET: i32 = 128;
    const DIGITS: bool = true;

    instructions! {
        unsafe fn bytes(p: *const u8) -> __m512i = _mm512_loadu_si512(p.cast());
        unsafe fn words(p: *const u8) -> __m512i = _mm512_loadu_si512(p.cast());
        unsafe fn store_words(p: *mut u32, x: __m512i) = _mm512_storeu_si512(p.cast(), x);
        unsafe fn gather(table: *const u32, index: __m512i) -> __m512i = _mm512_i32gather_epi32::<4>(index, table.cast());
        unsafe fn store_bytes(p: *mut i8, x: __m512) = _mm_storeu_si128(p.cast(), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
        unsafe fn nibbles(p: *const u8, half: usize) -> __m512i = {
            let w = _mm512_loadu_si512(p.cast());
            _mm512_and_si512(if half == 0 { w } else { _mm512_srli_epi16::<4>(w) }, _mm512_set1_epi8(15))
        };
    }
    instructions! {
        fn splat_i32(x: i32) -> __m512i = _mm512_set1_epi32(x);
        fn dot8(sum: __m512i, w: __m512i, x: __m512i) -> __m512i = _mm512_dpbusd_epi32(sum, w, x);
        fn to_f32(x: __m512i) -> __m512 = _mm512_cvtepi32_ps(x);
        fn to_integers(x: __m512) -> __m512i = _mm512_cvtps_epi32(x);
        fn or(a: __m512i, b: __m512i) -> __m512i = _mm512_or_si512(a, b);
        fn with_bits(x: __m512i, bits: i32) -> __m512 = _mm512_castsi512_ps(_mm512_or_si512(x, _mm512_set1_epi32(bits)));
        fn table(values: &[f32; 16]) -> __m512 = _mm512_loadu_ps(values.as_ptr());
        fn dot_digits(sum: __m512i, w: __m512i, x: __m512i) -> __m512i = _mm512_dpbusd_epi32(sum, w, x);
        fn round_upper_halves(x: __m512) -> __m512 =
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)));
        fn lookup_bytes(x: __m512i, table: &[u8; 16]) -> __m512i =
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), x);
        fn sign_bytes(x: __m512i, signs: __m512i, shift: i32, offset: __m512i) -> __m512i = {
            // All bits of the bytes of each of 16 signs. The instruction uses the lowest four bits of each word.
            const NEGATIVE: [u32; 16] = {
                let (mut words, mut i) = ([0; 16], 0);
                while i < 16 {
                    words[i] = ((i as u32).wrapping_mul(0x0020_4081) & 0x0101_0101) * 255;
                    i += 1;
                }
                words
            };
            let signs = _mm512_srl_epi32(signs, _mm_cvtsi32_si128(shift));
            let negative = _mm512_permutexvar_epi32(signs, _mm512_loadu_si512(NEGATIVE.as_ptr().cast()));
            _mm512_add_epi8(_mm512_xor_si512(x, negative), _mm512_sub_epi8(offset, negative))
        };
        fn field(x: __m512i, shift: i32, mask: i32) -> __m512i = {
            let count = _mm_cvtsi32_si128(shift.abs());
            let shifted = if shift < 0 { _mm512_sll_epi32(x, count) } else { _mm512_srl_epi32(x, count) };
            _mm512_and_si512(shifted, _mm512_set1_epi32(mask))
        };
        // The instruction uses the lowest four bits of each word.
        fn lookup(x: __m512i, shift: i32, table: __m512) -> __m512 =
            _mm512_permutexvar_ps(_mm512_srl_epi32(x, _mm_cvtsi32_si128(shift)), table);
        fn lookup_halves(x: __m512i, shift: i32, values: &[u16; 64], wide: bool) -> __m512 = {
            let low = _mm512_loadu_si512(values.as_ptr().cast());
            let high = _mm512_loadu_si512(values.as_ptr().add(32).cast());
            let index = _mm512_srl_epi16(x, _mm_cvtsi32_si128(shift));
            let found = if wide { _mm512_permutex2var_epi16(low, index, high) } else { _mm512_permutexvar_epi16(index, low) };
            _mm512_castsi512_ps(found)
        };
        fn pick_bf16(x: __m512i, shift: i32, table: [__m512; 2]) -> __m512 = {
            // The instruction uses the lowest five bits of each half: twice the code, and 1 for the upper half.
            let twice = if shift == 0 { _mm512_slli_epi16::<1>(x) } else { _mm512_srl_epi16(x, _mm_cvtsi32_si128(shift - 1)) };
            let index = _mm512_or_si512(twice, _mm512_set1_epi16(1));
            _mm512_castsi512_ps(_mm512_permutexvar_epi16(index, _mm512_castps_si512(table[0])))
        };
    }
}
