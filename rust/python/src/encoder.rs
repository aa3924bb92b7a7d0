//! The CPU encoder: loads weights and embeds texts. The GIL is released for all work except copies of arrays.

#![allow(clippy::needless_pass_by_value, reason = "arguments are made of Python's objects for each call")]

use std::sync::Mutex;

use chairlift_cpu as cpu;
use numpy::{PyArray2, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::linear::Linear;
use crate::threads::{lock, started};

/// Weight and bias of a layer norm.
type NormArgs = (PyBuffer<f32>, PyBuffer<f32>);

fn norm_of(py: Python<'_>, (weight, bias): &NormArgs) -> PyResult<cpu::Norm> {
    Ok(cpu::Norm { weight: weight.to_vec(py)?, bias: bias.to_vec(py)? })
}

/// One layer of an encoder. The encoder takes ownership of it.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct EncoderLayer(Mutex<Option<cpu::EncoderLayer>>);

#[pymethods]
impl EncoderLayer {
    #[new]
    #[pyo3(signature = (*, qkv_proj, o_proj, attention_norm, up_proj, down_proj, norm))]
    fn new(
        py: Python<'_>,
        qkv_proj: &Linear,
        o_proj: &Linear,
        attention_norm: NormArgs,
        up_proj: &Linear,
        down_proj: &Linear,
        norm: NormArgs,
    ) -> PyResult<Self> {
        let layer = cpu::EncoderLayer {
            qkv_proj: qkv_proj.take()?,
            o_proj: o_proj.take()?,
            attention_norm: norm_of(py, &attention_norm)?,
            up_proj: up_proj.take()?,
            down_proj: down_proj.take()?,
            norm: norm_of(py, &norm)?,
        };
        Ok(Self(Mutex::new(Some(layer))))
    }
}

/// Layers after the embeddings of tokens and positions, with their own threads.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct Encoder(Mutex<cpu::Encoder>);

#[pymethods]
impl Encoder {
    #[new]
    #[pyo3(signature = (layers, *, tokens, positions, norm, num_heads, norm_eps, pooling, threads))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        layers: Vec<PyRef<'_, EncoderLayer>>,
        tokens: PyBuffer<f32>,
        positions: PyBuffer<f32>,
        norm: NormArgs,
        num_heads: usize,
        norm_eps: f32,
        pooling: &str,
        threads: usize,
    ) -> PyResult<Self> {
        let pooling = match pooling {
            "first" => cpu::Pooling::First,
            "last" => cpu::Pooling::Last,
            "mean" => cpu::Pooling::Mean,
            _ => return Err(PyValueError::new_err(format!("no pooling is called {pooling:?}"))),
        };
        let layers = layers.iter().map(|layer| lock(&layer.0).take()).collect::<Option<_>>();
        let layers = layers.ok_or_else(|| PyValueError::new_err("these layers belong to a model already"))?;
        let embeddings = cpu::Embeddings { tokens: tokens.to_vec(py)?, positions: positions.to_vec(py)?, norm: norm_of(py, &norm)? };
        let encoder = cpu::Encoder::new(started(threads)?, num_heads, norm_eps, embeddings, layers, pooling);
        encoder.map(|encoder| Self(Mutex::new(encoder))).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Writes the embeddings of texts to `out` [texts, hidden size]. Text i has the ids from `starts[i]` to `starts[i + 1]`.
    ///
    /// Numpy's borrow flags prevent other Rust code from using `out` meanwhile.
    fn embed(&self, py: Python<'_>, ids: PyBuffer<i32>, starts: PyBuffer<i32>, out: &Bound<'_, PyArray2<f32>>) -> PyResult<()> {
        let (ids, starts) = (ids.to_vec(py)?, starts.to_vec(py)?);
        let rows = out.shape()[0];
        let mut out = out.try_readwrite().map_err(|error| PyValueError::new_err(format!("embeddings cannot be written: {error}")))?;
        let out = out.as_slice_mut().map_err(|_| PyValueError::new_err("embeddings need a C-contiguous float32 array"))?;
        if rows + 1 != starts.len() {
            return Err(PyValueError::new_err("there must be a row for each text"));
        }
        py.detach(|| lock(&self.0).embed(&ids, &starts, out)).map_err(|error| PyValueError::new_err(error.to_string()))
    }
}
