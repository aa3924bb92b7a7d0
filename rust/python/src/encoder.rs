//! The CPU encoder: loads weights and embeds texts. The GIL is released for all work except copies of arrays.

use std::sync::Mutex;

use chairlift_cpu as cpu;
use numpy::{PyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;

use crate::copied::{Copied, numbers, write};
use crate::errors::{invalid, unknown};
use crate::linear::Taken;
use crate::once::Once;
use crate::threads::{lock, started};

/// Weight of a norm, and the bias of a layer norm.
type NormArgs = (Copied<f32>, Option<Copied<f32>>);

/// The norms of a block's input, of its output, and of the sum.
type BlockNorms = (Option<NormArgs>, Option<NormArgs>, Option<NormArgs>);

/// Weights and activation of a dense layer, and the norm of its result.
type DenseArgs = (Taken, String, Option<NormArgs>);

fn norm_of(norm: Option<NormArgs>) -> Option<cpu::Norm> {
    norm.map(|(weight, bias)| cpu::Norm { weight: weight.0, bias: numbers(bias) })
}

/// One block of an encoder. The encoder takes ownership of it.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct EncoderBlock(Once<cpu::EncoderBlock>);

impl EncoderBlock {
    fn of(kind: cpu::EncoderBlockKind, norms: BlockNorms) -> Self {
        let (input_norm, output_norm, sum_norm) = (norm_of(norms.0), norm_of(norms.1), norm_of(norms.2));
        Self(Once::new(cpu::EncoderBlock { kind, input_norm, output_norm, sum_norm }))
    }
}

#[pymethods]
impl EncoderBlock {
    #[staticmethod]
    #[pyo3(signature = (*, norms, qkv_proj, o_proj, qk_norm=None, rope=None, window=None))]
    fn attention(
        norms: BlockNorms,
        qkv_proj: Taken,
        o_proj: Taken,
        qk_norm: Option<(Copied<f32>, Copied<f32>)>,
        rope: Option<usize>,
        window: Option<usize>,
    ) -> Self {
        let qk_norm = qk_norm.map(|(q, k)| [q.0, k.0]);
        let attention = cpu::TextAttention { qkv_proj: qkv_proj.0, o_proj: o_proj.0, qk_norm, rope, window };
        Self::of(cpu::EncoderBlockKind::Attention(attention), norms)
    }

    #[staticmethod]
    #[pyo3(signature = (*, norms, up_proj, down_proj, gate=None))]
    fn mlp(norms: BlockNorms, up_proj: Taken, down_proj: Taken, gate: Option<&str>) -> PyResult<Self> {
        let gate = match gate {
            None => None,
            Some("silu") => Some(cpu::Activation::Silu),
            Some("gelu") => Some(cpu::Activation::Gelu),
            Some("gelu_tanh") => Some(cpu::Activation::GeluTanh),
            Some(name) => return Err(unknown("activation", name)),
        };
        let mlp = cpu::EncoderMlp { up_proj: up_proj.0, down_proj: down_proj.0, gate };
        Ok(Self::of(cpu::EncoderBlockKind::Mlp(mlp), norms))
    }
}

/// A text that is computed a few blocks at a time.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct PartialText(Mutex<cpu::PartialText>);

#[pymethods]
impl PartialText {
    #[new]
    fn new(ids: Copied<i32>, types: Copied<i32>) -> Self {
        Self(Mutex::new(cpu::PartialText::new(ids.0, types.0)))
    }
}

/// Blocks between embeddings and a head, with their own threads.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct Encoder(Mutex<cpu::Encoder>, cpu::Progress);

#[pymethods]
impl Encoder {
    #[new]
    #[pyo3(signature = (
        blocks, *, tokens, positions, types, embedding_norm, final_norm, pooling, dense, normalized, hidden_size, num_heads, num_kv_heads,
        head_dim, norm_eps, embedding_scale, attention_scale, causal, distances, ropes, longest, threads
    ))]
    fn new(
        blocks: Vec<PyRef<'_, EncoderBlock>>,
        tokens: Taken,
        positions: Option<Copied<f32>>,
        types: Copied<f32>,
        embedding_norm: Option<NormArgs>,
        final_norm: Option<NormArgs>,
        pooling: &str,
        dense: Vec<DenseArgs>,
        normalized: bool,
        hidden_size: usize,
        num_heads: usize,
        num_kv_heads: usize,
        head_dim: usize,
        norm_eps: f32,
        embedding_scale: f32,
        attention_scale: f32,
        causal: bool,
        distances: Option<Copied<f32>>,
        ropes: Vec<Copied<f32>>,
        longest: usize,
        threads: usize,
    ) -> PyResult<Self> {
        let pooling = match pooling {
            "first" => cpu::Pooling::First,
            "last" => cpu::Pooling::Last,
            "mean" => cpu::Pooling::Mean,
            _ => return Err(unknown("pooling", pooling)),
        };
        let blocks = blocks.iter().map(|block| block.0.take("these blocks belong")).collect::<PyResult<_>>()?;
        let embeddings = cpu::Embeddings {
            tokens: tokens.0.into_matrix(),
            positions: numbers(positions),
            types: types.0,
            norm: norm_of(embedding_norm),
        };
        let dense = dense.into_iter().map(dense_of).collect::<PyResult<_>>()?;
        let head = cpu::Head { norm: norm_of(final_norm), pooling, dense, normalized };
        let config = cpu::EncoderConfig {
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
            norm_eps,
            embedding_scale,
            attention_scale,
            causal,
            distances: numbers(distances),
            ropes: ropes.into_iter().map(|rope| cpu::Rope { frequencies: rope.0, scale: 1.0 }).collect(),
            longest,
        };
        let pool = started(threads)?;
        let progress = pool.progress();
        let encoder = cpu::Encoder::new(pool, config, embeddings, blocks, head);
        encoder.map(|encoder| Self(Mutex::new(encoder), progress)).map_err(invalid)
    }

    /// A number that changes while the threads compute.
    #[getter]
    fn progress(&self) -> u64 {
        self.1.value()
    }

    /// Writes the results of texts to `out` [texts, width]. Text i has the ids from `starts[i]` to `starts[i + 1]`.
    fn embed(&self, ids: Copied<i32>, types: Copied<i32>, starts: Copied<i32>, out: &Bound<'_, PyArray2<f32>>) -> PyResult<()> {
        let (ids, types, starts) = (ids.0, types.0, starts.0);
        self.write(out, starts.len().wrapping_sub(1), |encoder, out| encoder.embed(&ids, &types, &starts, out))
    }

    /// The number of blocks.
    #[getter]
    fn blocks(&self) -> usize {
        lock(&self.0).blocks()
    }

    /// Computes a text up to its first `blocks` blocks, or up to the last block, which is left to `finish`.
    fn advance(&self, py: Python<'_>, text: &PartialText, blocks: usize) -> PyResult<()> {
        py.detach(|| lock(&self.0).advance(&mut lock(&text.0), blocks)).map_err(invalid)
    }

    /// Computes the rest of a text and writes its result to `out` [1, width]. The text is then as new.
    fn finish(&self, text: &PartialText, out: &Bound<'_, PyArray2<f32>>) -> PyResult<()> {
        self.write(out, 1, |encoder, out| encoder.finish(&mut lock(&text.0), out))
    }
}

impl Encoder {
    /// Has `compute` write the results of texts to `out`.
    fn write(
        &self,
        out: &Bound<'_, PyArray2<f32>>,
        texts: usize,
        compute: impl FnOnce(&mut cpu::Encoder, &mut [f32]) -> Result<(), cpu::TextError> + Send,
    ) -> PyResult<()> {
        let [rows, width] = [out.shape()[0], out.shape()[1]];
        let written = write(out, "embeddings", |out| {
            let mut encoder = lock(&self.0);
            if rows != texts || width != encoder.width() {
                return Err(format!("there must be a row of {} numbers for each text", encoder.width()));
            }
            compute(&mut encoder, out).map_err(|error| error.to_string())
        });
        written?.map_err(invalid)
    }
}

fn dense_of((linear, activation, norm): DenseArgs) -> PyResult<cpu::Dense> {
    let activation = match activation.as_str() {
        "identity" => cpu::DenseActivation::Identity,
        "tanh" => cpu::DenseActivation::Tanh,
        "gelu" => cpu::DenseActivation::Gelu,
        name => return Err(unknown("activation", name)),
    };
    Ok(cpu::Dense { linear: linear.0, activation, norm: norm_of(norm) })
}
