//! Runs attention to latents. The rows of a head are multiplied by its matrices, as those of an expert are.

use super::{Pass, Spare};
use crate::aligned::AlignedVec;
use crate::attention::Attention;
use crate::blocks::{Block, DecoderConfig};
use crate::cache::{KvDType, Pages};
use crate::gemm::RowGroup;
use crate::latent::LatentAttention;
use crate::linear::{Epilogue, Packed, Rows};
use crate::norm::RmsNorm;
use crate::pool::Worker;
use crate::rope::Rotate;
use crate::simd::Isa;
use crate::unsafe_slice::UnsafeSlice;

/// Buffers that are reused from step to step.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    rows: Rows,
    /// The rows of each head.
    groups: Vec<RowGroup>,
    /// Queries that are made of latents, \[tokens\]\[heads\]\[query size\].
    queries: AlignedVec<f32>,
    /// Queries for the latent, and for the rotated key, \[heads\]\[tokens\]\[head dim\].
    absorbed: AlignedVec<f32>,
    /// Outputs of the heads, \[heads\]\[tokens\]\[value size\].
    values: AlignedVec<f32>,
}

/// The buffers, shared by all threads.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a> {
    packed: Packed<'a>,
    groups: &'a [RowGroup],
    queries: UnsafeSlice<'a, f32>,
    absorbed: UnsafeSlice<'a, f32>,
    values: UnsafeSlice<'a, f32>,
}

impl Buffers {
    /// Makes room for a step through these blocks of a decoder.
    pub(crate) fn shared<'m>(
        &mut self,
        isa: Isa,
        tokens: usize,
        config: &DecoderConfig,
        blocks: impl Iterator<Item = &'m LatentAttention> + Clone,
    ) -> Shared<'_> {
        let Self { rows, groups, queries, absorbed, values } = self;
        let heads = if blocks.clone().next().is_some() { config.num_heads } else { 0 };
        let count = heads * tokens;
        groups.clear();
        groups.extend((0..heads).flat_map(|head| RowGroup::split(head, head * tokens..(head + 1) * tokens)));
        let most = |width: &dyn Fn(&LatentAttention) -> usize| blocks.clone().map(width).max().unwrap_or(0);
        queries.reserve(tokens * most(&|latent| latent.query.as_ref().map_or(0, |query| query.up.matrix.outs)));
        absorbed.reserve(count * most(&|latent| config.kv_heads[latent.kv.cache].head_dim));
        values.reserve(count * most(&|latent| latent.value_up.matrix.outs));
        rows.reserve(isa, count, tokens, blocks.flat_map(|latent| [&latent.key_up, &latent.value_up]));
        Shared {
            packed: rows.packed(isa, count, tokens),
            groups,
            queries: queries.shared(),
            absorbed: absorbed.shared(),
            values: values.shared(),
        }
    }
}

/// SAFETY of all blocks below: as for [`Pass`].
impl Pass<'_> {
    /// Runs a block of attention to latents.
    pub(super) fn attend_latent(&self, worker: &mut Worker<'_>, spare: &mut Spare, block: &Block, attention: &LatentAttention) {
        let Shared { packed, groups, absorbed, values, .. } = self.latent;
        let (tokens, heads) = (self.step.input_ids.len(), self.config.num_heads);
        let (plan, pages) = (&self.plans[attention.kv.cache], self.pages[attention.kv.cache]);
        let (latent, width, size) = (attention.norm.len(), pages.shape.head_dim, attention.value_up.matrix.outs);
        self.project(worker, spare, block, attention);
        worker.parallel_for(tokens, |t| self.write_latent(t, attention, pages, &mut spare.row));
        let packed = packed.grouped(groups);
        packed.pack(worker, self.isa, &attention.key_up, &mut spare.linear, |row, out| {
            // SAFETY: an earlier phase wrote this row (see `Pass`).
            out.copy_from_slice(&unsafe { self.query_of(attention, row % tokens, row / tokens) }[..out.len()]);
        });
        packed.multiply(worker, self.isa, &attention.key_up, absorbed, width, Epilogue::Store, &mut spare.linear);
        if pages.dtype == KvDType::Int8 {
            // SAFETY: only this index uses this row in this phase (see `Pass`).
            worker.parallel_for(heads * tokens, |row| self.rotate_for_int8(pages, unsafe { absorbed.write(row * width, width) }));
        }
        worker.parallel_for(plan.len(), |task| {
            let seen = Attention {
                plan,
                pages,
                layer: attention.kv.layer,
                window: None,
                scale: attention.scale,
                softcap: None,
                sinks: None,
                // SAFETY: earlier phases wrote these rows (see `Pass`).
                query: unsafe { absorbed.read(0, heads * tokens * width) },
                stride: width,
                head_stride: tokens * width,
                out: self.attended,
            };
            // SAFETY: one index runs each task, and earlier phases wrote all keys (see `Pass`).
            unsafe { seen.attend(self.isa, task, &mut spare.attention) }
        });
        packed.pack(worker, self.isa, &attention.value_up, &mut spare.linear, |row, out| {
            // SAFETY: an earlier phase wrote this row (see `Pass`).
            out.copy_from_slice(unsafe { self.attended.read((row % tokens * heads + row / tokens) * latent, latent) });
            self.rotate_for_int8(pages, out);
        });
        packed.multiply(worker, self.isa, &attention.value_up, values, size, Epilogue::Store, &mut spare.linear);
        self.add(worker, spare, block, &attention.o_proj, None, |t, out| {
            for (head, out) in out.chunks_exact_mut(size).enumerate() {
                // SAFETY: an earlier phase wrote this row (see `Pass`).
                out.copy_from_slice(unsafe { values.read((head * tokens + t) * size, size) });
            }
        });
    }

    /// Computes the queries and the latents of all tokens.
    fn project(&self, worker: &mut Worker<'_>, spare: &mut Spare, block: &Block, attention: &LatentAttention) {
        let width = attention.in_proj.matrix.outs;
        self.pack_input(worker, spare, &block.input, &attention.in_proj, None, None);
        self.multiply(worker, spare, &attention.in_proj, None, self.qkv, width, Epilogue::Store);
        let Some(query) = &attention.query else { return };
        self.packed.pack(worker, self.isa, &query.up, &mut spare.linear, |t, out| {
            // SAFETY: an earlier phase wrote this row (see `Pass`).
            let x = unsafe { self.qkv.read(t * width, query.norm.len()) };
            self.isa.run(RmsNorm { x, weight: &query.norm, eps: attention.eps, out });
        });
        let (out, stride) = (self.latent.queries, query.up.matrix.outs);
        self.packed.multiply(worker, self.isa, &query.up, out, stride, Epilogue::Store, &mut spare.linear);
    }

    /// A head's query for token `t`, as it was projected.
    ///
    /// # Safety
    ///
    /// An earlier phase wrote the queries.
    unsafe fn query_of(&self, attention: &LatentAttention, t: usize, head: usize) -> &[f32] {
        let size = attention.key_up.matrix.ins + attention.rotated(&self.config.ropes);
        let (queries, stride) = match &attention.query {
            Some(query) => (self.latent.queries, query.up.matrix.outs),
            None => (self.qkv, attention.in_proj.matrix.outs),
        };
        // SAFETY: the caller guarantees it.
        unsafe { queries.read(t * stride + head * size, size) }
    }

    /// Rotates the queries of token `t`, and writes its latent and rotated key to the cache.
    fn write_latent(&self, t: usize, attention: &LatentAttention, pages: Pages<'_>, key: &mut Vec<f32>) {
        let (latent, width, tokens) = (attention.norm.len(), pages.shape.head_dim, self.step.input_ids.len());
        let rotated = attention.rotated(&self.config.ropes);
        let projected = attention.in_proj.matrix.outs;
        // SAFETY: earlier phases wrote these rows (see `Pass`).
        let (cos_sin, x) = unsafe { (self.cos_sin_of(t, attention.rope), self.qkv.read((t + 1) * projected - width, width)) };
        let rotate = |x: &mut [f32]| self.isa.run(Rotate { heads: x, head_dim: rotated, cos_sin, adjacent: attention.adjacent });
        key.resize(width, 0.0);
        self.isa.run(RmsNorm { x: &x[..latent], weight: &attention.norm, eps: attention.eps, out: &mut key[..latent] });
        key[latent..].copy_from_slice(&x[latent..]);
        rotate(&mut key[latent..]);
        self.rotate_for_int8(pages, key);
        // SAFETY: the slots of a step are distinct, and only index t writes its queries in this phase (see `Pass`).
        unsafe {
            pages.write(attention.kv.layer, self.step.slots[t] as usize, key, key);
            for head in 0..self.config.num_heads {
                let to = self.latent.absorbed.write((head * tokens + t) * width + latent, rotated);
                to.copy_from_slice(&self.query_of(attention, t, head)[attention.key_up.matrix.ins..]);
                rotate(to);
            }
        }
    }
}
