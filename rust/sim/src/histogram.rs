//! A compact histogram of durations.

use chairlift_core::Time;

/// Buckets per doubling, as a power of two.
const BITS: u32 = 7;

/// Counts of durations by size. A bucket is at most 1/128 as wide as its values, as in `HdrHistogram` (Tene), so
/// percentiles are accurate to 0.4 %.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    counts: Vec<u64>,
}

impl Histogram {
    /// Counts one duration.
    pub fn add(&mut self, time: Time) {
        let octave = time.max(1).ilog2().saturating_sub(BITS);
        let bucket = ((octave as usize) << BITS) + (time >> octave) as usize;
        if bucket >= self.counts.len() {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
    }

    /// Non-empty buckets in ascending order: the middle of each and its count.
    pub fn buckets(&self) -> impl Iterator<Item = (Time, u64)> + '_ {
        self.counts.iter().enumerate().filter(|&(_, &count)| count > 0).map(|(bucket, &count)| {
            let octave = (bucket >> BITS).saturating_sub(1);
            let lowest = ((bucket - (octave << BITS)) as Time) << octave;
            (lowest + ((1 << octave) - 1) / 2, count)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_what_was_counted_within_a_256th() {
        for time in (0..300).chain([1000, 4095, 4096, 99_999, 1_234_567, u64::MAX / 2]) {
            let mut histogram = Histogram::default();
            histogram.add(time);
            histogram.add(time);
            let buckets: Vec<_> = histogram.buckets().collect();
            assert_eq!((buckets.len(), buckets[0].1), (1, 2));
            assert!(buckets[0].0.abs_diff(time) <= time / 256, "{time} became {}", buckets[0].0);
        }
    }
}
