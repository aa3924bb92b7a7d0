//! Drafts tokens without a draft model: finds an earlier occurrence of a sequence's last tokens and proposes the tokens after it.
//!
//! The method is prompt lookup decoding, with the hash chains of LZ77 (Ziv and Lempel, 1977; in `deflate`'s form) as
//! the index. Learned acceptance rates and the step-time model decide, for all sequences of a step together, how many
//! tokens to propose.

use crate::acceptance::{Acceptance, MAX_DRAFT, Source};
use crate::batch::StepPlan;
use crate::corpus::{Corpus, Key};
use crate::cost::{Load, StepModel};
use crate::recorder::Recorder;
use crate::request::{SeqId, Token};
use crate::text_index::{Index, extend};
use rustc_hash::FxHashMap;
use slotmap::SecondaryMap;

/// A drafted token must be worth this many times its cost, because rates and costs are estimates.
const MARGIN: f64 = 1.15;
/// Calls between two removals of indexes of ended sequences.
const SWEEP: u32 = 1024;

/// Draft counters since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftStats {
    /// Number of drafts, counted per sequence and step.
    pub drafts: u64,
    /// Drafted tokens that steps computed.
    pub draft_tokens: u64,
    /// Drafted tokens that the model would have chosen itself. Each saves a step.
    pub accepted_tokens: u64,
    /// Accepted tokens by position in the draft.
    pub accepted_by_position: Vec<u64>,
}

/// A sequence with drafting enabled.
#[derive(Debug)]
struct Drafted {
    index: Index,
    /// Tokens proposed for the current step.
    draft: Vec<Token>,
    source: Source,
    /// Whose finished texts it finds and joins.
    key: Key,
}

impl Drafted {
    /// Drafts up to `most` tokens from the sequence's own text or from a finished one: from where more of them are
    /// expected to be accepted.
    fn look_up(&mut self, tokens: &[Token], most: usize, corpus: Option<&Corpus>, acceptance: &Acceptance) {
        if let Some(found) = self.index.find(tokens) {
            self.source = Source::Text(found.len);
            extend(&mut self.draft, tokens, found.end + 1, most);
        }
        let Some((corpus, found)) = corpus.and_then(|corpus| Some((corpus, corpus.find(&self.key, tokens)?))) else { return };
        let expected = |source| acceptance.survival(source).take(most).sum::<f64>();
        let source = Source::Corpus(found.len);
        if self.draft.is_empty() || expected(source) > expected(self.source) {
            self.draft.clear();
            self.source = source;
            corpus.extend(&mut self.draft, found, most);
        }
    }
}

/// A drafted token that may be proposed.
struct Candidate {
    /// Index of its sequence among those with a match.
    index: usize,
    position: usize,
    /// Probability that this token and all before it are accepted.
    survival: f64,
}

/// Drafts tokens for the sequences enabled by [`watch`](Self::watch).
#[derive(Debug)]
pub struct Drafter {
    max_tokens: usize,
    seqs: SecondaryMap<SeqId, Drafted>,
    acceptance: Acceptance,
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
            acceptance: Acceptance::new(),
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
        self.seqs.insert(id, Drafted { index: Index::default(), draft: Vec::new(), source: Source::Grammar, key });
        if self.corpus.is_some() {
            core.keep_finished();
        }
    }

    /// Whether drafting is enabled for a sequence.
    pub fn watches(&self, id: SeqId) -> bool {
        self.seqs.contains_key(id)
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
        let forced: FxHashMap<SeqId, Vec<Token>> = forced.into_iter().collect();
        let (mut load, mut matched) = (Load::default(), Vec::new());
        for (id, tokens, room) in core.decoding() {
            load.decode_seqs += 1;
            load.context_tokens += tokens.len() as u64;
            let Some(drafted) = self.seqs.get_mut(id) else { continue };
            drafted.index.catch_up(tokens);
            drafted.draft.clear();
            let most = self.max_tokens.min(room);
            if let Some(forced) = forced.get(&id) {
                drafted.source = Source::Grammar;
                drafted.draft.extend(forced.iter().take(most));
            } else {
                drafted.look_up(tokens, most, self.corpus.as_ref(), &self.acceptance);
            }
            if !drafted.draft.is_empty() {
                matched.push(id);
            }
        }
        let mut worth = Worth::new(&load, core.model());
        let sorted = worth.sorted(self.candidates(&matched));
        let mut admitted = vec![0; matched.len()];
        for candidate in sorted.iter().take_while(|candidate| worth.add(candidate.survival)) {
            admitted[candidate.index] = candidate.position + 1;
        }
        for (id, admitted) in matched.into_iter().zip(admitted) {
            let drafted = &mut self.seqs[id];
            drafted.draft.truncate(admitted);
            if admitted > 0 {
                core.draft(id, &drafted.draft);
            } else {
                self.acceptance.idle(drafted.source);
            }
        }
    }

    /// All drafted tokens of these sequences.
    fn candidates<'a>(&'a self, matched: &'a [SeqId]) -> impl Iterator<Item = Candidate> + 'a {
        matched.iter().enumerate().flat_map(move |(index, &id)| {
            let drafted = &self.seqs[id];
            let survival = self.acceptance.survival(drafted.source).take(drafted.draft.len());
            survival.enumerate().map(move |(position, survival)| Candidate { index, position, survival })
        })
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
            let Some(seq) = self.seqs.get(chunk.seq) else { continue };
            let accepted = seq.draft.iter().zip(sampled).take(drafted).take_while(|&(&token, &sampled)| token as i32 == sampled).count();
            self.acceptance.observe(seq.source, drafted, accepted);
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

/// Expected tokens and time of a step.
struct Worth {
    tokens: f64,
    /// Microseconds of the step.
    time: f64,
    /// Microseconds of one more drafted token.
    each: f64,
}

impl Worth {
    fn new(load: &Load, model: &StepModel) -> Self {
        Self { tokens: load.decode_seqs.into(), time: model.step(load), each: model.drafted_token() }
    }

    /// Whether a token that is accepted with probability `survival` raises the tokens per second.
    fn pays(&self, survival: f64) -> bool {
        survival * self.time > MARGIN * self.tokens * self.each
    }

    /// Adds a token with this probability if it pays.
    fn add(&mut self, survival: f64) -> bool {
        let pays = self.pays(survival);
        if pays {
            self.tokens += survival;
            self.time += self.each;
        }
        pays
    }

    /// The candidates that may pay, most probable first. Each added token raises the threshold for the others.
    fn sorted(&self, candidates: impl Iterator<Item = Candidate>) -> Vec<Candidate> {
        let mut sorted: Vec<_> = candidates.filter(|candidate| self.pays(candidate.survival)).collect();
        sorted.sort_by(|a, b| b.survival.total_cmp(&a.survival).then(a.position.cmp(&b.position)));
        sorted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn added(load: &Load, model: &StepModel, survivals: &[f64]) -> usize {
        let mut worth = Worth::new(load, model);
        survivals.iter().take_while(|survival| worth.add(**survival)).count()
    }

    #[test]
    fn tokens_are_proposed_while_they_raise_the_rate() {
        // One sequence: a step takes 10 ms, and each drafted token 1 ms.
        let model = StepModel::new(9000.0, 1000.0, 1000.0, 0.0, 0.0);
        let load = Load { decode_seqs: 1, ..Load::default() };
        assert_eq!(added(&load, &model, &[0.9, 0.8, 0.7, 0.6]), 4);
        assert_eq!(added(&load, &model, &[0.9, 0.4, 0.05]), 2);
        assert_eq!(added(&load, &model, &[0.1]), 0);
        // A full batch: a drafted token costs as much as another sequence, so only a nearly certain token pays.
        let model = StepModel::new(1000.0, 1000.0, 1000.0, 0.0, 0.0);
        let load = Load { decode_seqs: 64, ..Load::default() };
        assert_eq!(added(&load, &model, &[0.95]), 0);
    }
}
