//! Finds earlier occurrences of a sequence's last tokens in its own text.

use crate::request::Token;

/// Minimum number of matching tokens.
pub(crate) const MIN_MATCH: usize = 3;
/// Maximum number of tokens compared. Longer matches count as this length.
pub(crate) const MAX_MATCH: usize = 32;
/// Maximum number of earlier positions compared.
pub(crate) const MAX_CANDIDATES: usize = 8;
const NONE: u32 = u32::MAX;

/// Index of the positions of each three consecutive tokens of one sequence. It uses 8 to 12 bytes per token.
#[derive(Debug, Default)]
pub(crate) struct Index {
    /// By hash: the latest position at which three tokens with this hash end.
    heads: Vec<u32>,
    /// By position: the previous position with the same hash.
    chain: Vec<u32>,
    /// The last match of full length, and the number of tokens at that time.
    followed: Option<(Match, usize)>,
}

/// An earlier occurrence of a sequence's last tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Match {
    /// End position of the match.
    pub(crate) end: usize,
    /// Number of equal tokens.
    pub(crate) len: usize,
}

impl Index {
    /// The longest match of the last tokens. The latest one if several are equally long.
    ///
    /// While the text goes on as it did after a match of full length, that match is followed. Its tokens are not indexed
    /// again, because their earlier occurrence is.
    pub(crate) fn find(&mut self, tokens: &[Token]) -> Option<Match> {
        let found = self.follow(tokens).or_else(|| {
            self.catch_up(tokens);
            self.search(tokens)
        });
        self.followed = found.filter(|found| found.len == MAX_MATCH).map(|found| (found, tokens.len()));
        found
    }

    /// The last match, if all tokens since then are equal to those after it.
    fn follow(&mut self, tokens: &[Token]) -> Option<Match> {
        let (Match { end, len }, since) = self.followed?;
        let end_now = end + tokens.len() - since;
        let goes_on = tokens[end + 1..=end_now] == tokens[since..];
        goes_on.then(|| {
            self.chain.resize(tokens.len() - 1, NONE);
            Match { end: end_now, len }
        })
    }

    /// Indexes all tokens but the last, whose successor is not known.
    fn catch_up(&mut self, tokens: &[Token]) {
        let known = tokens.len().saturating_sub(1);
        if known > self.heads.len() {
            self.heads.clear();
            self.heads.resize(known.next_power_of_two().max(64) * 2, NONE);
            self.chain.clear();
        }
        // No three tokens end at the first two positions.
        self.chain.resize(self.chain.len().max(known.min(MIN_MATCH - 1)), NONE);
        for end in self.chain.len()..known {
            let bucket = bucket(self.heads.len(), &tokens[end + 1 - MIN_MATCH..=end]);
            self.chain.push(std::mem::replace(&mut self.heads[bucket], end as u32));
        }
    }

    /// The longest match of the last tokens among those that are indexed.
    fn search(&self, tokens: &[Token]) -> Option<Match> {
        let last = tokens.len().checked_sub(1).filter(|last| *last >= MIN_MATCH)?;
        let mut best: Option<Match> = None;
        let mut candidate = self.heads[bucket(self.heads.len(), &tokens[tokens.len() - MIN_MATCH..])];
        for _ in 0..MAX_CANDIDATES {
            if candidate == NONE {
                break;
            }
            let end = candidate as usize;
            // One comparison of memory suffices where the text repeats itself.
            let longest = end + 1 >= MAX_MATCH && tokens[end + 1 - MAX_MATCH..=end] == tokens[last + 1 - MAX_MATCH..];
            let common = || (0..=end.min(MAX_MATCH - 1)).take_while(|&back| tokens[end - back] == tokens[last - back]).count();
            let len = if longest { MAX_MATCH } else { common() };
            if len >= MIN_MATCH && best.is_none_or(|best| len > best.len) {
                best = Some(Match { end, len });
                if len == MAX_MATCH {
                    break;
                }
            }
            candidate = self.chain[end];
        }
        best
    }
}

/// The place of three tokens in a table of `places`, a power of two.
#[inline]
fn bucket(places: usize, three: &[Token]) -> usize {
    mixed(0, three) & (places - 1)
}

/// A hash of tokens, to be cut to the size of a table.
#[inline]
pub(crate) fn mixed(seed: u64, tokens: &[Token]) -> usize {
    let hash = tokens.iter().fold(seed, |hash, &token| (hash.rotate_left(23) ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    (hash >> 32) as usize
}

/// Fills `draft` with the tokens from `from` on. After the last token it continues with the draft itself, because the
/// text may repeat.
pub(crate) fn extend(draft: &mut Vec<Token>, tokens: &[Token], from: usize, count: usize) {
    for at in from..from + count {
        let token = tokens.get(at).copied().unwrap_or_else(|| draft[at - tokens.len()]);
        draft.push(token);
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
        index.search(tokens)
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
            assert_eq!(index.search(&tokens[..len]), found(&tokens[..len]), "{len}");
        }
    }

    #[test]
    fn a_match_is_followed_for_as_long_as_the_text_goes_on_as_after_it() {
        // Three equal parts with different ends.
        let part: Vec<Token> = (100..150).collect();
        let tokens = [&part[..], &[1, 2], &part, &[3, 4, 5], &part, &[3, 4, 9]].concat();
        let mut index = Index::default();
        let mut end = |len: usize| index.find(&tokens[..len]).map(|found| found.end);
        assert_eq!(end(52 + 40), Some(39));
        assert_eq!(end(52 + 47), Some(46));
        // The text goes on in another way: there is no match yet.
        assert_eq!(end(52 + 51), None);
        // Both earlier parts end in these 32 tokens. Only the first one is indexed.
        assert_eq!(end(105 + 45), Some(44));
        assert_eq!(end(105 + 50), Some(49));
        // It leaves the first part as the second one did.
        assert_eq!(end(105 + 51), Some(52 + 50));
        assert_eq!(end(105 + 52), Some(52 + 51));
        assert_eq!(end(105 + 53), None);
    }

    #[test]
    fn a_repeating_text_is_drafted_beyond_its_end() {
        let mut draft = Vec::new();
        extend(&mut draft, &[7, 8, 9, 7, 8], 2, 5);
        assert_eq!(draft, [9, 7, 8, 9, 7]);
    }
}
