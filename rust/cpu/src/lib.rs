//! The forward passes of decoders and encoders on the CPU.
//!
//! Weights are packed in panels that fit the processor's registers. Every number of a result is summed in a fixed order that depends only
//! on the shape of the weights. So a request's result has the same bits whatever other requests are in its steps, however its prompt is
//! split, and on any number of threads.

mod aligned;
mod attention;
mod block_type;
mod blocks;
pub mod cache;
mod decoder;
mod encoder;
mod experts;
mod gemm;
mod ggml;
mod grids;
mod hadamard;
pub mod half;
mod latent;
mod layer_input;
mod linear;
mod lora;
mod mlp;
mod norm;
mod pass;
mod pod;
mod pool;
mod quant;
mod recurrent;
mod rope;
mod router;
pub mod sample;
mod simd;
pub mod state;
mod step;
mod tensor;
mod time_slice;
mod unsafe_slice;
mod weights;
mod zeroed;

pub use blocks::{Block, BlockKind, DecoderConfig, Input, SelfAttention, Temperature};
pub use cache::{KvHeads, KvPlace};
pub use decoder::Decoder;
pub use encoder::{
    Dense, DenseActivation, Embeddings, Encoder, EncoderBlock, EncoderBlockKind, EncoderConfig, EncoderMlp, Head, PartialText, Pooling,
    TextAttention, TextError,
};
pub use experts::{Mixture, MixtureNorms, SharedExpert};
pub use grids::{GridError, provide_grid};
pub use latent::{LatentAttention, QueryLatent};
pub use layer_input::{LayerEmbeddings, LayerInput};
pub use linear::{Activation, Linear};
pub use lora::{Adapter, LowRank, Update};
pub use mlp::{Inner, Mlp, ShapeError};
pub use norm::Norm;
pub use pool::{Progress, ThreadPool, Worker};
pub use recurrent::{Heads, Recurrent, RecurrentKind, Rule};
pub use rope::Rope;
pub use router::{Choice, ExpertGroups, Scores};
pub use simd::{Isa, TileSupport};
pub use step::{Step, StepError};
pub use tensor::{MakeBytes, Numbers, ReadError, Source, Tensor};
pub use weights::{DType, Matrix, Merge, PackError};
pub use zeroed::OutOfMemory;

/// ggml's type numbers of the block types that [`DType::Kept`] supports. Types with a grid are among them once [`provide_grid`] has set it.
pub fn block_types() -> Vec<u32> {
    block_type::BlockType::all().filter(|kind| kind.is_known()).map(block_type::BlockType::number).collect()
}
