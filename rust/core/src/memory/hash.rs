//! The name of a full block: a hash of its tokens and of all tokens before them.

use crate::request::{CacheScope, Token};
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
    /// The name with this integer, which [`to_bits`](Self::to_bits) gave.
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The name as an integer.
    pub fn to_bits(self) -> u64 {
        self.0
    }
}

/// Computes block names with SipHash-1-3 (Aumasson and Bernstein, 2012) and a key.
///
/// Clients choose tokens and salts. Without the key they cannot construct colliding names, which would evict other
/// callers' blocks and slow lookups down.
#[derive(Clone, Copy, Debug)]
pub struct BlockHasher {
    sip: SipHasher13,
    /// The state before the first token of a block.
    block: State,
}

impl BlockHasher {
    /// Creates a hasher with `key`. Names under different keys are unrelated.
    pub fn new(key: u128) -> Self {
        let (low, high) = (key as u64, (key >> 64) as u64);
        Self { sip: SipHasher13::new_with_keys(low, high), block: State::new(low, high) }
    }

    /// The parent name of a first block. `scope` separates callers that must not share blocks.
    pub fn root(&self, scope: &CacheScope) -> BlockHash {
        let mut hasher = self.sip;
        hasher.write(scope.group.as_bytes());
        // A group is UTF-8, so this byte ends it.
        hasher.write_u8(0xff);
        hasher.write(&scope.salt);
        BlockHash(hasher.finish())
    }

    /// The names of the full blocks of `tokens`.
    pub fn names(&self, scope: &CacheScope, tokens: &[Token], block_size: usize) -> Vec<BlockHash> {
        let mut parent = self.root(scope);
        let named = tokens.chunks_exact(block_size).map(|block| {
            parent = self.child(parent, block);
            parent
        });
        named.collect()
    }

    /// The name of the block with `tokens` after the block named `parent`.
    pub fn child(&self, parent: BlockHash, tokens: &[Token]) -> BlockHash {
        let mut state = self.block;
        state.absorb(parent.0);
        let pairs = tokens.chunks_exact(2);
        let last = pairs.remainder().first();
        pairs.for_each(|pair| state.absorb(u64::from(pair[0]) | u64::from(pair[1]) << 32));
        // The last word is the number of bytes, as in the original, above an odd token.
        let bytes = size_of::<BlockHash>() + size_of_val(tokens);
        state.absorb((bytes as u64) << 56 | u64::from(last.copied().unwrap_or(0)));
        BlockHash(state.finish())
    }
}

/// The state of SipHash-1-3. Blocks consist of whole words, so that a name takes a third of the instructions that a
/// hasher of bytes needs.
#[derive(Clone, Copy, Debug)]
struct State([u64; 4]);

impl State {
    fn new(low: u64, high: u64) -> Self {
        Self([low ^ 0x736f_6d65_7073_6575, high ^ 0x646f_7261_6e64_6f6d, low ^ 0x6c79_6765_6e65_7261, high ^ 0x7465_6462_7974_6573])
    }

    #[inline]
    fn absorb(&mut self, word: u64) {
        self.0[3] ^= word;
        self.round();
        self.0[0] ^= word;
    }

    fn finish(mut self) -> u64 {
        self.0[2] ^= 0xff;
        (0..3).for_each(|_| self.round());
        self.0.into_iter().fold(0, |hash, part| hash ^ part)
    }

    #[inline]
    fn round(&mut self) {
        let [mut a, mut b, mut c, mut d] = self.0;
        a = a.wrapping_add(b);
        c = c.wrapping_add(d);
        b = b.rotate_left(13) ^ a;
        d = d.rotate_left(16) ^ c;
        a = a.rotate_left(32).wrapping_add(d);
        c = c.wrapping_add(b);
        b = b.rotate_left(17) ^ c;
        d = d.rotate_left(21) ^ a;
        self.0 = [a, b, c.rotate_left(32), d];
    }
}

#[cfg(test)]
mod tests {
    use super::{BlockHash, BlockHasher};
    use crate::CacheScope;
    use siphasher::sip::SipHasher13;
    use std::collections::HashSet;
    use std::hash::Hasher;

    #[test]
    fn a_name_is_the_siphash_of_the_parent_s_name_and_the_tokens() {
        for len in 0..40_u32 {
            let tokens: Vec<_> = (0..len).map(|i| 0x9E37_79B1_u32.wrapping_mul(i + 1)).collect();
            let mut sip = SipHasher13::new_with_keys(3, 5);
            sip.write_u64(u64::from(len) << 40);
            for &token in &tokens {
                sip.write_u32(token);
            }
            assert_eq!(BlockHasher::new(5 << 64 | 3).child(BlockHash(u64::from(len) << 40), &tokens).to_bits(), sip.finish());
        }
    }

    #[test]
    fn names_depend_on_every_token_on_the_order_on_what_came_before_and_on_the_key() {
        let hasher = BlockHasher::new(1);
        let root = hasher.root(&CacheScope::default());
        let blocks: Vec<Vec<u32>> = (0..4096u32).map(|n| (0..6).map(|i| n >> (2 * i) & 3).collect()).collect();
        let mut seen: HashSet<_> = blocks.iter().map(|tokens| hasher.child(root, tokens)).collect();
        seen.extend(blocks.iter().map(|tokens| hasher.child(hasher.child(root, &[1]), tokens)));
        seen.extend(blocks.iter().map(|tokens| hasher.child(hasher.root(&CacheScope::salted(b"salt")), tokens)));
        seen.extend(blocks.iter().map(|tokens| hasher.child(hasher.root(&CacheScope::of_group("salt")), tokens)));
        for other in [0, 2, 1 << 64] {
            let other = BlockHasher::new(other);
            seen.extend(blocks.iter().map(|tokens| other.child(other.root(&CacheScope::default()), tokens)));
        }
        assert_eq!(seen.len(), 7 * blocks.len());
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
        let root = hasher.root(&CacheScope::default());
        let names: HashSet<_> = (1..=64).map(|first| hasher.child(root, &block(first))).collect();
        assert_eq!(names.len(), 64);
    }
}
