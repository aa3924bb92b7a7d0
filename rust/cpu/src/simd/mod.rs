//! Registers of fp32 lanes: one trait, an implementation per instruction set,
//! and the choice between them at run time.

mod int8;
mod portable;

pub(crate) use int8::Int8;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(test)]
mod tests;

/// What the kernels do with registers.
///
/// A value of the type is proof that the processor has the instructions: only
/// [`Isa::run`] makes one, inside a function compiled for them. All methods
/// are inlined there, as kernels must be.
pub(crate) trait Simd: Copy {
    /// fp32 numbers in a register.
    const LANES: usize;
    /// Registers that a panel of weights is wide (2 or 4).
    const VECTORS: usize;
    /// Most rows of activations that a tile has, so that its sums fit the registers beside the operands.
    const ROWS: usize;

    /// A register.
    type F: Copy;

    fn splat(self, x: f32) -> Self::F;
    /// Reads [`Simd::LANES`] numbers from `p`, which need not be aligned.
    unsafe fn load(self, p: *const f32) -> Self::F;
    /// Writes [`Simd::LANES`] numbers to `p`, which need not be aligned.
    unsafe fn store(self, p: *mut f32, x: Self::F);
    /// Reads IEEE half-precision numbers.
    unsafe fn load_f16(self, p: *const u16) -> Self::F;
    /// Reads numbers of which only the upper half of fp32 is kept.
    unsafe fn load_bf16(self, p: *const u16) -> Self::F;
    /// Reads integers of 8 bits.
    unsafe fn load_i8(self, p: *const i8) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// The larger of each pair; `b` where one is not a number.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller of each pair; `b` where one is not a number.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// The sum of all lanes, in an order of the instruction set's own.
    fn sum(self, x: Self::F) -> f32;
    /// The largest lane, of numbers that are not NaN.
    fn largest(self, x: Self::F) -> f32;
    /// Rounds to the nearest integer, ties to even.
    fn round(self, x: Self::F) -> Self::F;
    /// 2 to the power of `n`, integers from -126 to 127.
    fn power_of_two(self, n: Self::F) -> Self::F;
}

/// e to the power of `x`, to 2 units in the last place; 0 below -87.3, and never more than e to the power of 88.
///
/// The reduction and the polynomial are those of Cephes' `expf`.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    // Below the first bound the result would be subnormal. The mask is a factor, so that it needs no operation of its own.
    let x = s.min(s.splat(88.0), x);
    let kept = s.max(s.splat(-87.3), x);
    let (n, r, p) = exp_parts(s, kept);
    let p = s.fma(s.mul(r, r), p, s.add(r, s.splat(1.0)));
    // 1 where x >= -87.3, else 0: min(1, max(0, (x + 87.3) * huge + 1)).
    let inside = s.min(s.splat(1.0), s.max(s.splat(0.0), s.fma(s.sub(x, kept), s.splat(1e30), s.splat(1.0))));
    s.mul(s.mul(p, s.power_of_two(n)), inside)
}

/// `n`, `r` and `p` such that e to the power of `x` is (1 + r + r * r * p) times 2 to the power of `n`.
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
/// It is m / (m + 2), where m is e to the power of 2x, less 1. Numbers near 0 keep their digits, since there the 1 is never added.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    // Beyond these bounds the result is 1 or -1.
    let x = s.max(s.splat(-10.0), s.min(s.splat(10.0), x));
    let (n, r, p) = exp_parts(s, s.add(x, x));
    let power = s.power_of_two(n);
    let m = s.fma(power, s.fma(s.mul(r, r), p, r), s.sub(power, s.splat(1.0)));
    s.div(m, s.add(m, s.splat(2.0)))
}

/// Asks for the cache line at `p`, which need not be anybody's, to be read soon.
#[inline(always)]
pub(crate) fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which every processor of this kind knows.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}

/// Work that is compiled once for each instruction set.
pub(crate) trait Kernel {
    type Output;
    /// Does it with the registers of `S`. To be `#[inline(always)]`, as all that it calls.
    fn run<S: Int8>(self, s: S) -> Self::Output;
}

/// An instruction set that kernels are compiled for. All but `Portable` come from [`Isa::available`] alone: nobody else makes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// What every processor has.
    Portable,
    /// AVX2 with FMA and F16C: 8 lanes, 16 registers.
    #[cfg(target_arch = "x86_64")]
    #[non_exhaustive]
    Avx2,
    /// AVX-512 with VNNI: 16 lanes, 32 registers.
    #[cfg(target_arch = "x86_64")]
    #[non_exhaustive]
    Avx512,
    /// ARMv8: 4 lanes, 32 registers.
    #[cfg(target_arch = "aarch64")]
    #[non_exhaustive]
    Neon,
}

impl Isa {
    /// All that this processor has, the fastest first.
    pub fn available() -> Vec<Self> {
        let mut found = Vec::new();
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
                found.push(Self::Avx512);
            }
            if avx2 {
                found.push(Self::Avx2);
            }
        }
        #[cfg(target_arch = "aarch64")]
        found.push(Self::Neon);
        found.push(Self::Portable);
        found
    }

    /// The fastest that this processor has.
    pub fn best() -> Self {
        Self::available()[0]
    }

    /// A word for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "neon",
        }
    }

    /// Columns in a panel of weights.
    pub(crate) fn panel(self) -> usize {
        struct Width;
        impl Kernel for Width {
            type Output = usize;
            #[inline(always)]
            fn run<S: Simd>(self, _: S) -> usize {
                S::LANES * S::VECTORS
            }
        }
        self.run(Width)
    }

    /// Most rows in a tile of activations.
    pub(crate) fn rows(self) -> usize {
        struct Rows;
        impl Kernel for Rows {
            type Output = usize;
            #[inline(always)]
            fn run<S: Simd>(self, _: S) -> usize {
                S::ROWS
            }
        }
        self.run(Rows)
    }

    /// Runs a kernel as compiled for this instruction set.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Self::Portable => kernel.run(portable::Portable),
            // SAFETY: values other than `Portable` come from `available` alone, which has asked the processor.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2::run(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512::run(kernel) },
            // SAFETY: as above; NEON is part of every 64-bit ARM processor.
            #[cfg(target_arch = "aarch64")]
            Self::Neon => unsafe { neon::run(kernel) },
        }
    }
}
