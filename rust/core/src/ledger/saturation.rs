//! The ratio of demand to capacity: see [`Saturation::permille`].

use crate::request::Time;

/// Microseconds in a bucket. The next constant is the number of buckets in the window.
const BUCKET: Time = 1_000_000;
const WINDOW: usize = 10;

/// Measurements of one second.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    /// Number of the second since the clock's zero.
    second: u64,
    /// Microseconds of capacity used by steps.
    used: f64,
    /// The smallest number of requests that a plan of this second left waiting. A burst that the next steps admit is
    /// therefore not a backlog.
    waiting: u64,
    /// Requests that had arrived since the start, at the end of the second.
    arrived: u64,
}

/// Used capacity and queue lengths in the last ten seconds.
#[derive(Debug, Default)]
pub(crate) struct Saturation {
    /// The current second and the ten before it, indexed by the second modulo the length.
    buckets: [Bucket; WINDOW + 1],
    newest: u64,
    /// Requests that the latest plan left waiting. The next field is the number of requests that had arrived by then.
    waiting: u64,
    arrived: u64,
}

impl Saturation {
    /// Whether the latest plan left requests waiting.
    pub(crate) fn is_backlogged(&self) -> bool {
        self.waiting > 0
    }

    /// Records that steps used `share` of the capacity from `from` to `to`.
    pub(crate) fn used(&mut self, from: Time, to: Time, share: f64) {
        self.advance(to);
        let first = (to / BUCKET).saturating_sub(WINDOW as u64).max(from / BUCKET);
        for second in first..=to / BUCKET {
            let overlap = to.min((second + 1) * BUCKET) - from.max(second * BUCKET);
            self.bucket(second).used += overlap as f64 * share;
        }
    }

    /// Records that a plan left `waiting` requests of the `arrived` requests since the start.
    pub(crate) fn planned(&mut self, waiting: u64, arrived: u64, now: Time) {
        self.advance(now);
        (self.waiting, self.arrived) = (waiting, arrived);
        let bucket = self.bucket(now / BUCKET);
        (bucket.waiting, bucket.arrived) = (bucket.waiting.min(waiting), arrived);
    }

    /// Work that arrived in the last ten seconds divided by the work that could be served in that time, in thousandths.
    ///
    /// The value is the used share of the capacity, multiplied by the arrived requests and divided by the arrived
    /// requests that did not add to the queue. While the queue grows, all of the capacity is in use.
    pub(crate) fn permille(&self, now: Time) -> u32 {
        let current = now / BUCKET;
        let buckets: [Bucket; WINDOW + 1] = std::array::from_fn(|ago| {
            let Some(second) = current.checked_sub(ago as u64) else { return Bucket::default() };
            let kept = self.buckets[second as usize % (WINDOW + 1)];
            match () {
                () if kept.second == second => kept,
                () if second > self.newest => Bucket { second, used: 0.0, waiting: self.waiting, arrived: self.arrived },
                () => Bucket::default(),
            }
        });
        let passed = (now % BUCKET) as f64 / BUCKET as f64;
        let whole: f64 = buckets[..WINDOW].iter().map(|bucket| bucket.used).sum();
        let used = (whole + buckets[WINDOW].used * (1.0 - passed)) / (WINDOW as u64 * BUCKET) as f64;
        let fewest = |buckets: &[Bucket]| buckets.iter().map(|bucket| bucket.waiting).min().unwrap_or(0);
        let growth = fewest(&buckets[..2]) - fewest(&buckets);
        let arrived = buckets[1].arrived.saturating_sub(buckets[WINDOW].arrived);
        let served = arrived.saturating_sub(growth).max(1);
        let least: f64 = if growth > 0 { 1.0 } else { 0.0 };
        (used.max(least) * (1.0 + growth as f64 / served as f64) * 1000.0).round() as u32
    }

    /// Opens the buckets up to `now`, each with the queue length of its time.
    fn advance(&mut self, now: Time) {
        let current = now / BUCKET;
        if current <= self.newest {
            return;
        }
        let first = (self.newest + 1).max(current.saturating_sub(WINDOW as u64));
        for second in first..=current {
            *self.bucket(second) = Bucket { second, used: 0.0, waiting: self.waiting, arrived: self.arrived };
        }
        self.newest = current;
    }

    fn bucket(&mut self, second: u64) -> &mut Bucket {
        &mut self.buckets[second as usize % (WINDOW + 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Time = BUCKET;

    #[test]
    fn it_is_the_share_of_the_window_that_steps_used() {
        let mut saturation = Saturation::default();
        saturation.used(100 * SECOND, 104 * SECOND, 0.5);
        assert_eq!(saturation.permille(104 * SECOND), 200);
        assert_eq!(saturation.permille(110 * SECOND), 200, "the window still has all of it");
        assert_eq!(saturation.permille(112 * SECOND), 100, "half of it is older than ten seconds");
        assert_eq!(saturation.permille(112 * SECOND + SECOND / 2), 75);
        assert_eq!(saturation.permille(200 * SECOND), 0);
    }

    #[test]
    fn a_step_longer_than_the_window_fills_it() {
        let mut saturation = Saturation::default();
        saturation.used(5 * SECOND, 65 * SECOND, 1.0);
        assert_eq!(saturation.permille(65 * SECOND), 1000);
    }

    #[test]
    fn it_is_one_at_least_while_the_queue_grows_and_more_by_what_came_beyond_what_was_served() {
        let mut saturation = Saturation::default();
        for second in 100..130 {
            saturation.planned(second - 100, 0, second * SECOND);
        }
        assert!(saturation.permille(130 * SECOND) >= 1000, "though no step was run");
        for second in 130..150 {
            // Ten requests arrive each second and eight are served.
            saturation.used((second - 1) * SECOND, second * SECOND, 1.0);
            saturation.planned(2 * (second - 100), 10 * (second - 100), second * SECOND);
        }
        let growing = saturation.permille(150 * SECOND);
        assert!((1150..=1250).contains(&growing), "ten for eight: {growing}");
    }

    #[test]
    fn a_queue_that_shrinks_is_no_growth_and_a_burst_that_is_taken_in_is_no_backlog() {
        let mut saturation = Saturation::default();
        for second in 0..20 {
            saturation.planned(100 - second, second, second * SECOND);
            saturation.used(second * SECOND, (second + 1) * SECOND, 1.0);
        }
        assert_eq!(saturation.permille(20 * SECOND), 1000);
        let mut saturation = Saturation::default();
        for second in 0..20 {
            saturation.planned(3, 0, second * SECOND + SECOND / 4);
            saturation.planned(0, 3, second * SECOND + SECOND / 2);
            saturation.used(second * SECOND, second * SECOND + SECOND / 10, 1.0);
        }
        assert_eq!(saturation.permille(20 * SECOND), 100);
    }
}
