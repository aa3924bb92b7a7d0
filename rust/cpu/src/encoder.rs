//! An encoder of the BERT family (Devlin et al., 2018): computes an embedding of each text from its token ids.
//!
//! A text's embedding has the same bits whatever other texts are computed with it: see the crate's documentation.

mod attention;

use std::sync::{Mutex, PoisonError};

use crate::aligned::AlignedVec;
use crate::blocks::{ShapeError, check};
use crate::linear::{self, Epilogue, Linear, Packed, Rows};
use crate::norm::{LayerNorm, scale_to_one};
use crate::pool::{ThreadPool, Worker};
use crate::simd::Isa;
use crate::unsafe_slice::UnsafeSlice;
use crate::weights::Merge;
use attention::{Attend, Attention};

/// Weight and bias of a layer norm.
#[derive(Debug)]
pub struct Norm {
    /// Factor of each number.
    pub weight: Vec<f32>,
    /// Summand of each number.
    pub bias: Vec<f32>,
}

/// A layer: attention and an MLP. Each adds its output to its input and normalises the sum.
#[derive(Debug)]
pub struct EncoderLayer {
    /// Query, key and value projections, stacked.
    pub qkv_proj: Linear,
    /// Output projection of attention.
    pub o_proj: Linear,
    /// The norm after attention.
    pub attention_norm: Norm,
    /// First layer of the MLP. GELU is applied to its output.
    pub up_proj: Linear,
    /// Second layer of the MLP.
    pub down_proj: Linear,
    /// The norm after the MLP.
    pub norm: Norm,
}

/// The embeddings of tokens and positions.
#[derive(Debug)]
pub struct Embeddings {
    /// \[vocabulary\]\[hidden size\].
    pub tokens: Vec<f32>,
    /// \[positions\]\[hidden size\], with the embedding of the token type added.
    pub positions: Vec<f32>,
    /// The norm of their sum.
    pub norm: Norm,
}

/// How the hidden states of a text are combined to its embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The state of the first token.
    First,
    /// The state of the last token.
    Last,
    /// The mean of all states.
    Mean,
}

/// The reason why texts cannot be embedded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// `starts` does not ascend from 0 to the number of tokens, or a text is empty or too long.
    #[error("texts must start in ascending order from 0 to {tokens}, and have from 1 to {most} tokens")]
    Starts {
        /// Number of tokens.
        tokens: usize,
        /// Number of positions.
        most: usize,
    },
    /// A token id is outside the vocabulary.
    #[error("{0} is not a token id of this model")]
    Token(i32),
}

/// The layers of an encoder, and the buffers of a call.
#[derive(Debug)]
pub struct Encoder {
    isa: Isa,
    pool: ThreadPool,
    hidden_size: usize,
    num_heads: usize,
    norm_eps: f32,
    embeddings: Embeddings,
    layers: Vec<EncoderLayer>,
    pooling: Pooling,
    buffers: Buffers,
    rows: Rows,
    scratch: Vec<Mutex<Scratch>>,
}

/// Buffers that are reused from call to call.
#[derive(Debug, Default)]
struct Buffers {
    /// \[tokens\]\[hidden size\].
    hidden: AlignedVec<f32>,
    /// Queries, keys and values, \[tokens\]\[3\]\[hidden size\].
    qkv: AlignedVec<f32>,
    /// Outputs of attention, \[tokens\]\[hidden size\].
    attended: AlignedVec<f32>,
    /// Outputs of `up_proj`, \[tokens\]\[the largest inner width\].
    inner: AlignedVec<f32>,
}

/// Per-thread scratch memory.
#[derive(Debug, Default)]
struct Scratch {
    linear: linear::Scratch,
    attention: attention::Scratch,
}

impl Encoder {
    /// Creates an encoder of these weights, which must be packed for one instruction set.
    pub fn new(
        pool: ThreadPool,
        num_heads: usize,
        norm_eps: f32,
        embeddings: Embeddings,
        layers: Vec<EncoderLayer>,
        pooling: Pooling,
    ) -> Result<Self, ShapeError> {
        let hidden = embeddings.norm.weight.len();
        let isa = layers.first().map_or_else(Isa::best, |layer| layer.qkv_proj.matrix.isa);
        check(hidden > 0 && num_heads > 0 && hidden.is_multiple_of(num_heads), "heads")?;
        check(embeddings.tokens.len().is_multiple_of(hidden) && embeddings.positions.len().is_multiple_of(hidden), "embeddings")?;
        check(embeddings.norm.bias.len() == hidden, "norms")?;
        layers.iter().try_for_each(|layer| layer.check(isa, hidden))?;
        let scratch = (0..pool.size()).map(|_| Mutex::default()).collect();
        let (buffers, rows) = (Buffers::default(), Rows::default());
        Ok(Self { isa, pool, hidden_size: hidden, num_heads, norm_eps, embeddings, layers, pooling, buffers, rows, scratch })
    }

    /// Computes the embeddings of texts, as vectors of length 1, and writes them to `out`, \[texts\]\[hidden size\].
    ///
    /// Text i has the tokens `starts[i]` to `starts[i + 1]`. Returns an error, and changes nothing, for arrays that do not fit each other or
    /// the model. Panics if `out` is too short.
    pub fn embed(&mut self, ids: &[i32], starts: &[i32], out: &mut [f32]) -> Result<(), TextError> {
        let starts = self.check(ids, starts)?;
        if ids.is_empty() {
            return Ok(());
        }
        let Self { isa, pool, hidden_size: hidden, num_heads, norm_eps, embeddings, layers, pooling, buffers, rows, scratch } = self;
        let (isa, hidden, tokens) = (*isa, *hidden, ids.len());
        assert!(out.len() >= (starts.len() - 1) * hidden, "an embedding for each text");
        let inner = layers.iter().map(|layer| layer.up_proj.matrix.outs).max().unwrap_or(0);
        rows.reserve(isa, tokens, tokens, layers.iter().flat_map(EncoderLayer::linears));
        let room = |buffer: &mut AlignedVec<f32>, width: usize| buffer.reserve(tokens * width);
        room(&mut buffers.hidden, hidden);
        room(&mut buffers.qkv, 3 * hidden);
        room(&mut buffers.attended, hidden);
        room(&mut buffers.inner, inner);
        let pass = Pass {
            isa,
            hidden_size: hidden,
            num_heads: *num_heads,
            eps: *norm_eps,
            ids,
            starts: &starts,
            packed: rows.packed(isa, tokens, tokens),
            hidden: buffers.hidden.shared(),
            qkv: buffers.qkv.shared(),
            attended: buffers.attended.shared(),
            inner: buffers.inner.shared(),
            out: UnsafeSlice::new(out),
        };
        pool.run(|worker| {
            let mut scratch = scratch[worker.index()].lock().unwrap_or_else(PoisonError::into_inner);
            pass.embed(worker, embeddings);
            let mut norm = &embeddings.norm;
            for layer in layers.iter() {
                pass.attend(worker, &mut scratch, layer, norm);
                pass.mlp(worker, &mut scratch, layer);
                norm = &layer.norm;
            }
            pass.pool(worker, norm, *pooling);
        });
        Ok(())
    }

    /// Checks what the threads rely on. Returns the starts.
    fn check(&self, ids: &[i32], starts: &[i32]) -> Result<Vec<usize>, TextError> {
        let (vocabulary, most) = (self.embeddings.tokens.len() / self.hidden_size, self.embeddings.positions.len() / self.hidden_size);
        let wrong = TextError::Starts { tokens: ids.len(), most };
        let starts: Vec<usize> = starts.iter().map(|&start| usize::try_from(start).map_err(|_| wrong)).collect::<Result<_, _>>()?;
        let lengths_fit = starts.windows(2).all(|pair| pair[0] < pair[1] && pair[1] - pair[0] <= most);
        if starts.first() != Some(&0) || starts.last() != Some(&ids.len()) || !lengths_fit {
            return Err(wrong);
        }
        match ids.iter().find(|&&id| !usize::try_from(id).is_ok_and(|id| id < vocabulary)) {
            Some(&id) => Err(TextError::Token(id)),
            None => Ok(starts),
        }
    }
}

impl EncoderLayer {
    fn linears(&self) -> [&Linear; 4] {
        [&self.qkv_proj, &self.o_proj, &self.up_proj, &self.down_proj]
    }

    fn check(&self, isa: Isa, hidden: usize) -> Result<(), ShapeError> {
        let inner = self.up_proj.matrix.outs;
        let norms = [&self.attention_norm, &self.norm];
        check(norms.iter().all(|norm| norm.weight.len() == hidden && norm.bias.len() == hidden), "norms")?;
        check(self.qkv_proj.matrix.is(isa, 3 * hidden, hidden, Merge::Stacked), "query, key and value")?;
        check(self.o_proj.matrix.is(isa, hidden, hidden, Merge::Stacked), "weights of attention's output")?;
        check(self.up_proj.matrix.is(isa, inner, hidden, Merge::Stacked), "weights of the MLP")?;
        check(self.down_proj.matrix.is(isa, hidden, inner, Merge::Stacked), "weights of the MLP")
    }
}

/// A call, shared by all threads.
///
/// SAFETY of all blocks below: in a phase, one index writes each row, and the phase reads only rows that it writes itself or that earlier
/// phases wrote.
struct Pass<'a> {
    isa: Isa,
    hidden_size: usize,
    num_heads: usize,
    eps: f32,
    ids: &'a [i32],
    starts: &'a [usize],
    packed: Packed<'a>,
    hidden: UnsafeSlice<'a, f32>,
    qkv: UnsafeSlice<'a, f32>,
    attended: UnsafeSlice<'a, f32>,
    inner: UnsafeSlice<'a, f32>,
    out: UnsafeSlice<'a, f32>,
}

impl Pass<'_> {
    /// Adds the embeddings of each token and its position.
    fn embed(&self, worker: &mut Worker<'_>, embeddings: &Embeddings) {
        let hidden = self.hidden_size;
        worker.parallel_for(self.starts.len() - 1, |text| {
            for t in self.starts[text]..self.starts[text + 1] {
                // SAFETY: only this index writes the rows of the text (see `Pass`).
                let state = unsafe { self.hidden.write(t * hidden, hidden) };
                let token = &embeddings.tokens[self.ids[t] as usize * hidden..][..hidden];
                let position = &embeddings.positions[(t - self.starts[text]) * hidden..][..hidden];
                for ((state, token), position) in state.iter_mut().zip(token).zip(position) {
                    *state = token + position;
                }
            }
        });
    }

    /// Normalises the states with `norm` and runs a layer's attention.
    fn attend(&self, worker: &mut Worker<'_>, scratch: &mut Scratch, layer: &EncoderLayer, norm: &Norm) {
        let (hidden, heads) = (self.hidden_size, self.num_heads);
        self.pack_normed(worker, scratch, norm, &layer.qkv_proj);
        self.packed.multiply(worker, self.isa, &layer.qkv_proj, self.qkv, 3 * hidden, Epilogue::Store, &mut scratch.linear);
        worker.parallel_for((self.starts.len() - 1) * heads, |task| {
            let (text, head) = (task / heads, task % heads);
            let (start, end) = (self.starts[text], self.starts[text + 1]);
            // SAFETY: an earlier phase wrote these rows (see `Pass`).
            let qkv = unsafe { self.qkv.read(start * 3 * hidden, (end - start) * 3 * hidden) };
            let of = Attention { qkv, hidden_size: hidden, head_dim: hidden / heads, head, out: self.attended, first: start };
            self.isa.run(Attend { of: &of, scratch: &mut scratch.attention });
        });
        self.add(worker, scratch, &layer.o_proj, self.attended);
    }

    /// Normalises the states with the norm after attention and runs a layer's MLP.
    fn mlp(&self, worker: &mut Worker<'_>, scratch: &mut Scratch, layer: &EncoderLayer) {
        let inner = layer.up_proj.matrix.outs;
        self.pack_normed(worker, scratch, &layer.attention_norm, &layer.up_proj);
        self.packed.multiply(worker, self.isa, &layer.up_proj, self.inner, inner, Epilogue::Gelu, &mut scratch.linear);
        self.add(worker, scratch, &layer.down_proj, self.inner);
    }

    /// Normalises the states in place and packs them for `linear`.
    fn pack_normed(&self, worker: &mut Worker<'_>, scratch: &mut Scratch, norm: &Norm, linear: &Linear) {
        let hidden = self.hidden_size;
        self.packed.pack(worker, self.isa, linear, &mut scratch.linear, |t, out| {
            // SAFETY: only the index that packs this row uses it (see `Pass`).
            let x = unsafe { self.hidden.write(t * hidden, hidden) };
            self.isa.run(LayerNorm { x, weight: &norm.weight, bias: &norm.bias, eps: self.eps, out });
            x.copy_from_slice(out);
        });
    }

    /// Multiplies `rows` by `linear` and adds the result to the states.
    fn add(&self, worker: &mut Worker<'_>, scratch: &mut Scratch, linear: &Linear, rows: UnsafeSlice<'_, f32>) {
        let width = linear.matrix.ins;
        // SAFETY: an earlier phase wrote these rows (see `Pass`).
        let copy = |t: usize, out: &mut [f32]| out.copy_from_slice(unsafe { rows.read(t * width, width) });
        self.packed.pack(worker, self.isa, linear, &mut scratch.linear, copy);
        self.packed.multiply(worker, self.isa, linear, self.hidden, self.hidden_size, Epilogue::Add(1.0), &mut scratch.linear);
    }

    /// Normalises the states with the last norm, combines those of each text, and scales the result to length 1.
    fn pool(&self, worker: &mut Worker<'_>, norm: &Norm, pooling: Pooling) {
        let hidden = self.hidden_size;
        let mut state = vec![0.0; hidden];
        worker.parallel_for(self.starts.len() - 1, |text| {
            let (start, end) = (self.starts[text], self.starts[text + 1]);
            // SAFETY: only this index writes the text's embedding (see `Pass`).
            let out = unsafe { self.out.write(text * hidden, hidden) };
            out.fill(0.0);
            let tokens = match pooling {
                Pooling::First => start..start + 1,
                Pooling::Last => end - 1..end,
                Pooling::Mean => start..end,
            };
            for t in tokens {
                // SAFETY: an earlier phase wrote this row (see `Pass`).
                let x = unsafe { self.hidden.read(t * hidden, hidden) };
                self.isa.run(LayerNorm { x, weight: &norm.weight, bias: &norm.bias, eps: self.eps, out: &mut state });
                out.iter_mut().zip(&state).for_each(|(sum, x)| *sum += x);
            }
            scale_to_one(out);
        });
    }
}
