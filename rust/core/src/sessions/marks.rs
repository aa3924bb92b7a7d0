//! A sample of the names of a context's blocks, by which contexts are compared.

use crate::memory::BlockHash;

/// Maximum number of names of a sample.
const MAX_MARKS: usize = 64;

/// The name of the last full block of a context, and of each block whose number is a multiple of a power of two.
///
/// A name covers its block and all blocks before it. Two contexts have equal names up to some block, and no equal name after it. The sample
/// finds that block with an error of at most 1/32 of the context.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// Number of full blocks.
    depth: u32,
    last: Option<BlockHash>,
    /// Binary logarithm of the distance of the sampled blocks.
    stride_log: u32,
    names: Box<[BlockHash]>,
}

impl Marks {
    /// The sample of a context whose full blocks have these names.
    pub(super) fn of(names: &[BlockHash]) -> Self {
        let stride_log = names.len().div_ceil(MAX_MARKS).next_power_of_two().ilog2();
        let stride = 1 << stride_log;
        let sampled = names.iter().skip(stride - 1).step_by(stride).copied();
        Self { depth: names.len() as u32, last: names.last().copied(), stride_log, names: sampled.collect() }
    }

    /// Whether this is the sample of a context whose full blocks have these names.
    pub(super) fn is_of(&self, names: &[BlockHash]) -> bool {
        self.depth as usize == names.len() && self.last.as_ref() == names.last()
    }

    /// Number of full blocks.
    pub(super) fn depth(&self) -> u32 {
        self.depth
    }

    /// Whether the context is the beginning of the one whose blocks have these names.
    pub(super) fn begins(&self, names: &[BlockHash]) -> bool {
        self.depth > 0 && names.get(self.depth as usize - 1) == self.last.as_ref()
    }

    /// Leading blocks that the context has in common with the one whose blocks have these names, or a few less.
    pub(super) fn common(&self, names: &[BlockHash]) -> u32 {
        if self.begins(names) {
            return self.depth;
        }
        let equal = equal_prefix(self.names.len(), |at| names.get(((at + 1) << self.stride_log) - 1) == Some(&self.names[at]));
        (equal << self.stride_log) as u32
    }

    /// Leading blocks that two contexts have in common, or a few less.
    pub(super) fn common_with(&self, other: &Self) -> u32 {
        let (fine, coarse) = if self.stride_log <= other.stride_log { (self, other) } else { (other, self) };
        let apart = coarse.stride_log - fine.stride_log;
        let equal = equal_prefix(coarse.names.len(), |at| fine.names.get(((at + 1) << apart) - 1) == Some(&coarse.names[at]));
        let equal = (equal << coarse.stride_log) as u32;
        // Equal contexts have no mark at their end.
        if self.depth == other.depth && self.last == other.last { self.depth } else { equal }
    }
}

/// Length of the longest prefix of `0..len` for which `equal` holds, if it holds for no number after one for which it does not.
fn equal_prefix(len: usize, equal: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, len);
    while low < high {
        let middle = low.midpoint(high);
        (low, high) = if equal(middle) { (middle + 1, high) } else { (low, middle) };
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::BlockHasher;
    use crate::request::CacheScope;

    /// Names of `len` blocks, of which the first `common` are those of every context.
    fn names(common: usize, len: usize, own: u32) -> Vec<BlockHash> {
        let tokens: Vec<u32> = (0..len).map(|at| if at < common { 7 } else { own }).collect();
        BlockHasher::new(1).names(&CacheScope::default(), &tokens, 1)
    }

    #[test]
    fn the_common_beginning_is_found_with_a_small_error() {
        for (common, len, other) in
            [(0, 5, 5), (3, 5, 9), (5, 5, 9), (9, 9, 5), (100, 1000, 130), (900, 1000, 5000), (64, 64, 65), (7, 7, 7)]
        {
            let (ours, theirs) = (names(common, len, 1), names(common, other, 2));
            let (ours_sampled, theirs_sampled) = (Marks::of(&ours), Marks::of(&theirs));
            let exact = common.min(len).min(other) as u32;
            for found in
                [ours_sampled.common(&theirs), ours_sampled.common_with(&theirs_sampled), theirs_sampled.common_with(&ours_sampled)]
            {
                assert!(found <= exact && exact - found <= len.max(other) as u32 / 32, "{found} of {exact}");
            }
            assert_eq!(ours_sampled.begins(&theirs), common >= len && other >= len);
            assert!(ours_sampled.names.len() <= MAX_MARKS);
        }
    }
}
