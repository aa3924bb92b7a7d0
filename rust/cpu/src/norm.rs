//! Root-mean-square normalisation (Zhang and Sennrich, 2019).

use crate::simd::{Kernel, Simd};

/// Scales `x` to root mean square 1, multiplies it by `weight`, and writes it to `out`. All three have the same length.
pub(crate) struct RmsNorm<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { x, weight, eps, out } = self;
        let whole = x.len() / S::LANES * S::LANES;
        let mut squares = s.splat(0.0);
        for at in (0..whole).step_by(S::LANES) {
            // SAFETY: `x` has at least `S::LANES` numbers from `at` on.
            let x = unsafe { s.load(x.as_ptr().add(at)) };
            squares = s.fma(x, x, squares);
        }
        let rest: f32 = x[whole..].iter().map(|x| x * x).sum();
        let scale = 1.0 / ((s.sum(squares) + rest) / x.len() as f32 + eps).sqrt();
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = x * scale * weight;
        }
    }
}
