//! Linear layers and `LoRA` adapters: packs tensors in memory or in files. The GIL is released while they are packed.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Mutex;

use chairlift_cpu as cpu;
use cpu::{DType, Isa, MakeBytes, Merge, Numbers, Source, Tensor};
use numpy::PyReadonlyArray1;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::copied::Copied;
use crate::errors::{invalid, unknown};
use crate::once::Once;
use crate::threads::{lock, started};

/// An open file with weights, which are read while they are packed.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct TensorFile(File);

#[pymethods]
impl TensorFile {
    #[new]
    fn new(path: PathBuf) -> PyResult<Self> {
        Ok(Self(File::open(path)?))
    }
}

/// The weights of a linear layer, packed for this processor.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct Linear(Once<cpu::Linear>);

#[pymethods]
impl Linear {
    #[new]
    #[pyo3(signature = (tensors, ins, dtype, *, threads, bias=None, gated=false, isa="auto"))]
    fn new(
        py: Python<'_>,
        tensors: Vec<Vec<TensorArgs<'_>>>,
        ins: usize,
        dtype: &str,
        threads: usize,
        bias: Option<Copied<f32>>,
        gated: bool,
        isa: &str,
    ) -> PyResult<Self> {
        let (isa, dtype) = (isa_of(isa)?, dtype_of(dtype)?);
        let rows: usize = tensors.iter().flatten().map(|tensor| tensor.1).sum();
        if bias.as_ref().is_some_and(|bias| bias.0.len() != rows) {
            return Err(PyValueError::new_err("there must be a bias for each row"));
        }
        let merge = if gated { Merge::Gated } else { Merge::Stacked };
        let found = tensors.iter().map(|tensors| tensors.iter().map(|tensor| tensor_of(tensor, ins)).collect::<PyResult<Vec<_>>>());
        let found: Vec<_> = found.collect::<PyResult<_>>()?;
        let found: Vec<_> = found.iter().map(Vec::as_slice).collect();
        let linear = py.detach(|| {
            let mut pool = started(threads)?;
            let matrix = cpu::Matrix::pack(&mut pool, isa, &found, merge, dtype);
            matrix.map(|matrix| cpu::Linear::new(matrix, bias.as_ref().map(|bias| &*bias.0))).map_err(invalid)
        });
        let raised = || tensors.iter().flatten().find_map(|tensor| tensor.2.raised());
        linear.map_err(|error| raised().unwrap_or(error)).map(|linear| Self(Once::new(linear)))
    }
}

/// The packed weights of an argument, which only one model can take.
pub(crate) struct Taken(pub(crate) cpu::Linear);

impl FromPyObject<'_, '_> for Taken {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        object.cast::<Linear>()?.get().0.take("these weights belong").map(Self)
    }
}

/// A tensor: number type, rows, bytes, and the rows per head if heads are interleaved, else 0.
type TensorArgs<'py> = (String, usize, Bytes<'py>, usize);

/// The location of a tensor's bytes.
#[derive(FromPyObject)]
enum Bytes<'py> {
    Memory(PyReadonlyArray1<'py, u8>),
    File((Py<TensorFile>, u64)),
    Made(Maker),
}

impl Bytes<'_> {
    /// Takes the exception that ended the making of the bytes.
    fn raised(&self) -> Option<PyErr> {
        if let Self::Made(maker) = self { lock(&maker.raised).take() } else { None }
    }
}

/// A Python function that makes the bytes of a tensor, and the exception that it raised.
#[derive(Debug)]
struct Maker {
    function: Py<PyAny>,
    raised: Mutex<Option<PyErr>>,
}

impl FromPyObject<'_, '_> for Maker {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        if !object.is_callable() {
            return Err(PyTypeError::new_err("it is not a function"));
        }
        Ok(Self { function: object.to_owned().unbind(), raised: Mutex::new(None) })
    }
}

impl MakeBytes for Maker {
    fn make(&self) -> Result<Vec<u8>, String> {
        let made = Python::attach(|py| Ok(self.function.bind(py).call0()?.extract::<PyReadonlyArray1<'_, u8>>()?.as_slice()?.to_vec()));
        made.map_err(|error: PyErr| {
            let message = error.to_string();
            *lock(&self.raised) = Some(error);
            message
        })
    }
}

/// The update of a tensor: A and B as tensors, the inputs of A, and the scale.
type UpdateArgs<'py> = (TensorArgs<'py>, TensorArgs<'py>, usize, f32);

/// The updates of the tensors of one layer.
type LayerUpdates<'py> = Vec<Option<UpdateArgs<'py>>>;

/// A `LoRA` adapter, packed for this processor.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct Adapter(pub(crate) Once<cpu::Adapter>);

#[pymethods]
impl Adapter {
    #[new]
    #[pyo3(signature = (blocks, *, isa="auto"))]
    fn new(py: Python<'_>, blocks: Vec<(LayerUpdates<'_>, LayerUpdates<'_>)>, isa: &str) -> PyResult<Self> {
        let isa = isa_of(isa)?;
        let layers = |(first, second)| Ok::<_, PyErr>([updates_of(first)?, updates_of(second)?]);
        let blocks: Vec<_> = blocks.iter().map(|(first, second)| layers((first, second))).collect::<PyResult<_>>()?;
        let packed = py.detach(|| {
            let mut pool = started(1)?;
            let mut pack = |updates: &[_]| cpu::LowRank::pack(&mut pool, isa, updates);
            let blocks = blocks.iter().map(|[first, second]| Ok([pack(first)?, pack(second)?])).collect::<Result<_, cpu::PackError>>();
            blocks.map(cpu::Adapter::new).map_err(invalid)
        });
        packed.map(|adapter| Self(Once::new(adapter)))
    }
}

fn updates_of<'a>(updates: &'a LayerUpdates<'_>) -> PyResult<Vec<Option<cpu::Update<'a>>>> {
    let update = |(a, b, ins, scale): &'a UpdateArgs<'_>| Ok(cpu::Update { a: tensor_of(a, *ins)?, b: tensor_of(b, a.1)?, scale: *scale });
    updates.iter().map(|args| args.as_ref().map(update).transpose()).collect()
}

fn tensor_of<'a>((kind, rows, bytes, interleaved): &'a TensorArgs<'_>, ins: usize) -> PyResult<Tensor<'a>> {
    let numbers = match kind.as_str() {
        "float32" => Numbers::F32,
        "float16" => Numbers::F16,
        "bfloat16" => Numbers::Bf16,
        _ => Numbers::Ggml(kind.parse().map_err(|_| unknown("kind of number", kind))?),
    };
    let source = match bytes {
        Bytes::Memory(array) => {
            Source::Memory(array.as_slice().map_err(|_| PyValueError::new_err("a tensor's bytes must be a contiguous uint8 array"))?)
        }
        Bytes::File((file, start)) => Source::File(&file.get().0, *start),
        Bytes::Made(maker) => Source::Made(maker),
    };
    Ok(Tensor { numbers, rows: *rows, ins, source, interleaved: *interleaved })
}

pub(crate) fn isa_of(name: &str) -> PyResult<Isa> {
    let isa = if name == "auto" { Some(Isa::best()) } else { Isa::available().into_iter().find(|isa| isa.name() == name) };
    isa.ok_or_else(|| PyValueError::new_err(format!("the kernels cannot use {name} on this processor")))
}

fn dtype_of(name: &str) -> PyResult<DType> {
    match name {
        "float32" => Ok(DType::F32),
        "float16" => Ok(DType::F16),
        "bfloat16" => Ok(DType::Bf16),
        "kept" => Ok(DType::Kept),
        "int16" => Ok(DType::Int16),
        "rounded" => Ok(DType::Rounded),
        "int8" => Ok(DType::Int8),
        _ => Err(PyValueError::new_err(format!("weights cannot be kept as {name:?}"))),
    }
}
