//! Root-mean-square normalisation (Zhang and Sennrich, 2019) and layer normalisation (Ba, Kiros and Hinton, 2016).

use crate::simd::{Isa, Kernel, Simd};

/// A layer norm, or without a bias a root-mean-square norm.
#[derive(Debug)]
pub struct Norm {
    /// Factor of each number.
    pub weight: Vec<f32>,
    /// Summand of each number.
    pub bias: Option<Vec<f32>>,
}

impl Norm {
    /// Normalises `x` and writes the result to `out`.
    pub(crate) fn apply(&self, isa: Isa, eps: f32, x: &[f32], out: &mut [f32]) {
        match &self.bias {
            Some(bias) => isa.run(LayerNorm { x, weight: &self.weight, bias, eps, out }),
            None => isa.run(RmsNorm { x, weight: &self.weight, eps, out }),
        }
    }

    /// Normalises in place all numbers of `heads` together if there is a weight for each number, else each head of `head_dim` numbers. A
    /// layer norm always normalises each head.
    pub(crate) fn apply_to_heads(&self, isa: Isa, eps: f32, head_dim: usize, heads: &mut [f32], spare: &mut Vec<f32>) {
        let size = if self.bias.is_some() { head_dim } else { self.weight.len() };
        spare.resize(size, 0.0);
        for (index, x) in heads.chunks_exact_mut(size).enumerate() {
            let own = index * size % self.weight.len();
            let weight = &self.weight[own..own + size];
            match &self.bias {
                Some(bias) => isa.run(LayerNorm { x, weight, bias: &bias[own..own + size], eps, out: spare }),
                None => isa.run(RmsNorm { x, weight, eps, out: spare }),
            }
            x.copy_from_slice(spare);
        }
    }

    pub(crate) fn fits(&self, size: usize) -> bool {
        self.weight.len() == size && self.bias.as_ref().is_none_or(|bias| bias.len() == size)
    }
}

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

/// Shifts `x` to mean 0, scales it to variance 1, multiplies it by `weight`, adds `bias`, and writes it to `out`. All four have the same
/// length.
pub(crate) struct LayerNorm<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) bias: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) out: &'a mut [f32],
}

impl Kernel for LayerNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { x, weight, bias, eps, out } = self;
        let whole = x.len() / S::LANES * S::LANES;
        let mut sums = s.splat(0.0);
        for at in (0..whole).step_by(S::LANES) {
            // SAFETY: `x` has at least `S::LANES` numbers from `at` on.
            sums = s.add(sums, unsafe { s.load(x.as_ptr().add(at)) });
        }
        let mean = (s.sum(sums) + x[whole..].iter().sum::<f32>()) / x.len() as f32;
        let mut squares = s.splat(0.0);
        for at in (0..whole).step_by(S::LANES) {
            // SAFETY: as above.
            let apart = s.sub(unsafe { s.load(x.as_ptr().add(at)) }, s.splat(mean));
            squares = s.fma(apart, apart, squares);
        }
        let rest: f32 = x[whole..].iter().map(|x| (x - mean) * (x - mean)).sum();
        let scale = 1.0 / ((s.sum(squares) + rest) / x.len() as f32 + eps).sqrt();
        for (((out, x), weight), bias) in out.iter_mut().zip(x).zip(weight).zip(bias) {
            *out = (x - mean) * scale * weight + bias;
        }
    }
}

/// Scales a vector to length 1. The result of a zero vector is NaN.
pub(crate) fn scale_to_one(x: &mut [f32]) {
    let length = x.iter().map(|x| x * x).sum::<f32>().sqrt();
    for x in x {
        *x /= length;
    }
}
