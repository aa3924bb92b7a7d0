//! An MLP, as data.

use crate::linear::{Activation, Epilogue, Linear};
use crate::simd::Isa;
use crate::weights::Merge;

/// Two linear layers and what is between them.
#[derive(Debug)]
pub struct Mlp {
    /// The first layer: `gate_proj` and `up_proj`, merged as [`Merge::Gated`], or `up_proj` if there is no gate.
    pub gate_up_proj: Linear,
    /// `down_proj`.
    pub down_proj: Linear,
    /// The input of `down_proj`.
    pub inner: Inner,
}

/// What the second layer of an MLP reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Inner {
    /// `activation(gate_proj(x)) * up_proj(x)`.
    Gated(Activation),
    /// The squares of the positive numbers of `up_proj(x)`, and 0 for the others (Nemotron H).
    ReluSquared,
    /// The positive numbers of `up_proj(x)`, and 0 for the others (OPT).
    Relu,
    /// GELU of `up_proj(x)` (GPT-NeoX).
    Gelu,
    /// GELU of `up_proj(x)`, with the tanh approximation (`StarCoder2`).
    GeluTanh,
}

impl Inner {
    /// How the first layer's tensors are merged.
    pub(crate) fn merge(self) -> Merge {
        if let Self::Gated(_) = self { Merge::Gated } else { Merge::Stacked }
    }

    /// What is done with the sums of the first layer.
    pub(crate) fn epilogue(self) -> Epilogue {
        match self {
            Self::Gated(activation) => Epilogue::Gate(activation),
            Self::ReluSquared => Epilogue::ReluSquared,
            Self::Relu => Epilogue::Relu,
            Self::Gelu => Epilogue::Gelu,
            Self::GeluTanh => Epilogue::GeluTanh,
        }
    }
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

impl Mlp {
    /// Width of the inner layer.
    pub(crate) fn width(&self) -> usize {
        self.gate_up_proj.matrix.outs
    }

    /// Whether its matrices fit each other and a residual stream of width `hidden`.
    pub(crate) fn check(&self, isa: Isa, hidden: usize) -> Result<(), ShapeError> {
        check(self.gate_up_proj.matrix.is(isa, self.width(), hidden, self.inner.merge()), "gate_proj and up_proj")?;
        check(self.down_proj.matrix.is(isa, hidden, self.width(), Merge::Stacked), "weights of down_proj")
    }
}
