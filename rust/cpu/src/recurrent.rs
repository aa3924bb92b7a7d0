//! Recurrent layers, as data: short convolutions (LFM2), gated delta rules (Qwen3-Next, Qwen3.5) and state spaces (Mamba 2).
//!
//! A layer projects its input, sends some of the channels through a convolution over the last tokens, and may have heads, each with a matrix
//! as state. Prompts are computed token by token too: that takes as many operations as in blocks of tokens, and the results have the same
//! bits however a prompt is split.

mod convolve;
mod gated_norm;
mod heads;
#[cfg(test)]
mod tests;

pub(crate) use convolve::{Convolve, Form, MAX_TAPS};
pub(crate) use gated_norm::GatedNorm;
pub(crate) use heads::{Scratch, advance};

use std::ops::Range;

use crate::linear::Linear;
use crate::mlp::{ShapeError, check};
use crate::simd::Isa;
use crate::state::StateShape;
use crate::weights::Merge;

/// Channels and the sizes of heads are multiples of this number, the lanes of the widest register.
const LANES: usize = 16;

/// A recurrent layer.
#[derive(Debug)]
pub struct Recurrent {
    /// The projection of the input. [`Recurrent::kind`] says what its rows are.
    pub in_proj: Linear,
    /// The convolution's weights, \[taps\]\[channels\], that of the current token last.
    pub taps: Vec<f32>,
    /// A bias for each channel.
    pub bias: Option<Vec<f32>>,
    /// What is computed.
    pub kind: RecurrentKind,
    /// The projection of the output.
    pub out_proj: Linear,
    /// The layer among those with a state.
    pub layer: usize,
}

/// What a recurrent layer computes.
#[derive(Debug)]
pub enum RecurrentKind {
    /// The rows of the projection are B, C and x, of hidden size. The output is C times the convolution of B times x.
    Convolution,
    /// Heads. Their keys, queries and values are channels of the convolution, to which `x * sigmoid(x)` is applied.
    Heads(Box<Heads>),
}

/// Heads, each with a matrix S \[key size\]\[value size\] as state.
///
/// A token multiplies S by a decay, and adds the outer product of its key and of a vector that is made of its value. The output is the
/// transposed S times the query.
#[derive(Debug)]
pub struct Heads {
    /// Number of heads.
    pub count: usize,
    /// Number of keys and of queries, each of which serves as many heads.
    pub groups: usize,
    /// Size of a key.
    pub key_size: usize,
    /// Size of a value.
    pub value_size: usize,
    /// Whether head h uses key h modulo `groups`, as in GGUF files of Qwen3.5. Otherwise consecutive heads use the same.
    pub tiled: bool,
    /// For each head, the rate of its decay: the logarithm of the decay is rate * step, which is negative.
    pub rates: Vec<f32>,
    /// For each head, what is added to the input of its step, which is softplus of the sum.
    pub step_bias: Vec<f32>,
    /// What is added to the state.
    pub rule: Rule,
    /// Weight of the norm of the outputs. Its size is that of a norm's group, or of all outputs.
    pub norm: Vec<f32>,
    /// Number of outputs that are normalised together.
    pub norm_group: usize,
}

/// What a token adds to the state of a head.
#[derive(Debug)]
pub enum Rule {
    /// The gated delta rule (Yang, Kautz and Hatamizadeh, 2024): beta * (value - transposed S times key), with keys and queries of length 1.
    /// The output is normalised and multiplied by `z * sigmoid(z)`. The rows of the projection are queries, keys, values, z, beta, step.
    Delta,
    /// Mamba 2 (Dao and Gu, 2024): step * value. The output is the sum with `skip` times the value, multiplied by `z * sigmoid(z)`, and then
    /// normalised. The rows of the projection are z, values, keys, queries, step.
    Space {
        /// A factor for each head.
        skip: Vec<f32>,
        /// The smallest and the largest step.
        steps: (f32, f32),
    },
}

/// Where the parts of a token are in the rows of the projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offsets {
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) values: usize,
    pub(crate) gates: usize,
    /// Only of the delta rule.
    pub(crate) betas: usize,
    pub(crate) steps: usize,
    /// All of them together.
    pub(crate) width: usize,
}

impl Heads {
    /// The width of all values of a token.
    pub(crate) fn width(&self) -> usize {
        self.count * self.value_size
    }

    /// The key of a head.
    pub(crate) fn group_of(&self, head: usize) -> usize {
        if self.tiled { head % self.groups } else { head * self.groups / self.count }
    }

    pub(crate) fn offsets(&self) -> Offsets {
        let (keys, width, count) = (self.groups * self.key_size, self.width(), self.count);
        match self.rule {
            Rule::Delta => {
                let gates = 2 * keys + width;
                let betas = gates + width;
                Offsets { queries: 0, keys, values: 2 * keys, gates, betas, steps: betas + count, width: betas + 2 * count }
            }
            Rule::Space { .. } => {
                let keys_at = 2 * width;
                let steps = keys_at + 2 * keys;
                Offsets { queries: keys_at + keys, keys: keys_at, values: width, gates: 0, betas: 0, steps, width: steps + count }
            }
        }
    }

    /// Checks that the parts fit each other.
    fn check(&self) -> Result<(), ShapeError> {
        let whole = |size: usize| size > 0 && size.is_multiple_of(LANES);
        check(self.count > 0 && self.groups > 0 && self.count.is_multiple_of(self.groups), "numbers of recurrent heads")?;
        check(whole(self.key_size) && whole(self.value_size), "sizes of recurrent heads, which are multiples of 16,")?;
        check(self.rates.len() == self.count && self.step_bias.len() == self.count, "rates and biases of recurrent heads")?;
        check(self.rates.iter().all(|rate| *rate < 0.0), "rates of recurrent heads, which are negative,")?;
        let sound = match &self.rule {
            Rule::Delta => true,
            Rule::Space { skip, steps } => skip.len() == self.count && steps.0 >= 0.0 && steps.0 < steps.1,
        };
        check(sound, "factors or steps of recurrent heads")?;
        let group = self.norm_group;
        check(whole(group) && self.width().is_multiple_of(group), "groups of the recurrent norm")?;
        check([group, self.width()].contains(&self.norm.len()), "weights of the recurrent norm")
    }
}

impl Recurrent {
    /// Number of the convolution's channels.
    fn channels(&self, hidden: usize) -> usize {
        match &self.kind {
            RecurrentKind::Convolution => hidden,
            RecurrentKind::Heads(heads) => heads.width() + 2 * heads.groups * heads.key_size,
        }
    }

    /// The columns of a token's projection that go through the convolution.
    pub(crate) fn convolved(&self, hidden: usize) -> Range<usize> {
        let start = match &self.kind {
            RecurrentKind::Convolution => 2 * hidden,
            RecurrentKind::Heads(heads) => match heads.rule {
                Rule::Delta => 0,
                Rule::Space { .. } => heads.width(),
            },
        };
        start..start + self.channels(hidden)
    }

    /// The dimensions of the state, of which `layers` are in a model.
    pub(crate) fn state_shape(&self, hidden: usize, layers: usize) -> StateShape {
        let channels = self.channels(hidden);
        let (heads, matrix) = match &self.kind {
            RecurrentKind::Convolution => (0, 0),
            RecurrentKind::Heads(heads) => (heads.count, heads.key_size * heads.value_size),
        };
        StateShape { layers, columns: self.taps.len() / channels - 1, channels, heads, matrix }
    }

    pub(crate) fn check(&self, isa: Isa, hidden: usize) -> Result<(), ShapeError> {
        let (ins, outs) = match &self.kind {
            RecurrentKind::Convolution => (3 * hidden, hidden),
            RecurrentKind::Heads(heads) => {
                heads.check()?;
                (heads.offsets().width, heads.width())
            }
        };
        let channels = self.channels(hidden);
        let taps = self.taps.len() / channels;
        check(channels.is_multiple_of(LANES), "channels of convolutions, which are multiples of 16,")?;
        check((2..=MAX_TAPS).contains(&taps) && self.taps.len() == taps * channels, "weights of convolutions")?;
        check(self.bias.as_ref().is_none_or(|bias| bias.len() == channels), "biases of convolutions")?;
        check(self.in_proj.matrix.is(isa, ins, hidden, Merge::Stacked), "weights of in_proj")?;
        check(self.out_proj.matrix.is(isa, hidden, outs, Merge::Stacked), "weights of out_proj")
    }
}
