//! The CPU model: makes decoders of blocks, runs steps and returns logits. The GIL is released for all work except copies of arrays.

use std::sync::Mutex;

use chairlift_cpu as cpu;
use cpu::{Isa, TileSupport};
use numpy::{PyArray2, PyArrayMethods, PyReadonlyArray1, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::caches::{KvCache, StateCache, no_memory};
use crate::copied::{Copied, numbers, write};
use crate::errors::{invalid, unknown};
use crate::linear::{Adapter, Taken, isa_of};
use crate::once::Once;
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
pub(crate) struct DecoderBlock(Once<cpu::Block>);

impl DecoderBlock {
    fn of(input: cpu::Input, kind: cpu::BlockKind, post_norm: Option<Copied<f32>>, residual_scale: f32, stream_scale: f32) -> Self {
        let post_norm = numbers(post_norm);
        Self(Once::new(cpu::Block { input, kind, post_norm, residual_scale, stream_scale }))
    }
}

/// The weight of a norm, or the weight and the bias of a layer norm.
#[derive(FromPyObject)]
enum NormArgs {
    Root(Copied<f32>),
    Layer(Copied<f32>, Copied<f32>),
}

impl From<NormArgs> for cpu::Norm {
    fn from(norm: NormArgs) -> Self {
        match norm {
            NormArgs::Root(weight) => Self { weight: weight.0, bias: None },
            NormArgs::Layer(weight, bias) => Self { weight: weight.0, bias: Some(bias.0) },
        }
    }
}

/// What a block reads: what the block before it reads if it is `parallel`, with a norm of its own if there is one.
fn input_of(norm: Option<NormArgs>, parallel: bool) -> cpu::Input {
    let norm = norm.map(cpu::Norm::from);
    if parallel { cpu::Input::Before(norm) } else { norm.map_or(cpu::Input::Stream, cpu::Input::Normed) }
}

#[pymethods]
impl DecoderBlock {
    #[staticmethod]
    #[pyo3(signature = (
        *, norm, qkv_proj, kv, o_proj, scale, gated=false, temperature=None, qk_norm=None, rotated_first=false, value_norm=None,
        rope=None, softcap=None, window=None, sinks=None, post_norm=None, residual_scale=1.0
    ))]
    fn attention(
        norm: Option<NormArgs>,
        qkv_proj: Taken,
        kv: (usize, usize, bool),
        o_proj: Taken,
        scale: f32,
        gated: bool,
        temperature: Option<(f32, i32)>,
        qk_norm: Option<(NormArgs, NormArgs)>,
        rotated_first: bool,
        value_norm: Option<Copied<f32>>,
        rope: Option<usize>,
        softcap: Option<f32>,
        window: Option<usize>,
        sinks: Option<Copied<f32>>,
        post_norm: Option<Copied<f32>>,
        residual_scale: f32,
    ) -> Self {
        let attention = cpu::SelfAttention {
            qkv_proj: qkv_proj.0,
            gated,
            kv: cpu::KvPlace { cache: kv.0, layer: kv.1, shared: kv.2 },
            o_proj: o_proj.0,
            qk_norm: qk_norm.map(|(q, k)| [q.into(), k.into()]),
            rotated_first,
            value_norm: numbers(value_norm),
            rope,
            scale,
            temperature: temperature.map(|(beta, span)| cpu::Temperature { beta, span }),
            softcap,
            window,
            sinks: numbers(sinks),
        };
        Self::of(input_of(norm, false), cpu::BlockKind::Attention(attention), post_norm, residual_scale, 1.0)
    }

    #[staticmethod]
    #[pyo3(signature = (
        *, norm, in_proj, latent_norm, key_up, value_up, kv, o_proj, rope, adjacent, scale, eps, query_norm=None, query_up=None
    ))]
    fn latent_attention(
        norm: NormArgs,
        in_proj: Taken,
        latent_norm: Copied<f32>,
        key_up: Taken,
        value_up: Taken,
        kv: (usize, usize, bool),
        o_proj: Taken,
        rope: usize,
        adjacent: bool,
        scale: f32,
        eps: f32,
        query_norm: Option<Copied<f32>>,
        query_up: Option<Taken>,
    ) -> Self {
        let attention = cpu::LatentAttention {
            in_proj: in_proj.0,
            query: query_norm.zip(query_up).map(|(norm, up)| cpu::QueryLatent { norm: norm.0, up: up.0 }),
            norm: latent_norm.0,
            eps,
            key_up: key_up.0,
            value_up: value_up.0,
            o_proj: o_proj.0,
            kv: cpu::KvPlace { cache: kv.0, layer: kv.1, shared: kv.2 },
            rope,
            adjacent,
            scale,
        };
        Self::of(input_of(Some(norm), false), cpu::BlockKind::Latent(Box::new(attention)), None, 1.0, 1.0)
    }

    #[staticmethod]
    #[pyo3(signature = (*, norm, in_proj, taps, out_proj, layer, bias=None, heads=None, residual_scale=1.0))]
    fn recurrent(
        norm: NormArgs,
        in_proj: Taken,
        taps: Copied<f32>,
        out_proj: Taken,
        layer: usize,
        bias: Option<Copied<f32>>,
        heads: Option<&RecurrentHeads>,
        residual_scale: f32,
    ) -> PyResult<Self> {
        let kind = match heads {
            None => cpu::RecurrentKind::Convolution,
            Some(heads) => cpu::RecurrentKind::Heads(Box::new(heads.0.take("these blocks belong")?)),
        };
        let recurrent = cpu::Recurrent { in_proj: in_proj.0, taps: taps.0, bias: numbers(bias), kind, out_proj: out_proj.0, layer };
        Ok(Self::of(input_of(Some(norm), false), cpu::BlockKind::Recurrent(recurrent), None, residual_scale, 1.0))
    }

    #[staticmethod]
    #[pyo3(signature = (*, norm, gate_up_proj, down_proj, activation="silu", parallel=false, post_norm=None, residual_scale=1.0, stream_scale=1.0))]
    fn mlp(
        norm: Option<NormArgs>,
        gate_up_proj: Taken,
        down_proj: Taken,
        activation: &str,
        parallel: bool,
        post_norm: Option<Copied<f32>>,
        residual_scale: f32,
        stream_scale: f32,
    ) -> PyResult<Self> {
        let mlp = cpu::Mlp { gate_up_proj: gate_up_proj.0, down_proj: down_proj.0, inner: inner_of(activation)? };
        Ok(Self::of(input_of(norm, parallel), cpu::BlockKind::Mlp(mlp), post_norm, residual_scale, stream_scale))
    }

    #[staticmethod]
    #[pyo3(signature = (*, gate, projection, layer, activation, post_norm, stream_scale=1.0))]
    fn layer_input(
        gate: Taken,
        projection: Taken,
        layer: usize,
        activation: &str,
        post_norm: Copied<f32>,
        stream_scale: f32,
    ) -> PyResult<Self> {
        let input = cpu::LayerInput { gate: gate.0, projection: projection.0, layer, activation: activation_of(activation)? };
        Ok(Self::of(cpu::Input::Stream, cpu::BlockKind::LayerInput(input), Some(post_norm), 1.0, stream_scale))
    }

    #[staticmethod]
    #[pyo3(signature = (
        *, norm, router, gate_up_proj, down_proj, scores, used, activation="silu", parallel=false, clamp=None, bias=None, groups=None,
        normalised=None, scale=1.0, expert_scales=None, shared=None, shared_gate=false, norms=None, post_norm=None, residual_scale=1.0, stream_scale=1.0
    ))]
    fn mixture(
        norm: Option<NormArgs>,
        router: Taken,
        gate_up_proj: Taken,
        down_proj: Taken,
        scores: &str,
        used: usize,
        activation: &str,
        parallel: bool,
        clamp: Option<(f32, f32)>,
        bias: Option<Copied<f32>>,
        groups: Option<(usize, usize, usize)>,
        normalised: Option<f32>,
        scale: f32,
        expert_scales: Option<Copied<f32>>,
        shared: Option<(Taken, Taken)>,
        shared_gate: bool,
        norms: Option<[Copied<f32>; 4]>,
        post_norm: Option<Copied<f32>>,
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
        let norms = norms.map(|norms| {
            let [router, input, output, shared_output] = norms.map(|norm| norm.0);
            cpu::MixtureNorms { router, input, output, shared_output }
        });
        let groups = groups.map(|(count, used, best)| cpu::ExpertGroups { count, used, best });
        let shared = shared.map(|(gate_up, down)| {
            let mlp = cpu::Mlp { gate_up_proj: gate_up.0, down_proj: down.0, inner };
            cpu::SharedExpert { mlp, gated: shared_gate }
        });
        let (bias, expert_scales) = (numbers(bias), numbers(expert_scales));
        let mixture = cpu::Mixture {
            router: router.0,
            choice: cpu::Choice { scores, used, bias, groups, normalised, scale, expert_scales },
            gate_up_proj: gate_up_proj.0,
            down_proj: down_proj.0,
            inner,
            shared,
            norms,
        };
        Ok(Self::of(input_of(norm, parallel), cpu::BlockKind::Mixture(Box::new(mixture)), post_norm, residual_scale, stream_scale))
    }
}

/// The heads of a recurrent block, which takes ownership of them.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct RecurrentHeads(Once<cpu::Heads>);

#[pymethods]
impl RecurrentHeads {
    #[new]
    #[pyo3(signature = (*, count, groups, key_size, value_size, rates, step_bias, norm, norm_group, tiled=false, skip=None, steps=None))]
    fn new(
        count: usize,
        groups: usize,
        key_size: usize,
        value_size: usize,
        rates: Copied<f32>,
        step_bias: Copied<f32>,
        norm: Copied<f32>,
        norm_group: usize,
        tiled: bool,
        skip: Option<Copied<f32>>,
        steps: Option<(f32, f32)>,
    ) -> Self {
        let rule = match skip {
            None => cpu::Rule::Delta,
            Some(skip) => cpu::Rule::Space { skip: skip.0, steps: steps.unwrap_or((0.0, f32::INFINITY)) },
        };
        let (rates, step_bias, norm) = (rates.0, step_bias.0, norm.0);
        let heads = cpu::Heads { count, groups, key_size, value_size, tiled, rates, step_bias, rule, norm, norm_group };
        Self(Once::new(heads))
    }
}

fn inner_of(activation: &str) -> PyResult<cpu::Inner> {
    match activation {
        "relu" => Ok(cpu::Inner::Relu),
        "relu2" => Ok(cpu::Inner::ReluSquared),
        "gelu" => Ok(cpu::Inner::Gelu),
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
        positions=None, embedding_scale=1.0, final_softcap=None
    ))]
    fn new(
        blocks: Vec<PyRef<'_, DecoderBlock>>,
        norm: NormArgs,
        head: Taken,
        embedding: Option<Taken>,
        layer_embeddings: Option<(Taken, Taken, Copied<f32>)>,
        hidden_size: usize,
        num_heads: usize,
        kv_heads: Vec<(usize, usize, Option<usize>)>,
        rms_norm_eps: f32,
        ropes: Vec<(Copied<f32>, f32)>,
        threads: usize,
        positions: Option<Copied<f32>>,
        embedding_scale: f32,
        final_softcap: Option<f32>,
    ) -> PyResult<Self> {
        let config = cpu::DecoderConfig {
            hidden_size,
            num_heads,
            kv_heads: kv_heads.into_iter().map(|(count, head_dim, latent)| cpu::KvHeads { count, head_dim, latent }).collect(),
            rms_norm_eps,
            ropes: ropes.into_iter().map(|(frequencies, scale)| cpu::Rope { frequencies: frequencies.0, scale }).collect(),
            positions: numbers(positions),
            embedding_scale,
            final_softcap,
        };
        let blocks = blocks.iter().map(|block| block.0.take("these blocks belong")).collect::<PyResult<_>>()?;
        let embedding = embedding.map(|table| table.0.into_matrix());
        let layer_embeddings = layer_embeddings.map(|(table, projection, norm)| {
            let (table, projection, norm) = (table.0.into_matrix(), projection.0, norm.0);
            cpu::LayerEmbeddings { table, projection, norm }
        });
        let pool = started(threads)?;
        let progress = pool.progress();
        let decoder = cpu::Decoder::new(pool, config, blocks, norm.into(), embedding, layer_embeddings, head.0);
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
        input_ids: Copied<i32>,
        positions: Copied<i32>,
        slot_mapping: Copied<i32>,
        query_starts: Copied<i32>,
        context_lens: Copied<i32>,
        batch_slots: Copied<i32>,
        block_tables: &Bound<'_, PyArray2<i32>>,
        adapters: Option<Copied<i32>>,
        states: Option<&StateCache>,
        state_slots: Option<Copied<i32>>,
        state_saves: Option<Copied<i32>>,
    ) -> PyResult<()> {
        let max_blocks = block_tables.shape()[1];
        let [adapters, slots, saves] = [adapters, state_slots, state_saves].map(|array| numbers(array).unwrap_or_default());
        // This is the largest array and most of it is unread, so it is not copied.
        let tables = block_tables.try_readonly().map_err(|error| PyValueError::new_err(format!("block_tables cannot be read: {error}")))?;
        let tables = tables.as_slice().map_err(|_| PyValueError::new_err("block_tables need a C-contiguous int32 array"))?;
        py.detach(|| {
            let step = cpu::Step {
                input_ids: &input_ids.0,
                positions: &positions.0,
                slots: &slot_mapping.0,
                query_starts: &query_starts.0,
                context_lens: &context_lens.0,
                rows: &batch_slots.0,
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
        lock(&self.0).add_adapter(adapter.0.take("this adapter belongs")?).map_err(invalid)
    }

    /// Removes an adapter.
    fn remove_adapter(&self, number: usize) {
        lock(&self.0).remove_adapter(number);
    }

    /// Writes the last step's logits for the tokens at indices `at` to `out` [at, vocabulary].
    fn logits(&self, at: Copied<i32>, out: &Bound<'_, PyArray2<f32>>) -> PyResult<()> {
        write(out, "logits", |out| lock(&self.0).logits(&at.0, out))
    }

    /// Writes the last step's normalised hidden states of the tokens at indices `at`, scaled to length 1, to `out` [at, hidden size].
    fn states(&self, at: Copied<i32>, out: &Bound<'_, PyArray2<f32>>) -> PyResult<()> {
        write(out, "states", |out| lock(&self.0).states(&at.0, out))
    }
}
