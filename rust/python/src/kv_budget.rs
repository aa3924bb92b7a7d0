//! The division of KV bytes among models.

use crate::threads::lock;
use chairlift_core as core;
use pyo3::prelude::*;
use std::sync::Mutex;

/// Divides bytes for KV blocks among models: see `chairlift_core::KvBudget`.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct KvBudget(Mutex<core::KvBudget>);

#[pymethods]
impl KvBudget {
    #[new]
    fn new() -> Self {
        Self(Mutex::default())
    }

    #[pyo3(signature = (model, *, block_bytes, state_bytes, least, most))]
    fn add(&self, model: u32, block_bytes: u64, state_bytes: u64, least: u32, most: u32) {
        lock(&self.0).add(model, block_bytes, state_bytes, least, most);
    }

    fn remove(&self, model: u32) {
        lock(&self.0).remove(model);
    }

    fn promised(&self) -> u64 {
        lock(&self.0).promised()
    }

    fn report(&self, model: u32, held: u32, kept: u32, wanted: u32) {
        lock(&self.0).report(model, core::BlocksUsed { held, kept, wanted });
    }

    fn set(&self, model: u32, limit: u32) {
        lock(&self.0).set(model, limit);
    }

    fn is_short(&self) -> bool {
        lock(&self.0).is_short()
    }

    fn shrink(&self) -> Vec<(u32, u32)> {
        lock(&self.0).shrink()
    }

    fn grow(&self) -> Vec<(u32, u32)> {
        lock(&self.0).grow()
    }
}
