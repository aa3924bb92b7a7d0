//! Embeddings of tokens for each layer (Gemma 4), and the blocks that add them.

use crate::linear::{Activation, Linear};
use crate::mlp::{ShapeError, check};
use crate::simd::Isa;
use crate::weights::{Matrix, Merge};

/// `projection(activation(gate(x)) * e)`, where e is the token's embedding for a layer.
#[derive(Debug)]
pub struct LayerInput {
    /// `per_layer_input_gate`.
    pub gate: Linear,
    /// `per_layer_projection`.
    pub projection: Linear,
    /// Index of the embedding among those of a token.
    pub layer: usize,
    /// Activation of the gate.
    pub activation: Activation,
}

/// The embeddings: (norm(P x / sqrt(hidden size)) + sqrt(width) * t) / sqrt(2), where x is the token's usual embedding, and t its part of
/// `table` for the layer.
#[derive(Debug)]
pub struct LayerEmbeddings {
    /// `embed_tokens_per_layer`.
    pub table: Matrix,
    /// P, `per_layer_model_projection`.
    pub projection: Linear,
    /// Weight of the norm. Its size is the width of an embedding.
    pub norm: Vec<f32>,
}

impl LayerInput {
    pub(crate) fn check(&self, isa: Isa, hidden: usize) -> Result<(), ShapeError> {
        let width = self.gate.matrix.outs;
        check(self.gate.matrix.is(isa, width, hidden, Merge::Stacked), "weights of per_layer_input_gate")?;
        check(self.projection.matrix.is(isa, hidden, width, Merge::Stacked), "weights of per_layer_projection")
    }
}

impl LayerEmbeddings {
    /// The width of a token's embedding for one layer.
    pub(crate) fn width(&self) -> usize {
        self.norm.len()
    }

    /// Whether there are embeddings for a block.
    pub(crate) fn serve(&self, input: &LayerInput) -> bool {
        input.gate.matrix.outs == self.width() && (input.layer + 1) * self.width() <= self.table.ins
    }

    pub(crate) fn check(&self, isa: Isa, vocabulary: usize, hidden: usize) -> Result<(), ShapeError> {
        let (width, all) = (self.width(), self.table.ins);
        check(self.table.is(isa, vocabulary, all, Merge::Stacked), "weights of embed_tokens_per_layer")?;
        check(self.projection.matrix.is(isa, all, hidden, Merge::Stacked), "weights of per_layer_model_projection")?;
        // Activations are computed in whole registers.
        check(width > 0 && width.is_multiple_of(16) && all.is_multiple_of(width), "embeddings of layers")
    }
}
