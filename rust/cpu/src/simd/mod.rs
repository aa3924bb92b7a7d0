//! Registers of fp32 lanes: a trait, an implementation per instruction set, and the selection at run time.

/// Defines methods that are inlined into the kernel which is compiled for their instructions. Either all are unsafe or none is.
macro_rules! instructions {
    ($($(#[$doc:meta])* fn $name:ident($($operand:ident: $kind:ty),*) -> $result:ty = $value:expr;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        fn $name(self, $($operand: $kind),*) -> $result {
            // SAFETY: `self` proves that the processor has the instructions.
            unsafe { $value }
        }
    )*};
    ($(unsafe fn $name:ident($($operand:ident: $kind:ty),*) $(-> $result:ty)? = $value:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name(self, $($operand: $kind),*) $(-> $result)? {
            // SAFETY: as above, and the caller guarantees that pointers are valid.
            unsafe { $value }
        }
    )*};
}

/// Like `instructions`, for methods that need no instructions.
macro_rules! functions {
    ($($(#[$doc:meta])* fn $name:ident($($operand:ident: $kind:ty),*) -> $result:ty = $value:expr;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        fn $name(self, $($operand: $kind),*) -> $result {
            $value
        }
    )*};
}

mod int8;
#[cfg(test)]
mod oracle;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, unused_variables, reason = "no other processor has tiles"))]
mod piece_tiles;
mod portable;
mod scaled_tiles;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, unused_variables, reason = "no other processor has tiles"))]
mod tiles;

pub(crate) use int8::Int8;
pub(crate) use piece_tiles::{PieceProducts, RegisterProducts};
pub(crate) use scaled_tiles::{ScaledProducts, pair_place};
pub use tiles::TileSupport;
pub(crate) use tiles::{PairProducts, PairTiles, TILE};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(test)]
mod tests;

/// Register operations of the kernels.
///
/// A value of the type proves that the processor has the instructions. Only [`Isa::run`] creates one, inside a function that is compiled
/// for them. All methods are inlined there, and kernels must be inlined too.
pub(crate) trait Simd: Copy {
    /// Number of fp32 lanes in a register.
    const LANES: usize;
    /// Width of a panel of weights, in registers (2 or 4).
    const VECTORS: usize;
    /// Maximum rows of a tile. Its accumulators must fit the registers together with the operands.
    const ROWS: usize;
    /// Whether [`Simd::fma`] rounds once.
    const FUSED: bool;

    /// A register.
    type F: Copy;

    fn splat(self, x: f32) -> Self::F;
    /// Loads [`Simd::LANES`] numbers from `p`, which need not be aligned.
    unsafe fn load(self, p: *const f32) -> Self::F;
    /// Stores [`Simd::LANES`] numbers to `p`, which need not be aligned.
    unsafe fn store(self, p: *mut f32, x: Self::F);
    /// Loads half-precision numbers.
    unsafe fn load_f16(self, p: *const u16) -> Self::F;
    /// Loads bfloat16 numbers, which are the upper halves of fp32 numbers.
    unsafe fn load_bf16(self, p: *const u16) -> Self::F;
    /// Loads 8-bit integers.
    unsafe fn load_i8(self, p: *const i8) -> Self::F;
    /// Stores the upper halves of the numbers, which are bfloat16 numbers: those of `low` and `high` in turn.
    #[inline(always)]
    unsafe fn store_bf16_pairs(self, p: *mut u32, low: Self::F, high: Self::F) {
        let mut halves = [[0.0_f32; 16]; 2];
        // SAFETY: a register has at most 16 lanes, and the caller guarantees that `p` is valid.
        unsafe {
            self.store(halves[0].as_mut_ptr(), low);
            self.store(halves[1].as_mut_ptr(), high);
            let [low, high] = halves;
            for (lane, (low, high)) in low.into_iter().zip(high).enumerate().take(Self::LANES) {
                p.add(lane).write(low.to_bits() >> 16 | high.to_bits() & 0xffff_0000);
            }
        }
    }
    /// Rounds numbers to bfloat16: those of `low`, and then those of `high`. Consecutive ones are pairs of 32 bits.
    #[inline(always)]
    fn round_bf16_pairs(self, low: Self::F, high: Self::F) -> Self::F {
        portable::round_bf16_pairs(self, low, high)
    }
    /// Writes the first `count` columns of a square of [`Simd::LANES`] rows as rows. The rows begin `apart` numbers from each other, those
    /// that are written `to_apart`.
    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, apart: usize, to: *mut f32, to_apart: usize, count: usize) {
        for column in 0..count {
            for row in 0..Self::LANES {
                // SAFETY: the caller guarantees it.
                unsafe { to.add(column * to_apart + row).write(*from.add(row * apart + column)) };
            }
        }
    }
    /// Adds both products of pairs of bfloat16 numbers to `c`. Denormal numbers count as zeros.
    #[inline(always)]
    fn dot_bf16_pairs(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        portable::dot_bf16_pairs(self, a, b, c)
    }
    /// `a * b + c`, rounded once if [`Simd::FUSED`].
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// The larger of each pair. `b` if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller of each pair. `b` if either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// The sum of all lanes. The order depends on the instruction set.
    fn sum(self, x: Self::F) -> f32;
    /// The largest lane. No lane may be NaN.
    fn largest(self, x: Self::F) -> f32;
    /// Whether any lane of `a` is above that of `b`.
    fn any_above(self, a: Self::F, b: Self::F) -> bool;
    /// Rounds to the nearest integer, ties to even.
    fn round(self, x: Self::F) -> Self::F;
    /// e^`x`, to 2 units in the last place. 0 below -87.3, and never more than e^88.
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        // Below -87.3 the result would be subnormal, and is masked to 0. The mask is a factor, so that the trait needs no operation for it.
        let x = self.min(self.splat(88.0), x);
        let kept = self.max(self.splat(-87.3), x);
        let (n, r, p) = exp_parts(self, kept);
        let p = self.fma(self.mul(r, r), p, self.add(r, self.splat(1.0)));
        // 1 where x >= -87.3, otherwise 0: min(1, max(0, (x + 87.3) * huge + 1)).
        let inside = self.fma(self.sub(x, kept), self.splat(1e30), self.splat(1.0));
        let inside = self.min(self.splat(1.0), self.max(self.splat(0.0), inside));
        self.mul(self.mul(p, self.power_of_two(n)), inside)
    }
    /// e^(`x` - `base`) for exponents that are not above 88, to 13 bits: for results that become bfloat16. 0 below -87.7, or already below
    /// -87.
    #[inline(always)]
    fn exp_13_bits(self, x: Self::F, base: Self::F) -> Self::F {
        // 2^r between -0.5 and 0.5, with a relative error of 2^-13.
        const COEFFICIENTS: [f32; 4] = [1.0, 0.693_282_9, 0.242_211, 0.055_008_91];
        // The power of two of -127 is 0.
        let x = self.max(self.splat(-127.0), self.mul(self.sub(x, base), self.splat(std::f32::consts::LOG2_E)));
        let n = self.round(x);
        let r = self.sub(x, n);
        let [lower @ .., highest] = COEFFICIENTS;
        let mut p = self.splat(highest);
        for c in lower.into_iter().rev() {
            p = self.fma(p, r, self.splat(c));
        }
        self.mul(p, self.power_of_two(n))
    }
    /// 2^`n`, for integers from -127 to 127. The result is 0 for -127.
    fn power_of_two(self, n: Self::F) -> Self::F;
}

/// Returns `n`, `r` and `p` such that e^`x` is `(1 + r + r * r * p)` times 2^`n`. The reduction and the polynomial are those of Cephes'
/// `expf`.
#[inline(always)]
fn exp_parts<S: Simd>(s: S, x: S::F) -> (S::F, S::F, S::F) {
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.fma(n, s.splat(-0.693_359_4), x);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let mut p = s.splat(1.987_569_1e-4);
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = s.fma(p, r, s.splat(c));
    }
    (n, r, p)
}

/// The hyperbolic tangent, to a few units in the last place.
///
/// The result is `m / (m + 2)`, where m is e^(2x) - 1. Numbers near 0 keep their precision, because m is computed without adding 1.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    // The result is 1 or -1 beyond these bounds.
    let x = s.max(s.splat(-10.0), s.min(s.splat(10.0), x));
    let (n, r, p) = exp_parts(s, s.add(x, x));
    let power = s.power_of_two(n);
    let m = s.fma(power, s.fma(s.mul(r, r), p, r), s.sub(power, s.splat(1.0)));
    s.div(m, s.add(m, s.splat(2.0)))
}

/// `x * sigmoid(argument)`.
#[inline(always)]
pub(crate) fn swish<S: Simd>(s: S, x: S::F, argument: S::F) -> S::F {
    s.div(x, s.add(s.splat(1.0), s.exp(s.sub(s.splat(0.0), argument))))
}

/// Prefetches what a kernel will read that reads `bytes` bytes at `p` now. For kernels that are bound by arithmetic: the fewest instructions
/// that cover the memory latency. The kernel must call it for all that it reads, or some lines are missed. No address needs to be valid.
#[inline(always)]
pub(crate) fn prefetch_ahead(p: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        prefetch::<1>(p.wrapping_add(2048 + line));
    }
}

/// Like [`prefetch_ahead`], for kernels that are bound by memory. Lines come to the second-level cache early, `FAR` bytes ahead. Then they
/// come to the first in the order of their addresses, which the hardware prefetcher expects; the kernels read them in another order.
#[inline(always)]
pub(crate) fn prefetch_twice<const FAR: usize>(p: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        prefetch::<2>(p.wrapping_add(FAR + line));
        prefetch::<1>(p.wrapping_add(512 + line));
    }
}

/// Prefetches memory that will be written. No address needs to be valid.
#[inline(always)]
pub(crate) fn prefetch_to_write(p: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch is a hint. Processors without this one ignore it.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_ET0>(p.wrapping_add(line).cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = p.wrapping_add(line);
    }
}

/// Prefetches a cache line to the first- or second-level cache. The address need not be valid.
#[inline(always)]
fn prefetch<const LEVEL: u8>(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint, and every processor of this architecture has the instruction.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        if LEVEL == 1 { _mm_prefetch::<_MM_HINT_T0>(p.cast()) } else { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        if LEVEL == 1 {
            std::arch::asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, readonly, preserves_flags));
        } else {
            std::arch::asm!("prfm pldl2keep, [{p}]", p = in(reg) p, options(nostack, readonly, preserves_flags));
        }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}

/// Code that is compiled once for each instruction set.
pub(crate) trait Kernel {
    type Output;
    /// Runs the kernel with the registers of `S`. Implementations, and all functions that they call, must be `#[inline(always)]`.
    fn run<S: Int8>(self, s: S) -> Self::Output;
}

/// An instruction set that kernels are compiled for: vectors, and the unit that multiplies matrices. [`Isa::available`] returns those that
/// the processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa {
    vectors: Vectors,
    matrices: Matrices,
}

/// How the kernels of an instruction set need weights and activations.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    /// Number of columns in a panel of weights.
    panel: usize,
    /// Maximum rows in a tile of activations.
    rows: usize,
    /// Number of a column's 8-bit weights that are adjacent.
    pub(crate) group: usize,
    /// Offset that is added to stored 8-bit weights.
    pub(crate) offset: u8,
}

/// Registers of fp32 lanes and integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Vectors {
    /// Available on every processor.
    Portable,
    /// AVX2 with FMA and F16C: 8 lanes, 16 registers.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 with VNNI: 16 lanes, 32 registers.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// ARMv8: 4 lanes, 32 registers.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

/// The unit that multiplies matrices of bfloat16 weights, and of integer codes with scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Matrices {
    /// None: vectors multiply them.
    Vectors,
    /// Products of bytes in vectors (VNNI), for integer codes with scales only.
    Digits,
    /// AMX with bfloat16. Codes times few rows are products of bytes, with the same results.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// Portable code that computes what AMX computes.
    #[cfg(test)]
    Oracle,
}

impl Isa {
    /// Portable code.
    #[cfg(test)]
    pub(crate) const PORTABLE: Self = Self { vectors: Vectors::Portable, matrices: Matrices::Vectors };
    /// Portable code, for products of bytes too.
    #[cfg(test)]
    pub(crate) const PORTABLE_DIGITS: Self = Self { vectors: Vectors::Portable, matrices: Matrices::Digits };

    /// All instruction sets that this processor has, the fastest first.
    pub fn available() -> Vec<Self> {
        let mut found = Vec::new();
        let mut add = |vectors, matrices| found.push(Self { vectors, matrices });
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            if avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vnni")
            {
                if TileSupport::detect() == TileSupport::Usable {
                    add(Vectors::Avx512, Matrices::Amx);
                }
                add(Vectors::Avx512, Matrices::Digits);
                add(Vectors::Avx512, Matrices::Vectors);
            }
            if avx2 {
                add(Vectors::Avx2, Matrices::Vectors);
            }
        }
        #[cfg(target_arch = "aarch64")]
        add(Vectors::Neon, Matrices::Vectors);
        add(Vectors::Portable, Matrices::Vectors);
        found
    }

    /// Those of [`Isa::available`] that differ in more than products of bytes, which only weights of integer codes use.
    #[cfg(test)]
    pub(crate) fn without_digits() -> Vec<Self> {
        Self::available().into_iter().filter(|isa| isa.matrices != Matrices::Digits).collect()
    }

    /// All instruction sets that this processor has, portable products of bytes, and the oracle of AMX with the fastest vectors and with
    /// portable ones.
    #[cfg(test)]
    pub(crate) fn tested() -> Vec<Self> {
        let mut all = Self::available();
        all.push(Self::PORTABLE_DIGITS);
        all.push(Self::best().with_oracle());
        all.push(Self::PORTABLE.with_oracle());
        all
    }

    /// The same vectors, and the oracle of AMX.
    #[cfg(test)]
    pub(crate) fn with_oracle(self) -> Self {
        Self { matrices: Matrices::Oracle, ..self }
    }

    /// The fastest instruction set that this processor has.
    pub fn best() -> Self {
        Self::available()[0]
    }

    /// A readable name.
    pub fn name(self) -> &'static str {
        #[cfg(target_arch = "x86_64")]
        if self.matrices == Matrices::Amx {
            return "amx";
        }
        if self.matrices == Matrices::Digits {
            return "vnni";
        }
        match self.vectors {
            Vectors::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Vectors::Neon => "neon",
        }
    }

    /// Whether the vectors are portable code.
    pub(crate) fn is_portable(self) -> bool {
        self.vectors == Vectors::Portable
    }

    /// Whether tiles multiply weights of bfloat16, and integer codes times many rows.
    pub fn has_tiles(self) -> bool {
        !matches!(self.matrices, Matrices::Vectors | Matrices::Digits)
    }

    /// Whether products of bytes multiply weights of integer codes.
    pub fn has_digits(self) -> bool {
        self.matrices != Matrices::Vectors
    }

    /// Number of columns in a panel of weights.
    pub(crate) fn panel(self) -> usize {
        self.layout().panel
    }

    /// Maximum rows in a tile of activations.
    pub(crate) fn rows(self) -> usize {
        self.layout().rows
    }

    /// How the kernels need weights and activations.
    pub(crate) fn layout(self) -> Layout {
        struct Of;
        impl Kernel for Of {
            type Output = Layout;
            #[inline(always)]
            fn run<S: Int8>(self, _: S) -> Layout {
                Layout { panel: S::LANES * S::VECTORS, rows: S::ROWS, group: S::GROUP, offset: S::OFFSET as u8 }
            }
        }
        self.run(Of)
    }

    /// Whether the vectors multiply bfloat16 numbers in the processor.
    pub fn has_bf16(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.vectors == Vectors::Avx512 && is_x86_feature_detected!("avx512bf16");
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Runs the version of a kernel that is compiled for this instruction set, with products of bfloat16 where the processor has them.
    #[inline]
    pub(crate) fn run_bf16<K: Kernel>(self, kernel: K) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        if self.has_bf16() {
            // SAFETY: `available` has checked the processor for these vectors, and `has_bf16` for bfloat16.
            return unsafe { avx512::run_bf16(kernel) };
        }
        self.run(kernel)
    }

    /// Runs the version of a kernel that is compiled for this instruction set.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.vectors {
            Vectors::Portable => kernel.run(portable::Portable),
            // SAFETY: only `available` creates values with other vectors, and it has checked the processor.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx2 => unsafe { avx2::run(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx512 => unsafe { avx512::run(kernel) },
            // SAFETY: as above. Every 64-bit ARM processor has NEON.
            #[cfg(target_arch = "aarch64")]
            Vectors::Neon => unsafe { neon::run(kernel) },
        }
    }
}
