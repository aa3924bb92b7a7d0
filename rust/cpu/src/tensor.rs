//! A checkpoint's matrix, in memory or in a file, which is read row by row.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use crate::block_type::BlockType;
use crate::half;
use crate::pool::ThreadPool;

/// Reading weights from a file failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the weights cannot be read: {0}")]
pub struct ReadError(String);

/// The number format of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    /// fp32.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Blocks of the ggml type with this number.
    Ggml(u32),
}

impl Numbers {
    /// The block type, if it is supported without conversion.
    pub(crate) fn blocks(self) -> Option<BlockType> {
        match self {
            Self::Ggml(number) => BlockType::from_ggml(number),
            _ => None,
        }
    }

    /// Bytes of a row of `ins` numbers. `None` for unsupported ggml types, and for rows that are not whole blocks.
    pub(crate) fn row_bytes(self, ins: usize) -> Option<usize> {
        match self {
            Self::F32 => ins.checked_mul(4),
            Self::F16 | Self::Bf16 => ins.checked_mul(2),
            Self::Ggml(_) => self.blocks()?.row_bytes(ins),
        }
    }

    /// Converts a row to fp32.
    pub(crate) fn decode(self, row: &[u8], to: &mut [f32]) {
        let halves = || row.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
        match self {
            Self::F32 => {
                to.iter_mut().zip(row.as_chunks::<4>().0).for_each(|(to, &bytes)| *to = f32::from_le_bytes(bytes));
            }
            Self::F16 => to.iter_mut().zip(halves()).for_each(|(to, bits)| *to = half::to_f32(bits)),
            Self::Bf16 => to.iter_mut().zip(halves()).for_each(|(to, bits)| *to = f32::from_bits(u32::from(bits) << 16)),
            Self::Ggml(_) => self.blocks().expect("Matrix::pack checks the type").dequantize(row, to),
        }
    }
}

/// Makes the bytes of a tensor that a checkpoint stores in another layout.
pub trait MakeBytes: std::fmt::Debug + Sync {
    /// Makes the bytes, little-endian. It may be called more than once. Returns the reason if it fails.
    fn make(&self) -> Result<Vec<u8>, String>;
}

/// The location of a tensor's bytes.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// In memory, little-endian.
    Memory(&'a [u8]),
    /// In a file, starting at this byte offset.
    File(&'a File, u64),
    /// Made when the tensor is packed. They are in memory only meanwhile.
    Made(&'a dyn MakeBytes),
}

/// A matrix of `rows` rows of `ins` numbers.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// The number format.
    pub numbers: Numbers,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub ins: usize,
    /// The location of the bytes.
    pub source: Source<'a>,
    /// Number of rows of an attention head if its rows are interleaved for the rotary embedding, as llama.cpp writes Llama's queries and
    /// keys: the rows of the two halves alternate. The packed matrix has the first half of each head's rows first. 0 if the rows are in
    /// order.
    pub interleaved: usize,
}

/// Tensors of one shape and number format whose panels follow each other: those of a mixture's experts, or a single one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stack<'a>(&'a [Tensor<'a>]);

impl<'a> From<&'a Tensor<'a>> for Stack<'a> {
    fn from(tensor: &'a Tensor<'a>) -> Self {
        Self(std::slice::from_ref(tensor))
    }
}

impl<'a> Stack<'a> {
    /// A stack of these tensors. `None` if there are none, or if their shapes or number formats differ.
    pub(crate) fn new(tensors: &'a [Tensor<'a>]) -> Option<Self> {
        let alike = |a: &Tensor<'_>, b: &Tensor<'_>| (a.numbers, a.rows, a.ins) == (b.numbers, b.rows, b.ins);
        let first = tensors.first()?;
        tensors.iter().all(|tensor| alike(tensor, first)).then_some(Self(tensors))
    }

    /// The tensors, at least one.
    pub(crate) fn tensors(self) -> &'a [Tensor<'a>] {
        self.0
    }

    /// The format of all numbers.
    pub(crate) fn numbers(self) -> Numbers {
        self.0[0].numbers
    }

    /// Number of rows of each tensor.
    pub(crate) fn rows(self) -> usize {
        self.0[0].rows
    }

    /// Number of columns.
    pub(crate) fn ins(self) -> usize {
        self.0[0].ins
    }

    /// Number of panels of all tensors. Each tensor begins a panel.
    pub(crate) fn panels(self, width: usize) -> usize {
        self.0.len() * self.rows().div_ceil(width)
    }

    /// Calls `body` with the index of each panel of `width` rows, and its rows, on all threads of the pool. Tensors that are made are made
    /// one after the other, so that a single one is in memory.
    pub(crate) fn for_each_panel(
        self,
        pool: &mut ThreadPool,
        width: usize,
        body: impl Fn(usize, &RowReader<'_>) + Sync,
    ) -> Result<(), ReadError> {
        let size = self.numbers().row_bytes(self.ins()).expect("Matrix::pack checks the type");
        let mut before = 0;
        for tensors in self.0.chunk_by(|a, b| !a.is_made() && !b.is_made()) {
            let (bytes, made);
            let mut stack = Stack(tensors);
            if let Source::Made(maker) = tensors[0].source {
                bytes = maker.make().map_err(ReadError)?;
                if bytes.len() != self.rows() * size {
                    return Err(ReadError(format!("{} bytes were made of {}", bytes.len(), self.rows() * size)));
                }
                made = Tensor { source: Source::Memory(&bytes), ..tensors[0] };
                stack = Stack::from(&made);
            }
            stack.for_each_stored_panel(pool, width, size, |panel, rows| body(before + panel, rows))?;
            before += stack.panels(width);
        }
        Ok(())
    }

    /// As `for_each_panel`, for tensors in memory or in files, whose rows have `size` bytes.
    fn for_each_stored_panel(
        self,
        pool: &mut ThreadPool,
        width: usize,
        size: usize,
        body: impl Fn(usize, &RowReader<'_>) + Sync,
    ) -> Result<(), ReadError> {
        let each = self.rows().div_ceil(width).max(1);
        let failed = Mutex::new(None);
        pool.run(|worker| {
            let mut buffer = Vec::new();
            worker.parallel_for(self.panels(width), |panel| {
                let (tensor, first) = (&self.0[panel / each], panel % each * width);
                match tensor.read(first..tensor.rows.min(first + width), size, &mut buffer) {
                    Ok(bytes) => body(panel, &RowReader { bytes, size }),
                    Err(error) => {
                        failed.lock().expect("nobody panics with the lock").get_or_insert(error);
                    }
                }
            });
        });
        failed.into_inner().expect("nobody panics with the lock").map_or(Ok(()), |error| Err(ReadError(error)))
    }
}

impl Tensor<'_> {
    fn is_made(&self) -> bool {
        matches!(self.source, Source::Made(_))
    }

    /// The source's row for row `row` of the matrix.
    fn source_row(&self, row: usize) -> usize {
        if self.interleaved == 0 {
            return row;
        }
        let (head, within, half) = (row / self.interleaved, row % self.interleaved, self.interleaved / 2);
        head * self.interleaved + within % half * 2 + within / half
    }

    /// The bytes of some rows, in the matrix's order.
    fn read<'b>(&'b self, rows: std::ops::Range<usize>, size: usize, buffer: &'b mut Vec<u8>) -> Result<&'b [u8], String> {
        if let (Source::Memory(bytes), 0) = (self.source, self.interleaved) {
            return Ok(&bytes[rows.start * size..rows.end * size]);
        }
        buffer.resize(rows.len() * size, 0);
        let fill = |from: usize, to: &mut [u8]| match self.source {
            Source::Memory(bytes) => {
                to.copy_from_slice(&bytes[from * size..][..to.len()]);
                Ok(())
            }
            Source::File(file, start) => file.read_exact_at(to, start + (from * size) as u64).map_err(|error| match error.kind() {
                std::io::ErrorKind::UnexpectedEof => "the file ends too early, or became shorter while it was read".to_owned(),
                _ => error.to_string(),
            }),
            Source::Made(_) => unreachable!("`for_each_panel` makes the bytes"),
        };
        if self.interleaved == 0 {
            fill(rows.start, buffer)?;
        } else {
            for (row, to) in rows.zip(buffer.chunks_exact_mut(size)) {
                fill(self.source_row(row), to)?;
            }
        }
        Ok(buffer)
    }
}

/// The rows of a panel, as bytes.
pub(crate) struct RowReader<'a> {
    bytes: &'a [u8],
    size: usize,
}

impl RowReader<'_> {
    /// Number of rows.
    pub(crate) fn count(&self) -> usize {
        self.bytes.len() / self.size
    }

    /// The bytes of one row.
    pub(crate) fn row(&self, row: usize) -> &[u8] {
        &self.bytes[row * self.size..(row + 1) * self.size]
    }
}
