//! Epilogues: operations on a linear layer's sums while they are in the cache.

use crate::simd::{Kernel, Simd, exp, tanh};

/// Activation of the gate in a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU with the tanh approximation.
    GeluTanh,
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
}

/// Applies an epilogue other than [`Epilogue::Gate`] to a row of a panel's sums.
pub(super) struct Finish<'a> {
    pub(super) sums: &'a mut [f32],
    pub(super) out: &'a mut [f32],
    pub(super) epilogue: Epilogue,
}

impl Kernel for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { sums, out, epilogue } = self;
        if let Epilogue::Add(scale) = epilogue {
            return out.iter_mut().zip(sums).for_each(|(x, sum)| *x += *sum * scale);
        }
        match epilogue {
            Epilogue::Softcap(cap) => map(s, sums, |x| softcap(s, x, cap)),
            Epilogue::Gelu => map(s, sums, |x| gelu(s, x)),
            Epilogue::Store | Epilogue::Add(_) | Epilogue::Gate(_) => {}
        }
        out.copy_from_slice(&sums[..out.len()]);
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
    let tail = s.mul(s.mul(s.mul(p, t), exp(s, s.sub(s.splat(0.0), s.mul(z, z)))), s.splat(0.5));
    s.sub(s.max(x, s.splat(0.0)), s.mul(size, tail))
}

/// `c * tanh(x / c)`.
#[inline(always)]
pub(crate) fn softcap<S: Simd>(s: S, x: S::F, cap: f32) -> S::F {
    s.mul(s.splat(cap), tanh(s, s.div(x, s.splat(cap))))
}

/// Computes `activation(gate) * up` for a row of the sums of two panels.
pub(super) struct Gate<'a> {
    pub(super) gates: &'a mut [f32],
    pub(super) ups: &'a mut [f32],
    pub(super) biases: [Option<&'a [f32]>; 2],
    pub(super) activation: Activation,
    pub(super) out: &'a mut [f32],
}

impl Kernel for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { gates, ups, biases, activation, out } = self;
        add_bias(gates, biases[0]);
        add_bias(ups, biases[1]);
        match activation {
            Activation::Silu => gate(s, gates, ups, |gate| gate),
            // `0.5 * (1 + tanh(u))` equals `sigmoid(2 * u)`.
            Activation::GeluTanh => gate(s, gates, ups, |gate| {
                let cubic = s.fma(s.mul(gate, gate), s.splat(0.044_715), s.splat(1.0));
                s.mul(s.mul(gate, cubic), s.splat(2.0 * 0.797_884_6))
            }),
        }
        out.copy_from_slice(&gates[..out.len()]);
    }
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
            let activated = s.div(gate, s.add(s.splat(1.0), exp(s, s.sub(s.splat(0.0), argument(gate)))));
            s.store(gates.as_mut_ptr().add(at), s.mul(activated, up));
        }
    }
}

/// Adds a bias, if there is one.
pub(super) fn add_bias(sums: &mut [f32], bias: Option<&[f32]>) {
    sums.iter_mut().zip(bias.into_iter().flatten()).for_each(|(sum, b)| *sum += b);
}
