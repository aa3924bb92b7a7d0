//! Multiplication of 8-bit and 4-bit weights by 8-bit activations.

use super::Simd;
use super::portable::Portable;

/// Operations on registers of integers, for the kernels for quantised weights.
///
/// A register holds a few consecutive weights of each of [`Simd::LANES`] columns. It is multiplied by the activations of these weights,
/// which are the same for all columns. Sums are exact.
pub(crate) trait Int8: Simd {
    /// A register of [`Simd::LANES`] 32-bit integers, twice as many 16-bit integers, or four times as many 8-bit integers.
    type I: Copy;
    /// A table of 16 numbers.
    type Table: Copy;
    /// Whether [`Int8::lookup`] is faster than converting integers to fp32.
    const LOOKUP: bool;
    /// Number of 8-bit weights of a column in a register: 4 as bytes, or 2 as 16-bit integers.
    const GROUP: usize;
    /// Offset that is added to stored 8-bit weights, for processors that multiply unsigned weights.
    const OFFSET: i32;

    /// Whether [`Int8::dot_digits`] and [`Int8::lookup_bytes`] are implemented.
    const DIGITS: bool = false;

    /// Fills all columns with the same 32 bits.
    fn splat_i32(self, x: i32) -> Self::I;
    /// Loads 8-bit weights: [`Int8::GROUP`] of each column.
    unsafe fn bytes(self, p: *const u8) -> Self::I;
    /// Loads 4-bit weights, four of each column, from the low (`half` = 0) or high (`half` = 1) bits of each byte.
    unsafe fn nibbles(self, p: *const u8, half: usize) -> Self::I;
    /// Adds the products of 8-bit weights `w` and activations `x` to each column's sum.
    fn dot8(self, sum: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// Like `dot8`, for 4-bit weights. A sum can hold at most 32 products per column and must be read with `total4`.
    fn dot4(self, sum: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// Converts the sums of `dot4` to one 32-bit sum per column.
    fn total4(self, sum: Self::I) -> Self::I;
    fn to_f32(self, x: Self::I) -> Self::F;
    /// Rounds to the nearest integers, ties to even. Numbers that 32 bits do not hold give unspecified integers.
    fn to_integers(self, x: Self::F) -> Self::I;
    /// Loads [`Simd::LANES`] 32-bit words.
    unsafe fn words(self, p: *const u8) -> Self::I;
    /// Stores [`Simd::LANES`] 32-bit words.
    unsafe fn store_words(self, p: *mut u32, x: Self::I);
    /// Reads the word of `table` with each index. The table must have them all.
    unsafe fn gather(self, table: *const u32, index: Self::I) -> Self::I;
    /// Subtracts the bytes of each word from those of `offset`, none of which is smaller, if their bit is set in the four bits of `signs` that
    /// start at bit `shift`, and adds them to it if not.
    fn sign_bytes(self, x: Self::I, signs: Self::I, shift: i32, offset: Self::I) -> Self::I;
    /// Shifts each word right by `shift`, or left if it is negative, and masks it with `mask`.
    fn field(self, x: Self::I, shift: i32, mask: i32) -> Self::I;
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// Sets `bits` in each word and reads the words as fp32.
    fn with_bits(self, x: Self::I, bits: i32) -> Self::F;
    /// Prepares a table for [`Int8::lookup`].
    fn table(self, values: &[f32; 16]) -> Self::Table;
    /// Looks up the four bits of each word that start at bit `shift`.
    fn lookup(self, x: Self::I, shift: i32, table: Self::Table) -> Self::F;
    /// Rounds numbers from -128 to 127 to the nearest integers and stores them as bytes. Other numbers give unspecified bytes.
    unsafe fn store_bytes(self, p: *mut i8, x: Self::F);
    /// Adds the products of unsigned bytes `w` and signed bytes `x`, four of each column, to each column's sum.
    fn dot_digits(self, _sum: Self::I, _w: Self::I, _x: Self::I) -> Self::I {
        unreachable!("only where `DIGITS` is set")
    }
    /// Replaces each half of a word by one of `values`. The index is in the half's lowest 5 bits, or 6 if `wide`, after a shift to the right
    /// by `shift`.
    fn lookup_halves(self, _x: Self::I, _shift: i32, _values: &[u16; 64], _wide: bool) -> Self::F {
        unreachable!("only where `DIGITS` is set")
    }
    /// Replaces each half of a word by a number of `table` in bfloat16, the upper half of the number's bits. The index is in the half's
    /// lowest 4 bits after a shift to the right by `shift`, a multiple of 4. The table has 16 numbers, in as many registers as they need.
    fn pick_bf16(self, _x: Self::I, _shift: i32, _table: [Self::F; 2]) -> Self::F {
        unreachable!("only where `DIGITS` is set")
    }
    /// Rounds the upper halves of the numbers' bits to the nearest bfloat16 numbers, ties away from zero. The lower halves are unspecified.
    fn round_upper_halves(self, _x: Self::F) -> Self::F {
        unreachable!("only where `DIGITS` is set")
    }
    /// Replaces each byte, which must be below 16, by the byte of `table` with this index.
    fn lookup_bytes(self, _x: Self::I, _table: &[u8; 16]) -> Self::I {
        unreachable!("only where `DIGITS` is set")
    }
}

/// [`Int8::sign_bytes`] of a word, with the lowest four bits of `signs`.
#[inline(always)]
fn signed_bytes(x: u32, signs: u32, offset: u32) -> u32 {
    // The product has bit i at bit 8 i. No byte carries.
    let negative = ((signs & 15).wrapping_mul(0x0020_4081) & 0x0101_0101) * 255;
    offset + (x & !negative) - (x & negative)
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

    #[inline(always)]
    fn splat_i32(self, x: i32) -> [i32; 8] {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn bytes(self, p: *const u8) -> [i32; 8] {
        unsafe { p.cast::<[[u8; 4]; 8]>().read_unaligned() }.map(i32::from_ne_bytes)
    }
    #[inline(always)]
    unsafe fn nibbles(self, p: *const u8, half: usize) -> [i32; 8] {
        unsafe { self.bytes(p) }.map(|x| (x >> (4 * half)) & 0x0f0f_0f0f)
    }
    #[inline(always)]
    fn dot8(self, sum: [i32; 8], w: [i32; 8], x: [i32; 8]) -> [i32; 8] {
        let product = |w: i32, x: i32, byte: usize| i32::from((w >> (8 * byte)) as i8) * i32::from((x >> (8 * byte)) as i8);
        std::array::from_fn(|i| sum[i] + (0..4).map(|byte| product(w[i], x[i], byte)).sum::<i32>())
    }
    #[inline(always)]
    fn dot4(self, sum: [i32; 8], w: [i32; 8], x: [i32; 8]) -> [i32; 8] {
        self.dot8(sum, w, x)
    }
    #[inline(always)]
    fn total4(self, sum: [i32; 8]) -> [i32; 8] {
        sum
    }
    #[inline(always)]
    fn to_f32(self, x: [i32; 8]) -> [f32; 8] {
        x.map(|x| x as f32)
    }
    #[inline(always)]
    fn to_integers(self, x: [f32; 8]) -> [i32; 8] {
        x.map(|x| x.round_ties_even() as i32)
    }
    #[inline(always)]
    unsafe fn words(self, p: *const u8) -> [i32; 8] {
        unsafe { p.cast::<[i32; 8]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_words(self, p: *mut u32, x: [i32; 8]) {
        unsafe { p.cast::<[i32; 8]>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn gather(self, table: *const u32, index: [i32; 8]) -> [i32; 8] {
        index.map(|index| unsafe { *table.add(index as usize) } as i32)
    }
    #[inline(always)]
    fn sign_bytes(self, x: [i32; 8], signs: [i32; 8], shift: i32, offset: [i32; 8]) -> [i32; 8] {
        std::array::from_fn(|i| signed_bytes(x[i] as u32, signs[i] as u32 >> shift, offset[i] as u32) as i32)
    }
    #[inline(always)]
    fn field(self, x: [i32; 8], shift: i32, mask: i32) -> [i32; 8] {
        x.map(|x| (if shift < 0 { x << -shift } else { (x as u32 >> shift) as i32 }) & mask)
    }
    #[inline(always)]
    fn or(self, a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        std::array::from_fn(|i| a[i] | b[i])
    }
    #[inline(always)]
    fn with_bits(self, x: [i32; 8], bits: i32) -> [f32; 8] {
        x.map(|x| f32::from_bits((x | bits) as u32))
    }
    #[inline(always)]
    fn table(self, values: &[f32; 16]) -> [f32; 16] {
        *values
    }
    #[inline(always)]
    fn lookup(self, x: [i32; 8], shift: i32, table: [f32; 16]) -> [f32; 8] {
        x.map(|x| table[(x as u32 >> shift & 15) as usize])
    }
    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut i8, x: [f32; 8]) {
        unsafe { p.cast::<[i8; 8]>().write_unaligned(x.map(|x| x.round_ties_even() as i8)) }
    }
    #[inline(always)]
    fn dot_digits(self, sum: [i32; 8], w: [i32; 8], x: [i32; 8]) -> [i32; 8] {
        let product = |w: i32, x: i32, byte: usize| i32::from((w >> (8 * byte)) as u8) * i32::from((x >> (8 * byte)) as i8);
        std::array::from_fn(|i| sum[i] + (0..4).map(|byte| product(w[i], x[i], byte)).sum::<i32>())
    }
    #[inline(always)]
    fn lookup_halves(self, x: [i32; 8], shift: i32, values: &[u16; 64], wide: bool) -> [f32; 8] {
        let value = |half: i32| u32::from(values[(half >> shift) as usize & if wide { 63 } else { 31 }]);
        x.map(|x| f32::from_bits(value(x & 0xffff) | value((x >> 16) & 0xffff) << 16))
    }
    #[inline(always)]
    fn pick_bf16(self, x: [i32; 8], shift: i32, table: [[f32; 8]; 2]) -> [f32; 8] {
        let bits = |index: i32| table.as_flattened()[(index & 15) as usize].to_bits();
        x.map(|x| f32::from_bits(bits(x >> shift) >> 16 | bits(x >> (16 + shift)) & 0xffff_0000))
    }
    #[inline(always)]
    fn round_upper_halves(self, x: [f32; 8]) -> [f32; 8] {
        x.map(|x| f32::from_bits(x.to_bits().wrapping_add(0x8000)))
    }
    #[inline(always)]
    fn lookup_bytes(self, x: [i32; 8], table: &[u8; 16]) -> [i32; 8] {
        x.map(|x| i32::from_ne_bytes(x.to_ne_bytes().map(|code| table[usize::from(code)])))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::super::avx2::Avx2;
    use super::super::avx512::Avx512;
    use super::Int8;

    // SAFETY of all blocks below: `self` proves that the processor has the instructions, and the caller guarantees that pointers are valid.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Int8 for Avx2 {
        type I = __m256i;
        type Table = [__m256; 2];
        const LOOKUP: bool = false;
        // AVX2 multiplies signed bytes only by unsigned bytes and adds the products in pairs. The sums overflow 16 bits unless one factor
        // is small.
        const GROUP: usize = 2;
        const OFFSET: i32 = 0;

        #[inline(always)]
        fn splat_i32(self, x: i32) -> __m256i {
            unsafe { _mm256_set1_epi32(x) }
        }
        #[inline(always)]
        unsafe fn bytes(self, p: *const u8) -> __m256i {
            unsafe { _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())) }
        }
        #[inline(always)]
        unsafe fn nibbles(self, p: *const u8, half: usize) -> __m256i {
            unsafe {
                let w = _mm256_loadu_si256(p.cast());
                _mm256_and_si256(if half == 0 { w } else { _mm256_srli_epi16::<4>(w) }, _mm256_set1_epi8(15))
            }
        }
        #[inline(always)]
        fn dot8(self, sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
            unsafe { _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)) }
        }
        #[inline(always)]
        fn dot4(self, sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
            // 16 bits can hold the sum of 16 products of 15 and 127.
            unsafe { _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x)) }
        }
        #[inline(always)]
        fn total4(self, sum: __m256i) -> __m256i {
            unsafe { _mm256_madd_epi16(sum, _mm256_set1_epi16(1)) }
        }
        #[inline(always)]
        fn to_f32(self, x: __m256i) -> __m256 {
            unsafe { _mm256_cvtepi32_ps(x) }
        }
        #[inline(always)]
        fn to_integers(self, x: __m256) -> __m256i {
            unsafe { _mm256_cvtps_epi32(x) }
        }
        #[inline(always)]
        unsafe fn words(self, p: *const u8) -> __m256i {
            unsafe { _mm256_loadu_si256(p.cast()) }
        }
        #[inline(always)]
        unsafe fn store_words(self, p: *mut u32, x: __m256i) {
            unsafe { _mm256_storeu_si256(p.cast(), x) }
        }
        #[inline(always)]
        unsafe fn gather(self, table: *const u32, index: __m256i) -> __m256i {
            unsafe { _mm256_i32gather_epi32::<4>(table.cast(), index) }
        }
        #[inline(always)]
        fn sign_bytes(self, x: __m256i, signs: __m256i, shift: i32, offset: __m256i) -> __m256i {
            // The product has bit i at bit 8 i.
            unsafe {
                let signs = _mm256_and_si256(_mm256_srl_epi32(signs, _mm_cvtsi32_si128(shift)), _mm256_set1_epi32(15));
                let ones = _mm256_and_si256(_mm256_mullo_epi32(signs, _mm256_set1_epi32(0x0020_4081)), _mm256_set1_epi32(0x0101_0101));
                let negative = _mm256_sub_epi8(_mm256_setzero_si256(), ones);
                _mm256_add_epi8(_mm256_xor_si256(x, negative), _mm256_add_epi8(ones, offset))
            }
        }
        #[inline(always)]
        fn field(self, x: __m256i, shift: i32, mask: i32) -> __m256i {
            unsafe {
                let count = _mm_cvtsi32_si128(shift.abs());
                let shifted = if shift < 0 { _mm256_sll_epi32(x, count) } else { _mm256_srl_epi32(x, count) };
                _mm256_and_si256(shifted, _mm256_set1_epi32(mask))
            }
        }
        #[inline(always)]
        fn or(self, a: __m256i, b: __m256i) -> __m256i {
            unsafe { _mm256_or_si256(a, b) }
        }
        #[inline(always)]
        fn with_bits(self, x: __m256i, bits: i32) -> __m256 {
            unsafe { _mm256_castsi256_ps(_mm256_or_si256(x, _mm256_set1_epi32(bits))) }
        }
        #[inline(always)]
        fn table(self, values: &[f32; 16]) -> [__m256; 2] {
            unsafe { [_mm256_loadu_ps(values.as_ptr()), _mm256_loadu_ps(values.as_ptr().add(8))] }
        }
        #[inline(always)]
        fn lookup(self, x: __m256i, shift: i32, table: [__m256; 2]) -> __m256 {
            unsafe {
                // The permutation uses the lowest three bits of each word, and the blend uses the highest bit.
                let index = _mm256_srl_epi32(x, _mm_cvtsi32_si128(shift));
                let [low, high] = table.map(|half| _mm256_permutevar8x32_ps(half, index));
                _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index)))
            }
        }
        #[inline(always)]
        unsafe fn store_bytes(self, p: *mut i8, x: __m256) {
            unsafe {
                let wide = _mm256_cvtps_epi32(x);
                let halves = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256::<1>(wide));
                _mm_storel_epi64(p.cast(), _mm_packs_epi16(halves, halves));
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

        #[inline(always)]
        fn splat_i32(self, x: i32) -> __m512i {
            unsafe { _mm512_set1_epi32(x) }
        }
        #[inline(always)]
        unsafe fn bytes(self, p: *const u8) -> __m512i {
            unsafe { _mm512_loadu_si512(p.cast()) }
        }
        #[inline(always)]
        unsafe fn nibbles(self, p: *const u8, half: usize) -> __m512i {
            unsafe {
                let w = _mm512_loadu_si512(p.cast());
                _mm512_and_si512(if half == 0 { w } else { _mm512_srli_epi16::<4>(w) }, _mm512_set1_epi8(15))
            }
        }
        #[inline(always)]
        fn dot8(self, sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
            unsafe { _mm512_dpbusd_epi32(sum, w, x) }
        }
        #[inline(always)]
        fn dot4(self, sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
            self.dot8(sum, w, x)
        }
        #[inline(always)]
        fn total4(self, sum: __m512i) -> __m512i {
            sum
        }
        #[inline(always)]
        fn to_f32(self, x: __m512i) -> __m512 {
            unsafe { _mm512_cvtepi32_ps(x) }
        }
        #[inline(always)]
        fn to_integers(self, x: __m512) -> __m512i {
            unsafe { _mm512_cvtps_epi32(x) }
        }
        #[inline(always)]
        unsafe fn words(self, p: *const u8) -> __m512i {
            unsafe { _mm512_loadu_si512(p.cast()) }
        }
        #[inline(always)]
        unsafe fn store_words(self, p: *mut u32, x: __m512i) {
            unsafe { _mm512_storeu_si512(p.cast(), x) }
        }
        #[inline(always)]
        unsafe fn gather(self, table: *const u32, index: __m512i) -> __m512i {
            unsafe { _mm512_i32gather_epi32::<4>(index, table.cast()) }
        }
        #[inline(always)]
        fn sign_bytes(self, x: __m512i, signs: __m512i, shift: i32, offset: __m512i) -> __m512i {
            // All bits of the bytes of each of 16 signs. The instruction uses the lowest four bits of each word.
            const NEGATIVE: [u32; 16] = {
                let (mut words, mut i) = ([0; 16], 0);
                while i < 16 {
                    words[i] = ((i as u32).wrapping_mul(0x0020_4081) & 0x0101_0101) * 255;
                    i += 1;
                }
                words
            };
            unsafe {
                let signs = _mm512_srl_epi32(signs, _mm_cvtsi32_si128(shift));
                let negative = _mm512_permutexvar_epi32(signs, _mm512_loadu_si512(NEGATIVE.as_ptr().cast()));
                _mm512_add_epi8(_mm512_xor_si512(x, negative), _mm512_sub_epi8(offset, negative))
            }
        }
        #[inline(always)]
        fn field(self, x: __m512i, shift: i32, mask: i32) -> __m512i {
            unsafe {
                let count = _mm_cvtsi32_si128(shift.abs());
                let shifted = if shift < 0 { _mm512_sll_epi32(x, count) } else { _mm512_srl_epi32(x, count) };
                _mm512_and_si512(shifted, _mm512_set1_epi32(mask))
            }
        }
        #[inline(always)]
        fn or(self, a: __m512i, b: __m512i) -> __m512i {
            unsafe { _mm512_or_si512(a, b) }
        }
        #[inline(always)]
        fn with_bits(self, x: __m512i, bits: i32) -> __m512 {
            unsafe { _mm512_castsi512_ps(_mm512_or_si512(x, _mm512_set1_epi32(bits))) }
        }
        #[inline(always)]
        fn table(self, values: &[f32; 16]) -> __m512 {
            unsafe { _mm512_loadu_ps(values.as_ptr()) }
        }
        #[inline(always)]
        fn lookup(self, x: __m512i, shift: i32, table: __m512) -> __m512 {
            // The instruction uses the lowest four bits of each word.
            unsafe { _mm512_permutexvar_ps(_mm512_srl_epi32(x, _mm_cvtsi32_si128(shift)), table) }
        }
        #[inline(always)]
        unsafe fn store_bytes(self, p: *mut i8, x: __m512) {
            unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x))) }
        }
        #[inline(always)]
        fn dot_digits(self, sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
            unsafe { _mm512_dpbusd_epi32(sum, w, x) }
        }
        #[inline(always)]
        fn lookup_halves(self, x: __m512i, shift: i32, values: &[u16; 64], wide: bool) -> __m512 {
            unsafe {
                let low = _mm512_loadu_si512(values.as_ptr().cast());
                let high = _mm512_loadu_si512(values.as_ptr().add(32).cast());
                let index = _mm512_srl_epi16(x, _mm_cvtsi32_si128(shift));
                let found = if wide { _mm512_permutex2var_epi16(low, index, high) } else { _mm512_permutexvar_epi16(index, low) };
                _mm512_castsi512_ps(found)
            }
        }
        #[inline(always)]
        fn pick_bf16(self, x: __m512i, shift: i32, table: [__m512; 2]) -> __m512 {
            // The instruction uses the lowest five bits of each half: twice the code, and 1 for the upper half.
            unsafe {
                let twice = if shift == 0 { _mm512_slli_epi16::<1>(x) } else { _mm512_srl_epi16(x, _mm_cvtsi32_si128(shift - 1)) };
                let index = _mm512_or_si512(twice, _mm512_set1_epi16(1));
                _mm512_castsi512_ps(_mm512_permutexvar_epi16(index, _mm512_castps_si512(table[0])))
            }
        }
        #[inline(always)]
        fn round_upper_halves(self, x: __m512) -> __m512 {
            unsafe { _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000))) }
        }
        #[inline(always)]
        fn lookup_bytes(self, x: __m512i, table: &[u8; 16]) -> __m512i {
            unsafe { _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), x) }
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use std::arch::aarch64::*;

    use super::super::neon::Neon;
    use super::Int8;

    // SAFETY of all blocks below: every 64-bit ARM processor has NEON, and the caller guarantees that pointers are valid.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Int8 for Neon {
        type I = int32x4_t;
        type Table = [f32; 16];
        const LOOKUP: bool = false;
        const GROUP: usize = 4;
        const OFFSET: i32 = 0;

        #[inline(always)]
        fn splat_i32(self, x: i32) -> int32x4_t {
            unsafe { vdupq_n_s32(x) }
        }
        #[inline(always)]
        unsafe fn bytes(self, p: *const u8) -> int32x4_t {
            unsafe { vreinterpretq_s32_u8(vld1q_u8(p)) }
        }
        #[inline(always)]
        unsafe fn nibbles(self, p: *const u8, half: usize) -> int32x4_t {
            unsafe {
                let w = vld1q_u8(p);
                vreinterpretq_s32_u8(if half == 0 { vandq_u8(w, vdupq_n_u8(15)) } else { vshrq_n_u8::<4>(w) })
            }
        }
        #[inline(always)]
        fn dot8(self, sum: int32x4_t, w: int32x4_t, x: int32x4_t) -> int32x4_t {
            unsafe {
                let (w, x) = (vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x));
                let low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
                // 16 bits can hold the sum of two products of -128 and 127.
                vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(w, x)))
            }
        }
        #[inline(always)]
        fn dot4(self, sum: int32x4_t, w: int32x4_t, x: int32x4_t) -> int32x4_t {
            self.dot8(sum, w, x)
        }
        #[inline(always)]
        fn total4(self, sum: int32x4_t) -> int32x4_t {
            sum
        }
        #[inline(always)]
        fn to_f32(self, x: int32x4_t) -> float32x4_t {
            unsafe { vcvtq_f32_s32(x) }
        }
        #[inline(always)]
        fn to_integers(self, x: float32x4_t) -> int32x4_t {
            unsafe { vcvtnq_s32_f32(x) }
        }
        #[inline(always)]
        unsafe fn words(self, p: *const u8) -> int32x4_t {
            unsafe { vreinterpretq_s32_u8(vld1q_u8(p)) }
        }
        #[inline(always)]
        unsafe fn store_words(self, p: *mut u32, x: int32x4_t) {
            unsafe { vst1q_u32(p, vreinterpretq_u32_s32(x)) }
        }
        #[inline(always)]
        unsafe fn gather(self, table: *const u32, index: int32x4_t) -> int32x4_t {
            let mut indexes = [0_u32; 4];
            unsafe {
                vst1q_u32(indexes.as_mut_ptr(), vreinterpretq_u32_s32(index));
                vreinterpretq_s32_u32(vld1q_u32(indexes.map(|index| *table.add(index as usize)).as_ptr()))
            }
        }
        #[inline(always)]
        fn sign_bytes(self, x: int32x4_t, signs: int32x4_t, shift: i32, offset: int32x4_t) -> int32x4_t {
            // The product has bit i at bit 8 i.
            unsafe {
                let signs = vandq_u32(vshlq_u32(vreinterpretq_u32_s32(signs), vdupq_n_s32(-shift)), vdupq_n_u32(15));
                let ones = vandq_u32(vmulq_n_u32(signs, 0x0020_4081), vdupq_n_u32(0x0101_0101));
                let negative = vmulq_n_u32(ones, 255);
                let signed = vaddq_u8(vreinterpretq_u8_u32(veorq_u32(vreinterpretq_u32_s32(x), negative)), vreinterpretq_u8_u32(ones));
                vreinterpretq_s32_u8(vaddq_u8(signed, vreinterpretq_u8_s32(offset)))
            }
        }
        #[inline(always)]
        fn field(self, x: int32x4_t, shift: i32, mask: i32) -> int32x4_t {
            unsafe {
                let shifted = vshlq_u32(vreinterpretq_u32_s32(x), vdupq_n_s32(-shift));
                vreinterpretq_s32_u32(vandq_u32(shifted, vdupq_n_u32(mask as u32)))
            }
        }
        #[inline(always)]
        fn or(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
            unsafe { vorrq_s32(a, b) }
        }
        #[inline(always)]
        fn with_bits(self, x: int32x4_t, bits: i32) -> float32x4_t {
            unsafe { vreinterpretq_f32_s32(vorrq_s32(x, vdupq_n_s32(bits))) }
        }
        #[inline(always)]
        fn table(self, values: &[f32; 16]) -> [f32; 16] {
            *values
        }
        #[inline(always)]
        fn lookup(self, x: int32x4_t, shift: i32, table: [f32; 16]) -> float32x4_t {
            let mut words = [0_u32; 4];
            unsafe {
                vst1q_u32(words.as_mut_ptr(), vreinterpretq_u32_s32(x));
                vld1q_f32(words.map(|word| table[(word >> shift & 15) as usize]).as_ptr())
            }
        }
        #[inline(always)]
        unsafe fn store_bytes(self, p: *mut i8, x: float32x4_t) {
            unsafe {
                let halves = vqmovn_s32(vcvtnq_s32_f32(x));
                let bytes = vqmovn_s16(vcombine_s16(halves, halves));
                p.cast::<i32>().write_unaligned(vget_lane_s32::<0>(vreinterpret_s32_s8(bytes)));
            }
        }
    }
}
