//! Multiplication of 8-bit and 4-bit weights by 8-bit activations.

use super::Simd;

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
    #[inline(always)]
    fn dot4(self, sum: Self::I, w: Self::I, x: Self::I) -> Self::I {
        self.dot8(sum, w, x)
    }
    /// Converts the sums of `dot4` to one 32-bit sum per column.
    #[inline(always)]
    fn total4(self, sum: Self::I) -> Self::I {
        sum
    }
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
