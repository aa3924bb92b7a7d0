//! Arrays that are copied when an argument is read.

use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;

/// The numbers of an array.
pub(crate) struct Copied<T>(pub(crate) Vec<T>);

impl<T: Element> FromPyObject<'_, '_> for Copied<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        PyBuffer::get(&object)?.to_vec(object.py()).map(Self)
    }
}

/// The numbers of an array that may be absent.
pub(crate) fn numbers<T>(array: Option<Copied<T>>) -> Option<Vec<T>> {
    array.map(|array| array.0)
}
