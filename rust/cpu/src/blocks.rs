//! The blocks of a decoder, as data. Each block reads the residual stream and adds its output to it.

use crate::cache::{KvHeads, KvPlace};
use crate::experts::Mixture;
use crate::latent::LatentAttention;
use crate::layer_input::LayerInput;
use crate::linear::Linear;
use crate::mlp::{Mlp, ShapeError, check};
use crate::norm::Norm;
use crate::recurrent::Recurrent;
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
    /// The heads of each KV cache. Attention blocks refer to caches by index.
    pub kv_heads: Vec<KvHeads>,
    /// `rms_norm_eps`.
    pub rms_norm_eps: f32,
    /// Rotary embeddings. Attention blocks refer to them by index.
    pub ropes: Vec<Rope>,
    /// Embeddings of positions, \[positions\]\[hidden size\], which are added to those of tokens (GPT-2).
    pub positions: Option<Vec<f32>>,
    /// Factor of the embeddings (Gemma, Granite).
    pub embedding_scale: f32,
    /// The cap c if a logit x is replaced by `c * tanh(x / c)` (Gemma 2).
    pub final_softcap: Option<f32>,
}

/// A block: its input, attention, a recurrent layer, an MLP or a mixture of experts, and how the output is added to the residual stream.
#[derive(Debug)]
pub struct Block {
    /// What it reads.
    pub input: Input,
    /// What is computed.
    pub kind: BlockKind,
    /// Weight of the output norm (Gemma).
    pub post_norm: Option<Vec<f32>>,
    /// Factor of the output before it is added to the residual stream (Granite's `residual_multiplier`).
    pub residual_scale: f32,
    /// Factor of the residual stream after the block (Gemma 4). 1 unless there is an output norm.
    pub stream_scale: f32,
}

/// What a block reads.
#[derive(Debug)]
pub enum Input {
    /// The residual stream (`OLMo` 2).
    Stream,
    /// The normalised residual stream.
    Normed(Norm),
    /// What the block before it reads, which is one of attention without an output norm (Cohere). With a norm: the residual stream that
    /// the block before it reads, normalised (GPT-NeoX).
    Before(Option<Norm>),
}

/// The computation of a block.
#[derive(Debug)]
pub enum BlockKind {
    /// Attention, with one layer of the KV cache.
    Attention(SelfAttention),
    /// Attention to latents, with one layer of the KV cache.
    Latent(Box<LatentAttention>),
    /// A layer with a state.
    Recurrent(Recurrent),
    /// An MLP.
    Mlp(Mlp),
    /// A mixture of experts.
    Mixture(Box<Mixture>),
    /// The token's own embedding for a layer.
    LayerInput(LayerInput),
}

/// Causal attention with grouped queries.
#[derive(Debug)]
pub struct SelfAttention {
    /// `q_proj`, `k_proj` and `v_proj`, stacked. Only `q_proj` if the keys and values are shared. Last the gates if the output is gated.
    pub qkv_proj: Linear,
    /// Whether each number of the output is multiplied by the sigmoid of a gate (Qwen3-Next).
    pub gated: bool,
    /// Where the keys and values are.
    pub kv: KvPlace,
    /// `o_proj`.
    pub o_proj: Linear,
    /// The query norm and the key norm, which apply to each head (Qwen 3, Gemma 3) or to all heads together (`OLMoE`). Layer norms apply to
    /// each head, whose weights may be its own (Command R+).
    pub qk_norm: Option<[Norm; 2]>,
    /// Whether queries and keys are rotated before they are normalised (Hunyuan).
    pub rotated_first: bool,
    /// Weight of the norm of each head's values (Gemma 4).
    pub value_norm: Option<Vec<f32>>,
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
    pub(crate) fn check(&self) -> Result<(), ShapeError> {
        let divides = |heads: &KvHeads| heads.count > 0 && self.num_heads.is_multiple_of(heads.count);
        check(!self.kv_heads.is_empty() && self.kv_heads.iter().all(divides), "heads")?;
        let fits = |rope: &Rope| self.kv_heads.iter().any(|heads| rope.width() <= heads.head_dim);
        check(self.ropes.iter().all(fits), "rotary embeddings")?;
        check(self.embedding_scale.is_finite(), "embedding scales")?;
        check(positive(self.final_softcap), "soft caps")
    }
}

impl Input {
    /// The norm of the input.
    pub(crate) fn norm(&self) -> Option<&Norm> {
        match self {
            Self::Normed(norm) => Some(norm),
            Self::Before(norm) => norm.as_ref(),
            Self::Stream => None,
        }
    }
}

impl Block {
    pub(crate) fn check(&self, isa: Isa, config: &DecoderConfig) -> Result<(), ShapeError> {
        let hidden = config.hidden_size;
        check(
            self.input.norm().is_none_or(|norm| norm.fits(hidden)) && self.post_norm.as_ref().is_none_or(|norm| norm.len() == hidden),
            "norms",
        )?;
        check(self.residual_scale.is_finite(), "residual scales")?;
        let scalable = self.post_norm.is_some() || self.stream_scale.to_bits() == 1.0_f32.to_bits();
        check(self.stream_scale.is_finite() && scalable, "scales of the residual stream")?;
        match &self.kind {
            BlockKind::Attention(attention) => attention.check(isa, config),
            BlockKind::Latent(latent) => latent.check(isa, hidden, config.num_heads, &config.kv_heads, &config.ropes),
            BlockKind::Recurrent(recurrent) => recurrent.check(isa, hidden),
            BlockKind::Mlp(mlp) => mlp.check(isa, hidden),
            BlockKind::Mixture(mixture) => mixture.check(isa, hidden),
            BlockKind::LayerInput(input) => input.check(isa, hidden),
        }
    }

    /// What it reads, if the block before it must keep that.
    pub(crate) fn kept_input(&self) -> Option<&Input> {
        matches!(self.input, Input::Before(_)).then_some(&self.input)
    }

    /// The block's first and second linear layer, which adapters can update. `None` for other blocks than ordinary attention and MLPs.
    pub(crate) fn adaptable(&self) -> Option<[&Linear; 2]> {
        match &self.kind {
            BlockKind::Attention(attention) => Some([&attention.qkv_proj, &attention.o_proj]),
            BlockKind::Mlp(mlp) => Some([&mlp.gate_up_proj, &mlp.down_proj]),
            BlockKind::Latent(_) | BlockKind::Recurrent(_) | BlockKind::Mixture(_) | BlockKind::LayerInput(_) => None,
        }
    }

    /// The block's mixture of experts, if it is one.
    pub(crate) fn mixture(&self) -> Option<&Mixture> {
        if let BlockKind::Mixture(mixture) = &self.kind { Some(mixture) } else { None }
    }

    /// The recurrent layer, if that is the block's kind.
    pub(crate) fn recurrent(&self) -> Option<&Recurrent> {
        if let BlockKind::Recurrent(recurrent) = &self.kind { Some(recurrent) } else { None }
    }

    /// The attention to latents, if that is the block's kind.
    pub(crate) fn latent(&self) -> Option<&LatentAttention> {
        if let BlockKind::Latent(latent) = &self.kind { Some(latent) } else { None }
    }

    /// The linear layers that all tokens use.
    pub(crate) fn common(&self) -> impl Iterator<Item = &Linear> {
        let input = match &self.kind {
            BlockKind::LayerInput(input) => Some([&input.gate, &input.projection]),
            BlockKind::Recurrent(recurrent) => Some([&recurrent.in_proj, &recurrent.out_proj]),
            _ => None,
        };
        let linears = self.adaptable().or(input);
        let latent = self.latent().into_iter().flat_map(LatentAttention::common);
        linears.into_iter().flatten().chain(latent).chain(self.mixture().into_iter().flat_map(Mixture::common))
    }

    /// Where the block's keys and values are, if it is one of attention.
    pub(crate) fn kv(&self) -> Option<KvPlace> {
        match &self.kind {
            BlockKind::Attention(attention) => Some(attention.kv),
            BlockKind::Latent(latent) => Some(latent.kv),
            _ => None,
        }
    }

    /// The width of what attention or a recurrent layer makes of a token's input, and of the outputs of its heads. Zeros for other blocks.
    pub(crate) fn projected(&self, config: &DecoderConfig) -> (usize, usize) {
        match &self.kind {
            BlockKind::Attention(attention) => (attention.qkv_width(config), attention.widths(config).0),
            BlockKind::Latent(latent) => (latent.in_proj.matrix.outs, config.num_heads * latent.norm.len()),
            BlockKind::Recurrent(recurrent) => (recurrent.in_proj.matrix.outs, 0),
            _ => (0, 0),
        }
    }

    /// Width of the inner layers that a token uses at once. 0 for attention and recurrent layers.
    pub(crate) fn inner(&self) -> usize {
        match &self.kind {
            BlockKind::Attention(_) | BlockKind::Latent(_) | BlockKind::Recurrent(_) => 0,
            BlockKind::Mlp(mlp) => mlp.width(),
            BlockKind::Mixture(mixture) => mixture.width(),
            BlockKind::LayerInput(input) => input.gate.matrix.outs,
        }
    }
}

impl SelfAttention {
    /// The width of a token's queries, and of its new keys or values: 0 if they are shared.
    pub(crate) fn widths(&self, config: &DecoderConfig) -> (usize, usize) {
        let heads = config.kv_heads[self.kv.cache];
        (config.num_heads * heads.head_dim, if self.kv.shared { 0 } else { heads.count * heads.head_dim })
    }

    /// The width of a token's queries, new keys, new values and gates together.
    pub(crate) fn qkv_width(&self, config: &DecoderConfig) -> usize {
        let (queries, kv) = self.widths(config);
        queries + 2 * kv + if self.gated { queries } else { 0 }
    }

    fn check(&self, isa: Isa, config: &DecoderConfig) -> Result<(), ShapeError> {
        check(self.kv.cache < config.kv_heads.len(), "KV caches")?;
        let (hidden, head_dim) = (config.hidden_size, config.kv_heads[self.kv.cache].head_dim);
        let (queries, kv) = self.widths(config);
        let fits = |[query, key]: &[Norm; 2]| {
            let sizes = (query.weight.len(), key.weight.len());
            [(head_dim, head_dim), (queries, kv)].contains(&sizes) && query.fits(sizes.0) && key.fits(sizes.1)
        };
        check(self.qk_norm.as_ref().is_none_or(fits), "norms of queries and keys")?;
        check(!self.gated || queries.is_multiple_of(16), "gates of attention")?;
        check(self.value_norm.as_ref().is_none_or(|norm| norm.len() == head_dim), "norms of values")?;
        check(self.qkv_proj.matrix.is(isa, self.qkv_width(config), hidden, Merge::Stacked), "q_proj, k_proj and v_proj")?;
        check(self.o_proj.matrix.is(isa, hidden, queries, Merge::Stacked), "weights of o_proj")?;
        let rotary = |rope: usize| config.ropes.get(rope).is_some_and(|rope| rope.width() <= head_dim);
        check(self.rope.is_none_or(rotary), "rotary embeddings")?;
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
