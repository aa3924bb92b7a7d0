//! The blocks that a decoder is a list of, as data. Each reads the residual stream, and adds its output to it.

use crate::linear::{Activation, Linear};
use crate::rope::Rope;
use crate::weights::Merge;

/// What all blocks of a decoder share.
#[derive(Clone, Debug)]
pub struct DecoderConfig {
    /// Size of a token's hidden state.
    pub hidden_size: usize,
    /// Heads of queries.
    pub num_heads: usize,
    /// Heads of keys and values.
    pub num_kv_heads: usize,
    /// Numbers of a head.
    pub head_dim: usize,
    /// `rms_norm_eps`.
    pub rms_norm_eps: f32,
    /// Rotary embeddings, to which attention blocks refer by index.
    pub ropes: Vec<Rope>,
    /// What embeddings are multiplied by (Gemma, Granite).
    pub embedding_scale: f32,
    /// Where a logit x becomes c * tanh(x / c), that c (Gemma 2).
    pub final_softcap: Option<f32>,
}

/// A norm, what is computed of it, and how the result is added to the residual stream.
#[derive(Debug)]
pub struct Block {
    /// Weight of the norm of the block's input.
    pub norm: Vec<f32>,
    /// What the block computes.
    pub kind: BlockKind,
    /// Weight of a norm of the block's output (Gemma).
    pub post_norm: Option<Vec<f32>>,
    /// What the output is multiplied by before it is added (Granite's `residual_multiplier`).
    pub residual_scale: f32,
}

/// What a block computes.
#[derive(Debug)]
pub enum BlockKind {
    /// Attention to the tokens before, which keeps one layer of the KV cache.
    Attention(SelfAttention),
    /// A gated network of two layers.
    Mlp(GatedMlp),
}

/// Causal attention, with grouped queries.
#[derive(Debug)]
pub struct SelfAttention {
    /// `q_proj`, `k_proj` and `v_proj`, one under another.
    pub qkv_proj: Linear,
    /// `o_proj`.
    pub o_proj: Linear,
    /// Weights of the norms of each head's queries and keys (Qwen 3, Gemma 3).
    pub qk_norm: Option<[Vec<f32>; 2]>,
    /// The index of the rotary embedding in [`DecoderConfig::ropes`]; None where positions do not count (`SmolLM3`).
    pub rope: Option<usize>,
    /// What products of queries and keys are multiplied by.
    pub scale: f32,
    /// Where a score x becomes c * tanh(x / c), that c (Gemma 2).
    pub softcap: Option<f32>,
    /// How many tokens a token sees, itself included; all if None.
    pub window: Option<usize>,
}

/// `down_proj(activation(gate_proj(x)) * up_proj(x))`.
#[derive(Debug)]
pub struct GatedMlp {
    /// `gate_proj` and `up_proj`, as a gated matrix.
    pub gate_up_proj: Linear,
    /// `down_proj`.
    pub down_proj: Linear,
    /// What the gate goes through.
    pub activation: Activation,
}

/// Weights or options that do not fit each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} do not fit the decoder's configuration")]
pub struct ShapeError {
    /// Which.
    pub what: &'static str,
}

/// An error that names `what`, unless it `fits`.
pub(crate) fn check(fits: bool, what: &'static str) -> Result<(), ShapeError> {
    if fits { Ok(()) } else { Err(ShapeError { what }) }
}

impl DecoderConfig {
    /// Numbers of a token's queries, and of its keys or values.
    pub(crate) fn widths(&self) -> (usize, usize) {
        (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim)
    }

    /// Numbers of a token's queries, keys and values together.
    pub(crate) fn qkv_width(&self) -> usize {
        let (queries, kv) = self.widths();
        queries + 2 * kv
    }

    pub(crate) fn check(&self) -> Result<(), ShapeError> {
        check(self.num_kv_heads > 0 && self.num_heads.is_multiple_of(self.num_kv_heads), "heads")?;
        check(self.ropes.iter().all(|rope| rope.width() <= self.head_dim), "rotary embeddings")?;
        check(self.embedding_scale.is_finite(), "embedding scales")?;
        check(positive(self.final_softcap), "soft caps")
    }
}

impl Block {
    pub(crate) fn check(&self, config: &DecoderConfig) -> Result<(), ShapeError> {
        let hidden = config.hidden_size;
        check([Some(&self.norm), self.post_norm.as_ref()].into_iter().flatten().all(|norm| norm.len() == hidden), "norms")?;
        check(self.residual_scale.is_finite(), "residual scales")?;
        match &self.kind {
            BlockKind::Attention(attention) => attention.check(config),
            BlockKind::Mlp(mlp) => mlp.check(hidden),
        }
    }

    /// Numbers between the two layers of a network, 0 for other blocks.
    pub(crate) fn inner(&self) -> usize {
        match &self.kind {
            BlockKind::Attention(_) => 0,
            BlockKind::Mlp(mlp) => mlp.inner(),
        }
    }
}

impl SelfAttention {
    fn check(&self, config: &DecoderConfig) -> Result<(), ShapeError> {
        let hidden = config.hidden_size;
        check(self.qk_norm.iter().flatten().all(|norm| norm.len() == config.head_dim), "norms of queries and keys")?;
        check(self.qkv_proj.matrix.is(config.qkv_width(), hidden, Merge::Stacked), "q_proj, k_proj and v_proj")?;
        check(self.o_proj.matrix.is(hidden, config.widths().0, Merge::Stacked), "weights of o_proj")?;
        check(self.rope.is_none_or(|rope| rope < config.ropes.len()), "rotary embeddings")?;
        check(self.scale.is_finite() && positive(self.softcap), "attention scales or soft caps")?;
        check(self.window != Some(0), "windows")
    }
}

impl GatedMlp {
    /// Numbers between the two layers.
    pub(crate) fn inner(&self) -> usize {
        self.gate_up_proj.matrix.outs
    }

    fn check(&self, hidden: usize) -> Result<(), ShapeError> {
        check(self.gate_up_proj.matrix.is(self.inner(), hidden, Merge::Gated), "gate_proj and up_proj")?;
        check(self.down_proj.matrix.is(hidden, self.inner(), Merge::Stacked), "weights of down_proj")
    }
}

fn positive(cap: Option<f32>) -> bool {
    cap.is_none_or(|cap| cap.is_finite() && cap > 0.0)
}
