//! Runs a step through the blocks of a decoder, in phases on the thread pool.

pub(crate) mod mixture;

use crate::aligned::AlignedVec;
use crate::attention::{self, Attention, Plan};
use crate::blocks::{Block, BlockKind, DecoderConfig, SelfAttention};
use crate::cache::{KvDType, Pages};
use crate::hadamard::Hadamard;
use crate::linear::{Epilogue, Linear, Packed, Scratch};
use crate::lora::{self, AdaptedRows, Deltas};
use crate::mlp::GatedMlp;
use crate::norm::RmsNorm;
use crate::pool::Worker;
use crate::rope::{Rope, Rotate};
use crate::simd::Isa;
use crate::step::Step;
use crate::unsafe_slice::UnsafeSlice;
use crate::weights::Matrix;

/// Buffers that are reused from step to step.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    /// The residual stream, \[tokens\]\[hidden size\].
    pub(crate) hidden: AlignedVec<f32>,
    /// Queries, keys and values, \[tokens\]\[query heads and twice the KV heads\]\[head dim\].
    qkv: AlignedVec<f32>,
    /// Outputs of attention, \[tokens\]\[heads\]\[head dim\].
    attended: AlignedVec<f32>,
    /// Gated inputs of `down_proj`, \[tokens\]\[the largest inner width\].
    inner: AlignedVec<f32>,
    /// Outputs of a block before the output norm, \[tokens\]\[hidden size\].
    output: AlignedVec<f32>,
    /// Cos/sin tables, \[tokens\]\[ropes\].
    cos_sin: AlignedVec<f32>,
    pub(crate) mixture: mixture::Buffers,
}

/// Per-thread scratch memory.
#[derive(Debug, Default)]
pub(crate) struct Spare {
    pub(crate) linear: Scratch,
    lora: lora::Scratch,
    attention: attention::Scratch,
    sorted: mixture::Sorted,
    row: Vec<f32>,
    normed: Vec<f32>,
}

/// A step, shared by all threads.
///
/// SAFETY of all blocks below: in a phase, one index writes each row, and the phase reads only data of earlier phases. The slots of a step
/// are distinct.
pub(crate) struct Pass<'a> {
    pub(crate) isa: Isa,
    pub(crate) config: &'a DecoderConfig,
    pub(crate) step: &'a Step<'a>,
    pub(crate) plan: &'a Plan<'a>,
    pub(crate) pages: Pages<'a>,
    packed: Packed<'a>,
    adapted: Option<&'a AdaptedRows<'a>>,
    /// Width of a token's cos/sin tables, for all rotary embeddings.
    cos_sin_width: usize,
    hidden: UnsafeSlice<'a, f32>,
    qkv: UnsafeSlice<'a, f32>,
    attended: UnsafeSlice<'a, f32>,
    inner: UnsafeSlice<'a, f32>,
    output: UnsafeSlice<'a, f32>,
    cos_sin: UnsafeSlice<'a, f32>,
    mixture: mixture::Shared<'a>,
}

impl<'a> Pass<'a> {
    /// Creates the pass of a step through `blocks` and makes room for it in `buffers`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn new(
        isa: Isa,
        config: &'a DecoderConfig,
        step: &'a Step<'a>,
        plan: &'a Plan<'a>,
        pages: Pages<'a>,
        packed: Packed<'a>,
        adapted: Option<&'a AdaptedRows<'a>>,
        blocks: &[Block],
        buffers: &'a mut Buffers,
    ) -> Self {
        let tokens = step.input_ids.len();
        let inner = blocks.iter().map(Block::inner).max().unwrap_or(0);
        let mixtures = blocks.iter().filter_map(Block::mixture);
        let mixture = buffers.mixture.shared(isa, tokens, config.hidden_size, mixtures);
        let cos_sin_width = config.ropes.iter().map(Rope::width).sum();
        let room = |buffer: &'a mut AlignedVec<f32>, width: usize| {
            buffer.reserve(tokens * width);
            buffer.shared()
        };
        Self {
            isa,
            config,
            step,
            plan,
            pages,
            packed,
            adapted,
            cos_sin_width,
            hidden: room(&mut buffers.hidden, config.hidden_size),
            qkv: room(&mut buffers.qkv, config.qkv_width()),
            attended: room(&mut buffers.attended, config.widths().0),
            inner: room(&mut buffers.inner, inner),
            output: room(&mut buffers.output, config.hidden_size),
            cos_sin: room(&mut buffers.cos_sin, cos_sin_width),
            mixture,
        }
    }

    /// Runs all blocks. `table` is the embedding matrix.
    pub(crate) fn run(&self, worker: &mut Worker<'_>, spare: &mut Spare, table: &Matrix, blocks: &'a [Block]) {
        self.embed(worker, table);
        let mut layer = 0;
        for (index, block) in blocks.iter().enumerate() {
            let linears = block.adaptable();
            let deltas = |which: usize| self.adapted?.layer(index, which, &linears?[which].matrix);
            let deltas = [deltas(0), deltas(1)];
            match &block.kind {
                BlockKind::Attention(attention) => {
                    self.attend(worker, spare, block, attention, layer, deltas);
                    layer += 1;
                }
                BlockKind::Mlp(mlp) => self.gate(worker, spare, block, mlp, deltas),
                BlockKind::Mixture(mixture) => self.mix(worker, spare, block, mixture),
            }
        }
    }

    /// Reads the embeddings of the step's tokens and computes the cos/sin tables of their positions.
    fn embed(&self, worker: &mut Worker<'_>, table: &Matrix) {
        let Self { config: &DecoderConfig { hidden_size, embedding_scale, .. }, cos_sin_width, step, .. } = *self;
        worker.parallel_for(step.input_ids.len(), |t| {
            // SAFETY: only index t writes these rows in this phase (see `Pass`).
            let (state, mut cos_sin) =
                unsafe { (self.hidden.write(t * hidden_size, hidden_size), self.cos_sin.write(t * cos_sin_width, cos_sin_width)) };
            table.read_row(step.input_ids[t] as usize, state);
            for x in state {
                *x *= embedding_scale;
            }
            for rope in &self.config.ropes {
                let (own, others) = cos_sin.split_at_mut(rope.width());
                rope.write(step.positions[t], own);
                cos_sin = others;
            }
        });
    }

    /// Runs an attention block, whose keys and values are in the cache's `layer`.
    fn attend(
        &self,
        worker: &mut Worker<'_>,
        spare: &mut Spare,
        block: &Block,
        attention: &SelfAttention,
        layer: usize,
        deltas: [Option<Deltas<'a>>; 2],
    ) {
        let (width, (queries, _)) = (self.config.qkv_width(), self.config.widths());
        self.pack_normed(worker, spare, &block.norm, &attention.qkv_proj, deltas[0]);
        self.multiply(worker, spare, &attention.qkv_proj, deltas[0], self.qkv, width, Epilogue::Store);
        worker.parallel_for(self.step.input_ids.len(), |t| self.write_kv(t, attention, layer, &mut spare.row));
        let seen = Attention {
            plan: self.plan,
            pages: self.pages,
            layer,
            window: attention.window,
            scale: attention.scale,
            softcap: attention.softcap,
            sinks: attention.sinks.as_deref(),
            // SAFETY: an earlier phase wrote these rows (see `Pass`).
            query: unsafe { self.qkv.read(0, self.step.input_ids.len() * width) },
            stride: width,
            out: self.attended,
        };
        // SAFETY: one index runs each task, and earlier phases wrote all keys and values (see `Pass`).
        worker.parallel_for(self.plan.len(), |task| unsafe { seen.attend(self.isa, task, &mut spare.attention) });
        self.add(worker, spare, block, &attention.o_proj, deltas[1], |t, out| {
            // SAFETY: an earlier phase wrote this row (see `Pass`).
            out.copy_from_slice(unsafe { self.attended.read(t * queries, queries) });
            self.rotate_for_int8(out);
        });
    }

    /// Rotates heads if the cache has 8 bits for each number.
    fn rotate_for_int8(&self, heads: &mut [f32]) {
        if self.pages.dtype == KvDType::Int8 {
            self.isa.run(Hadamard { heads, head_dim: self.config.head_dim });
        }
    }

    /// Applies the query and key norms and the rotary embedding to token `t`, and writes its keys and values to the cache.
    fn write_kv(&self, t: usize, attention: &SelfAttention, layer: usize, spare: &mut Vec<f32>) {
        let &DecoderConfig { head_dim, rms_norm_eps: eps, ref ropes, .. } = self.config;
        let (width, (queries, kv)) = (self.config.qkv_width(), self.config.widths());
        // SAFETY: only index t writes this row in this phase (see `Pass`).
        let row = unsafe { self.qkv.write(t * width, width) };
        let heads = &mut row[..queries + kv];
        if let Some([query, key]) = &attention.qk_norm {
            let (queries, keys) = heads.split_at_mut(queries);
            for (heads, weight) in [(queries, query), (keys, key)] {
                spare.resize(weight.len(), 0.0);
                for x in heads.chunks_exact_mut(weight.len()) {
                    self.isa.run(RmsNorm { x, weight, eps, out: spare });
                    x.copy_from_slice(spare);
                }
            }
        }
        if let Some(index) = attention.rope {
            let start: usize = ropes[..index].iter().map(Rope::width).sum();
            // SAFETY: an earlier phase wrote this row (see `Pass`).
            let cos_sin = unsafe { self.cos_sin.read(t * self.cos_sin_width + start, ropes[index].width()) };
            self.isa.run(Rotate { heads, head_dim, cos_sin });
        }
        if let Some(temperature) = attention.temperature {
            let factor = temperature.factor(self.step.positions[t]);
            row[..queries].iter_mut().for_each(|x| *x *= factor);
        }
        self.rotate_for_int8(row);
        let (heads, values) = row.split_at(queries + kv);
        // SAFETY: the slots of a step are distinct (see `Pass`).
        unsafe { self.pages.write(layer, self.step.slots[t] as usize, &heads[queries..], values) };
    }

    /// Runs a gated MLP.
    fn gate(&self, worker: &mut Worker<'_>, spare: &mut Spare, block: &Block, mlp: &GatedMlp, deltas: [Option<Deltas<'a>>; 2]) {
        let inner = mlp.inner();
        self.pack_normed(worker, spare, &block.norm, &mlp.gate_up_proj, deltas[0]);
        self.multiply(worker, spare, &mlp.gate_up_proj, deltas[0], self.inner, inner, Epilogue::Gate(mlp.activation));
        self.add(worker, spare, block, &mlp.down_proj, deltas[1], |t, out| {
            // SAFETY: an earlier phase wrote this row (see `Pass`).
            out.copy_from_slice(unsafe { self.inner.read(t * inner, inner) });
        });
    }

    /// Multiplies the packed rows by `linear`, with the updates of their adapters.
    #[allow(clippy::too_many_arguments)]
    fn multiply(
        &self,
        worker: &mut Worker<'_>,
        spare: &mut Spare,
        linear: &Linear,
        deltas: Option<Deltas<'a>>,
        out: UnsafeSlice<'_, f32>,
        stride: usize,
        epilogue: Epilogue,
    ) {
        if let Some(deltas) = deltas {
            deltas.compute(worker, &mut spare.lora);
        }
        self.packed.with(deltas).multiply(worker, self.isa, linear, out, stride, epilogue, &mut spare.linear);
    }

    /// Normalises the residual stream and packs it for `linear`.
    fn pack_normed(&self, worker: &mut Worker<'_>, spare: &mut Spare, weight: &[f32], linear: &Linear, deltas: Option<Deltas<'a>>) {
        let &DecoderConfig { hidden_size, rms_norm_eps: eps, .. } = self.config;
        self.packed.pack(worker, self.isa, linear, &mut spare.linear, |t, out| {
            // SAFETY: an earlier phase wrote this row (see `Pass`).
            let x = unsafe { self.hidden.read(t * hidden_size, hidden_size) };
            self.isa.run(RmsNorm { x, weight, eps, out });
            keep(deltas, t, out);
        });
    }

    /// Multiplies the rows that `read` gives by `linear` and adds the block's output to the residual stream.
    fn add(
        &self,
        worker: &mut Worker<'_>,
        spare: &mut Spare,
        block: &Block,
        linear: &Linear,
        deltas: Option<Deltas<'a>>,
        read: impl Fn(usize, &mut [f32]),
    ) {
        let hidden_size = self.config.hidden_size;
        self.packed.pack(worker, self.isa, linear, &mut spare.linear, |t, out| {
            read(t, out);
            keep(deltas, t, out);
        });
        if block.post_norm.is_none() {
            let epilogue = Epilogue::Add(block.residual_scale);
            return self.multiply(worker, spare, linear, deltas, self.hidden, hidden_size, epilogue);
        }
        self.multiply(worker, spare, linear, deltas, self.output, hidden_size, Epilogue::Store);
        worker.parallel_for(self.step.input_ids.len(), |t| {
            // SAFETY: an earlier phase wrote the output, and only index t writes this row of the residual stream (see `Pass`).
            let (output, state) =
                unsafe { (self.output.read(t * hidden_size, hidden_size), self.hidden.write(t * hidden_size, hidden_size)) };
            self.add_output(block, output, &mut spare.normed, state);
        });
    }

    /// Adds a token's output of a block to the token's state, normalised if the block has a norm for it.
    fn add_output(&self, block: &Block, output: &[f32], normed: &mut Vec<f32>, state: &mut [f32]) {
        let output = match &block.post_norm {
            Some(weight) => {
                normed.resize(output.len(), 0.0);
                self.isa.run(RmsNorm { x: output, weight, eps: self.config.rms_norm_eps, out: normed });
                &*normed
            }
            None => output,
        };
        state.iter_mut().zip(output).for_each(|(state, x)| *state += x * block.residual_scale);
    }
}

/// Keeps the input of a layer with updates.
fn keep(deltas: Option<Deltas<'_>>, row: usize, x: &[f32]) {
    if let Some(deltas) = deltas {
        deltas.keep(row, x);
    }
}
