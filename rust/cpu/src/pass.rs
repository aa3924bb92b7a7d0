//! A step's way through the blocks of a decoder, in phases that all threads run together.

use crate::aligned::AlignedVec;
use crate::attention::{self, Attention, Plan};
use crate::blocks::{Block, BlockKind, DecoderConfig, GatedMlp, SelfAttention};
use crate::cache::Pages;
use crate::linear::{Epilogue, Linear, Packed, Scratch};
use crate::norm::RmsNorm;
use crate::pool::Worker;
use crate::rope::{Rope, Rotate};
use crate::simd::Isa;
use crate::step::Step;
use crate::unsafe_slice::UnsafeSlice;
use crate::weights::Matrix;

/// What a step is computed in, kept from one to the next.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    /// The residual stream, \[tokens\]\[hidden size\].
    pub(crate) hidden: AlignedVec<f32>,
    /// Queries, keys and values, \[tokens\]\[heads and twice the KV heads\]\[head dim\].
    qkv: AlignedVec<f32>,
    /// Outputs of attention, \[tokens\]\[heads\]\[head dim\].
    attended: AlignedVec<f32>,
    /// Gated inputs of `down_proj`, \[tokens\]\[the widest block's\].
    inner: AlignedVec<f32>,
    /// Outputs of a block before their norm, \[tokens\]\[hidden size\].
    output: AlignedVec<f32>,
    /// Cosines and sines, \[tokens\]\[ropes\].
    cos_sin: AlignedVec<f32>,
}

/// What one thread computes in.
#[derive(Debug, Default)]
pub(crate) struct Spare {
    pub(crate) linear: Scratch,
    attention: attention::Scratch,
    row: Vec<f32>,
}

/// A step, as all threads see it.
///
/// SAFETY of all blocks below: a phase writes rows that no other piece of the same phase touches, and reads what phases before it
/// wrote. A step's slots differ.
pub(crate) struct Pass<'a> {
    pub(crate) isa: Isa,
    pub(crate) config: &'a DecoderConfig,
    pub(crate) step: &'a Step<'a>,
    pub(crate) plan: &'a Plan<'a>,
    pub(crate) pages: Pages<'a>,
    packed: Packed<'a>,
    /// Numbers of a token's cosines and sines, for all ropes.
    cos_sin_width: usize,
    hidden: UnsafeSlice<'a, f32>,
    qkv: UnsafeSlice<'a, f32>,
    attended: UnsafeSlice<'a, f32>,
    inner: UnsafeSlice<'a, f32>,
    output: UnsafeSlice<'a, f32>,
    cos_sin: UnsafeSlice<'a, f32>,
}

impl<'a> Pass<'a> {
    /// A step in `buffers`, which get room for it; blocks have at most `inner` numbers a token between their layers.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn new(
        isa: Isa,
        config: &'a DecoderConfig,
        step: &'a Step<'a>,
        plan: &'a Plan<'a>,
        pages: Pages<'a>,
        packed: Packed<'a>,
        inner: usize,
        buffers: &'a mut Buffers,
    ) -> Self {
        let tokens = step.input_ids.len();
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
            cos_sin_width,
            hidden: room(&mut buffers.hidden, config.hidden_size),
            qkv: room(&mut buffers.qkv, config.qkv_width()),
            attended: room(&mut buffers.attended, config.widths().0),
            inner: room(&mut buffers.inner, inner),
            output: room(&mut buffers.output, config.hidden_size),
            cos_sin: room(&mut buffers.cos_sin, cos_sin_width),
        }
    }

    /// Runs all blocks; `table` has the embeddings.
    pub(crate) fn run(&self, worker: &mut Worker<'_>, spare: &mut Spare, table: &Matrix, blocks: &[Block]) {
        self.embed(worker, table);
        let mut layer = 0;
        for block in blocks {
            match &block.kind {
                BlockKind::Attention(attention) => {
                    self.attend(worker, spare, block, attention, layer);
                    layer += 1;
                }
                BlockKind::Mlp(mlp) => self.gate(worker, spare, block, mlp),
            }
        }
    }

    /// The embeddings of the step's tokens, and the cosines and sines of their positions.
    fn embed(&self, worker: &mut Worker<'_>, table: &Matrix) {
        let Self { config: &DecoderConfig { hidden_size, embedding_scale, .. }, cos_sin_width, step, .. } = *self;
        worker.parallel_for(step.input_ids.len(), |t| {
            // SAFETY: as said above.
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

    /// An attention block, whose keys and values are the cache's `layer`.
    fn attend(&self, worker: &mut Worker<'_>, spare: &mut Spare, block: &Block, attention: &SelfAttention, layer: usize) {
        let (width, (queries, _)) = (self.config.qkv_width(), self.config.widths());
        self.pack_normed(worker, spare, &block.norm, &attention.qkv_proj);
        self.packed.multiply(worker, self.isa, &attention.qkv_proj, self.qkv, width, Epilogue::Store, &mut spare.linear);
        worker.parallel_for(self.step.input_ids.len(), |t| self.write_kv(t, attention, layer, &mut spare.row));
        let seen = Attention {
            plan: self.plan,
            pages: self.pages,
            layer,
            window: attention.window,
            scale: attention.scale,
            softcap: attention.softcap,
            // SAFETY: as said above.
            query: unsafe { self.qkv.read(0, self.step.input_ids.len() * width) },
            stride: width,
            out: self.attended,
        };
        // SAFETY: as said above.
        worker.parallel_for(self.plan.len(), |task| unsafe { seen.attend(self.isa, task, &mut spare.attention) });
        self.add(worker, spare, block, &attention.o_proj, self.attended, queries);
    }

    /// Norms and turns the queries and keys of token `t`, and writes its keys and values to the cache.
    fn write_kv(&self, t: usize, attention: &SelfAttention, layer: usize, spare: &mut Vec<f32>) {
        let &DecoderConfig { num_heads, head_dim, rms_norm_eps: eps, ref ropes, .. } = self.config;
        let (width, (queries, kv)) = (self.config.qkv_width(), self.config.widths());
        // SAFETY: as said above.
        let row = unsafe { self.qkv.write(t * width, width) };
        let (heads, values) = row.split_at_mut(queries + kv);
        if let Some(weights) = &attention.qk_norm {
            spare.resize(head_dim, 0.0);
            for (i, x) in heads.chunks_exact_mut(head_dim).enumerate() {
                self.isa.run(RmsNorm { x, weight: &weights[usize::from(i >= num_heads)], eps, out: spare });
                x.copy_from_slice(spare);
            }
        }
        if let Some(index) = attention.rope {
            let start: usize = ropes[..index].iter().map(Rope::width).sum();
            // SAFETY: as said above.
            let cos_sin = unsafe { self.cos_sin.read(t * self.cos_sin_width + start, ropes[index].width()) };
            self.isa.run(Rotate { heads, head_dim, cos_sin });
        }
        // SAFETY: as said above.
        unsafe { self.pages.write(layer, self.step.slots[t] as usize, &heads[queries..], values) };
    }

    /// A gated network.
    fn gate(&self, worker: &mut Worker<'_>, spare: &mut Spare, block: &Block, mlp: &GatedMlp) {
        let inner = mlp.inner();
        self.pack_normed(worker, spare, &block.norm, &mlp.gate_up_proj);
        let epilogue = Epilogue::Gate(mlp.activation);
        self.packed.multiply(worker, self.isa, &mlp.gate_up_proj, self.inner, inner, epilogue, &mut spare.linear);
        self.add(worker, spare, block, &mlp.down_proj, self.inner, inner);
    }

    /// Packs the norm of the residual stream for `linear`.
    fn pack_normed(&self, worker: &mut Worker<'_>, spare: &mut Spare, weight: &[f32], linear: &Linear) {
        let &DecoderConfig { hidden_size, rms_norm_eps: eps, .. } = self.config;
        self.packed.pack(worker, self.isa, linear, &mut spare.linear, |t, out| {
            // SAFETY: as said above.
            let x = unsafe { self.hidden.read(t * hidden_size, hidden_size) };
            self.isa.run(RmsNorm { x, weight, eps, out });
        });
    }

    /// Adds a block's output, `linear` of rows of `width` numbers, to the residual stream.
    fn add(&self, worker: &mut Worker<'_>, spare: &mut Spare, block: &Block, linear: &Linear, rows: UnsafeSlice<'_, f32>, width: usize) {
        let &DecoderConfig { hidden_size, rms_norm_eps: eps, .. } = self.config;
        // SAFETY: as said above.
        let copy = |t: usize, out: &mut [f32]| out.copy_from_slice(unsafe { rows.read(t * width, width) });
        self.packed.pack(worker, self.isa, linear, &mut spare.linear, copy);
        let Some(weight) = &block.post_norm else {
            let epilogue = Epilogue::Add(block.residual_scale);
            return self.packed.multiply(worker, self.isa, linear, self.hidden, hidden_size, epilogue, &mut spare.linear);
        };
        self.packed.multiply(worker, self.isa, linear, self.output, hidden_size, Epilogue::Store, &mut spare.linear);
        spare.row.resize(hidden_size, 0.0);
        worker.parallel_for(self.step.input_ids.len(), |t| {
            // SAFETY: as said above.
            let (x, state) = unsafe { (self.output.read(t * hidden_size, hidden_size), self.hidden.write(t * hidden_size, hidden_size)) };
            self.isa.run(RmsNorm { x, weight, eps, out: &mut spare.row });
            state.iter_mut().zip(&spare.row).for_each(|(state, x)| *state += x * block.residual_scale);
        });
    }
}
