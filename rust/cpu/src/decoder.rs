//! A decoder of the Llama family: a step's forward pass, all of it on one thread pool.

use std::sync::{Mutex, PoisonError};

use crate::aligned::AlignedVec;
use crate::attention::{self, Attention, Plan, Sequences};
use crate::cache::{KvCache, KvShape};
use crate::linear::{Epilogue, Linear, Rows, Scratch};
use crate::norm::RmsNorm;
use crate::pool::ThreadPool;
use crate::rope::{Rotate, turns};
use crate::simd::Isa;
use crate::step::{SlotSet, Step, StepError};
use crate::unsafe_slice::UnsafeSlice;
use crate::weights::{Matrix, Merge};

/// The sizes of a decoder.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Numbers of a token's hidden state.
    pub hidden: usize,
    /// Numbers between the two layers of the gated network.
    pub inner: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Numbers of a head.
    pub head_dim: usize,
    /// `rms_norm_eps`.
    pub eps: f32,
    /// Radians per position of each pair of a head's numbers.
    pub frequencies: Vec<f32>,
}

/// A layer's weights.
#[derive(Debug)]
pub struct Layer {
    /// Of the norm before attention.
    pub input_norm: Vec<f32>,
    /// Queries, keys and values.
    pub qkv: Linear,
    /// Of the norms of each head's queries, and keys, if there are such.
    pub qk_norm: Option<[Vec<f32>; 2]>,
    /// `o_proj`.
    pub output: Linear,
    /// Of the norm before the gated network.
    pub post_norm: Vec<f32>,
    /// A gated matrix.
    pub gate_up: Linear,
    /// `down_proj`.
    pub down: Linear,
    /// Tokens that a token sees, itself included; all if none is said.
    pub window: Option<usize>,
}

/// A decoder, and what it computes in.
#[derive(Debug)]
pub struct Decoder {
    isa: Isa,
    pool: ThreadPool,
    shape: Shape,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    /// Where tokens' first hidden states are read, if not in the head.
    embedding: Option<Matrix>,
    head: Linear,
    slots: SlotSet,
    /// Tokens of the last step.
    tokens: usize,
    hidden: AlignedVec<f32>,
    qkv: AlignedVec<f32>,
    attended: AlignedVec<f32>,
    inner: AlignedVec<f32>,
    turns: AlignedVec<f32>,
    rows: Rows,
    scratch: Vec<Mutex<Spare>>,
}

/// What one thread computes in.
#[derive(Debug, Default)]
struct Spare {
    linear: Scratch,
    attention: attention::Scratch,
    head: Vec<f32>,
}

/// Weights that do not fit each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} do not fit the decoder's shape")]
pub struct ShapeError {
    /// Which.
    pub what: &'static str,
}

impl Decoder {
    /// A decoder of these weights; `embedding` where it is not the head's matrix.
    pub fn new(
        isa: Isa,
        pool: ThreadPool,
        shape: Shape,
        layers: Vec<Layer>,
        norm: Vec<f32>,
        embedding: Option<Matrix>,
        head: Linear,
    ) -> Result<Self, ShapeError> {
        let Shape { hidden, inner, heads, kv_heads, head_dim, .. } = shape;
        let (queries, kv) = (heads * head_dim, kv_heads * head_dim);
        let check = |fits: bool, what: &'static str| if fits { Ok(()) } else { Err(ShapeError { what }) };
        check(kv_heads > 0 && heads.is_multiple_of(kv_heads) && head_dim == 2 * shape.frequencies.len(), "heads")?;
        for layer in &layers {
            check(layer.input_norm.len() == hidden && layer.post_norm.len() == hidden, "norms")?;
            check(layer.qk_norm.iter().flatten().all(|norm| norm.len() == head_dim), "norms of queries and keys")?;
            check(layer.qkv.matrix.is(queries + 2 * kv, hidden, Merge::Stacked), "queries, keys and values")?;
            check(layer.output.matrix.is(hidden, queries, Merge::Stacked), "outputs of attention")?;
            check(layer.gate_up.matrix.is(inner, hidden, Merge::Gated), "gates")?;
            check(layer.down.matrix.is(hidden, inner, Merge::Stacked), "outputs of the gated network")?;
        }
        check(norm.len() == hidden, "norms")?;
        let vocabulary = head.matrix.outs;
        for matrix in embedding.iter().chain([&head.matrix]) {
            check(matrix.is(vocabulary, hidden, Merge::Stacked), "embeddings")?;
        }
        let scratch = (0..pool.size()).map(|_| Mutex::default()).collect();
        let empty = AlignedVec::default;
        Ok(Self {
            isa,
            pool,
            shape,
            layers,
            norm,
            embedding,
            head,
            slots: SlotSet::default(),
            tokens: 0,
            hidden: empty(),
            qkv: empty(),
            attended: empty(),
            inner: empty(),
            turns: empty(),
            rows: Rows::default(),
            scratch,
        })
    }

    /// Runs a step, and keeps the hidden states of its tokens.
    ///
    /// Refuses, with nothing changed, a step whose arrays do not fit each other, the model or the cache: threads rely on it that no two
    /// tokens have one slot or one place. Panics for a block table that names blocks which the cache does not have.
    pub fn forward(&mut self, step: &Step<'_>, cache: &mut KvCache) -> Result<(), StepError> {
        self.check(step, cache.shape())?;
        let Self { isa, pool, shape, layers, embedding, head, rows, scratch, .. } = self;
        let (isa, tokens) = (*isa, step.input_ids.len());
        self.tokens = tokens;
        let Shape { hidden, inner, heads, kv_heads, head_dim, eps, .. } = *shape;
        let (queries, kv) = (heads * head_dim, kv_heads * head_dim);
        let wide = queries + 2 * kv;
        self.hidden.reserve(tokens * hidden);
        self.qkv.reserve(tokens * wide);
        self.attended.reserve(tokens * queries);
        self.inner.reserve(tokens * inner);
        self.turns.reserve(tokens * head_dim);
        rows.reserve(isa, tokens, hidden.max(inner).max(queries));
        let (states, qkv, attended) = (self.hidden.shared(), self.qkv.shared(), self.attended.shared());
        let (inners, turned, packed) = (self.inner.shared(), self.turns.shared(), rows.packed(isa, tokens));
        let table = embedding.as_ref().unwrap_or(&head.matrix);
        let Step { query_starts, context_lens, block_tables, max_blocks, .. } = *step;
        let plan = Plan::new(Sequences { query_starts, context_lens, rows: step.rows, block_tables, max_blocks }, heads, kv_heads);
        let pages = cache.pages();
        // SAFETY of all blocks below: a phase writes rows that no other piece of the same phase touches, and reads what phases
        // before it wrote.
        pool.run(|worker| {
            let mut spare = scratch[worker.index()].lock().unwrap_or_else(PoisonError::into_inner);
            let Spare { linear, attention, head } = &mut *spare;
            worker.parallel_for(tokens, |t| {
                // SAFETY: as said above.
                let (state, turn) = unsafe { (states.write(t * hidden, hidden), turned.write(t * head_dim, head_dim)) };
                table.read_row(step.input_ids[t] as usize, state);
                turns(step.positions[t], &shape.frequencies, turn);
            });
            for (index, layer) in layers.iter().enumerate() {
                let normed = |weight: &'_ [f32], t: usize, out: &mut [f32]| {
                    // SAFETY: as said above.
                    let x = unsafe { states.read(t * hidden, hidden) };
                    isa.run(RmsNorm { x, weight, eps, out });
                };
                packed.pack(worker, isa, &layer.qkv, linear, |t, out| normed(&layer.input_norm, t, out));
                packed.multiply(worker, isa, &layer.qkv, qkv, wide, Epilogue::Store, linear);
                worker.parallel_for(tokens, |t| {
                    // SAFETY: as said above; a step has one token a slot.
                    unsafe {
                        let row = qkv.write(t * wide, wide);
                        if let Some(weights) = &layer.qk_norm {
                            head.resize(head_dim, 0.0);
                            for (i, x) in row[..queries + kv].chunks_exact_mut(head_dim).enumerate() {
                                isa.run(RmsNorm { x, weight: &weights[usize::from(i >= heads)], eps, out: head });
                                x.copy_from_slice(head);
                            }
                        }
                        isa.run(Rotate { heads: &mut row[..queries + kv], turns: turned.read(t * head_dim, head_dim) });
                        pages.write(index, step.slots[t] as usize, &row[queries..queries + kv], &row[queries + kv..]);
                    }
                });
                // SAFETY: as said above.
                let query = unsafe { qkv.read(0, tokens * wide) };
                let seen = Attention { plan: &plan, pages, layer: index, window: layer.window, query, stride: wide, out: attended };
                // SAFETY: as said above.
                worker.parallel_for(plan.len(), |task| unsafe { seen.attend(isa, task, attention) });
                // SAFETY: as said above.
                packed
                    .pack(worker, isa, &layer.output, linear, |t, out| out.copy_from_slice(unsafe { attended.read(t * queries, queries) }));
                packed.multiply(worker, isa, &layer.output, states, hidden, Epilogue::Add, linear);
                packed.pack(worker, isa, &layer.gate_up, linear, |t, out| normed(&layer.post_norm, t, out));
                packed.multiply(worker, isa, &layer.gate_up, inners, inner, Epilogue::Gate, linear);
                // SAFETY: as said above.
                packed.pack(worker, isa, &layer.down, linear, |t, out| out.copy_from_slice(unsafe { inners.read(t * inner, inner) }));
                packed.multiply(worker, isa, &layer.down, states, hidden, Epilogue::Add, linear);
            }
        });
        Ok(())
    }

    /// Checks a step against the model and the cache.
    fn check(&mut self, step: &Step<'_>, cache: KvShape) -> Result<(), StepError> {
        let sizes = [
            ("layers", cache.layers, self.layers.len()),
            ("KV heads", cache.kv_heads, self.shape.kv_heads),
            ("numbers a head", cache.head_dim, self.shape.head_dim),
        ];
        for (what, found, expected) in sizes {
            if found != expected {
                return Err(StepError::Cache { what, found, expected });
            }
        }
        step.check(self.head.matrix.outs, cache, &mut self.slots)
    }

    /// What the last step's hidden states say of the tokens after those at places `at`: [`at`][vocabulary] into `out`.
    pub fn logits(&mut self, at: &[i32], out: &mut [f32]) {
        let Self { isa, pool, shape, norm, head, rows, scratch, .. } = self;
        let (isa, hidden, eps) = (*isa, shape.hidden, shape.eps);
        let vocabulary = head.matrix.outs;
        assert!(out.len() >= at.len() * vocabulary && at.iter().all(|&t| (t as usize) < self.tokens), "places of the last step");
        rows.reserve(isa, at.len(), hidden);
        let (states, packed, out) = (&self.hidden, rows.packed(isa, at.len()), UnsafeSlice::new(out));
        pool.run(|worker| {
            let linear = &mut scratch[worker.index()].lock().unwrap_or_else(PoisonError::into_inner).linear;
            packed.pack(worker, isa, head, linear, |i, row| {
                let x = &states[at[i] as usize * hidden..][..hidden];
                isa.run(RmsNorm { x, weight: norm, eps, out: row });
            });
            packed.multiply(worker, isa, head, out, vocabulary, Epilogue::Store, linear);
        });
    }
}
