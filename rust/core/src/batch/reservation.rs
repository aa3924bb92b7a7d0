//! Admission by reservation: free blocks held back for the tokens that running sequences have yet to generate.

use crate::config::Reservation;
use crate::sequence::Sequence;

/// Blocks by which a running sequence is assumed to grow before other sequences end.
const GROWTH: usize = 8;

/// Blocks by which `running` sequences are assumed to grow before others end.
pub(crate) fn growth(running: usize) -> usize {
    GROWTH * running
}

/// Blocks that stay free beside `running` sequences so that they can grow. A few sequences need less than the watermark.
pub(crate) fn headroom(watermark: u32, running: usize) -> usize {
    (watermark as usize).min(growth(running))
}

/// Expected growth of the running sequences.
#[derive(Debug, Default)]
pub(crate) struct Reserved {
    /// Whether `growth` is out of date because a sequence was admitted or left, or a step has passed.
    stale: bool,
    /// Sequences with most tokens left first.
    growth: Vec<Growth>,
}

/// The blocks that a sequence is expected to allocate and release.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growth {
    /// Tokens of the sequence.
    len: u32,
    /// Tokens that need KV when the sequence ends.
    end: u32,
    /// Blocks of the sequence.
    blocks: u32,
    /// Blocks that become free when the sequence ends.
    own: usize,
}

impl Growth {
    /// Steps until the sequence ends.
    fn left(self) -> u32 {
        self.end.saturating_sub(self.len)
    }

    /// Blocks that the sequence allocates within `steps` steps.
    fn after(self, steps: u32, block_size: u32) -> usize {
        self.len.saturating_add(steps).min(self.end).div_ceil(block_size).saturating_sub(self.blocks) as usize
    }

    /// Blocks that the sequence allocates until it ends.
    pub(crate) fn whole(self, block_size: u32) -> usize {
        self.end.div_ceil(block_size).saturating_sub(self.blocks) as usize
    }
}

impl Reserved {
    /// Marks the growth as out of date.
    pub(crate) fn invalidate(&mut self) {
        self.stale = true;
    }

    pub(crate) fn is_stale(&self) -> bool {
        self.stale
    }

    /// Replaces the growth of the running sequences, given in any order.
    pub(crate) fn renew(&mut self, growth: impl Iterator<Item = Growth>) {
        self.stale = false;
        self.growth.clear();
        self.growth.extend(growth);
        self.growth.sort_unstable_by_key(|growth| std::cmp::Reverse(growth.left()));
    }

    /// Blocks that must stay free, beyond those that `own` gets now, if `own` is admitted beside the running sequences.
    pub(crate) fn held_back(&self, own: Growth, reservation: Reservation, block_size: u32) -> usize {
        match reservation {
            Reservation::Peak => peak(own, &self.growth, block_size),
            _ => self.growth.iter().chain([&own]).map(|growth| growth.whole(block_size)).sum(),
        }
    }
}

impl Growth {
    /// The growth of a sequence with `blocks` blocks under this reservation.
    pub(crate) fn of(seq: &Sequence, blocks: usize, reservation: Reservation, block_size: u32) -> Self {
        // The last token needs no KV.
        let end = match reservation {
            Reservation::Peak => seq.limit().min(seq.len() + seq.predicted_left()) - 1,
            _ => seq.limit() - 1,
        };
        // Other sequences may share the blocks found in the cache.
        let own = blocks.saturating_sub((seq.computed_from() / block_size) as usize);
        Self { len: seq.expected_len(), end, blocks: blocks as u32, own }
    }
}

/// The largest number of blocks that `own` and the running sequences allocate together at any later time, beyond what
/// they hold. `running` is sorted with most tokens left first.
fn peak(own: Growth, running: &[Growth], block_size: u32) -> usize {
    let (mut most, mut freed, mut counted) = (0, 0, false);
    // The peak is just before a sequence ends. By then all sequences with as many tokens left, or more, have grown.
    for (at, growth) in running.iter().enumerate().rev() {
        let grown = |steps: u32| (at + 1) * steps.div_ceil(block_size) as usize;
        if own.left() <= growth.left() && !counted {
            most = most.max((grown(own.left()) + own.whole(block_size)).saturating_sub(freed));
            (freed, counted) = (freed + own.own, true);
        }
        let mine = if counted { 0 } else { own.after(growth.left(), block_size) };
        most = most.max((grown(growth.left()) + mine).saturating_sub(freed));
        freed += growth.own;
    }
    if counted { most } else { most.max(own.whole(block_size).saturating_sub(freed)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The growth of a sequence with `left` tokens left. `fits` of them fit into its blocks of 4 tokens. It releases
    /// `own` blocks.
    fn growth(left: u32, fits: u32, own: usize) -> Growth {
        Growth { len: 40 - fits, end: 40 - fits + left, blocks: 10, own }
    }

    #[test]
    fn the_peak_is_just_before_somebody_ends() {
        // Alone: 10 tokens, 2 of which fit into the last block of 4.
        assert_eq!(peak(growth(10, 2, 3), &[], 4), 2);
        // Beside a sequence that ends after 8 tokens and releases 5 blocks: 2 + 2 blocks then, 3 - 5 later.
        assert_eq!(peak(growth(12, 0, 3), &[growth(8, 0, 5)], 4), 4);
        // Beside a sequence that runs longer. Both have grown by 2 when this one ends. The other takes 5 in all, and 3
        // are released.
        assert_eq!(peak(growth(8, 0, 3), &[growth(20, 0, 5)], 4), 4);
        assert_eq!(peak(growth(8, 0, 1), &[growth(40, 0, 5)], 4), 9);
        // Sequences that end together all hold their blocks until then.
        assert_eq!(peak(growth(8, 0, 3), &[growth(8, 0, 9), growth(8, 0, 9)], 4), 6);
    }
}
