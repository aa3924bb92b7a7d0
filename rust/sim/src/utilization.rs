//! Utilisation over time: exact sums, and samples for plots.

use chairlift_core::{Occupancy, Scheduler, StepPlan, Time};

/// The state from one time until the next sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Start time in microseconds.
    pub time: Time,
    /// Sequences in the step in flight. 0 if there is none.
    pub batch: usize,
    /// Tokens in the step in flight.
    pub tokens: usize,
    /// Sequences with a slot.
    pub running: usize,
    /// Sequences without a slot.
    pub waiting: usize,
    /// KV blocks held by sequences.
    pub blocks: usize,
    /// Work that arrived in the last ten seconds divided by the work that could be served in that time, in thousandths.
    pub saturation: u32,
}

impl Sample {
    /// The state while `step` runs, or without a step.
    pub(crate) fn of(time: Time, scheduler: &Scheduler, step: Option<&StepPlan>) -> Self {
        let Occupancy { running, waiting, blocks } = scheduler.occupancy();
        let (batch, tokens) = step.map_or((0, 0), |plan| (plan.chunks.len(), plan.load.tokens()));
        let saturation = scheduler.saturation(time);
        Self { time, batch, tokens: tokens as usize, running, waiting, blocks, saturation }
    }
}

/// Sums over time. They are integers, so they are the same on every machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// Microseconds with a step in flight.
    pub busy: Time,
    /// Sequences in the step in flight, multiplied by microseconds.
    pub batch: u64,
    /// Blocks held during steps, multiplied by microseconds.
    pub blocks: u64,
    /// Maximum sequences in a step.
    pub max_batch: usize,
    /// Maximum blocks held.
    pub max_blocks: usize,
}

/// Maximum number of samples.
const MAX_SAMPLES: usize = 4096;

/// The state from each change to the next. Sums cover every change. Samples cover every change while there are few.
/// Otherwise one sample, the last, is kept for each interval, and the interval doubles when there are too many samples.
#[derive(Clone, Debug)]
pub struct Utilization {
    samples: Vec<Sample>,
    every: Time,
    sums: Sums,
}

impl Default for Utilization {
    fn default() -> Self {
        Self { samples: Vec::new(), every: 1, sums: Sums::default() }
    }
}

impl Utilization {
    /// The state at the end of each interval with a change.
    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// The sums up to the last change.
    pub fn sums(&self) -> Sums {
        self.sums
    }

    /// Sets the state from now on.
    pub(crate) fn add(&mut self, sample: Sample) {
        let sums = &mut self.sums;
        sums.max_batch = sums.max_batch.max(sample.batch);
        sums.max_blocks = sums.max_blocks.max(sample.blocks);
        let last = self.samples.last_mut();
        if let Some(last) = last.as_ref().filter(|last| last.batch > 0) {
            let time = sample.time - last.time;
            sums.busy += time;
            sums.batch += last.batch as u64 * time;
            sums.blocks += last.blocks as u64 * time;
        }
        match last.filter(|last| last.time / self.every == sample.time / self.every) {
            Some(last) => *last = sample,
            None => self.samples.push(sample),
        }
        while self.samples.len() > MAX_SAMPLES {
            self.every *= 2;
            self.thin();
        }
    }

    /// Keeps the last sample of each interval.
    fn thin(&mut self) {
        let every = self.every;
        // Deduplication keeps the first of equal items. After the reversal, that is the last sample of the interval.
        self.samples.reverse();
        self.samples.dedup_by_key(|sample| sample.time / every);
        self.samples.reverse();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(time: Time, batch: usize, blocks: usize) -> Sample {
        Sample { time, batch, blocks, ..Sample::default() }
    }

    #[test]
    fn sums_are_of_all_changes_and_not_of_samples() {
        let mut utilization = Utilization { every: 10_000, ..Utilization::default() };
        // In one interval: 2 sequences for 30 us, none for 70 and 5 for 400. Blocks held between steps do not count.
        for sample in [at(1000, 2, 10), at(1030, 0, 7), at(1100, 5, 20), at(1500, 0, 30)] {
            utilization.add(sample);
        }
        let sums = Sums { busy: 430, batch: 2 * 30 + 5 * 400, blocks: 10 * 30 + 20 * 400, max_batch: 5, max_blocks: 30 };
        assert_eq!(utilization.sums(), sums);
        assert_eq!(utilization.samples(), [at(1500, 0, 30)]);
    }

    #[test]
    fn samples_say_what_was_true_at_the_ends_of_stretches() {
        let mut utilization = Utilization::default();
        // Steps of about 6 ms alternate with idle times of equal length. Samples at every second change would be all
        // busy or all idle.
        let changes: Vec<Sample> = (0..20_000).map(|i| at(6007 * i, if i % 2 == 0 { 3 } else { 0 }, 0)).collect();
        for &sample in &changes {
            utilization.add(sample);
        }
        let samples = utilization.samples();
        assert!(MAX_SAMPLES / 2 <= samples.len() && samples.len() <= MAX_SAMPLES);
        assert!(samples.windows(2).all(|pair| pair[0].time / utilization.every < pair[1].time / utilization.every));
        let busy = samples.iter().filter(|sample| sample.batch > 0).count();
        assert!(busy.abs_diff(samples.len() / 2) < samples.len() / 20, "{busy} of {}", samples.len());
        assert_eq!(utilization.sums().busy, 10_000 * 6007);
    }

    #[test]
    fn few_samples_are_kept_however_long_the_pauses() {
        let mut utilization = Utilization::default();
        for hour in 0..3 * MAX_SAMPLES as Time {
            utilization.add(at(hour * 3_600_000_000, 1, 1));
        }
        assert!(utilization.samples().len() <= MAX_SAMPLES);
    }
}
