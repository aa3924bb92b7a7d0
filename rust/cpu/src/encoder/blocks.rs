//! The blocks of an encoder, as data. Each block reads the states and adds its output to them.

use crate::linear::{Activation, Linear};
use crate::mlp::{ShapeError, check};
use crate::norm::Norm;
use crate::rope::Rope;
use crate::simd::Isa;
use crate::weights::Merge;

/// Configuration that all blocks of an encoder share.
#[derive(Clone, Debug)]
pub struct EncoderConfig {
    /// Size of the hidden state.
    pub hidden_size: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key and value heads.
    pub num_kv_heads: usize,
    /// Size of a head.
    pub head_dim: usize,
    /// Epsilon of all norms.
    pub norm_eps: f32,
    /// Factor of the embeddings (Gemma).
    pub embedding_scale: f32,
    /// Factor of the dot products of queries and keys.
    pub attention_scale: f32,
    /// Whether a token attends to no later one.
    pub causal: bool,
    /// What is added to a head's scores by how far the key is after the query, \[heads\]\[2 `longest` - 1\] from the smallest distance on.
    pub distances: Option<Vec<f32>>,
    /// Rotary embeddings. Attention blocks refer to them by index.
    pub ropes: Vec<Rope>,
    /// The most tokens of a text.
    pub longest: usize,
}

/// A block: attention or an MLP, and which of its input, its output and their sum are normalised.
#[derive(Debug)]
pub struct EncoderBlock {
    /// Attention or MLP.
    pub kind: EncoderBlockKind,
    /// Normalises what the block reads; the states stay as they are.
    pub input_norm: Option<Norm>,
    /// Normalises the output before it is added to the states.
    pub output_norm: Option<Norm>,
    /// Normalises the states after the output was added to them.
    pub sum_norm: Option<Norm>,
}

/// The computation of a block.
#[derive(Debug)]
pub enum EncoderBlockKind {
    /// Attention within a text.
    Attention(TextAttention),
    /// A multilayer perceptron.
    Mlp(EncoderMlp),
}

/// Attention of each token to all tokens of its text, or to those near it.
#[derive(Debug)]
pub struct TextAttention {
    /// Query, key and value projections, stacked.
    pub qkv_proj: Linear,
    /// Output projection.
    pub o_proj: Linear,
    /// Weights of the query norm and the key norm, which apply to each head.
    pub qk_norm: Option<[Vec<f32>; 2]>,
    /// Index of the rotary embedding in [`EncoderConfig::ropes`].
    pub rope: Option<usize>,
    /// How far away a token may be on either side to be attended to. `None`: any distance.
    pub window: Option<usize>,
}

/// `down_proj(gelu(up_proj(x)))`, or with a gate `down_proj(activation(gate_proj(x)) * up_proj(x))`.
#[derive(Debug)]
pub struct EncoderMlp {
    /// The first layer; with a gate, `gate_proj` and `up_proj`, merged as [`Merge::Gated`].
    pub up_proj: Linear,
    /// The second layer.
    pub down_proj: Linear,
    /// Activation of the gate. `None`: there is no gate.
    pub gate: Option<Activation>,
}

/// A layer that is applied to a text's combined state.
#[derive(Debug)]
pub struct Dense {
    /// The weights.
    pub linear: Linear,
    /// What is applied to the products.
    pub activation: DenseActivation,
    /// Normalises the result.
    pub norm: Option<Norm>,
}

/// The function that is applied to the products of a [`Dense`] layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenseActivation {
    /// None.
    Identity,
    /// tanh.
    Tanh,
    /// GELU.
    Gelu,
}

impl EncoderConfig {
    /// Width of a token's queries, and width of its keys or values.
    pub(super) fn widths(&self) -> (usize, usize) {
        (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim)
    }

    /// Width of a token's queries, keys and values together.
    pub(super) fn qkv_width(&self) -> usize {
        let (queries, kv) = self.widths();
        queries + 2 * kv
    }

    pub(super) fn check(&self) -> Result<(), ShapeError> {
        check(self.num_kv_heads > 0 && self.num_heads.is_multiple_of(self.num_kv_heads) && self.head_dim > 0, "heads")?;
        check(self.ropes.iter().all(|rope| rope.width() <= self.head_dim), "rotary embeddings")?;
        let entries = self.num_heads * (2 * self.longest).saturating_sub(1);
        check(self.distances.as_ref().is_none_or(|distances| distances.len() == entries), "distances")?;
        check(self.hidden_size > 0 && self.longest > 0, "sizes")
    }
}

impl EncoderBlock {
    /// The block's first and second linear layer.
    pub(super) fn linears(&self) -> [&Linear; 2] {
        match &self.kind {
            EncoderBlockKind::Attention(attention) => [&attention.qkv_proj, &attention.o_proj],
            EncoderBlockKind::Mlp(mlp) => [&mlp.up_proj, &mlp.down_proj],
        }
    }

    pub(super) fn check(&self, isa: Isa, config: &EncoderConfig) -> Result<(), ShapeError> {
        let hidden = config.hidden_size;
        check([&self.input_norm, &self.output_norm, &self.sum_norm].into_iter().flatten().all(|norm| norm.fits(hidden)), "norms")?;
        match &self.kind {
            EncoderBlockKind::Attention(attention) => attention.check(isa, config),
            EncoderBlockKind::Mlp(mlp) => mlp.check(isa, hidden),
        }
    }
}

impl TextAttention {
    fn check(&self, isa: Isa, config: &EncoderConfig) -> Result<(), ShapeError> {
        let hidden = config.hidden_size;
        check(self.qk_norm.iter().flatten().all(|norm| norm.len() == config.head_dim), "norms of queries and keys")?;
        check(self.qkv_proj.matrix.is(isa, config.qkv_width(), hidden, Merge::Stacked), "query, key and value")?;
        check(self.o_proj.matrix.is(isa, hidden, config.widths().0, Merge::Stacked), "weights of attention's output")?;
        check(self.rope.is_none_or(|rope| rope < config.ropes.len()), "rotary embeddings")
    }
}

impl EncoderMlp {
    fn check(&self, isa: Isa, hidden: usize) -> Result<(), ShapeError> {
        let inner = self.up_proj.matrix.outs;
        let merge = if self.gate.is_some() { Merge::Gated } else { Merge::Stacked };
        check(self.up_proj.matrix.is(isa, inner, hidden, merge), "weights of the MLP")?;
        check(self.down_proj.matrix.is(isa, hidden, inner, Merge::Stacked), "weights of the MLP")
    }
}

impl Dense {
    /// Returns the number of outputs.
    pub(super) fn check(&self, isa: Isa, ins: usize) -> Result<usize, ShapeError> {
        let outs = self.linear.matrix.outs;
        check(self.norm.as_ref().is_none_or(|norm| norm.fits(outs)), "norms")?;
        check(self.linear.matrix.is(isa, outs, ins, Merge::Stacked), "dense layers").map(|()| outs)
    }
}
