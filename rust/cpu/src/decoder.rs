//! A decoder: computes logits from token ids on one thread pool.

#[cfg(test)]
pub(crate) mod tests;

use std::sync::{Arc, Mutex, PoisonError};

use crate::attention::{Plan, Sequences};
use crate::blocks::{Block, BlockKind, DecoderConfig};
use crate::cache::{KvCache, KvHeads, KvPlace};
use crate::layer_input::LayerEmbeddings;
use crate::linear::{Epilogue, Linear, Rows};
use crate::lora::{self, AdaptedRows, Adapter};
use crate::mlp::{ShapeError, check};
use crate::norm::{Norm, scale_to_one};
use crate::pass::recurrent::Recurrence;
use crate::pass::{Buffers, Pass, Spare};
use crate::pool::ThreadPool;
use crate::recurrent::Recurrent;
use crate::simd::Isa;
use crate::state::{Chunks, StateShape, StateStep};
use crate::step::{SlotSet, Step, StepError};
use crate::unsafe_slice::UnsafeSlice;
use crate::weights::{Matrix, Merge};

/// The blocks of a model, its embeddings and LM head, and the buffers of a step.
#[derive(Debug)]
pub struct Decoder {
    isa: Isa,
    pool: Arc<Mutex<ThreadPool>>,
    config: DecoderConfig,
    blocks: Vec<Block>,
    norm: Norm,
    /// The embedding matrix. `None` if it is the head's matrix.
    embedding: Option<Matrix>,
    layer_embeddings: Option<LayerEmbeddings>,
    head: Linear,
    /// Adapter i + 1. `None`: the number is free.
    adapters: Vec<Option<Adapter>>,
    slots: SlotSet,
    /// Number of tokens in the last step.
    tokens: usize,
    buffers: Buffers,
    lora: lora::Buffers,
    rows: Rows,
    scratch: Vec<Mutex<Spare>>,
}

impl Decoder {
    /// Creates a decoder of these weights, which must be packed for one instruction set. `embedding` is `None` if the embeddings are the
    /// head's matrix.
    pub fn new(
        pool: ThreadPool,
        config: DecoderConfig,
        blocks: Vec<Block>,
        norm: Norm,
        embedding: Option<Matrix>,
        layer_embeddings: Option<LayerEmbeddings>,
        head: Linear,
    ) -> Result<Self, ShapeError> {
        let (isa, hidden) = (head.matrix.isa, config.hidden_size);
        config.check()?;
        blocks.iter().try_for_each(|block| block.check(isa, &config))?;
        check(norm.fits(hidden), "norms")?;
        check(config.positions.as_ref().is_none_or(|rows| rows.len().is_multiple_of(hidden)), "embeddings of positions")?;
        let vocabulary = embedding.as_ref().unwrap_or(&head.matrix).outs;
        for matrix in embedding.iter().chain([&head.matrix]) {
            check(matrix.is(isa, matrix.outs, hidden, Merge::Stacked), "embeddings")?;
        }
        check_places(&config, &blocks)?;
        check_inputs(&blocks)?;
        check_states(&blocks, hidden)?;
        layer_embeddings.iter().try_for_each(|own| own.check(isa, vocabulary, hidden))?;
        let served = |block: &Block| match (&block.kind, &layer_embeddings) {
            (BlockKind::LayerInput(input), own) => own.as_ref().is_some_and(|own| own.serve(input)),
            _ => true,
        };
        check(blocks.iter().all(served), "embeddings of layers")?;
        let scratch = (0..pool.size()).map(|_| Mutex::default()).collect();
        Ok(Self {
            isa,
            pool: Arc::new(Mutex::new(pool)),
            config,
            blocks,
            norm,
            embedding,
            layer_embeddings,
            head,
            adapters: Vec::new(),
            slots: SlotSet::default(),
            tokens: 0,
            buffers: Buffers::default(),
            lora: lora::Buffers::default(),
            rows: Rows::default(),
            scratch,
        })
    }

    /// The threads, which also sample between steps.
    pub fn pool(&self) -> Arc<Mutex<ThreadPool>> {
        Arc::clone(&self.pool)
    }

    /// Adds an adapter and returns its number for [`Step::adapters`].
    pub fn add_adapter(&mut self, adapter: Adapter) -> Result<usize, ShapeError> {
        let matrices = self.blocks.iter().map(|block| block.adaptable().map(|linears| linears.map(|linear| &linear.matrix)));
        check(adapter.fits(matrices), "the adapter's matrices")?;
        let index = self.adapters.iter().position(Option::is_none).unwrap_or(self.adapters.len());
        self.adapters.resize_with(self.adapters.len().max(index + 1), || None);
        self.adapters[index] = Some(adapter);
        Ok(index + 1)
    }

    /// Removes an adapter and frees its memory. Its number can then belong to another one. Panics if there is no such adapter.
    pub fn remove_adapter(&mut self, number: usize) {
        assert!(self.adapters[number - 1].take().is_some(), "the number of an adapter");
    }

    /// The dimensions of a sequence's state. `None` if no layer is recurrent.
    pub fn state_shape(&self) -> Option<StateShape> {
        state_shape(&self.blocks, self.config.hidden_size)
    }

    /// Runs a step with the caches of [`DecoderConfig::kv_heads`], and with the states of its sequences if the model has recurrent layers.
    /// Keeps the hidden states of the step's tokens.
    ///
    /// Returns an error, and changes nothing, if the step's arrays do not fit each other, the model or the caches. The threads rely on this
    /// check: no two tokens have the same slot or the same position in the step, and no two states the same slot. Panics if a block table
    /// names a block that the cache does not have.
    pub fn forward(&mut self, step: &Step<'_>, caches: &mut [KvCache], mut state: Option<StateStep<'_>>) -> Result<(), StepError> {
        self.check(step, caches)?;
        let chunks = match (&state, self.state_shape()) {
            (Some(state), Some(shape)) if state.cache.shape() == shape => Chunks::new(step, state)?,
            (None, None) => Chunks::default(),
            _ => return Err(StepError::States),
        };
        let Self { isa, pool, config, blocks, embedding, layer_embeddings, head, adapters, rows, buffers, lora, scratch, .. } = self;
        let numbers = step.adapters_by_token(|number| matches!(adapters.get(number - 1), Some(Some(_))))?;
        let mut pool = pool.lock().unwrap_or_else(PoisonError::into_inner);
        let (isa, tokens) = (*isa, step.input_ids.len());
        self.tokens = tokens;
        let projection = layer_embeddings.as_ref().map(|own| &own.projection);
        rows.reserve(isa, tokens, tokens, blocks.iter().flat_map(Block::common).chain(projection));
        let table = embedding.as_ref().unwrap_or(&head.matrix);
        let Step { query_starts, context_lens, block_tables, max_blocks, .. } = *step;
        let block_size = caches[0].shape().block_size;
        let sequences = Sequences { query_starts, context_lens, rows: step.rows, block_tables, max_blocks, block_size };
        let plan = |heads: &KvHeads| {
            let groups = heads.count * head_groups(config, heads, pool.size() / context_lens.len().max(1));
            Plan::new(sequences, config.num_heads, groups, pool.size())
        };
        let plans: Vec<_> = config.kv_heads.iter().map(plan).collect();
        let pages: Vec<_> = caches.iter_mut().map(KvCache::pages).collect();
        let adapted = AdaptedRows::new(&numbers, adapters, pool.size(), widest(blocks), lora);
        let (packed, own) = (rows.packed(isa, tokens, tokens), layer_embeddings.as_ref());
        let recurrence = state.as_mut().map(|state| Recurrence { states: state.cache.view(), chunks: &chunks });
        let pass = Pass::new(isa, config, step, &plans, &pages, &packed, adapted.as_ref(), own, recurrence, blocks, buffers);
        pool.run(|worker| {
            let mut spare = scratch[worker.index()].lock().unwrap_or_else(PoisonError::into_inner);
            pass.run(worker, &mut spare, table, blocks);
        });
        if let Some(state) = state {
            state.cache.advance(&chunks);
        }
        Ok(())
    }

    /// Checks a step against the model and the caches.
    fn check(&mut self, step: &Step<'_>, caches: &[KvCache]) -> Result<(), StepError> {
        let mut sizes = vec![("parts", caches.len(), self.config.kv_heads.len())];
        for (index, (cache, heads)) in caches.iter().zip(&self.config.kv_heads).enumerate() {
            let (shape, first) = (cache.shape(), caches[0].shape());
            sizes.extend([
                ("layers", shape.layers, layers_of(&self.blocks, index)),
                ("KV heads", shape.kv_heads, heads.count),
                ("numbers a head", shape.head_dim, heads.head_dim),
                ("numbers a value", shape.value_dim(), heads.latent.unwrap_or(heads.head_dim)),
                ("blocks", shape.blocks, first.blocks),
                ("tokens a block", shape.block_size, first.block_size),
            ]);
        }
        for (what, found, expected) in sizes {
            if found != expected {
                return Err(StepError::Cache { what, found, expected });
            }
        }
        let vocabulary = self.embedding.as_ref().unwrap_or(&self.head.matrix).outs;
        let positions = self.config.positions.as_ref().map_or(usize::MAX, |rows| rows.len() / self.config.hidden_size);
        step.check(vocabulary, positions, caches[0].shape(), &mut self.slots)
    }

    /// Computes the logits after the tokens at indices `at` of the last step. Writes one row of the head's outputs to `out` for each
    /// index.
    pub fn logits(&mut self, at: &[i32], out: &mut [f32]) {
        let Self { isa, pool, config, norm, head, rows, scratch, .. } = self;
        let mut pool = pool.lock().unwrap_or_else(PoisonError::into_inner);
        let (isa, hidden, eps) = (*isa, config.hidden_size, config.rms_norm_eps);
        let outs = head.matrix.outs;
        assert!(out.len() >= at.len() * outs && at.iter().all(|&t| (t as usize) < self.tokens), "places of the last step");
        rows.reserve(isa, at.len(), at.len(), [&*head]);
        let (states, packed, out) = (&self.buffers.hidden, rows.packed(isa, at.len(), at.len()), UnsafeSlice::new(out));
        let epilogue = config.final_softcap.map_or(Epilogue::Store, Epilogue::Softcap);
        pool.run(|worker| {
            let linear = &mut scratch[worker.index()].lock().unwrap_or_else(PoisonError::into_inner).linear;
            packed.pack(worker, isa, head, linear, |i, row| {
                norm.apply(isa, eps, &states[at[i] as usize * hidden..][..hidden], row);
            });
            packed.multiply(worker, isa, head, out, outs, epilogue, linear);
        });
    }

    /// Writes the normalised hidden states of the tokens at indices `at` of the last step to `out`, as vectors of length 1, one row of the
    /// hidden size for each index.
    pub fn states(&self, at: &[i32], out: &mut [f32]) {
        let DecoderConfig { hidden_size: hidden, rms_norm_eps: eps, .. } = self.config;
        assert!(out.len() >= at.len() * hidden && at.iter().all(|&t| (t as usize) < self.tokens), "places of the last step");
        for (&t, row) in at.iter().zip(out.chunks_exact_mut(hidden)) {
            self.norm.apply(self.isa, eps, &self.buffers.hidden[t as usize * hidden..][..hidden], row);
            scale_to_one(row);
        }
    }
}

/// Number of layers of a KV cache.
fn layers_of(blocks: &[Block], cache: usize) -> usize {
    blocks.iter().filter_map(Block::kv).filter(|kv| kv.cache == cache && !kv.shared).count()
}

/// Fewest query heads of a task, which reads its latents for all of them.
const MIN_HEADS: usize = 4;

/// The number of groups, at most `most`, into which the query heads that attend to latents are divided. Tasks for parts of the heads keep
/// all threads busy when there are few sequences. Other layers have several KV heads for that.
fn head_groups(config: &DecoderConfig, heads: &KvHeads, most: usize) -> usize {
    let most = if heads.latent.is_some() { most.min(config.num_heads / MIN_HEADS) } else { 1 };
    (1..=most).rev().find(|groups| config.num_heads.is_multiple_of(*groups)).unwrap_or(1)
}

/// Checks that each layer of each KV cache is written by one block, in ascending order, and shared only after that.
fn check_places(config: &DecoderConfig, blocks: &[Block]) -> Result<(), ShapeError> {
    let mut written = vec![0; config.kv_heads.len()];
    let mut places = blocks.iter().filter_map(Block::kv);
    places.try_for_each(|KvPlace { cache, layer, shared }| {
        let written = &mut written[cache];
        check(if shared { layer < *written } else { layer == *written }, "layers of KV caches")?;
        *written += usize::from(!shared);
        Ok(())
    })
}

/// Checks that blocks that read what the block before them reads follow attention, which keeps it where outputs are normalised.
fn check_inputs(blocks: &[Block]) -> Result<(), ShapeError> {
    let keeps = |block: &Block| matches!(block.kind, BlockKind::Attention(_)) && block.post_norm.is_none();
    let first = blocks.first().is_none_or(|block| block.kept_input().is_none());
    check(first && blocks.windows(2).all(|pair| pair[1].kept_input().is_none() || keeps(&pair[0])), "inputs of blocks")
}

/// The dimensions of a state, those of the first recurrent layer. `None` if there is none.
fn state_shape(blocks: &[Block], hidden: usize) -> Option<StateShape> {
    let layers = blocks.iter().filter_map(Block::recurrent).count();
    blocks.iter().find_map(Block::recurrent).map(|recurrent| recurrent.state_shape(hidden, layers))
}

/// Checks that recurrent layers are numbered in ascending order, and have states of the same dimensions.
fn check_states(blocks: &[Block], hidden: usize) -> Result<(), ShapeError> {
    let shape = state_shape(blocks, hidden);
    let fits = |(index, recurrent): (usize, &Recurrent)| {
        recurrent.layer == index && shape.is_some_and(|shape| recurrent.state_shape(hidden, shape.layers) == shape)
    };
    check(blocks.iter().filter_map(Block::recurrent).enumerate().all(fits), "states of recurrent layers")
}

/// The largest numbers of inputs and of outputs of the linear layers that adapters can update, with whole panels for each tensor.
fn widest(blocks: &[Block]) -> (usize, usize) {
    let matrices = || blocks.iter().filter_map(Block::adaptable).flatten().map(|linear| &linear.matrix);
    (
        matrices().map(|matrix| matrix.ins).max().unwrap_or(0),
        matrices().map(|matrix| matrix.panel_column(matrix.parts.len())).max().unwrap_or(0),
    )
}
