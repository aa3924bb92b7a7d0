//! The name of a full block: its tokens and everything before them.

use crate::Token;

/// A cheap 64-bit name, chained from the first block on.
///
/// It only finds a candidate: tokens and ancestry are compared before a block
/// is shared (see [`BlockPool::find`](crate::BlockPool::find)), so a collision
/// costs a miss and never leaks one caller's cache to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(u64);

// Odd constants from the digits of pi.
const KEYS: [u64; 3] = [0x243F_6A88_85A3_08D3, 0x1319_8A2E_0370_7345, 0xA409_3822_299F_31D1];

/// The mixing of wyhash: a product, its halves folded together.
pub(crate) fn fold(a: u64, b: u64) -> u64 {
    let wide = u128::from(a) * u128::from(b);
    (wide as u64) ^ (wide >> 64) as u64
}

impl BlockHash {
    /// The parent of a first block; `salt` separates callers who must not share.
    pub fn root(salt: &[u8]) -> Self {
        Self(salt.iter().fold(KEYS[0], |hash, &byte| fold(hash ^ u64::from(byte), KEYS[1])))
    }

    /// The name as a plain number.
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// The name of the block that holds `tokens` after the block named `self`.
    #[must_use]
    pub fn child(self, tokens: &[Token]) -> Self {
        let mut hash = fold(self.0 ^ KEYS[0], KEYS[1]);
        for pair in tokens.chunks(2) {
            let word = u64::from(pair[0]) | u64::from(*pair.last().unwrap_or(&0)) << 32;
            hash = fold(hash ^ word, KEYS[2]);
        }
        Self(hash)
    }
}

#[cfg(test)]
mod tests {
    use super::BlockHash;
    use std::collections::HashSet;

    #[test]
    fn names_depend_on_every_token_on_the_order_and_on_what_came_before() {
        let root = BlockHash::root(b"");
        let blocks: Vec<Vec<u32>> = (0..4096u32).map(|n| (0..6).map(|i| n >> (2 * i) & 3).collect()).collect();
        let mut seen: HashSet<_> = blocks.iter().map(|tokens| root.child(tokens)).collect();
        seen.extend(blocks.iter().map(|tokens| root.child(&[1]).child(tokens)));
        seen.extend(blocks.iter().map(|tokens| BlockHash::root(b"salt").child(tokens)));
        assert_eq!(seen.len(), 3 * blocks.len());
    }
}
