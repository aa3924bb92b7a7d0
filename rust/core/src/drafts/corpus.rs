//! Finished texts of all tenants in one ring, in which a tenant finds only its own.

use super::text_index::{MAX_CANDIDATES, MAX_MATCH, MIN_MATCH, Match, mixed};
use crate::request::Token;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes of the ring for each token, at most.
pub const CORPUS_BYTES_PER_TOKEN: usize = size_of::<Cell>() + size_of::<u32>();
/// Maximum number of cells visited per lookup. Cells of others and overwritten ones are no candidates.
const MAX_VISITS: usize = 64;
/// Positions begin at 1, so that an unused head is zero and takes no memory.
const NONE: u32 = 0;

/// The tenant and the cache salt of a text. Texts are found only under an equal key.
pub(crate) type Key = (Arc<str>, Arc<[u8]>);

/// One token of a text.
#[derive(Clone, Copy, Debug)]
struct Cell {
    token: Token,
    owner: u32,
    /// The previous position at which three tokens with the same hash end.
    previous: u32,
}

/// Who shares texts.
#[derive(Debug)]
struct Owner {
    id: u32,
    /// Number of texts of which the ring holds a part.
    texts: u32,
}

/// A ring of finished texts, with LZ77's hash chains over it. The oldest tokens are overwritten first.
#[derive(Debug)]
pub(crate) struct Corpus {
    capacity: usize,
    cells: Vec<Cell>,
    /// By hash: the latest position at which three tokens with this hash end.
    heads: Vec<u32>,
    /// Position of the next token. Position p is in cell (p - 1) % capacity.
    next: u32,
    /// End and key of the texts, oldest first.
    texts: VecDeque<(u32, Key)>,
    owners: FxHashMap<Key, Owner>,
    next_owner: u32,
}

impl Corpus {
    /// Creates a ring for `capacity` tokens, which takes memory as it fills. `None` for a capacity of zero.
    pub(crate) fn new(capacity: usize) -> Option<Self> {
        let heads = capacity.checked_ilog2().map(|bits| vec![NONE; 1 << bits])?;
        let (texts, owners) = (VecDeque::new(), FxHashMap::default());
        Some(Self { capacity, cells: Vec::with_capacity(capacity), heads, next: 1, texts, owners, next_owner: 0 })
    }

    /// Adds a finished text.
    pub(crate) fn push(&mut self, key: &Key, tokens: &[Token]) {
        let tokens = &tokens[tokens.len().saturating_sub(self.capacity)..];
        if tokens.len() <= MIN_MATCH {
            return;
        }
        if u32::MAX as usize - self.next as usize <= tokens.len() {
            *self = Self::new(self.capacity).expect("it has a capacity");
        }
        let owner = self.join(key);
        for (at, &token) in tokens.iter().enumerate() {
            // Nothing follows the last token.
            let indexed = at + 1 >= MIN_MATCH && at + 1 < tokens.len();
            let previous = if indexed {
                let bucket = self.bucket(owner, &tokens[at + 1 - MIN_MATCH..=at]);
                std::mem::replace(&mut self.heads[bucket], self.next)
            } else {
                NONE
            };
            let cell = Cell { token, owner, previous };
            match self.cells.get_mut((self.next as usize - 1) % self.capacity) {
                Some(old) => *old = cell,
                None => self.cells.push(cell),
            }
            self.next += 1;
        }
        self.texts.push_back((self.next, key.clone()));
        self.forget_overwritten();
    }

    /// The longest match of the last tokens among the texts of `key`. The latest one if several are equally long.
    pub(crate) fn find(&self, key: &Key, tokens: &[Token]) -> Option<Match> {
        let owner = self.owners.get(key)?.id;
        let last = tokens.len().checked_sub(1).filter(|last| *last + 1 >= MIN_MATCH)?;
        let mut best: Option<Match> = None;
        let mut position = self.heads[self.bucket(owner, &tokens[tokens.len() - MIN_MATCH..])];
        let mut candidates = 0;
        for _ in 0..MAX_VISITS {
            let Some(cell) = self.cell(position).filter(|_| candidates < MAX_CANDIDATES) else { break };
            candidates += usize::from(cell.owner == owner);
            let equal = |&back: &usize| self.token(owner, position.saturating_sub(back as u32)) == Some(tokens[last - back]);
            let len = (0..=last.min(MAX_MATCH - 1)).take_while(equal).count();
            if len >= MIN_MATCH && best.is_none_or(|best| len > best.len) {
                best = Some(Match { end: position as usize, len });
            }
            position = cell.previous;
        }
        best
    }

    /// Appends up to `count` tokens that follow a match to `draft`.
    pub(crate) fn extend(&self, draft: &mut Vec<Token>, found: Match, count: usize) {
        let Some(&Cell { owner, .. }) = self.cell(found.end as u32) else { return };
        draft.extend((found.end + 1..=found.end + count).map_while(|position| self.token(owner, position as u32)));
    }

    /// Counts a further text of `key` and returns its owner.
    fn join(&mut self, key: &Key) -> u32 {
        let owner = self.owners.entry(key.clone()).or_insert_with(|| {
            // An owner's number is used again after 2^32 others, when the ring has no text of it.
            self.next_owner = self.next_owner.wrapping_add(1);
            Owner { id: self.next_owner, texts: 0 }
        });
        owner.texts += 1;
        owner.id
    }

    /// Removes the texts of which no token is left, and their owners.
    fn forget_overwritten(&mut self) {
        while self.texts.front().is_some_and(|(end, _)| *end as usize + self.capacity <= self.next as usize) {
            let (_, key) = self.texts.pop_front().expect("it was just seen");
            let owner = self.owners.get_mut(&key).expect("a text has an owner");
            owner.texts -= 1;
            if owner.texts == 0 {
                self.owners.remove(&key);
            }
        }
    }

    fn bucket(&self, owner: u32, three: &[Token]) -> usize {
        mixed(owner.into(), three) & (self.heads.len() - 1)
    }

    /// The cell of a position, unless it was overwritten.
    fn cell(&self, position: u32) -> Option<&Cell> {
        let held = position != NONE && position < self.next && (self.next - position) as usize <= self.capacity;
        held.then(|| &self.cells[(position as usize - 1) % self.capacity])
    }

    /// The token at a position, if it is the owner's.
    fn token(&self, owner: u32, position: u32) -> Option<Token> {
        self.cell(position).filter(|cell| cell.owner == owner).map(|cell| cell.token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(tenant: &str, salt: &[u8]) -> Key {
        (tenant.into(), salt.into())
    }

    fn draft(corpus: &Corpus, key: &Key, tokens: &[Token], count: usize) -> Vec<Token> {
        let mut draft = Vec::new();
        if let Some(found) = corpus.find(key, tokens) {
            corpus.extend(&mut draft, found, count);
        }
        draft
    }

    fn numbers(seed: u32) -> impl Iterator<Item = u32> {
        std::iter::successors(Some(seed), |state| Some(state.wrapping_mul(1_103_515_245).wrapping_add(12_345))).map(|state| state >> 16)
    }

    #[test]
    fn what_followed_the_longest_match_is_drafted() {
        let (mut corpus, ours) = (Corpus::new(100).unwrap(), key("a", b""));
        corpus.push(&ours, &[9, 1, 2, 3, 4, 5, 6]);
        corpus.push(&ours, &[8, 1, 2, 3, 7, 7, 7]);
        assert_eq!(draft(&corpus, &ours, &[5, 1, 2, 3], 2), [7, 7], "the latest of equal ones");
        assert_eq!(draft(&corpus, &ours, &[9, 1, 2, 3], 2), [4, 5]);
        assert!(draft(&corpus, &ours, &[7, 7, 7], 2).is_empty(), "nothing follows the last token");
        assert!(draft(&corpus, &ours, &[1, 2], 2).is_empty());
    }

    #[test]
    fn a_tenant_and_a_salt_find_only_their_own() {
        let keys = [key("a", b""), key("b", b""), key("a", b"x"), key("", b"a")];
        let mut corpus = Corpus::new(1 << 16).unwrap();
        let mut alone: Vec<_> = keys.iter().map(|_| Corpus::new(1 << 16).unwrap()).collect();
        // Every text has tokens of its key's own range, behind beginnings that all share.
        let mut random = numbers(1);
        for turn in 0..200 {
            let who = turn % 4;
            let text: Vec<_> = (0..40).map(|i| if i % 8 < 4 { i % 8 } else { 10 + 10 * who as u32 + random.next().unwrap() % 5 }).collect();
            corpus.push(&keys[who], &text);
            alone[who].push(&keys[who], &text);
        }
        let mut found = 0;
        for (who, key) in keys.iter().enumerate() {
            for first in 0..50 {
                let drafted = draft(&corpus, key, &[first % 10, 1, 2, 3], 6);
                assert_eq!(drafted, draft(&alone[who], key, &[first % 10, 1, 2, 3], 6), "others change nothing");
                assert!(drafted.iter().all(|token| *token < 10 || token / 10 == who as u32 + 1), "a token of another key");
                found += usize::from(!drafted.is_empty());
            }
        }
        assert!(found > 100);
        assert!(draft(&corpus, &key("c", b""), &[0, 1, 2, 3], 6).is_empty());
    }

    #[test]
    fn the_oldest_tokens_are_overwritten_first_and_their_owners_forgotten() {
        let mut corpus = Corpus::new(64).unwrap();
        let text = |n: u32| -> Vec<Token> { (0..16).map(|i| 100 * n + i).collect() };
        for n in 0..20 {
            corpus.push(&key(&n.to_string(), b""), &text(n));
            for old in 0..=n {
                let drafted = draft(&corpus, &key(&old.to_string(), b""), &text(old)[..4], 3);
                assert_eq!(drafted.len(), if n - old < 4 { 3 } else { 0 }, "text {old} after {n}");
            }
            assert!(corpus.owners.len() <= 4 && corpus.texts.len() == corpus.owners.len());
            assert_eq!(corpus.cells.len(), 64.min(16 * (n as usize + 1)));
        }
        corpus.push(&key("long", b""), &(0..1000).collect::<Vec<_>>());
        assert_eq!(draft(&corpus, &key("long", b""), &[940, 941, 942], 3), [943, 944, 945]);
        assert!(draft(&corpus, &key("long", b""), &[900, 901, 902], 3).is_empty());
        assert_eq!(corpus.owners.len(), 1);
    }

    #[test]
    fn it_begins_anew_before_its_positions_overflow() {
        let (mut corpus, ours) = (Corpus::new(64).unwrap(), key("a", b""));
        corpus.next = u32::MAX - 40;
        corpus.cells = vec![Cell { token: 1, owner: 9, previous: NONE }; 64];
        corpus.push(&ours, &(0..30).collect::<Vec<_>>());
        assert_eq!(draft(&corpus, &ours, &[3, 4, 5], 2), [6, 7]);
        corpus.push(&ours, &(50..80).collect::<Vec<_>>());
        assert!(draft(&corpus, &ours, &[3, 4, 5], 2).is_empty());
        assert_eq!(draft(&corpus, &ours, &[53, 54, 55], 2), [56, 57]);
    }

    #[test]
    fn a_lookup_in_uniform_text_stays_short_and_finds_the_longest() {
        let (mut corpus, ours) = (Corpus::new(10_000).unwrap(), key("a", b""));
        corpus.push(&ours, &vec![5; 5000]);
        let found = corpus.find(&ours, &[5; 100]).unwrap();
        assert_eq!(found.len, MAX_MATCH);
        assert!(Corpus::new(0).is_none());
        assert_eq!(CORPUS_BYTES_PER_TOKEN, 16);
    }
}
