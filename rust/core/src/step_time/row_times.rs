//! Learns how long decode steps take by their number of rows.

/// Classes of numbers of rows: each number up to 16, then four to an octave, up to 8192.
const CLASSES: usize = 52;
/// Observed steps of a class before its time is used.
const ENOUGH: u32 = 2;
/// Observed steps of a class whose mean its time is, at most: then each step replaces as much of it.
const MEAN: u32 = 8;
/// Steps for which a time is used, for each observed step of the class, of at most `MEAN`. It is then measured again.
const VALID: u32 = 256;
/// The part of the pace that each step replaces.
const PACE_RATE: f64 = 0.25;
/// A step counts as at most this many times its predicted time: more had another cause.
const MAX_RATIO: f64 = 1.5;

#[derive(Clone, Copy, Debug, Default)]
struct Class {
    /// Microseconds of a row at a pace of one.
    each: f64,
    /// Observed steps, `MEAN` at most. Less if the time is not valid any more.
    seen: u32,
    /// The latest observed step.
    latest: u32,
}

/// Times of steps without prompt tokens, by number of rows: one for each decoding sequence and one for each drafted token.
///
/// They are no line. Kernels compute rows in tiles, so that one row more may be nearly free or cost half a step.
#[derive(Clone, Debug)]
pub(crate) struct RowTimes {
    classes: [Class; CLASSES],
    /// Observed steps.
    steps: u32,
    /// Running mean of the times of recent steps, each divided by its prediction. Long contexts and other programs slow down all
    /// classes, but only some of them are observed meanwhile.
    pace: f64,
}

impl Default for RowTimes {
    fn default() -> Self {
        Self { classes: [Class::default(); CLASSES], steps: 0, pace: 1.0 }
    }
}

fn class(rows: u32) -> usize {
    let last = rows.max(1) - 1;
    let class = if last < 16 { last } else { 4 * last.ilog2() + (last >> (last.ilog2() - 2) & 3) };
    (class as usize).min(CLASSES - 1)
}

impl RowTimes {
    /// Records a step of `rows` that took `took` microseconds.
    pub(crate) fn observe(&mut self, rows: u32, took: f64) {
        self.steps = self.steps.wrapping_add(1);
        let class = &mut self.classes[class(rows)];
        if self.steps.wrapping_sub(class.latest) > VALID * class.seen {
            class.seen = class.seen.min(ENOUGH - 1);
        }
        // A step takes no time only where the clock was set back. A time of zero would never grow again.
        let each = took.max(1.0) / f64::from(rows.max(1));
        if class.seen == 0 {
            class.each = each / self.pace;
        } else {
            let ratio = (each / (class.each * self.pace)).min(MAX_RATIO);
            class.each *= 1.0 + (ratio - 1.0) / f64::from(class.seen + 1);
            self.pace *= 1.0 + PACE_RATE * (ratio - 1.0);
        }
        class.seen = (class.seen + 1).min(MEAN);
        class.latest = self.steps;
    }

    /// Microseconds of a step of `rows`. `None` if too few were observed lately.
    pub(crate) fn step(&self, rows: u32) -> Option<f64> {
        let class = &self.classes[class(rows)];
        let known = class.seen >= ENOUGH && self.steps.wrapping_sub(class.latest) <= VALID * class.seen;
        known.then(|| class.each * self.pace * f64::from(rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_numbers_of_rows_and_then_quarters_of_octaves() {
        assert_eq!([1, 2, 16, 17, 20, 21, 32, 33, 40, 41, 8192, 100_000].map(class), [0, 1, 15, 16, 16, 17, 19, 20, 20, 21, 51, 51]);
    }

    #[test]
    fn a_time_is_known_by_two_steps_until_it_is_old() {
        let mut times = RowTimes::default();
        times.observe(4, 900.0);
        assert_eq!(times.step(4), None);
        times.observe(4, 900.0);
        assert_eq!((times.step(4), times.step(5)), (Some(900.0), None));
        (0..2 * VALID).for_each(|_| times.observe(5, 1500.0));
        assert!((times.step(4).unwrap() - 900.0).abs() < 1.0);
        times.observe(5, 1500.0);
        assert_eq!(times.step(4), None);
        times.observe(4, 600.0);
        assert!((600.0..900.0).contains(&times.step(4).unwrap()), "half of it is new");
    }

    #[test]
    fn steps_without_time_while_the_clock_was_set_back_are_forgotten() {
        let mut times = RowTimes::default();
        (0..10_000).for_each(|_| times.observe(4, 0.0));
        (0..100).for_each(|_| times.observe(4, 900.0));
        assert!((times.step(4).unwrap() - 900.0).abs() < 1.0, "{:?}", times.step(4));
    }

    #[test]
    fn a_slower_machine_slows_what_is_not_observed_and_one_hiccup_hardly_does() {
        let mut times = RowTimes::default();
        (0..20).for_each(|_| (0..2).for_each(|i| times.observe([4, 8][i], [900.0, 1200.0][i])));
        times.observe(4, 90_000.0);
        assert!((times.step(8).unwrap() - 1200.0).abs() < 0.15 * 1200.0);
        (0..60).for_each(|_| times.observe(4, 1800.0));
        assert!((times.step(4).unwrap() - 1800.0).abs() < 1.0);
        assert!((times.step(8).unwrap() - 2400.0).abs() < 0.3 * 2400.0, "{:?}", times.step(8));
    }
}
