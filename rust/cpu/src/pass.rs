//! Runs a step through the blocks of a decoder, in phases on the thread pool.

pub(crate) mod latent;
pub(crate) mod mixture;
pub(crate) mod recurrent;

use crate::aligned::AlignedVec;
use crate::attention::{self, Attention, Plan};
use crate::blocks::{Block, BlockKind, DecoderConfig, Input, SelfAttention};
use crate::cache::{KvDType, Pages};
use crate::hadamard::Hadamard;
use crate::layer_input::{LayerEmbeddings, LayerInput};
use crate::linear::{Activate, Epilogue, Linear, Packed, Scratch};
use crate::lora::{self, AdaptedRows, Deltas};
use crate::mlp::Mlp;
use crate::norm::RmsNorm;
use crate::pool::Worker;
use crate::rope::{Rope, Rotate};
use crate::simd::{Isa, Kernel, Simd, swish};
use crate::step::Step;
use crate::unsafe_slice::UnsafeSlice;
use crate::weights::Matrix;
use recurrent::Recurrence;

/// Buffers that are reused from step to step.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    /// The residual stream, \[tokens\]\[hidden size\].
    pub(crate) hidden: AlignedVec<f32>,
    /// Queries, new keys and new values, \[tokens\]\[query heads and twice the KV heads\]\[head dim\], and gates of the outputs if there are
    /// any; or what attention to latents or a recurrent layer makes of its input.
    qkv: AlignedVec<f32>,
    /// Outputs of attention, \[tokens\]\[heads\]\[head dim\].
    attended: AlignedVec<f32>,
    /// Inputs of `down_proj`, \[tokens\]\[the largest inner width\].
    inner: AlignedVec<f32>,
    /// Outputs of a block before the output norm, or the input of attention that the next block reads too, \[tokens\]\[hidden size\].
    output: AlignedVec<f32>,
    /// Cos/sin tables, \[tokens\]\[ropes\].
    cos_sin: AlignedVec<f32>,
    /// Embeddings for each layer, \[tokens\]\[layers\]\[width\].
    layer_embeddings: AlignedVec<f32>,
    latent: latent::Buffers,
    pub(crate) mixture: mixture::Buffers,
}

/// Per-thread scratch memory.
#[derive(Debug, Default)]
pub(crate) struct Spare {
    pub(crate) linear: Scratch,
    lora: lora::Scratch,
    attention: attention::Scratch,
    recurrence: crate::recurrent::Scratch,
    row: Vec<f32>,
    normed: Vec<f32>,
}

/// A step, shared by all threads.
///
/// SAFETY of all blocks below: in a phase, one index writes each row, and the phase reads only data of earlier phases. Between phases nothing
/// is read that a later one writes (see [`Worker::parallel_for`]). The slots of a step are distinct.
pub(crate) struct Pass<'a> {
    pub(crate) isa: Isa,
    pub(crate) config: &'a DecoderConfig,
    pub(crate) step: &'a Step<'a>,
    /// For each KV cache, how attention is split into tasks.
    plans: &'a [Plan<'a>],
    /// The KV caches.
    pages: &'a [Pages<'a>],
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
    own: Option<&'a LayerEmbeddings>,
    layer_embeddings: UnsafeSlice<'a, f32>,
    latent: latent::Shared<'a>,
    mixture: mixture::Shared<'a>,
    recurrence: Option<Recurrence<'a>>,
}

impl<'a> Pass<'a> {
    /// Creates the pass of a step through `blocks` and makes room for it in `buffers`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn new(
        isa: Isa,
        config: &'a DecoderConfig,
        step: &'a Step<'a>,
        plans: &'a [Plan<'a>],
        pages: &'a [Pages<'a>],
        packed: &Packed<'a>,
        adapted: Option<&'a AdaptedRows<'a>>,
        own: Option<&'a LayerEmbeddings>,
        recurrence: Option<Recurrence<'a>>,
        blocks: &[Block],
        buffers: &'a mut Buffers,
    ) -> Self {
        let tokens = step.input_ids.len();
        let inner = blocks.iter().map(Block::inner).max().unwrap_or(0);
        let mixture = buffers.mixture.shared(isa, tokens, config.hidden_size, blocks);
        let latent = buffers.latent.shared(isa, tokens, config, blocks.iter().filter_map(Block::latent));
        let widths = blocks.iter().map(|block| block.projected(config));
        let (projected, attended) = widths.fold((0, 0), |most, widths| (most.0.max(widths.0), most.1.max(widths.1)));
        let cos_sin_width = config.ropes.iter().map(Rope::width).sum();
        let room = |buffer: &'a mut AlignedVec<f32>, width: usize| {
            buffer.reserve(tokens * width);
            buffer.shared()
        };
        Self {
            isa,
            config,
            step,
            plans,
            pages,
            packed: *packed,
            adapted,
            cos_sin_width,
            hidden: room(&mut buffers.hidden, config.hidden_size),
            qkv: room(&mut buffers.qkv, projected),
            attended: room(&mut buffers.attended, attended),
            inner: room(&mut buffers.inner, inner),
            output: room(&mut buffers.output, config.hidden_size),
            cos_sin: room(&mut buffers.cos_sin, cos_sin_width),
            own,
            layer_embeddings: room(&mut buffers.layer_embeddings, own.map_or(0, |own| own.table.ins)),
            latent,
            mixture,
            recurrence,
        }
    }

    /// Runs all blocks. `table` is the embedding matrix.
    pub(crate) fn run(&self, worker: &mut Worker<'_>, spare: &mut Spare, table: &Matrix, blocks: &'a [Block]) {
        self.embed(worker, table);
        if let Some(own) = self.own {
            self.embed_layers(worker, spare, own);
        }
        for (index, block) in blocks.iter().enumerate() {
            let kept = blocks.get(index + 1).and_then(Block::kept_input);
            let linears = block.adaptable();
            let deltas = |which: usize| self.adapted?.layer(index, which, &linears?[which].matrix);
            let deltas = [deltas(0), deltas(1)];
            match &block.kind {
                BlockKind::Attention(attention) => self.attend(worker, spare, block, attention, deltas, kept),
                BlockKind::Latent(attention) => self.attend_latent(worker, spare, block, attention),
                BlockKind::Recurrent(recurrent) => self.recur(worker, spare, block, recurrent),
                BlockKind::Mlp(mlp) => self.feed(worker, spare, block, mlp, deltas),
                BlockKind::Mixture(mixture) => self.mix(worker, spare, index, block, mixture),
                BlockKind::LayerInput(input) => self.add_layer_input(worker, spare, block, input),
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
            for x in &mut *state {
                *x *= embedding_scale;
            }
            if let Some(rows) = &self.config.positions {
                let row = &rows[step.positions[t] as usize * hidden_size..][..hidden_size];
                state.iter_mut().zip(row).for_each(|(x, position)| *x += position);
            }
            for rope in &self.config.ropes {
                let (own, others) = cos_sin.split_at_mut(rope.width());
                rope.write(step.positions[t], own);
                cos_sin = others;
            }
        });
    }

    /// Computes the embeddings of the step's tokens for each layer.
    fn embed_layers(&self, worker: &mut Worker<'_>, spare: &mut Spare, own: &LayerEmbeddings) {
        let &DecoderConfig { hidden_size, rms_norm_eps: eps, .. } = self.config;
        let (all, width) = (own.table.ins, own.width());
        self.pack_input(worker, spare, &Input::Stream, &own.projection, None, None);
        self.multiply(worker, spare, &own.projection, None, self.layer_embeddings, all, Epilogue::Store);
        let Spare { row, normed, .. } = spare;
        row.resize(all, 0.0);
        normed.resize(width, 0.0);
        worker.parallel_for(self.step.input_ids.len(), |t| {
            own.table.read_row(self.step.input_ids[t] as usize, row);
            // SAFETY: only index t writes this row in this phase (see `Pass`).
            let embeddings = unsafe { self.layer_embeddings.write(t * all, all) };
            for (embedding, table) in embeddings.chunks_exact_mut(width).zip(row.chunks_exact(width)) {
                for x in &mut *embedding {
                    *x /= (hidden_size as f32).sqrt();
                }
                self.isa.run(RmsNorm { x: embedding, weight: &own.norm, eps, out: normed });
                for ((to, normed), table) in embedding.iter_mut().zip(&*normed).zip(table) {
                    *to = (normed + table * (width as f32).sqrt()) * std::f32::consts::FRAC_1_SQRT_2;
                }
            }
        });
    }

    /// Runs an attention block, which keeps the input of the next one if that is one to be `kept`.
    fn attend(
        &self,
        worker: &mut Worker<'_>,
        spare: &mut Spare,
        block: &Block,
        attention: &SelfAttention,
        deltas: [Option<Deltas<'a>>; 2],
        kept: Option<&Input>,
    ) {
        let (width, (queries, _)) = (attention.qkv_width(self.config), attention.widths(self.config));
        let (plan, pages) = (&self.plans[attention.kv.cache], self.pages[attention.kv.cache]);
        self.pack_input(worker, spare, &block.input, &attention.qkv_proj, deltas[0], kept);
        self.multiply(worker, spare, &attention.qkv_proj, deltas[0], self.qkv, width, Epilogue::Store);
        worker.parallel_for(self.step.input_ids.len(), |t| self.write_kv(t, attention, pages, &mut spare.row));
        worker.parallel_for(plan.len(), |task| {
            let seen = Attention {
                plan,
                pages,
                layer: attention.kv.layer,
                window: attention.window,
                scale: attention.scale,
                softcap: attention.softcap,
                sinks: attention.sinks.as_deref(),
                // SAFETY: an earlier phase wrote these rows (see `Pass`).
                query: unsafe { self.qkv.read(0, self.step.input_ids.len() * width) },
                stride: width,
                head_stride: pages.shape.head_dim,
                out: self.attended,
            };
            // SAFETY: one index runs each task, and earlier phases wrote all keys and values (see `Pass`).
            unsafe { seen.attend(self.isa, task, &mut spare.attention) }
        });
        self.add(worker, spare, block, &attention.o_proj, deltas[1], |t, out| {
            // SAFETY: an earlier phase wrote this row (see `Pass`).
            out.copy_from_slice(unsafe { self.attended.read(t * queries, queries) });
            self.rotate_for_int8(pages, out);
            if attention.gated {
                // SAFETY: as above.
                let gates = unsafe { self.qkv.read((t + 1) * width - queries, queries) };
                self.isa.run(Gate { x: out, gates });
            }
        });
    }

    /// Rotates heads if the cache has 8 bits for each number.
    fn rotate_for_int8(&self, pages: Pages<'_>, heads: &mut [f32]) {
        if pages.dtype == KvDType::Int8 {
            self.isa.run(Hadamard { heads, head_dim: pages.shape.rotated() });
        }
    }

    /// Applies the norms and the rotary embedding to token `t`, and writes its keys and values to the cache unless they are shared.
    fn write_kv(&self, t: usize, attention: &SelfAttention, pages: Pages<'_>, spare: &mut Vec<f32>) {
        let eps = self.config.rms_norm_eps;
        let (width, (queries, kv)) = (attention.qkv_width(self.config), attention.widths(self.config));
        // SAFETY: only index t writes this row in this phase (see `Pass`).
        let row = unsafe { self.qkv.write(t * width, queries + 2 * kv) };
        let (heads, values) = row.split_at_mut(queries + kv);
        let turn = |heads: &mut [f32]| {
            if let Some(rope) = attention.rope {
                // SAFETY: an earlier phase wrote this row (see `Pass`).
                let cos_sin = unsafe { self.cos_sin_of(t, rope) };
                self.isa.run(Rotate { heads, head_dim: pages.shape.head_dim, cos_sin, adjacent: false });
            }
        };
        if attention.rotated_first {
            turn(heads);
        }
        let (query_heads, keys) = heads.split_at_mut(queries);
        if let Some(norms) = &attention.qk_norm {
            for (heads, norm) in [query_heads, keys].into_iter().zip(norms) {
                norm.apply_to_heads(self.isa, eps, pages.shape.head_dim, heads, spare);
            }
        }
        if let Some(weight) = &attention.value_norm {
            spare.resize(weight.len(), 0.0);
            for x in values.chunks_exact_mut(weight.len()) {
                self.normalise(weight, x, spare);
                x.copy_from_slice(spare);
            }
        }
        if !attention.rotated_first {
            turn(heads);
        }
        if let Some(temperature) = attention.temperature {
            let factor = temperature.factor(self.step.positions[t]);
            row[..queries].iter_mut().for_each(|x| *x *= factor);
        }
        self.rotate_for_int8(pages, row);
        if !attention.kv.shared {
            let (heads, values) = row.split_at(queries + kv);
            // SAFETY: the slots of a step are distinct (see `Pass`).
            unsafe { pages.write(attention.kv.layer, self.step.slots[t] as usize, &heads[queries..], values) };
        }
    }

    /// The cosines and sines of a rotary embedding for token `t`.
    ///
    /// # Safety
    ///
    /// An earlier phase wrote them.
    unsafe fn cos_sin_of(&self, t: usize, rope: usize) -> &[f32] {
        let ropes = &self.config.ropes;
        let start: usize = ropes[..rope].iter().map(Rope::width).sum();
        // SAFETY: the caller guarantees it.
        unsafe { self.cos_sin.read(t * self.cos_sin_width + start, ropes[rope].width()) }
    }

    /// Runs an MLP.
    fn feed(&self, worker: &mut Worker<'_>, spare: &mut Spare, block: &Block, mlp: &Mlp, deltas: [Option<Deltas<'a>>; 2]) {
        let inner = mlp.width();
        self.pack_input(worker, spare, &block.input, &mlp.gate_up_proj, deltas[0], None);
        self.multiply(worker, spare, &mlp.gate_up_proj, deltas[0], self.inner, inner, mlp.inner.epilogue());
        self.add(worker, spare, block, &mlp.down_proj, deltas[1], |t, out| {
            // SAFETY: an earlier phase wrote this row (see `Pass`).
            out.copy_from_slice(unsafe { self.inner.read(t * inner, inner) });
        });
    }

    /// Adds the embeddings of a layer.
    fn add_layer_input(&self, worker: &mut Worker<'_>, spare: &mut Spare, block: &Block, input: &LayerInput) {
        let width = input.gate.matrix.outs;
        let all = self.own.map_or(0, |own| own.table.ins);
        self.pack_input(worker, spare, &block.input, &input.gate, None, None);
        self.multiply(worker, spare, &input.gate, None, self.inner, width, Epilogue::Store);
        self.add(worker, spare, block, &input.projection, None, |t, out| {
            // SAFETY: earlier phases wrote these rows, and only the index that packs the row uses them in this phase (see `Pass`).
            let (gates, ups) =
                unsafe { (self.inner.read(t * width, width), self.layer_embeddings.write(t * all + input.layer * width, width)) };
            out.copy_from_slice(gates);
            self.isa.run(Activate { gates: out, ups, activation: input.activation });
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

    /// Packs the input of a block for `linear`, and keeps that of the next block if it is one to be `kept`.
    fn pack_input(
        &self,
        worker: &mut Worker<'_>,
        spare: &mut Spare,
        input: &Input,
        linear: &Linear,
        deltas: Option<Deltas<'a>>,
        kept: Option<&Input>,
    ) {
        let hidden_size = self.config.hidden_size;
        self.packed.pack(worker, self.isa, linear, &mut spare.linear, |t, out| {
            self.read_input(input, t, out);
            if let Some(next) = kept {
                // SAFETY: only the index that packs the row writes its copy (see `Pass`).
                let copy = unsafe { self.output.write(t * hidden_size, hidden_size) };
                if let Some(norm) = next.norm() {
                    // SAFETY: an earlier phase wrote this row (see `Pass`).
                    let stream = unsafe { self.hidden.read(t * hidden_size, hidden_size) };
                    norm.apply(self.isa, self.config.rms_norm_eps, stream, copy);
                } else {
                    copy.copy_from_slice(out);
                }
            }
            keep(deltas, t, out);
        });
    }

    /// Writes the input of a block for token `t` to `out`.
    fn read_input(&self, input: &Input, t: usize, out: &mut [f32]) {
        let hidden = self.config.hidden_size;
        let rows = if let Input::Before(_) = input { self.output } else { self.hidden };
        // SAFETY: an earlier phase wrote this row (see `Pass`).
        let x = unsafe { rows.read(t * hidden, hidden) };
        match input {
            Input::Normed(norm) => norm.apply(self.isa, self.config.rms_norm_eps, x, out),
            Input::Stream | Input::Before(_) => out.copy_from_slice(x),
        }
    }

    /// Scales `x` to root mean square 1, multiplies it by `weight`, and writes it to `out`.
    fn normalise(&self, weight: &[f32], x: &[f32], out: &mut [f32]) {
        self.isa.run(RmsNorm { x, weight, eps: self.config.rms_norm_eps, out });
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
                self.normalise(weight, output, normed);
                &*normed
            }
            None => output,
        };
        state.iter_mut().zip(output).for_each(|(state, x)| *state = (*state + x * block.residual_scale) * block.stream_scale);
    }
}

/// Multiplies numbers by the sigmoids of `gates`.
struct Gate<'a> {
    x: &'a mut [f32],
    gates: &'a [f32],
}

impl Kernel for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { x, gates } = self;
        assert!(x.len() == gates.len() && x.len().is_multiple_of(S::LANES));
        for at in (0..x.len()).step_by(S::LANES) {
            // SAFETY: both slices have at least `S::LANES` numbers from `at` on.
            unsafe { s.store(x.as_mut_ptr().add(at), swish(s, s.load(x.as_ptr().add(at)), s.load(gates.as_ptr().add(at)))) };
        }
    }
}

/// Keeps the input of a layer with updates.
fn keep(deltas: Option<Deltas<'_>>, row: usize, x: &[f32]) {
    if let Some(deltas) = deltas {
        deltas.keep(row, x);
    }
}
