//! The CPU model: loads weights, runs steps and returns logits. The GIL is released for all work except copies of arrays.

#![allow(clippy::needless_pass_by_value, reason = "arguments are made of Python's objects for each call")]

use std::fs::File;
use std::path::PathBuf;
use std::sync::Mutex;

use chairlift_cpu as cpu;
use cpu::{DType, Isa, Merge, Numbers, Source, Tensor, TileSupport};
use numpy::{PyArray2, PyArrayMethods, PyReadonlyArray1, PyUntypedArrayMethods};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::threads::{ThreadPool, lock, started};

/// The instruction sets that the kernels can use on this machine. The first is the fastest.
#[pyfunction]
pub(crate) fn instruction_sets() -> Vec<&'static str> {
    Isa::available().into_iter().map(Isa::name).collect()
}

/// The unit that multiplies bfloat16 numbers in an instruction set: 'none', 'vectors', or vectors and 'tiles'. Raises `ValueError` for one
/// that this machine does not have.
#[pyfunction]
pub(crate) fn bf16_products(isa: &str) -> PyResult<&'static str> {
    let isa = isa_of(isa)?;
    Ok(match (isa.has_bf16(), isa.has_tiles()) {
        (true, true) => "tiles",
        (true, false) => "vectors",
        (false, _) => "none",
    })
}

/// Whether this process can use the processor's matrix tiles (AMX): 'absent', 'refused' by the operating system, or 'usable'.
#[pyfunction]
pub(crate) fn matrix_tiles() -> &'static str {
    match TileSupport::detect() {
        TileSupport::Absent => "absent",
        TileSupport::Refused => "refused",
        TileSupport::Usable => "usable",
    }
}

/// ggml's numbers of the block types that the kernels use without conversion.
#[pyfunction]
pub(crate) fn block_types() -> Vec<u32> {
    cpu::block_types()
}

/// An open file with weights, which are read while they are packed.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct TensorFile(File);

#[pymethods]
impl TensorFile {
    #[new]
    fn new(path: PathBuf) -> PyResult<Self> {
        Ok(Self(File::open(path)?))
    }
}

/// The weights of a linear layer, packed for this processor.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct Linear(Mutex<Option<cpu::Linear>>);

#[pymethods]
impl Linear {
    #[new]
    #[pyo3(signature = (tensors, ins, dtype, *, threads, bias=None, gated=false, isa="auto"))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        tensors: Vec<TensorArgs<'_>>,
        ins: usize,
        dtype: &str,
        threads: usize,
        bias: Option<PyBuffer<f32>>,
        gated: bool,
        isa: &str,
    ) -> PyResult<Self> {
        let isa = isa_of(isa)?;
        let bias = bias.map(|bias| bias.to_vec(py)).transpose()?;
        let dtype = dtype_of(dtype)?;
        if bias.as_ref().is_some_and(|bias| bias.len() != tensors.iter().map(|tensor| tensor.1).sum::<usize>()) {
            return Err(PyValueError::new_err("there must be a bias for each row"));
        }
        let merge = if gated { Merge::Gated } else { Merge::Stacked };
        let tensors: Vec<_> = tensors.iter().map(|tensor| tensor_of(tensor, ins)).collect::<PyResult<_>>()?;
        let linear = py.detach(|| {
            let mut pool = started(threads)?;
            let matrix = cpu::Matrix::pack(&mut pool, isa, &tensors, merge, dtype);
            matrix.map(|matrix| cpu::Linear::new(matrix, bias.as_deref())).map_err(|error| PyValueError::new_err(error.to_string()))
        });
        linear.map(|linear| Self(Mutex::new(Some(linear))))
    }
}

impl Linear {
    /// Takes the packed weights. Only one model can take them.
    pub(crate) fn take(&self) -> PyResult<cpu::Linear> {
        lock(&self.0).take().ok_or_else(|| PyValueError::new_err("these weights belong to a model already"))
    }
}

/// A tensor: number type, rows, bytes, and the rows per head if heads are interleaved, else 0.
type TensorArgs<'py> = (String, usize, Bytes<'py>, usize);

/// The location of a tensor's bytes.
#[derive(FromPyObject)]
enum Bytes<'py> {
    Memory(PyReadonlyArray1<'py, u8>),
    File((Py<TensorFile>, u64)),
}

/// The update of a tensor: A and B as tensors, the inputs of A, and the scale.
type UpdateArgs<'py> = (TensorArgs<'py>, TensorArgs<'py>, usize, f32);

/// The updates of the tensors of one layer.
type LayerUpdates<'py> = Vec<Option<UpdateArgs<'py>>>;

/// A `LoRA` adapter, packed for this processor.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct Adapter(Mutex<Option<cpu::Adapter>>);

#[pymethods]
impl Adapter {
    #[new]
    #[pyo3(signature = (blocks, *, isa="auto"))]
    fn new(py: Python<'_>, blocks: Vec<(LayerUpdates<'_>, LayerUpdates<'_>)>, isa: &str) -> PyResult<Self> {
        let isa = isa_of(isa)?;
        let layers = |(first, second)| Ok::<_, PyErr>([updates_of(first)?, updates_of(second)?]);
        let blocks: Vec<_> = blocks.iter().map(|(first, second)| layers((first, second))).collect::<PyResult<_>>()?;
        let packed = py.detach(|| {
            let mut pool = started(1)?;
            let mut pack = |updates: &[_]| cpu::LowRank::pack(&mut pool, isa, updates);
            let blocks = blocks.iter().map(|[first, second]| Ok([pack(first)?, pack(second)?])).collect::<Result<_, cpu::PackError>>();
            blocks.map(cpu::Adapter::new).map_err(|error| PyValueError::new_err(error.to_string()))
        });
        packed.map(|adapter| Self(Mutex::new(Some(adapter))))
    }
}

fn updates_of<'a>(updates: &'a LayerUpdates<'_>) -> PyResult<Vec<Option<cpu::Update<'a>>>> {
    let update = |(a, b, ins, scale): &'a UpdateArgs<'_>| Ok(cpu::Update { a: tensor_of(a, *ins)?, b: tensor_of(b, a.1)?, scale: *scale });
    updates.iter().map(|args| args.as_ref().map(update).transpose()).collect()
}

fn tensor_of<'a>((kind, rows, bytes, interleaved): &'a TensorArgs<'_>, ins: usize) -> PyResult<Tensor<'a>> {
    let numbers = match kind.as_str() {
        "float32" => Numbers::F32,
        "float16" => Numbers::F16,
        "bfloat16" => Numbers::Bf16,
        _ => Numbers::Ggml(kind.parse().map_err(|_| PyValueError::new_err(format!("no kind of number is called {kind:?}")))?),
    };
    let source = match bytes {
        Bytes::Memory(array) => {
            Source::Memory(array.as_slice().map_err(|_| PyValueError::new_err("a tensor's bytes must be a contiguous uint8 array"))?)
        }
        Bytes::File((file, start)) => Source::File(&file.get().0, *start),
    };
    Ok(Tensor { numbers, rows: *rows, ins, source, interleaved: *interleaved })
}

fn isa_of(name: &str) -> PyResult<Isa> {
    let isa = if name == "auto" { Some(Isa::best()) } else { Isa::available().into_iter().find(|isa| isa.name() == name) };
    isa.ok_or_else(|| PyValueError::new_err(format!("the kernels cannot use {name} on this processor")))
}

fn dtype_of(name: &str) -> PyResult<DType> {
    match name {
        "float32" => Ok(DType::F32),
        "float16" => Ok(DType::F16),
        "bfloat16" => Ok(DType::Bf16),
        "kept" => Ok(DType::Kept),
        "rounded" => Ok(DType::Rounded),
        "int8" => Ok(DType::Int8),
        _ => Err(PyValueError::new_err(format!("weights cannot be kept as {name:?}"))),
    }
}

/// One block of a decoder. The decoder takes ownership of it.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct DecoderBlock(Mutex<Option<cpu::Block>>);

impl DecoderBlock {
    fn of(
        py: Python<'_>,
        norm: PyBuffer<f32>,
        kind: cpu::BlockKind,
        post_norm: Option<PyBuffer<f32>>,
        residual_scale: f32,
    ) -> PyResult<Self> {
        let post_norm = post_norm.map(|norm| norm.to_vec(py)).transpose()?;
        Ok(Self(Mutex::new(Some(cpu::Block { norm: norm.to_vec(py)?, kind, post_norm, residual_scale }))))
    }
}

#[pymethods]
impl DecoderBlock {
    #[staticmethod]
    #[pyo3(signature = (*, norm, qkv_proj, o_proj, scale, qk_norm=None, rope=None, softcap=None, window=None, post_norm=None, residual_scale=1.0))]
    #[allow(clippy::too_many_arguments)]
    fn attention(
        py: Python<'_>,
        norm: PyBuffer<f32>,
        qkv_proj: &Linear,
        o_proj: &Linear,
        scale: f32,
        qk_norm: Option<(PyBuffer<f32>, PyBuffer<f32>)>,
        rope: Option<usize>,
        softcap: Option<f32>,
        window: Option<usize>,
        post_norm: Option<PyBuffer<f32>>,
        residual_scale: f32,
    ) -> PyResult<Self> {
        let qk_norm = qk_norm.map(|(q, k)| Ok::<_, PyErr>([q.to_vec(py)?, k.to_vec(py)?])).transpose()?;
        let (qkv_proj, o_proj) = (qkv_proj.take()?, o_proj.take()?);
        let attention = cpu::SelfAttention { qkv_proj, o_proj, qk_norm, rope, scale, softcap, window };
        Self::of(py, norm, cpu::BlockKind::Attention(attention), post_norm, residual_scale)
    }

    #[staticmethod]
    #[pyo3(signature = (*, norm, gate_up_proj, down_proj, activation="silu", post_norm=None, residual_scale=1.0))]
    fn gated_mlp(
        py: Python<'_>,
        norm: PyBuffer<f32>,
        gate_up_proj: &Linear,
        down_proj: &Linear,
        activation: &str,
        post_norm: Option<PyBuffer<f32>>,
        residual_scale: f32,
    ) -> PyResult<Self> {
        let activation = match activation {
            "silu" => cpu::Activation::Silu,
            "gelu_tanh" => cpu::Activation::GeluTanh,
            _ => return Err(PyValueError::new_err(format!("no activation is called {activation:?}"))),
        };
        let mlp = cpu::GatedMlp { gate_up_proj: gate_up_proj.take()?, down_proj: down_proj.take()?, activation };
        Self::of(py, norm, cpu::BlockKind::Mlp(mlp), post_norm, residual_scale)
    }
}

/// A list of blocks between embeddings and a head, with its own threads.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct Decoder(Mutex<cpu::Decoder>);

#[pymethods]
impl Decoder {
    #[new]
    #[pyo3(signature = (
        blocks, *, norm, head, embedding=None, hidden_size, num_heads, num_kv_heads, head_dim, rms_norm_eps, ropes, threads,
        embedding_scale=1.0, final_softcap=None
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        blocks: Vec<PyRef<'_, DecoderBlock>>,
        norm: PyBuffer<f32>,
        head: &Linear,
        embedding: Option<&Linear>,
        hidden_size: usize,
        num_heads: usize,
        num_kv_heads: usize,
        head_dim: usize,
        rms_norm_eps: f32,
        ropes: Vec<(PyBuffer<f32>, f32)>,
        threads: usize,
        embedding_scale: f32,
        final_softcap: Option<f32>,
    ) -> PyResult<Self> {
        let ropes = ropes.into_iter().map(|(frequencies, scale)| Ok(cpu::Rope { frequencies: frequencies.to_vec(py)?, scale }));
        let config = cpu::DecoderConfig {
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
            rms_norm_eps,
            ropes: ropes.collect::<PyResult<_>>()?,
            embedding_scale,
            final_softcap,
        };
        let blocks = blocks.iter().map(|block| lock(&block.0).take()).collect::<Option<_>>();
        let blocks = blocks.ok_or_else(|| PyValueError::new_err("these blocks belong to a model already"))?;
        let embedding = embedding.map(Linear::take).transpose()?.map(cpu::Linear::into_matrix);
        let (norm, head) = (norm.to_vec(py)?, head.take()?);
        let decoder = cpu::Decoder::new(started(threads)?, config, blocks, norm, embedding, head);
        decoder.map(|decoder| Self(Mutex::new(decoder))).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Runs a step with the KV cache and keeps the hidden states of its tokens.
    #[pyo3(signature = (cache, *, input_ids, positions, slot_mapping, query_starts, context_lens, batch_slots, block_tables, adapters=None))]
    #[allow(clippy::too_many_arguments)]
    fn forward(
        &self,
        py: Python<'_>,
        cache: &KvCache,
        input_ids: PyBuffer<i32>,
        positions: PyBuffer<i32>,
        slot_mapping: PyBuffer<i32>,
        query_starts: PyBuffer<i32>,
        context_lens: PyBuffer<i32>,
        batch_slots: PyBuffer<i32>,
        block_tables: &Bound<'_, PyArray2<i32>>,
        adapters: Option<PyBuffer<i32>>,
    ) -> PyResult<()> {
        let max_blocks = block_tables.shape()[1];
        let all = [input_ids, positions, slot_mapping, query_starts, context_lens, batch_slots].map(|array| array.to_vec(py));
        let [input_ids, positions, slot_mapping, query_starts, context_lens, batch_slots] = all;
        let (input_ids, positions, slot_mapping) = (input_ids?, positions?, slot_mapping?);
        let (query_starts, context_lens, batch_slots) = (query_starts?, context_lens?, batch_slots?);
        let adapters = adapters.map_or(Ok(Vec::new()), |array| array.to_vec(py))?;
        // This is the largest array and most of it is unread, so it is not copied.
        let tables = block_tables.try_readonly().map_err(|error| PyValueError::new_err(format!("block_tables cannot be read: {error}")))?;
        let tables = tables.as_slice().map_err(|_| PyValueError::new_err("block_tables need a C-contiguous int32 array"))?;
        py.detach(|| {
            let step = cpu::Step {
                input_ids: &input_ids,
                positions: &positions,
                slots: &slot_mapping,
                query_starts: &query_starts,
                context_lens: &context_lens,
                rows: &batch_slots,
                block_tables: tables,
                max_blocks,
                adapters: &adapters,
            };
            lock(&self.0).forward(&step, &mut lock(&cache.0)).map_err(|error| PyValueError::new_err(error.to_string()))
        })
    }

    /// The threads, which also sample between steps.
    #[getter]
    fn pool(&self) -> ThreadPool {
        ThreadPool::of(lock(&self.0).pool())
    }

    /// Adds an adapter and returns its number.
    fn add_adapter(&self, adapter: &Adapter) -> PyResult<usize> {
        let adapter = lock(&adapter.0).take().ok_or_else(|| PyValueError::new_err("this adapter belongs to a model already"))?;
        lock(&self.0).add_adapter(adapter).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Removes an adapter.
    fn remove_adapter(&self, number: usize) {
        lock(&self.0).remove_adapter(number);
    }

    /// Writes the last step's logits for the tokens at indices `at` to `out` [at, vocabulary].
    ///
    /// Numpy's borrow flags prevent other Rust code from using `out` meanwhile.
    fn logits(&self, py: Python<'_>, at: PyBuffer<i32>, out: &Bound<'_, PyArray2<f32>>) -> PyResult<()> {
        let at = at.to_vec(py)?;
        let mut out = out.try_readwrite().map_err(|error| PyValueError::new_err(format!("logits cannot be written: {error}")))?;
        let out = out.as_slice_mut().map_err(|_| PyValueError::new_err("logits need a C-contiguous float32 array"))?;
        py.detach(|| lock(&self.0).logits(&at, out));
        Ok(())
    }

    /// Writes the last step's normalised hidden states of the tokens at indices `at`, scaled to length 1, to `out` [at, hidden size].
    fn states(&self, py: Python<'_>, at: PyBuffer<i32>, out: &Bound<'_, PyArray2<f32>>) -> PyResult<()> {
        let at = at.to_vec(py)?;
        let mut out = out.try_readwrite().map_err(|error| PyValueError::new_err(format!("states cannot be written: {error}")))?;
        let out = out.as_slice_mut().map_err(|_| PyValueError::new_err("states need a C-contiguous float32 array"))?;
        py.detach(|| lock(&self.0).states(&at, out));
        Ok(())
    }
}

/// The keys and values of all layers, in blocks.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct KvCache(Mutex<cpu::cache::KvCache>);

#[pymethods]
impl KvCache {
    #[new]
    #[pyo3(signature = (*, layers, blocks, kv_heads, block_size, head_dim, dtype, host_blocks=0))]
    fn new(
        layers: usize,
        blocks: usize,
        kv_heads: usize,
        block_size: usize,
        head_dim: usize,
        dtype: &str,
        host_blocks: usize,
    ) -> PyResult<Self> {
        if [layers, blocks, kv_heads, block_size, head_dim].contains(&0) {
            return Err(PyValueError::new_err("a cache has at least one of everything"));
        }
        if dtype == "bfloat16" && (block_size % 2 == 1 || head_dim % 2 == 1) {
            return Err(PyValueError::new_err("a cache in bfloat16 has an even block size and an even head size"));
        }
        let shape = cpu::cache::KvShape { layers, blocks, kv_heads, block_size, head_dim };
        let cache = cpu::cache::KvCache::new(shape, kv_dtype_of(dtype)?, host_blocks);
        cache.map(|cache| Self(Mutex::new(cache))).map_err(|error| PyMemoryError::new_err(error.to_string()))
    }

    /// Copies whole blocks, pair (from, to) by pair.
    fn copy(&self, py: Python<'_>, pairs: Vec<(u32, u32)>) {
        py.detach(|| lock(&self.0).copy(&pairs));
    }

    /// Copies blocks to the host pool (block, host block), then blocks from it (host block, block).
    fn swap(&self, py: Python<'_>, outs: Vec<(u32, u32)>, ins: Vec<(u32, u32)>) {
        py.detach(|| lock(&self.0).swap(&outs, &ins));
    }

    /// Returns the bytes of a block.
    fn read<'py>(&self, py: Python<'py>, block: u32) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &lock(&self.0).read(block))
    }

    /// Returns the memory of blocks to the system.
    fn discard(&self, py: Python<'_>, blocks: Vec<u32>) {
        py.detach(|| lock(&self.0).discard(&blocks));
    }

    /// Overwrites a block with bytes of `read`.
    #[allow(clippy::needless_pass_by_value)] // a type that Python passes
    fn write(&self, py: Python<'_>, block: u32, bytes: PyBuffer<u8>) -> PyResult<()> {
        let bytes = bytes.to_vec(py)?;
        lock(&self.0).write(block, &bytes);
        Ok(())
    }
}

fn kv_dtype_of(name: &str) -> PyResult<cpu::cache::KvDType> {
    match name {
        "float32" => Ok(cpu::cache::KvDType::F32),
        "float16" => Ok(cpu::cache::KvDType::F16),
        "bfloat16" => Ok(cpu::cache::KvDType::Bf16),
        "int8" => Ok(cpu::cache::KvDType::Int8),
        _ => Err(PyValueError::new_err(format!("KV cannot be kept as {name:?}"))),
    }
}
