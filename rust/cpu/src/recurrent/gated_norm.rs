//! Root-mean-square norms of the outputs of heads, with a gate before or after it.

use crate::simd::{Kernel, Simd, swish};

/// Scales each group of `x` to root mean square 1 and multiplies it by `weight` and by `gate * sigmoid(gate)`, in place.
pub(crate) struct GatedNorm<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) gate: &'a [f32],
    /// The weights of one group, or of all.
    pub(crate) weight: &'a [f32],
    /// Size of a group, a multiple of 16.
    pub(crate) group: usize,
    pub(crate) eps: f32,
    /// Whether the gate is applied before the norm (Mamba 2), or after it.
    pub(crate) gate_first: bool,
}

impl Kernel for GatedNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { x, gate, weight, group, eps, gate_first } = self;
        assert!(x.len() == gate.len() && group.is_multiple_of(S::LANES) && [group, x.len()].contains(&weight.len()));
        let gates = gate.chunks_exact(group);
        for (index, (x, gate)) in x.chunks_exact_mut(group).zip(gates).enumerate() {
            let weight = &weight[index * group % weight.len()..][..group];
            let mut squares = s.splat(0.0);
            // SAFETY: the slices have `group` numbers, which are whole registers.
            unsafe {
                for at in (0..group).step_by(S::LANES) {
                    let mut y = s.load(x.as_ptr().add(at));
                    if gate_first {
                        let gate = s.load(gate.as_ptr().add(at));
                        y = s.mul(y, swish(s, gate, gate));
                        s.store(x.as_mut_ptr().add(at), y);
                    }
                    squares = s.fma(y, y, squares);
                }
                let scale = s.splat(1.0 / (s.sum(squares) / group as f32 + eps).sqrt());
                for at in (0..group).step_by(S::LANES) {
                    let mut y = s.mul(s.mul(s.load(x.as_ptr().add(at)), scale), s.load(weight.as_ptr().add(at)));
                    if !gate_first {
                        let gate = s.load(gate.as_ptr().add(at));
                        y = s.mul(y, swish(s, gate, gate));
                    }
                    s.store(x.as_mut_ptr().add(at), y);
                }
            }
        }
    }
}
