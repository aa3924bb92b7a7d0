//! Drafts tokens without a draft model: finds an earlier occurrence of a sequence's last tokens and proposes the tokens after it.
//!
//! The method is prompt lookup decoding, with the hash chains of LZ77 (Ziv and Lempel, 1977; in `deflate`'s form) as
//! the index. Learned acceptance rates and the step-time model decide, for all sequences of a step together, how many
//! tokens to propose.

use crate::batch::StepPlan;
use crate::cost::{Load, StepModel};
use crate::recorder::Recorder;
use crate::request::{SeqId, Token};
use rustc_hash::FxHashMap;
use slotmap::SecondaryMap;

/// Maximum number of tokens drafted per sequence and step.
pub const MAX_DRAFT: usize = 16;
/// Minimum number of matching tokens.
const MIN_MATCH: usize = 3;
/// Maximum number of tokens compared. Longer matches count as this length.
const MAX_MATCH: usize = 32;
/// Maximum number of earlier positions compared.
const MAX_CANDIDATES: usize = 8;
/// A drafted token must be worth this many times its cost, because rates and costs are estimates.
const MARGIN: f64 = 1.15;
/// Calls between two removals of indexes of ended sequences.
const SWEEP: u32 = 1024;
const NONE: u32 = u32::MAX;

/// Index of the positions of each three consecutive tokens of one sequence. It uses 8 to 12 bytes per token.
#[derive(Debug, Default)]
struct Index {
    /// By hash: the latest position at which three tokens with this hash end.
    heads: Vec<u32>,
    /// By position: the previous position with the same hash.
    chain: Vec<u32>,
}

/// An earlier occurrence of a sequence's last tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Match {
    /// End position of the match.
    end: usize,
    /// Number of equal tokens.
    len: usize,
}

impl Index {
    fn bucket(&self, three: &[Token]) -> usize {
        let mixed = three.iter().fold(0_u64, |hash, &token| (hash.rotate_left(23) ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        (mixed >> 32) as usize & (self.heads.len() - 1)
    }

    /// Indexes all tokens but the last, whose successor is not known.
    fn catch_up(&mut self, tokens: &[Token]) {
        let known = tokens.len().saturating_sub(1);
        if known > self.heads.len() {
            self.heads.clear();
            self.heads.resize(known.next_power_of_two().max(64) * 2, NONE);
            self.chain.clear();
        }
        for end in self.chain.len()..known {
            if end + 1 < MIN_MATCH {
                self.chain.push(NONE);
                continue;
            }
            let bucket = self.bucket(&tokens[end + 1 - MIN_MATCH..=end]);
            self.chain.push(self.heads[bucket]);
            self.heads[bucket] = end as u32;
        }
    }

    /// The longest match of the last tokens. The latest one if several are equally long.
    fn find(&self, tokens: &[Token]) -> Option<Match> {
        let last = tokens.len().checked_sub(1).filter(|last| *last >= MIN_MATCH)?;
        let mut best: Option<Match> = None;
        let mut candidate = self.heads[self.bucket(&tokens[tokens.len() - MIN_MATCH..])];
        for _ in 0..MAX_CANDIDATES {
            if candidate == NONE {
                break;
            }
            let end = candidate as usize;
            let len = (0..=end.min(MAX_MATCH - 1)).take_while(|&back| tokens[end - back] == tokens[last - back]).count();
            if len >= MIN_MATCH && best.is_none_or(|best| len > best.len) {
                best = Some(Match { end, len });
            }
            candidate = self.chain[end];
        }
        best
    }
}

/// Where a draft comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// A match in the text. The class of its length.
    Text(usize),
    /// The request's grammar, which allows no other tokens.
    Grammar,
}

/// Acceptance rates of tokens drafted from the text, by match length and position.
#[derive(Debug)]
struct Acceptance {
    /// Counts of (accepted, all) drafted tokens whose predecessors were accepted.
    counts: [[(f64, f64); MAX_DRAFT]; Self::CLASSES],
}

impl Acceptance {
    const CLASSES: usize = 6;
    /// Assumed rate before any observation, by class. The next constant is its weight in tokens.
    const PRIOR: [f64; Self::CLASSES] = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9];
    const PRIOR_WEIGHT: f64 = 8.0;
    /// Factor applied to earlier observations for each new token, because content changes.
    const DECAY: f64 = 0.995;
    /// Like `DECAY`, for each proposal that was predicted not to pay, so that it is tried again later.
    const IDLE_DECAY: f64 = 0.9995;

    fn new() -> Self {
        let prior = |class: usize| (Self::PRIOR[class] * Self::PRIOR_WEIGHT, Self::PRIOR_WEIGHT);
        Self { counts: std::array::from_fn(|class| [prior(class); MAX_DRAFT]) }
    }

    fn class(len: usize) -> usize {
        match len {
            0..=3 => 0,
            4 => 1,
            5..=6 => 2,
            7..=10 => 3,
            11..=20 => 4,
            _ => 5,
        }
    }

    /// Probability that a token is accepted if those before it are.
    fn probability(&self, source: Source, position: usize) -> f64 {
        match source {
            Source::Text(class) => self.rate(class, position),
            Source::Grammar => 1.0,
        }
    }

    fn rate(&self, class: usize, position: usize) -> f64 {
        let (accepted, seen) = self.counts[class][position];
        accepted / seen
    }

    /// Records that the first `accepted` of `drafted` tokens were accepted.
    fn observe(&mut self, class: usize, drafted: usize, accepted: usize) {
        for (position, count) in self.counts[class].iter_mut().enumerate().take(drafted.min(accepted + 1)) {
            Self::fade(count, Self::PRIOR[class], Self::DECAY);
            count.0 += f64::from(u8::from(position < accepted));
            count.1 += 1.0;
        }
    }

    /// Records that the first token of a match was not worth proposing.
    fn idle(&mut self, class: usize) {
        Self::fade(&mut self.counts[class][0], Self::PRIOR[class], Self::IDLE_DECAY);
    }

    /// Moves a count towards the assumed rate.
    fn fade(count: &mut (f64, f64), prior: f64, keep: f64) {
        count.0 = prior * Self::PRIOR_WEIGHT + keep * (count.0 - prior * Self::PRIOR_WEIGHT);
        count.1 = Self::PRIOR_WEIGHT + keep * (count.1 - Self::PRIOR_WEIGHT);
    }
}

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
}

impl Default for Drafted {
    fn default() -> Self {
        Self { index: Index::default(), draft: Vec::new(), source: Source::Grammar }
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
    stats: DraftStats,
    until_sweep: u32,
}

impl Drafter {
    /// Creates a drafter that proposes at most `max_tokens` tokens (up to [`MAX_DRAFT`]) per sequence and step.
    pub fn new(max_tokens: usize) -> Self {
        let max_tokens = max_tokens.min(MAX_DRAFT);
        Self {
            max_tokens,
            seqs: SecondaryMap::new(),
            acceptance: Acceptance::new(),
            stats: DraftStats { accepted_by_position: vec![0; max_tokens], ..DraftStats::default() },
            until_sweep: SWEEP,
        }
    }

    /// Enables drafting for a sequence.
    pub fn watch(&mut self, id: SeqId) {
        self.seqs.insert(id, Drafted::default());
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
            } else if let Some(found) = drafted.index.find(tokens) {
                drafted.source = Source::Text(Acceptance::class(found.len));
                extend(&mut drafted.draft, tokens, found.end + 1, most);
            } else {
                continue;
            }
            matched.push(id);
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
            } else if let Source::Text(class) = drafted.source {
                self.acceptance.idle(class);
            }
        }
    }

    /// All drafted tokens of these sequences.
    fn candidates<'a>(&'a self, matched: &'a [SeqId]) -> impl Iterator<Item = Candidate> + 'a {
        matched.iter().enumerate().flat_map(move |(index, &id)| {
            let drafted = &self.seqs[id];
            (0..drafted.draft.len()).scan(1.0, move |survival, position| {
                *survival *= self.acceptance.probability(drafted.source, position);
                Some(Candidate { index, position, survival: *survival })
            })
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
            if let Source::Text(class) = seq.source {
                self.acceptance.observe(class, drafted, accepted);
            }
            self.stats.drafts += 1;
            self.stats.draft_tokens += drafted as u64;
            self.stats.accepted_tokens += accepted as u64;
            self.stats.accepted_by_position[..accepted].iter_mut().for_each(|count| *count += 1);
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

/// Fills `draft` with the tokens from `from` on. After the last token it continues with the draft itself, because the
/// text may repeat.
fn extend(draft: &mut Vec<Token>, tokens: &[Token], from: usize, count: usize) {
    for at in from..from + count {
        let token = tokens.get(at).copied().unwrap_or_else(|| draft[at - tokens.len()]);
        draft.push(token);
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

    fn found(tokens: &[Token]) -> Option<Match> {
        let mut index = Index::default();
        for len in 1..=tokens.len() {
            index.catch_up(&tokens[..len]);
        }
        index.find(tokens)
    }

    #[test]
    fn the_longest_match_is_found_and_of_equal_ones_the_newest() {
        assert_eq!(found(&[]), None);
        assert_eq!(found(&[1, 2, 3]), None);
        assert_eq!(found(&[1, 2, 3, 1, 2]), None);
        assert_eq!(found(&[1, 2, 3, 9, 1, 2, 3]), Some(Match { end: 2, len: 3 }));
        assert_eq!(found(&[0, 1, 2, 3, 9, 1, 2, 3, 8, 0, 1, 2, 3]), Some(Match { end: 3, len: 4 }));
        assert_eq!(found(&[1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3]), Some(Match { end: 6, len: 3 }));
        assert_eq!(found(&[5; 100]), Some(Match { end: 98, len: MAX_MATCH }));
    }

    #[test]
    fn an_index_that_grew_in_pieces_finds_what_one_made_at_once_does() {
        let mut state = 1_u32;
        let tokens: Vec<Token> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_103_515_245).wrapping_add(12_345);
            state >> 16 & 3
        })
        .take(700)
        .collect();
        for len in (3..700).step_by(37) {
            let mut index = Index::default();
            index.catch_up(&tokens[..len]);
            assert_eq!(index.find(&tokens[..len]), found(&tokens[..len]), "{len}");
        }
    }

    #[test]
    fn a_repeating_text_is_drafted_beyond_its_end() {
        let mut draft = Vec::new();
        extend(&mut draft, &[7, 8, 9, 7, 8], 2, 5);
        assert_eq!(draft, [9, 7, 8, 9, 7]);
    }

    #[test]
    fn what_is_accepted_is_learned_and_fades() {
        let mut acceptance = Acceptance::new();
        let before = acceptance.rate(0, 0);
        (0..200).for_each(|_| acceptance.observe(0, 4, 0));
        assert!(acceptance.rate(0, 0) < 0.05);
        assert!((acceptance.rate(0, 1) - before).abs() < 1e-9, "nothing was seen of the second");
        (0..20_000).for_each(|_| acceptance.idle(0));
        assert!((acceptance.rate(0, 0) - before).abs() < 0.01);
        (0..200).for_each(|_| acceptance.observe(0, 4, 4));
        assert!(acceptance.rate(0, 3) > 0.9);
    }

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
