//! A causal convolution of each channel over the last few tokens.

use std::ops::Range;

use crate::simd::{Kernel, Simd, swish};
use crate::unsafe_slice::UnsafeSlice;

/// The most tokens that a convolution sees, with the current one.
pub(crate) const MAX_TAPS: usize = 4;

/// What is done before and after the convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// `x * sigmoid(x)` of the result.
    Swish,
    /// The input is multiplied by the number this many places before it, and the result by the number in the middle between them.
    Gated(usize),
}

/// Replaces channels of consecutive tokens by their convolution, and the state by the last inputs.
pub(crate) struct Convolve<'a> {
    /// \[taps\]\[all channels\], that of the current token last.
    pub(crate) taps: &'a [f32],
    pub(crate) bias: Option<&'a [f32]>,
    /// Number of all channels.
    pub(crate) all: usize,
    /// The channels, whose number is a multiple of 16.
    pub(crate) channels: Range<usize>,
    pub(crate) form: Form,
    /// Channel 0 of token t is at `first + t * stride`.
    pub(crate) rows: UnsafeSlice<'a, f32>,
    pub(crate) first: usize,
    pub(crate) stride: usize,
    pub(crate) tokens: Range<usize>,
    /// Channel 0 of the earliest of the last inputs, \[taps - 1\]\[all channels\], is at `state`.
    pub(crate) states: UnsafeSlice<'a, f32>,
    pub(crate) state: usize,
}

impl Kernel for Convolve<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.taps.len() / self.all {
            2 => self.convolve::<S, 2>(s),
            3 => self.convolve::<S, 3>(s),
            _ => self.convolve::<S, MAX_TAPS>(s),
        }
    }
}

impl Convolve<'_> {
    /// The convolution over `TAPS` tokens, one register of channels after another. A sum begins with the bias, then the earliest token.
    #[inline(always)]
    fn convolve<S: Simd, const TAPS: usize>(self, s: S) {
        let Self { taps, bias, all, ref channels, form, rows, first, stride, ref tokens, states, state } = self;
        assert!(channels.len().is_multiple_of(S::LANES) && channels.end <= all && taps.len() == TAPS * all);
        assert!(bias.is_none_or(|bias| bias.len() == all));
        for channel in channels.clone().step_by(S::LANES) {
            let column = |tap: usize| states.pointer(state + tap * all + channel, S::LANES);
            // SAFETY: the registers are within the arrays, which is asserted above and by `pointer`. The caller gives the channels of the
            // rows and of the state to one thread.
            unsafe {
                let weights: [S::F; TAPS] = std::array::from_fn(|tap| s.load(taps.as_ptr().add(tap * all + channel)));
                let bias = bias.map_or(s.splat(0.0), |bias| s.load(bias.as_ptr().add(channel)));
                // The inputs that the next token's result needs; the last place is for its own.
                let mut seen: [S::F; TAPS] = std::array::from_fn(|tap| if tap + 1 < TAPS { s.load(column(tap)) } else { s.splat(0.0) });
                for token in tokens.clone() {
                    let at = first + token * stride + channel;
                    let place = rows.pointer(at, S::LANES);
                    let mut x = s.load(place);
                    if let Form::Gated(before) = form {
                        x = s.mul(x, s.load(rows.pointer(at - before, S::LANES)));
                    }
                    seen[TAPS - 1] = x;
                    let mut y = bias;
                    for (weight, x) in weights.iter().zip(&seen) {
                        y = s.fma(*weight, *x, y);
                    }
                    seen.copy_within(1.., 0);
                    let result = match form {
                        Form::Swish => swish(s, y, y),
                        Form::Gated(before) => s.mul(y, s.load(rows.pointer(at - before / 2, S::LANES))),
                    };
                    s.store(place, result);
                }
                for (tap, x) in seen[..TAPS - 1].iter().enumerate() {
                    s.store(column(tap), *x);
                }
            }
        }
    }
}
