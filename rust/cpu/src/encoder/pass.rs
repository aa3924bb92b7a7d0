//! Runs a call through blocks of an encoder, in phases on the thread pool.

use std::ops::Range;

use super::attention::{self, Attend, Attention};
use super::blocks::{Dense, DenseActivation, EncoderBlock, EncoderBlockKind, EncoderConfig, EncoderMlp, TextAttention};
use super::{Embeddings, Head, Pooling};
use crate::aligned::AlignedVec;
use crate::linear::{self, Epilogue, Linear, Packed};
use crate::norm::{Norm, RmsNorm, scale_to_one};
use crate::pool::Worker;
use crate::rope::{Rope, Rotate};
use crate::simd::Isa;
use crate::unsafe_slice::UnsafeSlice;

/// Buffers that are reused from call to call.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// Queries, keys and values, \[tokens\]\[heads\]\[head dim\].
    qkv: AlignedVec<f32>,
    /// Outputs of attention, \[tokens\]\[query heads\]\[head dim\].
    attended: AlignedVec<f32>,
    /// Outputs of `up_proj`, \[tokens\]\[the largest inner width\].
    inner: AlignedVec<f32>,
    /// Outputs of a block before the output norm, \[tokens\]\[hidden size\].
    output: AlignedVec<f32>,
    /// Cos/sin tables, \[tokens of the longest text\]\[ropes\].
    cos_sin: AlignedVec<f32>,
    /// Combined states and outputs of the dense layers, \[texts\]\[the largest width\].
    pooled: AlignedVec<f32>,
}

/// Per-thread scratch memory.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    linear: linear::Scratch,
    attention: attention::Scratch,
    row: Vec<f32>,
}

/// A call, shared by all threads.
///
/// SAFETY of all blocks below: in a phase, one index writes each row, and the phase reads only rows that it writes itself or that earlier
/// phases wrote.
pub(super) struct Pass<'a> {
    isa: Isa,
    config: &'a EncoderConfig,
    ids: &'a [i32],
    types: &'a [i32],
    starts: &'a [usize],
    packed: Packed<'a>,
    packed_texts: Packed<'a>,
    cos_sin_width: usize,
    pooled_width: usize,
    hidden: UnsafeSlice<'a, f32>,
    qkv: UnsafeSlice<'a, f32>,
    attended: UnsafeSlice<'a, f32>,
    inner: UnsafeSlice<'a, f32>,
    output: UnsafeSlice<'a, f32>,
    cos_sin: UnsafeSlice<'a, f32>,
    pooled: UnsafeSlice<'a, f32>,
    out: UnsafeSlice<'a, f32>,
}

impl<'a> Pass<'a> {
    /// Creates the pass of a call and makes room for it in `hidden`, \[tokens\]\[hidden size\], and `buffers`. `texts` are the ids, the types
    /// and the starts; `packed` are the rows of tokens and those of texts.
    pub(super) fn new(
        isa: Isa,
        config: &'a EncoderConfig,
        texts: (&'a [i32], &'a [i32], &'a [usize]),
        packed: &[Packed<'a>; 2],
        (blocks, head): (&[EncoderBlock], &Head),
        (hidden, buffers): (&'a mut AlignedVec<f32>, &'a mut Buffers),
        out: &'a mut [f32],
    ) -> Self {
        let (ids, types, starts) = texts;
        let (tokens, width) = (ids.len(), config.hidden_size);
        let longest = starts.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
        let cos_sin_width = config.ropes.iter().map(Rope::width).sum();
        let pooled_width = head.dense.iter().map(|dense| dense.linear.matrix.outs).fold(width, usize::max);
        let inner = blocks.iter().map(|block| block.linears()[1].matrix.ins).max().unwrap_or(0);
        let room = |buffer: &'a mut AlignedVec<f32>, rows: usize, width: usize| {
            buffer.reserve(rows * width);
            buffer.shared()
        };
        Self {
            isa,
            config,
            ids,
            types,
            starts,
            packed: packed[0],
            packed_texts: packed[1],
            cos_sin_width,
            pooled_width,
            hidden: room(hidden, tokens, width),
            qkv: room(&mut buffers.qkv, tokens, config.qkv_width()),
            attended: room(&mut buffers.attended, tokens, config.widths().0),
            inner: room(&mut buffers.inner, tokens, inner),
            output: room(&mut buffers.output, tokens, width),
            cos_sin: room(&mut buffers.cos_sin, longest, cos_sin_width),
            pooled: room(&mut buffers.pooled, starts.len() - 1, pooled_width),
            out: UnsafeSlice::new(out),
        }
    }

    /// Runs the blocks in `range`: before the first, the embeddings, and after the last, the head.
    pub(super) fn run(
        &self,
        worker: &mut Worker<'_>,
        scratch: &mut Scratch,
        embeddings: &Embeddings,
        (blocks, range): (&[EncoderBlock], Range<usize>),
        head: &Head,
    ) {
        if range.start == 0 {
            self.embed(worker, embeddings);
        }
        self.turn(worker);
        // The norm of a sum is applied when the next block reads the states.
        let before = range.start.checked_sub(1).map(|last| &blocks[last]);
        let mut pending = before.map_or(embeddings.norm.as_ref(), |block| block.sum_norm.as_ref());
        for block in &blocks[range.clone()] {
            match &block.kind {
                EncoderBlockKind::Attention(attention) => self.attend(worker, scratch, block, attention, pending),
                EncoderBlockKind::Mlp(mlp) => self.mlp(worker, scratch, block, mlp, pending),
            }
            pending = block.sum_norm.as_ref();
        }
        if range.end == blocks.len() {
            self.finish(worker, scratch, pending.or(head.norm.as_ref()), head);
        }
    }

    /// Runs the head. `pending` is the norm of the states.
    fn finish(&self, worker: &mut Worker<'_>, scratch: &mut Scratch, pending: Option<&Norm>, head: &Head) {
        self.pool(worker, scratch, pending, head.pooling);
        for dense in &head.dense {
            self.dense(worker, scratch, dense);
        }
        let width = head.dense.last().map_or(self.config.hidden_size, |dense| dense.linear.matrix.outs);
        worker.parallel_for(self.starts.len() - 1, |text| {
            // SAFETY: an earlier phase wrote the row, and only this index writes the text's result (see `Pass`).
            let (row, out) = unsafe { (self.pooled.read(text * self.pooled_width, width), self.out.write(text * width, width)) };
            out.copy_from_slice(row);
            if head.normalized {
                scale_to_one(out);
            }
        });
    }

    /// Adds the embeddings of each token, its position and its type.
    fn embed(&self, worker: &mut Worker<'_>, embeddings: &Embeddings) {
        let hidden = self.config.hidden_size;
        worker.parallel_for(self.starts.len() - 1, |text| {
            for t in self.starts[text]..self.starts[text + 1] {
                // SAFETY: only this index writes the rows of the text (see `Pass`).
                let state = unsafe { self.hidden.write(t * hidden, hidden) };
                embeddings.tokens.read_row(self.ids[t] as usize, state);
                let kind = self.types.get(t).map_or(0, |&kind| kind as usize);
                let position = embeddings.positions.as_ref().map(|rows| &rows[(t - self.starts[text]) * hidden..][..hidden]);
                let kind = (!embeddings.types.is_empty()).then(|| &embeddings.types[kind * hidden..][..hidden]);
                for x in &mut *state {
                    *x *= self.config.embedding_scale;
                }
                for row in [position, kind].into_iter().flatten() {
                    state.iter_mut().zip(row).for_each(|(state, x)| *state += x);
                }
            }
        });
    }

    /// Computes the cos/sin tables of all positions.
    fn turn(&self, worker: &mut Worker<'_>) {
        if self.config.ropes.is_empty() {
            return;
        }
        let longest = self.starts.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
        worker.parallel_for(longest, |position| {
            // SAFETY: only this index writes the row (see `Pass`).
            let mut row = unsafe { self.cos_sin.write(position * self.cos_sin_width, self.cos_sin_width) };
            for rope in &self.config.ropes {
                let (own, others) = row.split_at_mut(rope.width());
                rope.write(position as i32, own);
                row = others;
            }
        });
    }

    /// Runs an attention block. `pending` is the norm of the states.
    fn attend(
        &self,
        worker: &mut Worker<'_>,
        scratch: &mut Scratch,
        block: &EncoderBlock,
        attention: &TextAttention,
        pending: Option<&Norm>,
    ) {
        let config = self.config;
        let (width, (queries, kv)) = (config.qkv_width(), config.widths());
        self.pack_normed(worker, scratch, pending, block.input_norm.as_ref(), &attention.qkv_proj);
        self.packed.multiply(worker, self.isa, &attention.qkv_proj, self.qkv, width, Epilogue::Store, &mut scratch.linear);
        if attention.qk_norm.is_some() || attention.rope.is_some() {
            worker.parallel_for(self.starts.len() - 1, |text| self.place(text, attention, &mut scratch.row));
        }
        worker.parallel_for((self.starts.len() - 1) * config.num_heads, |task| {
            let (text, head) = (task / config.num_heads, task % config.num_heads);
            let (start, end) = (self.starts[text], self.starts[text + 1]);
            let kv_head = head / (config.num_heads / config.num_kv_heads);
            let of = Attention {
                // SAFETY: an earlier phase wrote these rows (see `Pass`).
                qkv: unsafe { self.qkv.read(start * width, (end - start) * width) },
                width,
                columns: [head * config.head_dim, queries + kv_head * config.head_dim, queries + kv + kv_head * config.head_dim],
                head_dim: config.head_dim,
                scale: config.attention_scale,
                window: attention.window,
                causal: config.causal,
                distances: config.distances.as_ref().map(|rows| &rows[head * (2 * config.longest - 1)..][..2 * config.longest - 1]),
                out: self.attended,
                out_width: queries,
                first: start,
            };
            self.isa.run(Attend { of: &of, scratch: &mut scratch.attention });
        });
        self.add(worker, scratch, block, &attention.o_proj, self.attended);
    }

    /// Applies the query and key norms and the rotary embedding to the tokens of a text.
    fn place(&self, text: usize, attention: &TextAttention, spare: &mut Vec<f32>) {
        let &EncoderConfig { num_heads, head_dim, norm_eps: eps, ref ropes, .. } = self.config;
        let (width, (queries, kv)) = (self.config.qkv_width(), self.config.widths());
        for t in self.starts[text]..self.starts[text + 1] {
            // SAFETY: only this index writes the rows of the text (see `Pass`).
            let heads = &mut unsafe { self.qkv.write(t * width, width) }[..queries + kv];
            if let Some(weights) = &attention.qk_norm {
                spare.resize(head_dim, 0.0);
                for (i, x) in heads.chunks_exact_mut(head_dim).enumerate() {
                    self.isa.run(RmsNorm { x, weight: &weights[usize::from(i >= num_heads)], eps, out: spare });
                    x.copy_from_slice(spare);
                }
            }
            if let Some(index) = attention.rope {
                let start: usize = ropes[..index].iter().map(Rope::width).sum();
                let row = (t - self.starts[text]) * self.cos_sin_width;
                // SAFETY: an earlier phase wrote this row (see `Pass`).
                let cos_sin = unsafe { self.cos_sin.read(row + start, ropes[index].width()) };
                self.isa.run(Rotate { heads, head_dim, cos_sin, adjacent: false });
            }
        }
    }

    /// Runs an MLP. `pending` is the norm of the states.
    fn mlp(&self, worker: &mut Worker<'_>, scratch: &mut Scratch, block: &EncoderBlock, mlp: &EncoderMlp, pending: Option<&Norm>) {
        let inner = mlp.up_proj.matrix.outs;
        self.pack_normed(worker, scratch, pending, block.input_norm.as_ref(), &mlp.up_proj);
        let epilogue = mlp.gate.map_or(Epilogue::Gelu, Epilogue::Gate);
        self.packed.multiply(worker, self.isa, &mlp.up_proj, self.inner, inner, epilogue, &mut scratch.linear);
        self.add(worker, scratch, block, &mlp.down_proj, self.inner);
    }

    /// Normalises the states in place with `pending`, and packs them for `linear`, normalised with `input` if there is one.
    fn pack_normed(&self, worker: &mut Worker<'_>, scratch: &mut Scratch, pending: Option<&Norm>, input: Option<&Norm>, linear: &Linear) {
        let (hidden, eps) = (self.config.hidden_size, self.config.norm_eps);
        self.packed.pack(worker, self.isa, linear, &mut scratch.linear, |t, out| {
            // SAFETY: only the index that packs this row uses it (see `Pass`).
            let x = unsafe { self.hidden.write(t * hidden, hidden) };
            if let Some(norm) = pending {
                norm.apply(self.isa, eps, x, out);
                x.copy_from_slice(out);
            }
            match input {
                Some(norm) => norm.apply(self.isa, eps, x, out),
                None => out.copy_from_slice(x),
            }
        });
    }

    /// Multiplies `rows` by `linear` and adds the block's output to the states.
    fn add(&self, worker: &mut Worker<'_>, scratch: &mut Scratch, block: &EncoderBlock, linear: &Linear, rows: UnsafeSlice<'_, f32>) {
        let (width, hidden) = (linear.matrix.ins, self.config.hidden_size);
        // SAFETY: an earlier phase wrote these rows (see `Pass`).
        let copy = |t: usize, out: &mut [f32]| out.copy_from_slice(unsafe { rows.read(t * width, width) });
        self.packed.pack(worker, self.isa, linear, &mut scratch.linear, copy);
        let Some(norm) = &block.output_norm else {
            return self.packed.multiply(worker, self.isa, linear, self.hidden, hidden, Epilogue::Add(1.0), &mut scratch.linear);
        };
        self.packed.multiply(worker, self.isa, linear, self.output, hidden, Epilogue::Store, &mut scratch.linear);
        scratch.row.resize(hidden, 0.0);
        worker.parallel_for(self.ids.len(), |t| {
            // SAFETY: an earlier phase wrote the output, and only this index writes the state (see `Pass`).
            let (x, state) = unsafe { (self.output.read(t * hidden, hidden), self.hidden.write(t * hidden, hidden)) };
            norm.apply(self.isa, self.config.norm_eps, x, &mut scratch.row);
            state.iter_mut().zip(&scratch.row).for_each(|(state, x)| *state += x);
        });
    }

    /// Normalises the states with the last norm and combines those of each text.
    fn pool(&self, worker: &mut Worker<'_>, scratch: &mut Scratch, norm: Option<&Norm>, pooling: Pooling) {
        let hidden = self.config.hidden_size;
        scratch.row.resize(hidden, 0.0);
        let state = &mut scratch.row[..hidden];
        worker.parallel_for(self.starts.len() - 1, |text| {
            let (start, end) = (self.starts[text], self.starts[text + 1]);
            // SAFETY: only this index writes the text's row (see `Pass`).
            let out = unsafe { self.pooled.write(text * self.pooled_width, hidden) };
            out.fill(0.0);
            let tokens = match pooling {
                Pooling::First => start..start + 1,
                Pooling::Last => end - 1..end,
                Pooling::Mean => start..end,
            };
            let share = 1.0 / tokens.len() as f32;
            for t in tokens {
                // SAFETY: an earlier phase wrote this row (see `Pass`).
                let x = unsafe { self.hidden.read(t * hidden, hidden) };
                match norm {
                    Some(norm) => norm.apply(self.isa, self.config.norm_eps, x, state),
                    None => state.copy_from_slice(x),
                }
                out.iter_mut().zip(&*state).for_each(|(sum, x)| *sum += x);
            }
            for x in &mut *out {
                *x *= share;
            }
        });
    }

    /// Applies a layer to the combined states.
    fn dense(&self, worker: &mut Worker<'_>, scratch: &mut Scratch, dense: &Dense) {
        let (stride, ins) = (self.pooled_width, dense.linear.matrix.ins);
        // SAFETY: an earlier phase wrote these rows (see `Pass`).
        let copy = |text: usize, out: &mut [f32]| out.copy_from_slice(unsafe { self.pooled.read(text * stride, ins) });
        self.packed_texts.pack(worker, self.isa, &dense.linear, &mut scratch.linear, copy);
        let epilogue = match dense.activation {
            DenseActivation::Identity => Epilogue::Store,
            DenseActivation::Tanh => Epilogue::Softcap(1.0),
            DenseActivation::Gelu => Epilogue::Gelu,
        };
        self.packed_texts.multiply(worker, self.isa, &dense.linear, self.pooled, stride, epilogue, &mut scratch.linear);
        if let Some(norm) = &dense.norm {
            let outs = dense.linear.matrix.outs;
            scratch.row.resize(outs, 0.0);
            worker.parallel_for(self.starts.len() - 1, |text| {
                // SAFETY: an earlier phase wrote the row, and only this index uses it (see `Pass`).
                let row = unsafe { self.pooled.write(text * stride, outs) };
                norm.apply(self.isa, self.config.norm_eps, row, &mut scratch.row);
                row.copy_from_slice(&scratch.row);
            });
        }
    }
}
