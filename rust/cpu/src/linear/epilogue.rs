//! Epilogues: operations on a linear layer's sums while they are in the cache.

use crate::simd::{Kernel, Simd, swish, tanh};
use crate::unsafe_slice::UnsafeSlice;

/// Activation of the gate in a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU with the tanh approximation.
    GeluTanh,
    /// `x * sigmoid(slope * x)` of the gate, which is at most `limit`, times the value plus one, which is within `limit` on both sides of
    /// 0 (gpt-oss).
    Clamped {
        /// Factor of the sigmoid's argument.
        slope: f32,
        /// Limit of the gate and of the value.
        limit: f32,
    },
    /// GELU.
    Gelu,
}

/// The operation on the sums.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Epilogue {
    /// Store the sums.
    Store,
    /// Multiply the sums by this factor and add them to the output.
    Add(f32),
    /// For a gated matrix: store `activation(gate) * up`.
    Gate(Activation),
    /// Store `c * tanh(sum / c)`.
    Softcap(f32),
    /// Store GELU of the sums.
    Gelu,
    /// Store GELU of the sums, with the tanh approximation.
    GeluTanh,
    /// Store positive sums, and 0 for the others.
    Relu,
    /// Store the squares of positive sums, and 0 for the others.
    ReluSquared,
}

/// Adds the biases to a panel's sums, applies an epilogue, and writes the results.
pub(super) struct Finish<'a> {
    /// \[rows\]\[columns of the panel\].
    pub(super) sums: &'a mut [f32],
    /// The sums that the activated `sums` are multiplied by, for [`Epilogue::Gate`].
    pub(super) ups: &'a mut [f32],
    /// Biases of `sums` and of `ups`.
    pub(super) biases: [Option<&'a [f32]>; 2],
    pub(super) epilogue: Epilogue,
    /// A row's results begin `stride` numbers after those of the row before. The first row's begin at `first`.
    pub(super) out: UnsafeSlice<'a, f32>,
    pub(super) first: usize,
    pub(super) stride: usize,
    /// Columns that exist.
    pub(super) count: usize,
}

impl Kernel for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { sums, ups, biases, epilogue, out, first, stride, count } = self;
        let width = S::VECTORS * S::LANES;
        for (row, sums) in sums.chunks_exact_mut(width).enumerate() {
            add_bias(sums, biases[0]);
            match epilogue {
                Epilogue::Gate(activation) => {
                    let ups = &mut ups[row * width..(row + 1) * width];
                    add_bias(ups, biases[1]);
                    activate(s, sums, ups, activation);
                }
                Epilogue::Softcap(cap) => map(s, sums, |x| softcap(s, x, cap)),
                Epilogue::Gelu => map(s, sums, |x| gelu(s, x)),
                Epilogue::GeluTanh => map(s, sums, |x| swish(s, x, twice_tanh(s, x))),
                // NaN is the result if it is the second argument.
                Epilogue::Relu => map(s, sums, |x| s.max(s.splat(0.0), x)),
                Epilogue::ReluSquared => map(s, sums, |x| {
                    let positive = s.max(s.splat(0.0), x);
                    s.mul(positive, positive)
                }),
                Epilogue::Store | Epilogue::Add(_) => {}
            }
            // SAFETY: `Packed::multiply` gives the columns of a panel in each row to one thread.
            let out = unsafe { out.write(first + row * stride, count) };
            write(s, sums, out, epilogue);
        }
    }
}

/// Stores a row's results, or adds them to the output.
#[inline(always)]
fn write<S: Simd>(s: S, sums: &[f32], out: &mut [f32], epilogue: Epilogue) {
    let whole = out.len() / S::LANES * S::LANES;
    assert!(out.len() <= sums.len());
    for at in (0..whole).step_by(S::LANES) {
        // SAFETY: both slices have at least `S::LANES` numbers from `at` on.
        unsafe {
            let (sum, to) = (s.load(sums.as_ptr().add(at)), out.as_mut_ptr().add(at));
            s.store(to, if let Epilogue::Add(scale) = epilogue { s.add(s.load(to), s.mul(sum, s.splat(scale))) } else { sum });
        }
    }
    for (x, sum) in out[whole..].iter_mut().zip(&sums[whole..]) {
        *x = if let Epilogue::Add(scale) = epilogue { *x + sum * scale } else { *sum };
    }
}

/// Replaces each number by a function of it.
#[inline(always)]
fn map<S: Simd>(s: S, numbers: &mut [f32], function: impl Fn(S::F) -> S::F) {
    assert!(numbers.len().is_multiple_of(S::LANES));
    for at in (0..numbers.len()).step_by(S::LANES) {
        // SAFETY: the slice has at least `S::LANES` numbers from `at` on.
        unsafe {
            let x = s.load(numbers.as_ptr().add(at));
            s.store(numbers.as_mut_ptr().add(at), function(x));
        }
    }
}

/// x times the normal distribution's cumulative function at x, with an absolute error below 1e-6.
///
/// The error function is formula 7.1.26 of Abramowitz and Stegun. `max(x, 0) - |x| * tail`, where `tail` is the part above |x|, is exact
/// on both sides of 0.
#[inline(always)]
fn gelu<S: Simd>(s: S, x: S::F) -> S::F {
    let size = s.max(x, s.sub(s.splat(0.0), x));
    let z = s.mul(size, s.splat(std::f32::consts::FRAC_1_SQRT_2));
    let t = s.div(s.splat(1.0), s.fma(z, s.splat(0.327_591_1), s.splat(1.0)));
    let mut p = s.splat(1.061_405_4);
    for c in [-1.453_152_1, 1.421_413_8, -0.284_496_74, 0.254_829_6] {
        p = s.fma(p, t, s.splat(c));
    }
    let tail = s.mul(s.mul(s.mul(p, t), s.exp(s.sub(s.splat(0.0), s.mul(z, z)))), s.splat(0.5));
    s.sub(s.max(x, s.splat(0.0)), s.mul(size, tail))
}

/// `c * tanh(x / c)`.
#[inline(always)]
pub(crate) fn softcap<S: Simd>(s: S, x: S::F, cap: f32) -> S::F {
    s.mul(s.splat(cap), tanh(s, s.div(x, s.splat(cap))))
}

/// Replaces each gate by `activation(gate) * up`. Their number must be a multiple of 16. The values of `ups` are undefined afterwards.
pub(crate) struct Activate<'a> {
    pub(crate) gates: &'a mut [f32],
    pub(crate) ups: &'a mut [f32],
    pub(crate) activation: Activation,
}

impl Kernel for Activate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        activate(s, self.gates, self.ups, self.activation);
    }
}

/// Replaces each gate by `activation(gate) * up`.
#[inline(always)]
fn activate<S: Simd>(s: S, gates: &mut [f32], ups: &mut [f32], activation: Activation) {
    match activation {
        Activation::Clamped { slope, limit } => {
            // NaN is the result if it is the second argument.
            map(s, gates, |gate| s.min(s.splat(limit), gate));
            map(s, ups, |up| s.add(s.max(s.splat(-limit), s.min(s.splat(limit), up)), s.splat(1.0)));
            gate(s, gates, ups, |gate| s.mul(gate, s.splat(slope)));
        }
        Activation::Silu => gate(s, gates, ups, |gate| gate),
        Activation::Gelu => {
            map(s, gates, |x| gelu(s, x));
            gates.iter_mut().zip(ups).for_each(|(gate, up)| *gate *= *up);
        }
        Activation::GeluTanh => gate(s, gates, ups, |gate| twice_tanh(s, gate)),
    }
}

/// The argument of the sigmoid by which GELU with the tanh approximation multiplies x: `0.5 * (1 + tanh(u))` equals `sigmoid(2 * u)`.
#[inline(always)]
fn twice_tanh<S: Simd>(s: S, x: S::F) -> S::F {
    let cubic = s.fma(s.mul(x, x), s.splat(0.044_715), s.splat(1.0));
    s.mul(s.mul(x, cubic), s.splat(2.0 * 0.797_884_6))
}

/// Replaces each gate by `gate * sigmoid(argument(gate)) * up`.
#[inline(always)]
fn gate<S: Simd>(s: S, gates: &mut [f32], ups: &[f32], argument: impl Fn(S::F) -> S::F) {
    assert!(gates.len() == ups.len() && gates.len().is_multiple_of(S::LANES));
    for at in (0..gates.len()).step_by(S::LANES) {
        // SAFETY: both slices have at least `S::LANES` numbers from `at` on.
        unsafe {
            let gate = s.load(gates.as_ptr().add(at));
            let up = s.load(ups.as_ptr().add(at));
            s.store(gates.as_mut_ptr().add(at), s.mul(swish(s, gate, argument(gate)), up));
        }
    }
}

/// Adds a bias, if there is one.
#[inline(always)]
fn add_bias(sums: &mut [f32], bias: Option<&[f32]>) {
    for (sum, b) in sums.iter_mut().zip(bias.unwrap_or_default()) {
        *sum += b;
    }
}
