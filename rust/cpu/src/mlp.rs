//! A gated MLP, as data.

use crate::linear::{Activation, Linear};
use crate::simd::Isa;
use crate::weights::Merge;

/// `down_proj(activation(gate_proj(x)) * up_proj(x))`.
#[derive(Debug)]
pub struct GatedMlp {
    /// `gate_proj` and `up_proj`, merged as [`Merge::Gated`].
    pub gate_up_proj: Linear,
    /// `down_proj`.
    pub down_proj: Linear,
    /// Activation of the gate.
    pub activation: Activation,
}

/// Weights or options do not fit each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} do not fit the decoder's configuration")]
pub struct ShapeError {
    /// The weights or options that do not fit.
    pub what: &'static str,
}

/// Returns an error that names `what`, unless `fits` is true.
pub(crate) fn check(fits: bool, what: &'static str) -> Result<(), ShapeError> {
    if fits { Ok(()) } else { Err(ShapeError { what }) }
}

impl GatedMlp {
    /// Width of the inner layer.
    pub(crate) fn inner(&self) -> usize {
        self.gate_up_proj.matrix.outs
    }

    /// Whether its matrices fit each other and a residual stream of width `hidden`.
    pub(crate) fn check(&self, isa: Isa, hidden: usize) -> Result<(), ShapeError> {
        check(self.gate_up_proj.matrix.is(isa, self.inner(), hidden, Merge::Gated), "gate_proj and up_proj")?;
        check(self.down_proj.matrix.is(isa, hidden, self.inner(), Merge::Stacked), "weights of down_proj")
    }
}
