//! The time that reloads of parked sessions take, and the part of all time that they may take.

use crate::request::Time;

/// The part of the time that reloads may take. With a larger one, sessions take shorter turns and lose more time to reloads.
pub(super) const SHARE: f64 = 0.15;
/// Microseconds of reloads that may be saved up.
const BUCKET: f64 = 60e6;
/// The part of the time that spread reloads may take while saved time is used.
const SPREAD_SHARE: f64 = 0.2;
/// Storage is read while the mean cost is less. After reads that cost more, reloads are computed until the mean is nearly that of computing.
const READS: f64 = 1.05;
/// The part of a new measurement in the mean cost.
const NEW: f64 = 0.125;

/// How long it takes to bring back what a session had computed and is no longer on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Reload {
    /// Microseconds, by copies from host memory as far as there are any, or by the mean cost of reloads if storage is read.
    pub(crate) takes: f64,
    /// Microseconds if all of it were computed.
    pub(crate) computing: f64,
    /// Whether storage is read for it. What it takes is known only when that has ended.
    pub(crate) reads: bool,
}

impl Reload {
    /// Adds what another request of the session lacks.
    pub(crate) fn add(&mut self, other: Self) {
        self.takes += other.takes;
        self.computing += other.computing;
        self.reads |= other.reads;
    }
}

/// The bucket of time for reloads, and how much the latest ones took.
#[derive(Debug)]
pub(super) struct Reloads {
    /// Microseconds that are saved up. Below 0 after a reload that was longer.
    saved: f64,
    filled_at: Time,
    /// When the next reload may begin, if they are spread.
    next_at: Option<f64>,
    /// Mean time of reloads as a part of the time to compute them. `None` before the first one.
    cost: Option<f64>,
}

impl Default for Reloads {
    fn default() -> Self {
        Self { saved: BUCKET, filled_at: 0, next_at: None, cost: None }
    }
}

impl Reloads {
    /// Adds the time that has passed.
    pub(super) fn fill(&mut self, now: Time) {
        self.saved = (self.saved + SHARE * now.saturating_sub(self.filled_at) as f64).min(BUCKET);
        self.filled_at = self.filled_at.max(now);
    }

    /// Whether there is time for a reload. One that is longer than the bucket needs a full one.
    pub(super) fn allow(&self, reload: Reload) -> bool {
        self.saved >= reload.takes.min(BUCKET) && self.next_at.is_none_or(|next| next <= self.filled_at as f64)
    }

    /// Spreads reloads from now on, so that they do not take more than [`SPREAD_SHARE`] of any time.
    pub(super) fn spread(&mut self) {
        self.next_at.get_or_insert(0.0);
    }

    /// Records that a reload begins.
    pub(super) fn begin(&mut self, reload: Reload) {
        self.saved -= reload.takes;
        if let Some(next) = &mut self.next_at {
            *next = next.max(self.filled_at as f64) + reload.takes / SPREAD_SHARE;
        }
        if !reload.reads {
            self.note_cost(reload);
        }
    }

    /// Corrects what a reload was expected to take, once storage was read for it, by the microseconds that it `takes`.
    pub(super) fn end_read(&mut self, expected: Reload, takes: f64) {
        self.saved = (self.saved + expected.takes - takes).min(BUCKET);
        self.note_cost(Reload { takes, ..expected });
    }

    /// Whether reads from storage take less time than computing, by the latest reloads.
    pub(super) fn reads_pay(&self) -> bool {
        self.cost.is_none_or(|cost| cost < READS)
    }

    fn note_cost(&mut self, reload: Reload) {
        if reload.computing > 0.0 {
            let cost = reload.takes / reload.computing;
            self.cost = Some(self.cost.map_or(cost, |mean| mean + NEW * (cost - mean)));
        }
    }

    /// Microseconds of a reload that would take `computing` microseconds to compute. It takes no longer: nothing is read then.
    pub(super) fn expected(&self, computing: f64) -> f64 {
        self.cost.map_or(1.0, |cost| cost.min(1.0)) * computing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reload(takes: f64, computing: f64) -> Reload {
        Reload { takes, computing, reads: false }
    }

    #[test]
    fn reloads_cost_what_the_latest_ones_did() {
        let expected = |reloads: &Reloads| reloads.expected(80_000.0) as Time;
        let mut reloads = Reloads::default();
        assert_eq!(expected(&reloads), 80_000);
        reloads.begin(reload(1.0, 10.0));
        assert_eq!(expected(&reloads), 8000);
        for _ in 0..40 {
            reloads.begin(reload(5.0, 10.0));
        }
        assert!((39_000..=40_000).contains(&expected(&reloads)), "{reloads:?}");
        // A session that lost nothing says nothing of the cost.
        let before = expected(&reloads);
        reloads.begin(Reload::default());
        assert_eq!(expected(&reloads), before);
    }

    #[test]
    fn a_reload_longer_than_the_bucket_needs_a_full_one() {
        let mut reloads = Reloads::default();
        let [long, short] = [2.0 * BUCKET, 1.0].map(|takes| reload(takes, takes));
        assert!(reloads.allow(long));
        reloads.begin(long);
        assert!(!reloads.allow(short));
        // It is paid when as much time as it took has passed at the share, and the bucket is full after as much again.
        let paid = (BUCKET / SHARE) as Time;
        reloads.fill(paid + 100);
        assert!(reloads.allow(short) && !reloads.allow(long));
        reloads.fill(2 * paid + 100);
        assert!(reloads.allow(long));
    }

    #[test]
    fn reloads_that_are_spread_do_not_follow_one_another_at_once() {
        let mut reloads = Reloads::default();
        let one = reload(1e6, 1e6);
        for spread in [false, true] {
            if spread {
                reloads.spread();
            }
            reloads.begin(one);
            assert_eq!(reloads.allow(one), !spread);
        }
        // A second of reloads is a fifth of five seconds.
        reloads.fill(4_999_999);
        assert!(!reloads.allow(one));
        reloads.fill(5_000_000);
        reloads.spread();
        assert!(reloads.allow(one));
    }

    #[test]
    fn no_reload_is_expected_to_take_longer_than_computing() {
        let mut reloads = Reloads::default();
        reloads.end_read(Reload { takes: 10.0, computing: 10.0, reads: true }, 40.0);
        assert!(!reloads.reads_pay());
        assert_eq!(reloads.expected(1000.0) as Time, 1000);
    }

    #[test]
    fn a_read_costs_what_it_took_and_gives_back_what_was_expected() {
        let mut reloads = Reloads::default();
        let expected = Reload { takes: BUCKET, computing: BUCKET, reads: true };
        reloads.begin(expected);
        assert_eq!(reloads.expected(1000.0) as Time, 1000, "nothing is known yet");
        assert!(!reloads.allow(reload(1.0, 1.0)));
        reloads.end_read(expected, BUCKET / 10.0);
        assert_eq!(reloads.expected(1000.0) as Time, 100);
        assert!(reloads.allow(reload(0.9 * BUCKET, 1.0)) && !reloads.allow(reload(0.91 * BUCKET, 1.0)));
        // A read that ends late gives back no more than the bucket holds.
        reloads.fill(Time::from(u32::MAX));
        reloads.end_read(expected, 0.0);
        reloads.begin(reload(BUCKET, 1.0));
        assert!(!reloads.allow(reload(1.0, 1.0)));
    }
}
