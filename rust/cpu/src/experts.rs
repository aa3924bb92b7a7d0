//! A mixture of experts, as data.

use crate::linear::Linear;
use crate::mlp::{Inner, Mlp, ShapeError, check};
use crate::router::Choice;
use crate::simd::Isa;
use crate::weights::Merge;

/// MLPs of one shape, of which a router chooses a few for each token. The output is the weighted sum of their outputs, and that of a
/// shared expert, if there is one.
#[derive(Debug)]
pub struct Mixture {
    /// The router's projection: one row for each expert, and last a row for the gate of the shared expert if it has one.
    pub router: Linear,
    /// The choice of experts.
    pub choice: Choice,
    /// The first layers of all experts: `gate_proj` and `up_proj`, merged as [`Merge::Gated`], or `up_proj` if there is no gate.
    pub gate_up_proj: Linear,
    /// `down_proj` of all experts.
    pub down_proj: Linear,
    /// The input of `down_proj`.
    pub inner: Inner,
    /// The expert that all tokens use.
    pub shared: Option<SharedExpert>,
    /// The norms of a mixture whose block's norm is that of the shared expert alone.
    pub norms: Option<MixtureNorms>,
}

/// The weights of norms inside a mixture (Gemma 4). The router and the experts read the residual stream, each through a norm of its own.
#[derive(Debug)]
pub struct MixtureNorms {
    /// Of the router's input.
    pub router: Vec<f32>,
    /// Of the experts' input.
    pub input: Vec<f32>,
    /// Of the sum of the experts' outputs.
    pub output: Vec<f32>,
    /// Of the shared expert's output.
    pub shared_output: Vec<f32>,
}

/// The expert that all tokens use.
#[derive(Debug)]
pub struct SharedExpert {
    /// The expert.
    pub mlp: Mlp,
    /// Whether the output is multiplied by the sigmoid of the router's last logit (Qwen).
    pub gated: bool,
}

impl Mixture {
    /// Number of experts, without the shared one.
    pub(crate) fn experts(&self) -> usize {
        self.gate_up_proj.matrix.count
    }

    /// Width of an expert's inner layer.
    pub(crate) fn expert_inner(&self) -> usize {
        self.gate_up_proj.matrix.outs
    }

    /// Number of logits of a token.
    pub(crate) fn logits(&self) -> usize {
        self.router.matrix.outs
    }

    /// Width of the inner layers that a token uses at once.
    pub(crate) fn width(&self) -> usize {
        let shared = self.shared.as_ref().map_or(0, |shared| shared.mlp.width());
        shared.max(self.choice.used * self.expert_inner())
    }

    /// The layers that all tokens use.
    pub(crate) fn common(&self) -> impl Iterator<Item = &Linear> {
        let shared = self.shared.iter().flat_map(|shared| [&shared.mlp.gate_up_proj, &shared.mlp.down_proj]);
        std::iter::once(&self.router).chain(shared)
    }

    pub(crate) fn check(&self, isa: Isa, hidden: usize) -> Result<(), ShapeError> {
        let (experts, inner) = (self.experts(), self.expert_inner());
        let gates = usize::from(self.shared.as_ref().is_some_and(|shared| shared.gated));
        check(self.choice.fits(experts), "the number of experts of a token, their groups or their biases")?;
        check(self.router.matrix.is(isa, experts + gates, hidden, Merge::Stacked), "weights of the router")?;
        check(self.gate_up_proj.matrix.is_of(experts, isa, inner, hidden, self.inner.merge()), "gate_proj and up_proj of the experts")?;
        check(self.down_proj.matrix.is_of(experts, isa, hidden, inner, Merge::Stacked), "down_proj of the experts")?;
        let norms = self.norms.iter().flat_map(|norms| [&norms.router, &norms.input, &norms.output, &norms.shared_output]);
        check(norms.into_iter().all(|norm| norm.len() == hidden), "norms inside of the experts")?;
        self.shared.as_ref().map_or(Ok(()), |shared| shared.mlp.check(isa, hidden))
    }
}
