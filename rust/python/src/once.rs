//! Values that Python makes and a model takes.

use std::sync::Mutex;

use pyo3::prelude::*;

use crate::errors::invalid;
use crate::threads::lock;

/// A value that can be taken once.
pub(crate) struct Once<T>(Mutex<Option<T>>);

impl<T> Once<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Mutex::new(Some(value)))
    }

    /// Takes the value. Raises `ValueError` if it was taken before: with the `subject` "these blocks belong", the message is
    /// "these blocks belong to a model already".
    pub(crate) fn take(&self, subject: &str) -> PyResult<T> {
        lock(&self.0).take().ok_or_else(|| invalid(format!("{subject} to a model already")))
    }
}
