//! The arbiter between models.

use chairlift_core as core;
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Chooses which of several models runs the next step: see `chairlift_core::Arbiter`.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct Arbiter(Mutex<core::Arbiter>);

impl Arbiter {
    fn lock(&self) -> MutexGuard<'_, core::Arbiter> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Arbiter {
    #[new]
    fn new() -> Self {
        Self(Mutex::default())
    }

    #[pyo3(signature = (model, *, weight = 1, priority = 0, itl = None))]
    fn add(&self, model: u32, weight: u32, priority: i32, itl: Option<core::Time>) {
        self.lock().add(model, weight, priority, itl);
    }

    fn remove(&self, model: u32) {
        self.lock().remove(model);
    }

    fn ready(&self, model: u32, now: core::Time) {
        self.lock().ready(model, now);
    }

    fn idle(&self, model: u32) {
        self.lock().idle(model);
    }

    fn expect(&self, model: u32, us: core::Time, begins: u32) {
        self.lock().expect(model, us, begins);
    }

    fn choose(&self, now: core::Time) -> Option<u32> {
        self.lock().choose(now)
    }

    fn charge(&self, model: u32, us: core::Time, now: core::Time) {
        self.lock().charge(model, us, now);
    }
}
