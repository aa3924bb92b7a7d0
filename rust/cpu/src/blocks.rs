//! The blocks of a decoder, as data. Each block reads the residual stream and adds its output to it.

use crate::experts::Mixture;
use crate::linear::Linear;
use crate::mlp::{GatedMlp, ShapeError, check};
use crate::rope::Rope;
use crate::simd::Isa;
use crate::weights::Merge;

/// Configuration that all blocks of a decoder share.
#[derive(Clone, Debug)]
pub struct DecoderConfig {
    /// Size of the hidden state.
    pub hidden_size: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of KV heads.
    pub num_kv_heads: usize,
    /// Size of a head.
    pub head_dim: usize,
    /// `rms_norm_eps`.
    pub rms_norm_eps: f32,
    /// Rotary embeddings. Attention blocks refer to them by index.
    pub ropes: Vec<Rope>,
    /// Factor of the embeddings (Gemma, Granite).
    pub embedding_scale: f32,
    /// The cap c if a logit x is replaced by `c * tanh(x / c)` (Gemma 2).
    pub final_softcap: Option<f32>,
}

/// A block: an input norm, attention, an MLP or a mixture of experts, and how the output is added to the residual stream.
#[derive(Debug)]
pub struct Block {
    /// Weight of the input norm.
    pub norm: Vec<f32>,
    /// Attention, MLP or mixture.
    pub kind: BlockKind,
    /// Weight of the output norm (Gemma).
    pub post_norm: Option<Vec<f32>>,
    /// Factor of the output before it is added to the residual stream (Granite's `residual_multiplier`).
    pub residual_scale: f32,
}

/// The computation of a block.
#[derive(Debug)]
pub enum BlockKind {
    /// Attention, with one layer of the KV cache.
    Attention(SelfAttention),
    /// A gated MLP.
    Mlp(GatedMlp),
    /// A mixture of experts.
    Mixture(Box<Mixture>),
}

/// Causal attention with grouped queries.
#[derive(Debug)]
pub struct SelfAttention {
    /// `q_proj`, `k_proj` and `v_proj`, stacked.
    pub qkv_proj: Linear,
    /// `o_proj`.
    pub o_proj: Linear,
    /// Weights of the query norm and the key norm, which apply to each head (Qwen 3, Gemma 3) or to all heads together (`OLMoE`).
    pub qk_norm: Option<[Vec<f32>; 2]>,
    /// Index of the rotary embedding in [`DecoderConfig::ropes`]. `None`: the layer has no positional embedding (`SmolLM3`).
    pub rope: Option<usize>,
    /// Factor of the dot products of queries and keys.
    pub scale: f32,
    /// How queries grow with their position (Ministral 3).
    pub temperature: Option<Temperature>,
    /// The cap c if a score x is replaced by `c * tanh(x / c)` (Gemma 2).
    pub softcap: Option<f32>,
    /// Sliding window: how many tokens a token attends to, including itself. `None`: all tokens.
    pub window: Option<usize>,
    /// For each head, the score of a sink: a token without a value that all tokens attend to (gpt-oss).
    pub sinks: Option<Vec<f32>>,
}

/// The query at a position p is multiplied by `1 + beta * ln(1 + floor(p / span))`.
#[derive(Clone, Copy, Debug)]
pub struct Temperature {
    /// Weight of the logarithm.
    pub beta: f32,
    /// Number of positions with one factor.
    pub span: i32,
}

impl DecoderConfig {
    /// Width of a token's queries, and width of its keys or values.
    pub(crate) fn widths(&self) -> (usize, usize) {
        (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim)
    }

    /// Width of a token's queries, keys and values together.
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
    pub(crate) fn check(&self, isa: Isa, config: &DecoderConfig) -> Result<(), ShapeError> {
        let hidden = config.hidden_size;
        check([Some(&self.norm), self.post_norm.as_ref()].into_iter().flatten().all(|norm| norm.len() == hidden), "norms")?;
        check(self.residual_scale.is_finite(), "residual scales")?;
        match &self.kind {
            BlockKind::Attention(attention) => attention.check(isa, config),
            BlockKind::Mlp(mlp) => mlp.check(isa, hidden),
            BlockKind::Mixture(mixture) => mixture.check(isa, hidden),
        }
    }

    /// The block's first and second linear layer, which adapters can update. `None` for a mixture.
    pub(crate) fn adaptable(&self) -> Option<[&Linear; 2]> {
        match &self.kind {
            BlockKind::Attention(attention) => Some([&attention.qkv_proj, &attention.o_proj]),
            BlockKind::Mlp(mlp) => Some([&mlp.gate_up_proj, &mlp.down_proj]),
            BlockKind::Mixture(_) => None,
        }
    }

    /// The block's mixture of experts, if it is one.
    pub(crate) fn mixture(&self) -> Option<&Mixture> {
        if let BlockKind::Mixture(mixture) = &self.kind { Some(mixture) } else { None }
    }

    /// The linear layers that all tokens use.
    pub(crate) fn common(&self) -> impl Iterator<Item = &Linear> {
        let mixture = self.mixture();
        self.adaptable().into_iter().flatten().chain(mixture.into_iter().flat_map(Mixture::common))
    }

    /// Width of the inner layers that a token uses at once. 0 for attention.
    pub(crate) fn inner(&self) -> usize {
        match &self.kind {
            BlockKind::Attention(_) => 0,
            BlockKind::Mlp(mlp) => mlp.inner(),
            BlockKind::Mixture(mixture) => mixture.inner(),
        }
    }
}

impl SelfAttention {
    fn check(&self, isa: Isa, config: &DecoderConfig) -> Result<(), ShapeError> {
        let hidden = config.hidden_size;
        let (queries, kv) = config.widths();
        let fits = |[query, key]: &[Vec<f32>; 2]| [(config.head_dim, config.head_dim), (queries, kv)].contains(&(query.len(), key.len()));
        check(self.qk_norm.as_ref().is_none_or(fits), "norms of queries and keys")?;
        check(self.qkv_proj.matrix.is(isa, config.qkv_width(), hidden, Merge::Stacked), "q_proj, k_proj and v_proj")?;
        check(self.o_proj.matrix.is(isa, hidden, config.widths().0, Merge::Stacked), "weights of o_proj")?;
        check(self.rope.is_none_or(|rope| rope < config.ropes.len()), "rotary embeddings")?;
        check(self.scale.is_finite() && positive(self.softcap), "attention scales or soft caps")?;
        check(self.temperature.is_none_or(|temperature| temperature.beta.is_finite() && temperature.span > 0), "attention temperatures")?;
        check(self.sinks.as_ref().is_none_or(|sinks| sinks.len() == config.num_heads), "attention sinks")?;
        check(self.window != Some(0), "windows")
    }
}

impl Temperature {
    /// The factor of the query at `position`.
    pub(crate) fn factor(self, position: i32) -> f32 {
        1.0 + self.beta * (1.0 + (position / self.span) as f32).ln()
    }
}

fn positive(cap: Option<f32>) -> bool {
    cap.is_none_or(|cap| cap.is_finite() && cap > 0.0)
}
