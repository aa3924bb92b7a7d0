//! The name of a full block: a hash of its tokens and of all tokens before them.

use crate::request::Token;
use siphasher::sip::SipHasher13;
use std::hash::Hasher;

/// A 64-bit name. Names are chained from the first block on.
///
/// A name only finds a candidate. Tokens and ancestry are compared before a block is shared (see
/// [`BlockPool::find`](crate::BlockPool::find)). A collision therefore costs a miss and never leaks one caller's cache
/// to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(u64);

impl BlockHash {
    /// The name as an integer.
    pub fn to_bits(self) -> u64 {
        self.0
    }
}

/// Computes block names with SipHash-1-3 and a key.
///
/// Clients choose tokens and salts. Without the key they cannot construct colliding names, which would evict other
/// callers' blocks and slow lookups down.
#[derive(Clone, Copy, Debug)]
pub struct BlockHasher(SipHasher13);

impl BlockHasher {
    /// Creates a hasher with `key`. Names under different keys are unrelated.
    pub fn new(key: u128) -> Self {
        Self(SipHasher13::new_with_keys(key as u64, (key >> 64) as u64))
    }

    /// The parent name of a first block. `salt` separates callers that must not share blocks.
    pub fn root(&self, salt: &[u8]) -> BlockHash {
        let mut hasher = self.0;
        hasher.write(salt);
        BlockHash(hasher.finish())
    }

    /// The name of the block with `tokens` after the block named `parent`.
    pub fn child(&self, parent: BlockHash, tokens: &[Token]) -> BlockHash {
        let mut hasher = self.0;
        hasher.write_u64(parent.0);
        for pair in tokens.chunks(2) {
            hasher.write_u64(u64::from(pair[0]) | u64::from(*pair.last().unwrap_or(&0)) << 32);
        }
        BlockHash(hasher.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::BlockHasher;
    use std::collections::HashSet;

    #[test]
    fn names_depend_on_every_token_on_the_order_on_what_came_before_and_on_the_key() {
        let hasher = BlockHasher::new(1);
        let root = hasher.root(b"");
        let blocks: Vec<Vec<u32>> = (0..4096u32).map(|n| (0..6).map(|i| n >> (2 * i) & 3).collect()).collect();
        let mut seen: HashSet<_> = blocks.iter().map(|tokens| hasher.child(root, tokens)).collect();
        seen.extend(blocks.iter().map(|tokens| hasher.child(hasher.child(root, &[1]), tokens)));
        seen.extend(blocks.iter().map(|tokens| hasher.child(hasher.root(b"salt"), tokens)));
        for other in [0, 2, 1 << 64] {
            let other = BlockHasher::new(other);
            seen.extend(blocks.iter().map(|tokens| other.child(other.root(b""), tokens)));
        }
        assert_eq!(seen.len(), 6 * blocks.len());
    }

    /// Regression test. An earlier hash multiplied the state, xored with a pair of tokens, by a public number. A pair
    /// equal to the state gave zero, whatever came before, so any number of blocks could have the same name.
    #[test]
    fn tokens_cannot_be_chosen_to_give_equal_names() {
        let fold = |a: u64, b: u64| {
            let wide = u128::from(a) * u128::from(b);
            (wide as u64) ^ (wide >> 64) as u64
        };
        let block = |first: u64| {
            let state = fold(first, 0xA409_3822_299F_31D1);
            [first as u32, (first >> 32) as u32, state as u32, (state >> 32) as u32]
        };
        let hasher = BlockHasher::new(1);
        let root = hasher.root(b"");
        let names: HashSet<_> = (1..=64).map(|first| hasher.child(root, &block(first))).collect();
        assert_eq!(names.len(), 64);
    }
}
