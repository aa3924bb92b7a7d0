//! Admission by reservation: which free blocks are kept for the tokens that running sequences have yet to generate.

use crate::config::Reservation;
use crate::sequence::Sequence;

/// What running sequences are expected to take and to give back.
#[derive(Debug, Default)]
pub(crate) struct Reserved {
    /// Whether somebody has come or gone, or a step has passed, since `growth` was computed.
    stale: bool,
    /// Those with most left first.
    growth: Vec<Growth>,
}

/// What a sequence is expected to take and to give back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growth {
    /// Tokens that it has.
    len: u32,
    /// Tokens that need KV when it ends.
    end: u32,
    /// Blocks that it has.
    blocks: u32,
    /// Blocks that are free again when it has ended.
    own: usize,
}

impl Growth {
    /// Steps until it ends.
    fn left(self) -> u32 {
        self.end.saturating_sub(self.len)
    }

    /// Blocks that it takes within so many steps.
    fn after(self, steps: u32, block_size: u32) -> usize {
        self.len.saturating_add(steps).min(self.end).div_ceil(block_size).saturating_sub(self.blocks) as usize
    }

    /// Blocks that it takes until it ends.
    pub(crate) fn whole(self, block_size: u32) -> usize {
        self.end.div_ceil(block_size).saturating_sub(self.blocks) as usize
    }
}

impl Reserved {
    /// Has the next question answered from what is true then.
    pub(crate) fn invalidate(&mut self) {
        self.stale = true;
    }

    pub(crate) fn is_stale(&self) -> bool {
        self.stale
    }

    /// Takes what those that run are expected to take, in any order.
    pub(crate) fn renew(&mut self, growth: impl Iterator<Item = Growth>) {
        self.stale = false;
        self.growth.clear();
        self.growth.extend(growth);
        self.growth.sort_unstable_by_key(|growth| std::cmp::Reverse(growth.left()));
    }

    /// Blocks that must be free beyond those that `own` gets now, should it be admitted beside all that run.
    pub(crate) fn held_back(&self, own: Growth, reservation: Reservation, block_size: u32) -> usize {
        match reservation {
            Reservation::Peak => peak(own, &self.growth, block_size),
            _ => self.growth.iter().chain([&own]).map(|growth| growth.whole(block_size)).sum(),
        }
    }
}

impl Growth {
    /// That of a sequence with so many blocks, under this reservation.
    pub(crate) fn of(seq: &Sequence, blocks: usize, reservation: Reservation, block_size: u32) -> Self {
        // The last token's KV is never needed.
        let end = match reservation {
            Reservation::Peak => seq.limit().min(seq.len() + seq.predicted_left()) - 1,
            _ => seq.limit() - 1,
        };
        // Blocks that it found in the cache may be others' too.
        let own = blocks.saturating_sub((seq.computed_from() / block_size) as usize);
        Self { len: seq.expected_len(), end, blocks: blocks as u32, own }
    }
}

/// The most blocks that `own` and those that run take together at any time from now on, beyond what they have. `running` has those
/// with most left first.
fn peak(own: Growth, running: &[Growth], block_size: u32) -> usize {
    let (mut most, mut freed, mut counted) = (0, 0, false);
    // The most is held just before somebody ends: all that have as much left, or more, have grown by then.
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

    /// One that has so many tokens left, of which some fit into the blocks of 4 that it has, and gives so many blocks back.
    fn growth(left: u32, fits: u32, own: usize) -> Growth {
        Growth { len: 40 - fits, end: 40 - fits + left, blocks: 10, own }
    }

    #[test]
    fn the_peak_is_just_before_somebody_ends() {
        // Alone: 10 tokens, of which 2 fit into its last block of 4.
        assert_eq!(peak(growth(10, 2, 3), &[], 4), 2);
        // Beside one that ends after 8 tokens and gives 5 blocks back: 2 + 2 then, 3 - 5 later.
        assert_eq!(peak(growth(12, 0, 3), &[growth(8, 0, 5)], 4), 4);
        // Beside one that goes on longer: both have grown by 2 when it ends; the other takes 5 in all, and 3 are given back.
        assert_eq!(peak(growth(8, 0, 3), &[growth(20, 0, 5)], 4), 4);
        assert_eq!(peak(growth(8, 0, 1), &[growth(40, 0, 5)], 4), 9);
        // Those that end together are all there until then.
        assert_eq!(peak(growth(8, 0, 3), &[growth(8, 0, 9), growth(8, 0, 9)], 4), 6);
    }
}
