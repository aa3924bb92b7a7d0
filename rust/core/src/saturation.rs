//! How much of what the machine can do is asked of it: see [`Saturation::permille`].

use crate::request::Time;

/// Microseconds that one bucket covers, and how many of them are one window.
const BUCKET: Time = 1_000_000;
const WINDOW: usize = 10;

/// One second of the engine's life.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    /// Seconds since the clock's zero.
    second: u64,
    /// Microseconds of capacity that steps used.
    used: f64,
    /// The fewest requests that plans left waiting in it: a burst that the next steps take in is no backlog.
    waiting: u64,
    /// Requests that had come since the start, at its end.
    arrived: u64,
}

/// Used capacity and queue lengths over the last ten seconds.
#[derive(Debug, Default)]
pub(crate) struct Saturation {
    /// The current second and the ten before it, each in the place of its number.
    buckets: [Bucket; WINDOW + 1],
    newest: u64,
    /// Requests that the newest plan left waiting, and all that had come by then.
    waiting: u64,
    arrived: u64,
}

impl Saturation {
    /// Whether the newest plan left requests waiting.
    pub(crate) fn is_backlogged(&self) -> bool {
        self.waiting > 0
    }

    /// Notes that steps used `share` of the capacity from `from` to `to`.
    pub(crate) fn used(&mut self, from: Time, to: Time, share: f64) {
        self.advance(to);
        let first = (to / BUCKET).saturating_sub(WINDOW as u64).max(from / BUCKET);
        for second in first..=to / BUCKET {
            let overlap = to.min((second + 1) * BUCKET) - from.max(second * BUCKET);
            self.bucket(second).used += overlap as f64 * share;
        }
    }

    /// Notes that a plan left so many waiting of all that had come since the start.
    pub(crate) fn planned(&mut self, waiting: u64, arrived: u64, now: Time) {
        self.advance(now);
        (self.waiting, self.arrived) = (waiting, arrived);
        let bucket = self.bucket(now / BUCKET);
        (bucket.waiting, bucket.arrived) = (bucket.waiting.min(waiting), arrived);
    }

    /// Work that arrived in the last ten seconds over work that could be served in them, in thousandths.
    ///
    /// It is the share of the capacity that steps used, times the requests that
    /// came over those of them that the queue did not keep. While it grows, all
    /// of the capacity is in use.
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

    /// Begins the buckets up to `now`, each with the queue that there was.
    fn advance(&mut self, now: Time) {
        let current = now / BUCKET;
        let first = (self.newest + 1).max(current.saturating_sub(WINDOW as u64));
        for second in first..=current {
            *self.bucket(second) = Bucket { second, used: 0.0, waiting: self.waiting, arrived: self.arrived };
        }
        self.newest = self.newest.max(current);
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
            // Ten come each second, and eight of them are served.
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
