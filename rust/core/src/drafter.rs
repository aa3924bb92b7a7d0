//! Proposes the tokens after a sequence's last one, without a model: by looking for its last tokens earlier in the same sequence.
//!
//! Prompt lookup decoding, with the hash chains of LZ77 (Ziv and Lempel, 1977; `deflate`'s form) as the index. How many tokens are
//! worth proposing is decided for all sequences of a step together, from learned acceptance rates and the cost model.

use crate::batch::StepPlan;
use crate::cost::{Load, StepModel};
use crate::recorder::Recorder;
use crate::request::{SeqId, Token};
use slotmap::SecondaryMap;

/// Most tokens that can be proposed for one sequence and step.
pub const MAX_DRAFT: usize = 16;
/// Tokens that must match, at least.
const MIN_MATCH: usize = 3;
/// Tokens that are compared, at most: longer matches count as this long.
const MAX_MATCH: usize = 32;
/// Earlier places that are compared, at most.
const MAX_CANDIDATES: usize = 8;
/// A drafted token must be worth this much more than it costs: rates and costs are estimates.
const MARGIN: f64 = 1.15;
/// Proposals between two removals of indexes whose sequences have ended.
const SWEEP: u32 = 1024;
const NONE: u32 = u32::MAX;

/// Where each three tokens of one sequence occurred. 8 to 12 bytes for each token.
#[derive(Debug, Default)]
struct Index {
    /// By hash: the newest position at which three tokens of this hash end.
    heads: Vec<u32>,
    /// By position: the one before it of the same hash.
    chain: Vec<u32>,
}

/// An earlier occurrence of a sequence's last tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Match {
    /// Where it ends.
    end: usize,
    /// How many tokens are equal.
    len: usize,
}

impl Index {
    fn bucket(&self, three: &[Token]) -> usize {
        let mixed = three.iter().fold(0_u64, |hash, &token| (hash.rotate_left(23) ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        (mixed >> 32) as usize & (self.heads.len() - 1)
    }

    /// Takes in all tokens but the last, whose successor is not known.
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

    /// The longest match of the last tokens, of equal ones the newest.
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

/// How often drafted tokens are accepted, by the length of the match and by position.
#[derive(Debug)]
struct Acceptance {
    /// Of drafted tokens whose predecessors were accepted: how many were, and how many there were.
    counts: [[(f64, f64); MAX_DRAFT]; Self::CLASSES],
}

impl Acceptance {
    const CLASSES: usize = 6;
    /// What is assumed before anything was seen, by class, with the weight of so many tokens.
    const PRIOR: [f64; Self::CLASSES] = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9];
    const PRIOR_WEIGHT: f64 = 8.0;
    /// What is seen counts a little less with each further token: content changes.
    const DECAY: f64 = 0.995;
    /// As for `DECAY`, with each proposal that was thought not to pay: so that it is tried again some day.
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

    fn rate(&self, class: usize, position: usize) -> f64 {
        let (accepted, seen) = self.counts[class][position];
        accepted / seen
    }

    /// Learns that of `drafted` tokens the first `accepted` were right.
    fn observe(&mut self, class: usize, drafted: usize, accepted: usize) {
        for (position, count) in self.counts[class].iter_mut().enumerate().take(drafted.min(accepted + 1)) {
            Self::fade(count, Self::PRIOR[class], Self::DECAY);
            count.0 += f64::from(u8::from(position < accepted));
            count.1 += 1.0;
        }
    }

    /// Notes that the first token of a match was not worth proposing.
    fn idle(&mut self, class: usize) {
        Self::fade(&mut self.counts[class][0], Self::PRIOR[class], Self::IDLE_DECAY);
    }

    /// Moves a count towards what is assumed.
    fn fade(count: &mut (f64, f64), prior: f64, keep: f64) {
        count.0 = prior * Self::PRIOR_WEIGHT + keep * (count.0 - prior * Self::PRIOR_WEIGHT);
        count.1 = Self::PRIOR_WEIGHT + keep * (count.1 - Self::PRIOR_WEIGHT);
    }
}

/// What drafts have brought since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftStats {
    /// Sequences' steps with a draft.
    pub drafts: u64,
    /// Drafted tokens that were computed.
    pub draft_tokens: u64,
    /// Those that the model would have chosen itself: each saves a step.
    pub accepted_tokens: u64,
    /// The same by position in the draft.
    pub accepted_by_position: [u64; MAX_DRAFT],
}

/// A sequence whose tokens are drafted.
#[derive(Debug, Default)]
struct Drafted {
    index: Index,
    /// What was proposed for the step under way, and the class of its match.
    draft: Vec<Token>,
    class: usize,
    /// How many of them pay: 0 but while that is being found out.
    admitted: usize,
}

/// A drafted token that may be proposed.
struct Candidate {
    seq: SeqId,
    position: usize,
    /// The probability that it is accepted, and all before it.
    survival: f64,
}

/// Proposes tokens for the sequences that it was told to [`watch`](Self::watch).
#[derive(Debug)]
pub struct Drafter {
    max_tokens: usize,
    seqs: SecondaryMap<SeqId, Drafted>,
    acceptance: Acceptance,
    stats: DraftStats,
    until_sweep: u32,
}

impl Drafter {
    /// Proposes at most `max_tokens` tokens, up to [`MAX_DRAFT`], for each sequence and step.
    pub fn new(max_tokens: usize) -> Self {
        Self {
            max_tokens: max_tokens.min(MAX_DRAFT),
            seqs: SecondaryMap::new(),
            acceptance: Acceptance::new(),
            stats: DraftStats::default(),
            until_sweep: SWEEP,
        }
    }

    /// Has a sequence's tokens drafted from now on.
    pub fn watch(&mut self, id: SeqId) {
        self.seqs.insert(id, Drafted::default());
    }

    /// Whether a sequence's tokens are drafted.
    pub fn watches(&self, id: SeqId) -> bool {
        self.seqs.contains_key(id)
    }

    /// What drafts have brought.
    pub fn stats(&self) -> &DraftStats {
        &self.stats
    }

    /// Proposes tokens for the next step of the sequences that decode, as many as are likely to pay. To be called before each plan.
    pub fn propose(&mut self, core: &mut Recorder) {
        self.sweep(core);
        if self.seqs.is_empty() || !core.model().knows() {
            return;
        }
        let (mut load, mut matched) = (Load::default(), Vec::new());
        for (id, tokens, room) in core.decoding() {
            load.decode_seqs += 1;
            load.context_tokens += tokens.len() as u64;
            let Some(drafted) = self.seqs.get_mut(id) else { continue };
            drafted.index.catch_up(tokens);
            drafted.draft.clear();
            if let Some(found) = drafted.index.find(tokens) {
                drafted.class = Acceptance::class(found.len);
                extend(&mut drafted.draft, tokens, found.end + 1, self.max_tokens.min(room));
                matched.push(id);
            }
        }
        let mut worth = Worth::new(&load, core.model());
        let sorted = worth.sorted(self.candidates(&matched));
        for candidate in sorted {
            if !worth.add(candidate.survival) {
                break;
            }
            self.seqs[candidate.seq].admitted = candidate.position + 1;
        }
        for id in matched {
            let drafted = &mut self.seqs[id];
            let admitted = std::mem::take(&mut drafted.admitted);
            drafted.draft.truncate(admitted);
            if admitted == 0 {
                self.acceptance.idle(drafted.class);
            } else {
                core.draft(id, &drafted.draft);
            }
        }
    }

    /// All tokens that were drafted for these sequences.
    fn candidates<'a>(&'a self, matched: &'a [SeqId]) -> impl Iterator<Item = Candidate> + 'a {
        matched.iter().flat_map(move |&seq| {
            let drafted = &self.seqs[seq];
            (0..drafted.draft.len()).scan(1.0, move |survival, position| {
                *survival *= self.acceptance.rate(drafted.class, position);
                Some(Candidate { seq, position, survival: *survival })
            })
        })
    }

    /// Learns from what a step sampled. To be called before its commit.
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
            self.acceptance.observe(seq.class, drafted, accepted);
            self.stats.drafts += 1;
            self.stats.draft_tokens += drafted as u64;
            self.stats.accepted_tokens += accepted as u64;
            self.stats.accepted_by_position[..accepted].iter_mut().for_each(|count| *count += 1);
        }
    }

    /// Forgets sequences that have ended, now and then.
    fn sweep(&mut self, core: &Recorder) {
        self.until_sweep -= 1;
        if self.until_sweep == 0 {
            self.until_sweep = SWEEP;
            self.seqs.retain(|id, _| core.tokens(id).is_some());
        }
    }
}

/// Fills `draft` with the tokens from `from` on. Past the last one it goes on with the draft itself: the text may repeat.
fn extend(draft: &mut Vec<Token>, tokens: &[Token], from: usize, count: usize) {
    for at in from..from + count {
        let token = tokens.get(at).copied().unwrap_or_else(|| draft[at - tokens.len()]);
        draft.push(token);
    }
}

/// What a step is expected to give, and to take.
struct Worth {
    tokens: f64,
    /// Microseconds.
    time: f64,
    /// Microseconds of one more drafted token.
    each: f64,
}

impl Worth {
    fn new(load: &Load, model: &StepModel) -> Self {
        Self { tokens: load.decode_seqs.into(), time: model.step(load), each: model.drafted_token() }
    }

    /// Whether a token that is accepted with this probability raises the tokens per second.
    fn pays(&self, survival: f64) -> bool {
        survival * self.time > MARGIN * self.tokens * self.each
    }

    /// Adds such a token if it pays.
    fn add(&mut self, survival: f64) -> bool {
        let pays = self.pays(survival);
        if pays {
            self.tokens += survival;
            self.time += self.each;
        }
        pays
    }

    /// The candidates that may pay, the most probable first: each that is added makes it harder for the others.
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
        // One sequence: a step of 10 ms, and 1 ms for each drafted token.
        let model = StepModel::new(9000.0, 1000.0, 1000.0, 0.0, 0.0);
        let load = Load { decode_seqs: 1, ..Load::default() };
        assert_eq!(added(&load, &model, &[0.9, 0.8, 0.7, 0.6]), 4);
        assert_eq!(added(&load, &model, &[0.9, 0.4, 0.05]), 2);
        assert_eq!(added(&load, &model, &[0.1]), 0);
        // A full batch, where a drafted token costs what another sequence would: only what is nearly sure pays.
        let model = StepModel::new(1000.0, 1000.0, 1000.0, 0.0, 0.0);
        let load = Load { decode_seqs: 64, ..Load::default() };
        assert_eq!(added(&load, &model, &[0.95]), 0);
    }
}
