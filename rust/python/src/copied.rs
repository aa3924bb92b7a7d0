//! Arrays that are copied when an argument is read, or written in place.

use numpy::{PyArray2, PyArrayMethods};
use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;

use crate::errors::invalid;

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

/// Writes an array, which errors call `what`, without the GIL. Numpy's borrow flags prevent other Rust code from using it meanwhile.
pub(crate) fn write<R: Send>(array: &Bound<'_, PyArray2<f32>>, what: &str, write: impl FnOnce(&mut [f32]) -> R + Send) -> PyResult<R> {
    let mut array_written = array.try_readwrite().map_err(|error| invalid(format!("{what} cannot be written: {error}")))?;
    let numbers = array_written.as_slice_mut().map_err(|_| invalid(format!("{what} need a C-contiguous float32 array")))?;
    Ok(array.py().detach(|| write(numbers)))
}
