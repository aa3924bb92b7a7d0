//! The CPU model: makes decoders of blocks, runs steps and returns logits. The GIL is released for all work except copies of arrays.

use std::sync::Mutex;

use chairlift_cpu as cpu;
use cpu::{Isa, TileSupport};
use numpy::{PyArray2, PyArrayMethods, PyReadonlyArray1, PyUntypedArrayMethods};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::caches::{KvCache, StateCache, no_memory};
use crate::errors::{invalid, taken, unknown};
use crate::linear::{Adapter, Linear, isa_of};
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

/// Whether an instruction set multiplies the codes of blocks as bytes. Raises `ValueError` for one that this machine does not have.
#[pyfunction]
pub(crate) fn byte_products(isa: &str) -> PyResult<bool> {
    Ok(isa_of(isa)?.has_digits())
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

/// ggml's numbers of the block types that the kernels use without conversion. Those with a grid are among them once it was provided.
#[pyfunction]
pub(crate) fn block_types() -> Vec<u32> {
    cpu::block_types()
}

/// Sets the grid of a ggml type, \[entries\]\[weights of an entry\], for all models of the process. Raises `ValueError` if it is not the type's.
#[pyfunction]
pub(crate) fn provide_grid(kind: u32, values: PyReadonlyArray1<'_, i8>) -> PyResult<()> {
    let values = values.as_slice().map_err(|_| PyValueError::new_err("a grid must be a contiguous array"))?;
    cpu::provide_grid(kind, values).map_err(invalid)
}

/// One block of a decoder. The decoder takes ownership of it.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct DecoderBlock(Mutex<Option<cpu::Block>>);

impl DecoderBlock {
    fn of(
        py: Python<'_>,
        input: cpu::Input,
        kind: cpu::BlockKind,
        post_norm: Option<PyBuffer<f32>>,
        residual_scale: f32,
        stream_scale: f32,
    ) -> PyResult<Self> {
        let post_norm = post_norm.map(|norm| norm.to_vec(py)).transpose()?;
        Ok(Self(Mutex::new(Some(cpu::Block { input, kind, post_norm, residual_scale, stream_scale }))))
    }
}

/// The weight of a norm, or the weight and the bias of a layer norm.
#[derive(FromPyObject)]
enum NormArgs {
    Root(PyBuffer<f32>),
    Layer(PyBuffer<f32>, PyBuffer<f32>),
}

impl NormArgs {
    fn read(&self, py: Python<'_>) -> PyResult<cpu::Norm> {
        Ok(match self {
            Self::Root(weight) => cpu::Norm { weight: weight.to_vec(py)?, bias: None },
            Self::Layer(weight, bias) => cpu::Norm { weight: weight.to_vec(py)?, bias: Some(bias.to_vec(py)?) },
        })
    }
}

/// What a block reads: the input of the block before it if it is `parallel`.
fn input_of(py: Python<'_>, norm: Option<&NormArgs>, parallel: bool) -> PyResult<cpu::Input> {
    let normed = norm.map(|norm| norm.read(py)).transpose()?.map_or(cpu::Input::Stream, cpu::Input::Normed);
    Ok(if parallel { cpu::Input::Before } else { normed })
}

#[pymethods]
impl DecoderBlock {
    #[staticmethod]
    #[pyo3(signature = (
        *, norm, qkv_proj, kv, o_proj, scale, gated=false, temperature=None, qk_norm=None, rotated_first=false, value_norm=None,
        rope=None, softcap=None, window=None, sinks=None, post_norm=None, residual_scale=1.0
    ))]
    fn attention(
        py: Python<'_>,
        norm: Option<NormArgs>,
        qkv_proj: &Linear,
        kv: (usize, usize, bool),
        o_proj: &Linear,
        scale: f32,
        gated: bool,
        temperature: Option<(f32, i32)>,
        qk_norm: Option<(PyBuffer<f32>, PyBuffer<f32>)>,
        rotated_first: bool,
        value_norm: Option<PyBuffer<f32>>,
        rope: Option<usize>,
        softcap: Option<f32>,
        window: Option<usize>,
        sinks: Option<PyBuffer<f32>>,
        post_norm: Option<PyBuffer<f32>>,
        residual_scale: f32,
    ) -> PyResult<Self> {
        let qk_norm = qk_norm.map(|(q, k)| Ok::<_, PyErr>([q.to_vec(py)?, k.to_vec(py)?])).transpose()?;
        let (qkv_proj, o_proj) = (qkv_proj.take()?, o_proj.take()?);
        let kv = cpu::KvPlace { cache: kv.0, layer: kv.1, shared: kv.2 };
        let sinks = sinks.map(|sinks| sinks.to_vec(py)).transpose()?;
        let value_norm = value_norm.map(|norm| norm.to_vec(py)).transpose()?;
        let temperature = temperature.map(|(beta, span)| cpu::Temperature { beta, span });
        let attention = cpu::SelfAttention {
            qkv_proj,
            gated,
            kv,
            o_proj,
            qk_norm,
            rotated_first,
            value_norm,
            rope,
            scale,
            temperature,
            softcap,
            window,
            sinks,
        };
        Self::of(py, input_of(py, norm.as_ref(), false)?, cpu::BlockKind::Attention(attention), post_norm, residual_scale, 1.0)
    }

    #[staticmethod]
    #[pyo3(signature = (
        *, norm, in_proj, latent_norm, key_up, value_up, kv, o_proj, rope, adjacent, scale, eps, query_norm=None, query_up=None
    ))]
    fn latent_attention(
        py: Python<'_>,
        norm: NormArgs,
        in_proj: &Linear,
        latent_norm: PyBuffer<f32>,
        key_up: &Linear,
        value_up: &Linear,
        kv: (usize, usize, bool),
        o_proj: &Linear,
        rope: usize,
        adjacent: bool,
        scale: f32,
        eps: f32,
        query_norm: Option<PyBuffer<f32>>,
        query_up: Option<&Linear>,
    ) -> PyResult<Self> {
        let query = query_norm.zip(query_up).map(|(norm, up)| Ok::<_, PyErr>(cpu::QueryLatent { norm: norm.to_vec(py)?, up: up.take()? }));
        let attention = cpu::LatentAttention {
            in_proj: in_proj.take()?,
            query: query.transpose()?,
            norm: latent_norm.to_vec(py)?,
            eps,
            key_up: key_up.take()?,
            value_up: value_up.take()?,
            o_proj: o_proj.take()?,
            kv: cpu::KvPlace { cache: kv.0, layer: kv.1, shared: kv.2 },
            rope,
            adjacent,
            scale,
        };
        Self::of(py, input_of(py, Some(&norm), false)?, cpu::BlockKind::Latent(Box::new(attention)), None, 1.0, 1.0)
    }

    #[staticmethod]
    #[pyo3(signature = (*, norm, in_proj, taps, out_proj, layer, bias=None, heads=None, residual_scale=1.0))]
    fn recurrent(
        py: Python<'_>,
        norm: NormArgs,
        in_proj: &Linear,
        taps: PyBuffer<f32>,
        out_proj: &Linear,
        layer: usize,
        bias: Option<PyBuffer<f32>>,
        heads: Option<&RecurrentHeads>,
        residual_scale: f32,
    ) -> PyResult<Self> {
        let kind = match heads {
            None => cpu::RecurrentKind::Convolution,
            Some(heads) => cpu::RecurrentKind::Heads(Box::new(lock(&heads.0).take().ok_or_else(|| taken("blocks"))?)),
        };
        let bias = bias.map(|bias| bias.to_vec(py)).transpose()?;
        let (in_proj, out_proj, taps) = (in_proj.take()?, out_proj.take()?, taps.to_vec(py)?);
        let recurrent = cpu::Recurrent { in_proj, taps, bias, kind, out_proj, layer };
        Self::of(py, input_of(py, Some(&norm), false)?, cpu::BlockKind::Recurrent(recurrent), None, residual_scale, 1.0)
    }

    #[staticmethod]
    #[pyo3(signature = (*, norm, gate_up_proj, down_proj, activation="silu", parallel=false, post_norm=None, residual_scale=1.0, stream_scale=1.0))]
    fn mlp(
        py: Python<'_>,
        norm: Option<NormArgs>,
        gate_up_proj: &Linear,
        down_proj: &Linear,
        activation: &str,
        parallel: bool,
        post_norm: Option<PyBuffer<f32>>,
        residual_scale: f32,
        stream_scale: f32,
    ) -> PyResult<Self> {
        let mlp = mlp_of(gate_up_proj, down_proj, inner_of(activation)?)?;
        Self::of(py, input_of(py, norm.as_ref(), parallel)?, cpu::BlockKind::Mlp(mlp), post_norm, residual_scale, stream_scale)
    }

    #[staticmethod]
    #[pyo3(signature = (*, gate, projection, layer, activation, post_norm, stream_scale=1.0))]
    fn layer_input(
        py: Python<'_>,
        gate: &Linear,
        projection: &Linear,
        layer: usize,
        activation: &str,
        post_norm: PyBuffer<f32>,
        stream_scale: f32,
    ) -> PyResult<Self> {
        let activation = activation_of(activation)?;
        let input = cpu::LayerInput { gate: gate.take()?, projection: projection.take()?, layer, activation };
        Self::of(py, cpu::Input::Stream, cpu::BlockKind::LayerInput(input), Some(post_norm), 1.0, stream_scale)
    }

    #[staticmethod]
    #[pyo3(signature = (
        *, norm, router, gate_up_proj, down_proj, scores, used, activation="silu", parallel=false, clamp=None, bias=None, groups=None,
        normalised=None, scale=1.0, expert_scales=None, shared=None, shared_gate=false, norms=None, post_norm=None, residual_scale=1.0, stream_scale=1.0
    ))]
    fn mixture(
        py: Python<'_>,
        norm: Option<NormArgs>,
        router: &Linear,
        gate_up_proj: &Linear,
        down_proj: &Linear,
        scores: &str,
        used: usize,
        activation: &str,
        parallel: bool,
        clamp: Option<(f32, f32)>,
        bias: Option<PyBuffer<f32>>,
        groups: Option<(usize, usize, usize)>,
        normalised: Option<f32>,
        scale: f32,
        expert_scales: Option<PyBuffer<f32>>,
        shared: Option<(PyRef<'_, Linear>, PyRef<'_, Linear>)>,
        shared_gate: bool,
        norms: Option<[PyBuffer<f32>; 4]>,
        post_norm: Option<PyBuffer<f32>>,
        residual_scale: f32,
        stream_scale: f32,
    ) -> PyResult<Self> {
        let scores = match scores {
            "softmax" => cpu::Scores::Softmax,
            "sigmoid" => cpu::Scores::Sigmoid,
            "logits" => cpu::Scores::Logits,
            _ => return Err(unknown("kind of scores", scores)),
        };
        let inner = match clamp {
            Some((slope, limit)) => cpu::Inner::Gated(cpu::Activation::Clamped { slope, limit }),
            None => inner_of(activation)?,
        };
        let [bias, expert_scales] = [bias, expert_scales].map(|numbers| numbers.map(|numbers| numbers.to_vec(py)).transpose());
        let (bias, expert_scales) = (bias?, expert_scales?);
        let norms = norms.map(|norms| {
            let [router, input, output, shared_output] = norms.map(|norm| norm.to_vec(py));
            Ok::<_, PyErr>(cpu::MixtureNorms { router: router?, input: input?, output: output?, shared_output: shared_output? })
        });
        let groups = groups.map(|(count, used, best)| cpu::ExpertGroups { count, used, best });
        let shared =
            shared.map(|(gate_up, down)| Ok::<_, PyErr>(cpu::SharedExpert { mlp: mlp_of(&gate_up, &down, inner)?, gated: shared_gate }));
        let mixture = cpu::Mixture {
            router: router.take()?,
            choice: cpu::Choice { scores, used, bias, groups, normalised, scale, expert_scales },
            gate_up_proj: gate_up_proj.take()?,
            down_proj: down_proj.take()?,
            inner,
            shared: shared.transpose()?,
            norms: norms.transpose()?,
        };
        Self::of(
            py,
            input_of(py, norm.as_ref(), parallel)?,
            cpu::BlockKind::Mixture(Box::new(mixture)),
            post_norm,
            residual_scale,
            stream_scale,
        )
    }
}

/// The heads of a recurrent block, which takes ownership of them.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct RecurrentHeads(Mutex<Option<cpu::Heads>>);

#[pymethods]
impl RecurrentHeads {
    #[new]
    #[pyo3(signature = (*, count, groups, key_size, value_size, rates, step_bias, norm, norm_group, tiled=false, skip=None, steps=None))]
    fn new(
        py: Python<'_>,
        count: usize,
        groups: usize,
        key_size: usize,
        value_size: usize,
        rates: PyBuffer<f32>,
        step_bias: PyBuffer<f32>,
        norm: PyBuffer<f32>,
        norm_group: usize,
        tiled: bool,
        skip: Option<PyBuffer<f32>>,
        steps: Option<(f32, f32)>,
    ) -> PyResult<Self> {
        let rule = match skip {
            None => cpu::Rule::Delta,
            Some(skip) => cpu::Rule::Space { skip: skip.to_vec(py)?, steps: steps.unwrap_or((0.0, f32::INFINITY)) },
        };
        let (rates, step_bias, norm) = (rates.to_vec(py)?, step_bias.to_vec(py)?, norm.to_vec(py)?);
        let heads = cpu::Heads { count, groups, key_size, value_size, tiled, rates, step_bias, rule, norm, norm_group };
        Ok(Self(Mutex::new(Some(heads))))
    }
}

fn mlp_of(gate_up_proj: &Linear, down_proj: &Linear, inner: cpu::Inner) -> PyResult<cpu::Mlp> {
    Ok(cpu::Mlp { gate_up_proj: gate_up_proj.take()?, down_proj: down_proj.take()?, inner })
}

fn inner_of(activation: &str) -> PyResult<cpu::Inner> {
    match activation {
        "relu2" => Ok(cpu::Inner::ReluSquared),
        "gelu_new" => Ok(cpu::Inner::GeluTanh),
        _ => activation_of(activation).map(cpu::Inner::Gated),
    }
}

fn activation_of(name: &str) -> PyResult<cpu::Activation> {
    match name {
        "silu" => Ok(cpu::Activation::Silu),
        "gelu_tanh" => Ok(cpu::Activation::GeluTanh),
        _ => Err(unknown("activation", name)),
    }
}

/// A list of blocks between embeddings and a head, with its own threads.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct Decoder(Mutex<cpu::Decoder>, cpu::Progress);

#[pymethods]
impl Decoder {
    #[new]
    #[pyo3(signature = (
        blocks, *, norm, head, embedding=None, layer_embeddings=None, hidden_size, num_heads, kv_heads, rms_norm_eps, ropes, threads,
        embedding_scale=1.0, final_softcap=None
    ))]
    fn new(
        py: Python<'_>,
        blocks: Vec<PyRef<'_, DecoderBlock>>,
        norm: NormArgs,
        head: &Linear,
        embedding: Option<&Linear>,
        layer_embeddings: Option<(PyRef<'_, Linear>, PyRef<'_, Linear>, PyBuffer<f32>)>,
        hidden_size: usize,
        num_heads: usize,
        kv_heads: Vec<(usize, usize, Option<usize>)>,
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
            kv_heads: kv_heads.into_iter().map(|(count, head_dim, latent)| cpu::KvHeads { count, head_dim, latent }).collect(),
            rms_norm_eps,
            ropes: ropes.collect::<PyResult<_>>()?,
            embedding_scale,
            final_softcap,
        };
        let blocks = blocks.iter().map(|block| lock(&block.0).take()).collect::<Option<_>>();
        let blocks = blocks.ok_or_else(|| taken("blocks"))?;
        let embedding = embedding.map(Linear::take).transpose()?.map(cpu::Linear::into_matrix);
        let layer_embeddings = layer_embeddings.map(|(table, projection, norm)| {
            let (table, projection) = (table.take()?.into_matrix(), projection.take()?);
            Ok::<_, PyErr>(cpu::LayerEmbeddings { table, projection, norm: norm.to_vec(py)? })
        });
        let (norm, head) = (norm.read(py)?, head.take()?);
        let pool = started(threads)?;
        let progress = pool.progress();
        let decoder = cpu::Decoder::new(pool, config, blocks, norm, embedding, layer_embeddings.transpose()?, head);
        decoder.map(|decoder| Self(Mutex::new(decoder), progress)).map_err(invalid)
    }

    /// Creates slots for states, on which nothing else depends. `None` if no layer is recurrent.
    fn allocate_states(&self, slots: usize) -> PyResult<Option<StateCache>> {
        let cache = lock(&self.0).state_shape().map(|shape| cpu::state::StateCache::new(shape, slots)).transpose();
        Ok(cache.map_err(no_memory)?.map(|cache| StateCache(Mutex::new(cache))))
    }

    /// Runs a step with the KV cache, and with the states of its sequences. Keeps the hidden states of its tokens.
    #[pyo3(signature = (
        cache, *, input_ids, positions, slot_mapping, query_starts, context_lens, batch_slots, block_tables, adapters=None, states=None,
        state_slots=None, state_saves=None
    ))]
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
        states: Option<&StateCache>,
        state_slots: Option<PyBuffer<i32>>,
        state_saves: Option<PyBuffer<i32>>,
    ) -> PyResult<()> {
        let max_blocks = block_tables.shape()[1];
        let all = [input_ids, positions, slot_mapping, query_starts, context_lens, batch_slots].map(|array| array.to_vec(py));
        let [input_ids, positions, slot_mapping, query_starts, context_lens, batch_slots] = all;
        let (input_ids, positions, slot_mapping) = (input_ids?, positions?, slot_mapping?);
        let (query_starts, context_lens, batch_slots) = (query_starts?, context_lens?, batch_slots?);
        let optional = |array: Option<PyBuffer<i32>>| array.map_or(Ok(Vec::new()), |array| array.to_vec(py));
        let (adapters, slots, saves) = (optional(adapters)?, optional(state_slots)?, optional(state_saves)?);
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
            let mut states = states.map(|states| lock(&states.0));
            let state = states.as_mut().map(|cache| cpu::state::StateStep { cache, slots: &slots, saves: saves.as_chunks().0 });
            lock(&self.0).forward(&step, &mut lock(&cache.parts), state).map_err(invalid)
        })
    }

    /// A number that changes while the threads compute.
    #[getter]
    fn progress(&self) -> u64 {
        self.1.value()
    }

    /// The threads, which also sample between steps.
    #[getter]
    fn pool(&self) -> ThreadPool {
        ThreadPool::of(lock(&self.0).pool())
    }

    /// Adds an adapter and returns its number.
    fn add_adapter(&self, adapter: &Adapter) -> PyResult<usize> {
        lock(&self.0).add_adapter(adapter.take()?).map_err(invalid)
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
