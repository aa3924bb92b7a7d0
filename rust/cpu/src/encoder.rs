//! An encoder: computes an embedding, or a classifier's scores, of each text from its token ids.
//!
//! The blocks are data, so that the same code computes BERT (Devlin et al., 2018), which normalises the sums, `ModernBERT`, which normalises
//! the inputs of blocks, encoders made of Gemma 3, which normalise their outputs too, and decoders, whose states are combined.
//!
//! A text's embedding has the same bits whatever other texts are computed with it: see the crate's documentation.

mod attention;
mod blocks;
mod pass;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::aligned::AlignedVec;
use crate::linear::Rows;
use crate::mlp::{ShapeError, check};
use crate::norm::Norm;
use crate::pool::ThreadPool;
use crate::simd::Isa;
use crate::weights::{Matrix, Merge};
use pass::{Buffers, Pass, Scratch};

pub use blocks::{Dense, DenseActivation, EncoderBlock, EncoderBlockKind, EncoderConfig, EncoderMlp, TextAttention};

/// The embeddings of tokens, positions and token types.
#[derive(Debug)]
pub struct Embeddings {
    /// \[vocabulary\]\[hidden size\].
    pub tokens: Matrix,
    /// \[positions\]\[hidden size\]. `None` for rotary positions.
    pub positions: Option<Vec<f32>>,
    /// \[token types\]\[hidden size\], empty if tokens have no type.
    pub types: Vec<f32>,
    /// The norm of their sum.
    pub norm: Option<Norm>,
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

/// What becomes of the hidden states after the last block.
#[derive(Debug)]
pub struct Head {
    /// The norm after the last block.
    pub norm: Option<Norm>,
    /// How a text's states are combined.
    pub pooling: Pooling,
    /// Layers that are applied to the combined state, one after another.
    pub dense: Vec<Dense>,
    /// Whether the result is scaled to length 1.
    pub normalized: bool,
}

/// The reason why texts cannot be embedded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// `starts` does not ascend from 0 to the number of tokens, or a text is empty or too long.
    #[error("texts must start in ascending order from 0 to {tokens}, and have from 1 to {most} tokens")]
    Starts {
        /// Number of tokens.
        tokens: usize,
        /// The most tokens of a text.
        most: usize,
    },
    /// A token id is outside the vocabulary.
    #[error("{0} is not a token id of this model")]
    Token(i32),
    /// There is not a known type for each token.
    #[error("token types must be one for each token, or none, and from 0 to {0}")]
    Types(usize),
}

/// A text that is computed a few blocks at a time, so that other texts need not wait for all of it.
#[derive(Debug)]
pub struct PartialText {
    ids: Vec<i32>,
    types: Vec<i32>,
    /// \[tokens\]\[hidden size\] after `blocks` blocks; empty before the first.
    hidden: AlignedVec<f32>,
    blocks: usize,
}

impl PartialText {
    /// A text of which nothing has been computed. `types` has the type of each token, or is empty if all are 0.
    pub fn new(ids: Vec<i32>, types: Vec<i32>) -> Self {
        Self { ids, types, hidden: AlignedVec::default(), blocks: 0 }
    }
}

/// The blocks of an encoder, and the buffers of a call.
#[derive(Debug)]
pub struct Encoder {
    isa: Isa,
    pool: ThreadPool,
    config: EncoderConfig,
    embeddings: Embeddings,
    blocks: Vec<EncoderBlock>,
    head: Head,
    /// The hidden states of texts that a call computes whole.
    hidden: AlignedVec<f32>,
    buffers: Buffers,
    rows: Rows,
    pooled_rows: Rows,
    scratch: Vec<Mutex<Scratch>>,
}

impl Encoder {
    /// Creates an encoder of these weights, which must be packed for one instruction set.
    pub fn new(
        pool: ThreadPool,
        config: EncoderConfig,
        embeddings: Embeddings,
        blocks: Vec<EncoderBlock>,
        head: Head,
    ) -> Result<Self, ShapeError> {
        let (isa, hidden) = (embeddings.tokens.isa, config.hidden_size);
        config.check()?;
        let positions = embeddings.positions.as_ref().map_or(config.longest * hidden, Vec::len);
        check(embeddings.tokens.is(isa, embeddings.tokens.outs, hidden, Merge::Stacked), "embeddings")?;
        check(positions >= config.longest * hidden && embeddings.types.len().is_multiple_of(hidden), "embeddings")?;
        check([&embeddings.norm, &head.norm].into_iter().flatten().all(|norm| norm.fits(hidden)), "norms")?;
        blocks.iter().try_for_each(|block| block.check(isa, &config))?;
        head.dense.iter().try_fold(hidden, |ins, dense| dense.check(isa, ins))?;
        let scratch = (0..pool.size()).map(|_| Mutex::default()).collect();
        let (hidden, buffers, rows, pooled_rows) = (AlignedVec::default(), Buffers::default(), Rows::default(), Rows::default());
        Ok(Self { isa, pool, config, embeddings, blocks, head, hidden, buffers, rows, pooled_rows, scratch })
    }

    /// The length of a text's result.
    pub fn width(&self) -> usize {
        self.head.dense.last().map_or(self.config.hidden_size, |dense| dense.linear.matrix.outs)
    }

    /// Computes the embeddings of texts and writes them to `out`, \[texts\]\[width\].
    ///
    /// Text i has the tokens `starts[i]` to `starts[i + 1]`. `types` has the type of each token, or is empty if all are 0. Returns an
    /// error, and changes nothing, for arrays that do not fit each other or the model. Panics if `out` is too short.
    pub fn embed(&mut self, ids: &[i32], types: &[i32], starts: &[i32], out: &mut [f32]) -> Result<(), TextError> {
        let starts = self.check(ids, types, starts)?;
        if ids.is_empty() {
            return Ok(());
        }
        assert!(out.len() >= (starts.len() - 1) * self.width(), "an embedding for each text");
        let mut hidden = std::mem::take(&mut self.hidden);
        self.run((ids, types, &starts), &mut hidden, 0..self.blocks.len(), out);
        self.hidden = hidden;
        Ok(())
    }

    /// The number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Computes a text up to its first `blocks` blocks, or up to the last block, which is left to `finish`.
    ///
    /// Returns an error, and changes nothing, for a text that does not fit the model.
    pub fn advance(&mut self, text: &mut PartialText, blocks: usize) -> Result<(), TextError> {
        let starts = self.check(&text.ids, &text.types, &[0, text.ids.len() as i32])?;
        let blocks = blocks.min(self.blocks.len().saturating_sub(1));
        if text.blocks < blocks {
            self.run((&text.ids, &text.types, &starts), &mut text.hidden, text.blocks..blocks, &mut []);
            text.blocks = blocks;
        }
        Ok(())
    }

    /// Computes the rest of a text and writes its embedding to `out`, \[width\]. The text is then as new.
    ///
    /// Returns an error for a text that does not fit the model. Panics if `out` is too short.
    pub fn finish(&mut self, text: &mut PartialText, out: &mut [f32]) -> Result<(), TextError> {
        let starts = self.check(&text.ids, &text.types, &[0, text.ids.len() as i32])?;
        assert!(out.len() >= self.width(), "room for the embedding");
        self.run((&text.ids, &text.types, &starts), &mut text.hidden, text.blocks..self.blocks.len(), out);
        text.blocks = 0;
        Ok(())
    }

    /// Runs checked texts, which have ids, types and starts, through the blocks in `range`. `hidden` are their states.
    fn run(&mut self, texts: (&[i32], &[i32], &[usize]), hidden: &mut AlignedVec<f32>, range: Range<usize>, out: &mut [f32]) {
        let Self { isa, pool, config, embeddings, blocks, head, buffers, rows, pooled_rows, scratch, .. } = self;
        let (tokens, count) = (texts.0.len(), texts.2.len() - 1);
        rows.reserve(*isa, tokens, tokens, blocks.iter().flat_map(EncoderBlock::linears));
        pooled_rows.reserve(*isa, count, count, head.dense.iter().map(|dense| &dense.linear));
        let packed = [rows.packed(*isa, tokens, tokens), pooled_rows.packed(*isa, count, count)];
        let pass = Pass::new(*isa, config, texts, &packed, (blocks, head), (hidden, buffers), out);
        pool.run(|worker| {
            let mut scratch = scratch[worker.index()].lock().unwrap_or_else(PoisonError::into_inner);
            pass.run(worker, &mut scratch, embeddings, (blocks, range.clone()), head);
        });
    }

    /// Checks what the threads rely on. Returns the starts.
    fn check(&self, ids: &[i32], types: &[i32], starts: &[i32]) -> Result<Vec<usize>, TextError> {
        let (vocabulary, most) = (self.embeddings.tokens.outs, self.config.longest);
        let wrong = TextError::Starts { tokens: ids.len(), most };
        let starts: Vec<usize> = starts.iter().map(|&start| usize::try_from(start).map_err(|_| wrong)).collect::<Result<_, _>>()?;
        let lengths_fit = starts.windows(2).all(|pair| pair[0] < pair[1] && pair[1] - pair[0] <= most);
        if starts.first() != Some(&0) || starts.last() != Some(&ids.len()) || !lengths_fit {
            return Err(wrong);
        }
        let known = (self.embeddings.types.len() / self.config.hidden_size).max(1);
        let is_below = |count: usize, id: i32| usize::try_from(id).is_ok_and(|id| id < count);
        if !(types.is_empty() || types.len() == ids.len()) || !types.iter().all(|&kind| is_below(known, kind)) {
            return Err(TextError::Types(known - 1));
        }
        match ids.iter().find(|&&id| !is_below(vocabulary, id)) {
            Some(&id) => Err(TextError::Token(id)),
            None => Ok(starts),
        }
    }
}
