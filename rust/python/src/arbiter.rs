//! The arbiter between models.

use crate::threads::lock;
use chairlift_core as core;
use pyo3::prelude::*;
use std::sync::Mutex;

/// Chooses which of several models runs the next step: see `chairlift_core::Arbiter`.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct Arbiter(Mutex<core::Arbiter>);

#[pymethods]
impl Arbiter {
    #[new]
    fn new() -> Self {
        Self(Mutex::default())
    }

    #[pyo3(signature = (model, *, weight = 1, priority = 0, itl = None))]
    fn add(&self, model: u32, weight: u32, priority: i32, itl: Option<core::Time>) {
        lock(&self.0).add(model, weight, priority, itl);
    }

    fn remove(&self, model: u32) {
        lock(&self.0).remove(model);
    }

    fn ready(&self, model: u32, now: core::Time) {
        lock(&self.0).ready(model, now);
    }

    fn idle(&self, model: u32) {
        lock(&self.0).idle(model);
    }

    fn expect(&self, model: u32, us: core::Time, begins: u32) {
        lock(&self.0).expect(model, us, begins);
    }

    fn choose(&self, now: core::Time) -> Option<u32> {
        lock(&self.0).choose(now)
    }

    fn charge(&self, model: u32, us: core::Time, now: core::Time) {
        lock(&self.0).charge(model, us, now);
    }
}
