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
        if let Epilogue::Softcap(cap) = epilogue {
            assert!(sums.len().is_multiple_of(S::LANES));
            for at in (0..sums.len()).step_by(S::LANES) {
                // SAFETY: the slice has at least `S::LANES` numbers from `at` on.
                unsafe {
                    let x = s.load(sums.as_ptr().add(at));
                    s.store(sums.as_mut_ptr().add(at), softcap(s, x, cap));
                }
            }
        }
        out.copy_from_slice(&sums[..out.len()]);
    }
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
