//! Drafts tokens without a draft model: finds an earlier occurrence of a sequence's last tokens and proposes the tokens after it.
//!
//! The method is prompt lookup decoding, with the hash chains of LZ77 (Ziv and Lempel, 1977; in `deflate`'s form) as
//! the index. Learned acceptance rates and the step-time model decide, for all sequences of a step together, how many
//! tokens to propose.

use super::acceptance::Acceptance;
use super::corpus::{Corpus, Key};
use super::draft_length::{DraftGain, DraftLengths};
use super::loss_budget::{LossBudget, Price};
use super::text_index::{Index, extend};
use crate::journal::Recorder;
use crate::request::{SeqId, Token};
use crate::step::{DraftSource, MAX_DRAFT, StepPlan};
use crate::step_time::Load;
use rustc_hash::FxHashMap;
use serde::Serialize;
use slotmap::SecondaryMap;

/// Calls between two removals of indexes of ended sequences.
const SWEEP: u32 = 1024;

/// Draft counters since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DraftStats {
    /// Number of drafts, counted per sequence and step.
    pub drafts: u64,
    /// Drafted tokens that steps computed.
    pub draft_tokens: u64,
    /// Drafted tokens that the model would have chosen itself. Each saves a step.
    #[serde(rename = "accepted_draft_tokens")]
    pub accepted_tokens: u64,
    /// Accepted tokens by position in the draft.
    #[serde(rename = "accepted_draft_tokens_by_position")]
    pub accepted_by_position: Vec<u64>,
}

/// A sequence with drafting enabled.
#[derive(Debug)]
struct Drafted {
    index: Index,
    /// Tokens proposed for the current step.
    draft: Vec<Token>,
    source: DraftSource,
    loss_budget: LossBudget,
    /// Whose finished texts it finds and joins.
    key: Key,
}

impl Drafted {
    /// Drafts up to `most` tokens from the sequence's own text or from a finished one: from where more of them are
    /// expected to be accepted.
    fn look_up(&mut self, tokens: &[Token], most: usize, corpus: Option<&Corpus>, acceptance: &Acceptance) {
        if let Some(found) = self.index.find(tokens) {
            self.source = DraftSource::Text(found.len);
            extend(&mut self.draft, tokens, found.end + 1, most);
        }
        let Some((corpus, found)) = corpus.and_then(|corpus| Some((corpus, corpus.find(&self.key, tokens)?))) else { return };
        let expected = |source| acceptance.survival(source)[..most].iter().sum::<f64>();
        let source = DraftSource::Corpus(found.len);
        if self.draft.is_empty() || expected(source) > expected(self.source) {
            self.draft.clear();
            self.source = source;
            corpus.extend(&mut self.draft, found, most);
        }
    }
}

/// Drafts tokens for the sequences enabled by [`watch`](Self::watch).
#[derive(Debug)]
pub struct Drafter {
    max_tokens: usize,
    seqs: SecondaryMap<SeqId, Drafted>,
    lengths: DraftLengths,
    /// What the drafted tokens of the latest step cost and save.
    price: Price,
    corpus: Option<Corpus>,
    stats: DraftStats,
    until_sweep: u32,
}

impl Drafter {
    /// Creates a drafter that proposes at most `max_tokens` tokens (up to [`MAX_DRAFT`]) per sequence and step, and finds
    /// them in the last `corpus_tokens` tokens of finished texts too.
    pub fn new(max_tokens: usize, corpus_tokens: usize) -> Self {
        let max_tokens = max_tokens.min(MAX_DRAFT);
        Self {
            max_tokens,
            seqs: SecondaryMap::new(),
            lengths: DraftLengths::default(),
            price: Price::default(),
            corpus: Corpus::new(corpus_tokens),
            stats: DraftStats { accepted_by_position: vec![0; max_tokens], ..DraftStats::default() },
            until_sweep: SWEEP,
        }
    }

    /// Enables drafting for a sequence. Its finished text is kept for sequences of the same tenant and cache salt.
    pub fn watch(&mut self, id: SeqId, core: &mut Recorder) {
        // The new sequence may get the place of a finished one.
        self.learn_finished(core);
        let Some(key) = core.owner(id) else { return };
        let (index, loss_budget) = (Index::default(), LossBudget::default());
        self.seqs.insert(id, Drafted { index, draft: Vec::new(), source: DraftSource::Grammar, loss_budget, key });
        if self.corpus.is_some() {
            core.keep_finished();
        }
    }

    /// Draft counters since the start.
    pub fn stats(&self) -> &DraftStats {
        &self.stats
    }

    /// Proposes tokens for the next step of decoding sequences, as many as are likely to pay. Call it before each plan.
    /// `forced` are tokens that a sequence's grammar leaves no choice about.
    pub fn propose(&mut self, core: &mut Recorder, forced: impl IntoIterator<Item = (SeqId, Vec<Token>)>) {
        self.learn_finished(core);
        self.sweep(core);
        if self.seqs.is_empty() || !core.model().knows() {
            return;
        }
        let mut load = Load::default();
        for (_, tokens, _) in core.decoding() {
            load.decode_seqs += 1;
            load.context_tokens += tokens.len() as u64;
        }
        // In a full batch not even a certain token pays, so nothing is looked up.
        let Some(gain) = DraftGain::new(&load, core.model()).filter(|gain| gain.may_pay(self.max_tokens)) else { return };
        let token = gain.token_price();
        let matched = self.look_up(core, &forced.into_iter().collect(), load.decode_seqs as usize, token);
        let drafts: Vec<_> = matched.iter().map(|&id| (self.seqs[id].source, self.seqs[id].draft.len())).collect();
        let admitted = self.lengths.admit(&load, core.model(), &drafts);
        let ahead = admitted.iter().filter(|&&admitted| admitted > 0).count();
        self.price = Price { token, accepted: ahead as f64 / f64::from(load.decode_seqs) };
        for (id, admitted) in matched.into_iter().zip(admitted) {
            let drafted = &mut self.seqs[id];
            drafted.draft.truncate(admitted);
            if admitted > 0 {
                core.draft(id, &drafted.draft, drafted.source);
            }
        }
    }

    /// Drafts tokens for each of `decoding` sequences. Returns the sequences with a draft.
    ///
    /// `token` is the price of a drafted token.
    fn look_up(&mut self, core: &Recorder, forced: &FxHashMap<SeqId, Vec<Token>>, decoding: usize, token: f64) -> Vec<SeqId> {
        let mut matched = Vec::with_capacity(decoding);
        for (id, tokens, room) in core.decoding() {
            let Some(drafted) = self.seqs.get_mut(id) else { continue };
            let most = self.max_tokens.min(room);
            let paid = drafted.loss_budget.step(most, token);
            drafted.draft.clear();
            if let Some(forced) = forced.get(&id) {
                drafted.source = DraftSource::Grammar;
                drafted.draft.extend(forced.iter().take(most));
            } else if paid > 0 {
                drafted.look_up(tokens, paid, self.corpus.as_ref(), self.lengths.acceptance());
            }
            if !drafted.draft.is_empty() {
                matched.push(id);
            }
        }
        matched
    }

    /// Learns from a step's sampled tokens. Call it before the step's commit.
    pub fn observe(&mut self, plan: &StepPlan, sampled: &[i32]) {
        let mut at = 0;
        for chunk in plan.chunks.iter().filter(|chunk| chunk.samples) {
            let drafted = chunk.drafted as usize;
            let sampled = &sampled[at..=at + drafted];
            at += sampled.len();
            if drafted == 0 {
                continue;
            }
            let Some(seq) = self.seqs.get_mut(chunk.seq) else { continue };
            let accepted = seq.draft.iter().zip(sampled).take(drafted).take_while(|&(&token, &sampled)| token as i32 == sampled).count();
            self.lengths.observe(seq.source, drafted, accepted);
            if seq.source != DraftSource::Grammar {
                seq.loss_budget.observe(drafted, accepted, self.price);
            }
            self.stats.drafts += 1;
            self.stats.draft_tokens += drafted as u64;
            self.stats.accepted_tokens += accepted as u64;
            self.stats.accepted_by_position[..accepted].iter_mut().for_each(|count| *count += 1);
        }
    }

    /// Adds the texts that were finished since the last call to the corpus.
    fn learn_finished(&mut self, core: &mut Recorder) {
        let Some(corpus) = &mut self.corpus else { return };
        for (id, tokens) in core.take_finished() {
            if let Some(seq) = self.seqs.remove(id) {
                corpus.push(&seq.key, &tokens);
            }
        }
    }

    /// Periodically removes sequences that have ended.
    fn sweep(&mut self, core: &Recorder) {
        self.until_sweep -= 1;
        if self.until_sweep == 0 {
            self.until_sweep = SWEEP;
            self.seqs.retain(|id, _| core.tokens(id).is_some());
        }
    }
}
