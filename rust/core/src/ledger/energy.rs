//! The measured energy, divided among the sequences whose steps took it.

use crate::request::{SeqId, Time};

/// Energy in microjoules, from the start of the metering. A window is the time between two readings of the meter.
#[derive(Debug, Default)]
pub(crate) struct Energy {
    /// A reading that is not divided yet.
    pending: Option<u64>,
    window_from: Time,
    /// When the meter was read last.
    read_at: Time,
    /// Time of all steps at the start of the window, in nanoseconds.
    steps_from: u64,
    /// Sequences that lost their slot in the window.
    left: Vec<SeqId>,
    total: u64,
    idle: u64,
}

/// Divides the energy of a window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    energy: u64,
    /// Nanoseconds.
    time: u64,
}

impl Window {
    /// All of its energy.
    pub(crate) fn energy(&self) -> u64 {
        self.energy
    }

    /// The energy of `ns` nanoseconds of step time.
    pub(crate) fn share(&self, ns: u64) -> u64 {
        (u128::from(self.energy) * u128::from(ns) / u128::from(self.time)) as u64
    }
}

impl Energy {
    /// Begins to meter.
    pub(crate) fn begin(now: Time, steps: u64) -> Self {
        Self { window_from: now, read_at: now, steps_from: steps, ..Self::default() }
    }

    /// Adds the energy since the last reading.
    pub(crate) fn read(&mut self, energy: u64, now: Time) {
        *self.pending.get_or_insert(0) += energy;
        self.read_at = now.max(self.read_at);
    }

    /// Notes a sequence that lost its slot.
    pub(crate) fn leave(&mut self, id: SeqId) {
        self.left.push(id);
    }

    /// Ends the window at the last reading, if there is a new one. `steps` is the time of all steps so far, in nanoseconds. Returns the
    /// window, and the sequences that lost their slot in it.
    pub(crate) fn end_window(&mut self, steps: u64) -> Option<(Window, Vec<SeqId>)> {
        let energy = self.pending.take()?;
        let time = (1000 * (self.read_at - self.window_from)).max(steps - self.steps_from).max(1);
        (self.window_from, self.steps_from) = (self.read_at, steps);
        self.total += energy;
        Some((Window { energy, time }, std::mem::take(&mut self.left)))
    }

    /// Books energy that no sequence took.
    pub(crate) fn add_idle(&mut self, energy: u64) {
        self.idle += energy;
    }

    /// The divided energy.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// The part of it that no sequence took.
    pub(crate) fn idle(&self) -> u64 {
        self.idle
    }
}
