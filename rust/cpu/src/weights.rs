//! A linear layer's weights, packed in panels: columns that a tile computes
//! side by side lie side by side.

use crate::aligned::{AlignedVec, Pod};
use crate::half;
use crate::pool::ThreadPool;
use crate::quant::{BLOCK, Bits, BlockType, QuantWeights, Source};
use crate::simd::{Isa, Simd};

/// How weights are kept, and computed with: in fp32, but for `Int8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// As they are.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of fp32.
    Bf16,
    /// As their blocks of integers, which lose nothing: [`Numbers::Blocks`] of equal bits only.
    Blocks,
    /// Integers of 8 bits, or of 4 where the source has them so, in blocks of 32 with a scale each; multiplied by activations that
    /// are made such integers too.
    Int8,
}

/// Numbers as a checkpoint has them, row by row.
#[derive(Clone, Copy, Debug)]
pub enum Numbers<'a> {
    /// fp32.
    F32(&'a [f32]),
    /// IEEE half precision.
    F16(&'a [u16]),
    /// The upper half of fp32.
    Bf16(&'a [u16]),
    /// Blocks of 32 numbers, of a type that ggml numbers so.
    Blocks(u32, &'a [u8]),
}

impl Numbers<'_> {
    /// How many bits the integers of blocks have.
    fn bits(self) -> Option<Bits> {
        match self {
            Self::Blocks(kind, _) => BlockType::from_ggml(kind).map(BlockType::bits),
            _ => None,
        }
    }

    /// Reads a row of as many columns as `to` is long.
    fn read_row(self, row: usize, to: &mut [f32]) {
        let range = row * to.len()..(row + 1) * to.len();
        match self {
            Self::F32(numbers) => to.copy_from_slice(&numbers[range]),
            Self::F16(numbers) => to.iter_mut().zip(&numbers[range]).for_each(|(x, &bits)| *x = half::to_f32(bits)),
            Self::Bf16(numbers) => to.iter_mut().zip(&numbers[range]).for_each(|(x, &bits)| *x = f32::from_bits(u32::from(bits) << 16)),
            Self::Blocks(..) => unreachable!("blocks are used as they are"),
        }
    }
}

/// How the rows of several sources become one matrix's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// One under another.
    Stacked,
    /// Two of equal shape, half a panel of each in turn: a gate, and what it lets through.
    Gated,
}

/// Why weights cannot be kept as asked.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PackError {
    /// Half precision ends at 65504.
    #[error("a weight of {0:e} does not fit float16: use float32 or bfloat16")]
    Overflow(f32),
    /// The sources' lengths do not make rows of equal length.
    #[error("{rows} rows of {ins} numbers are {expected} numbers or bytes, not {found}")]
    Shape {
        /// Rows that the caller counted.
        rows: usize,
        /// Numbers in each.
        ins: usize,
        /// How long the source should be.
        expected: usize,
        /// How long it is.
        found: usize,
    },
    /// A gate and what it lets through are two matrices of one shape.
    #[error("a gated matrix is made of two of the same shape")]
    Gate,
    /// Some are no blocks, or of other bits than the rest.
    #[error("only blocks of one number of bits can be kept as they are")]
    Mixed,
    /// Blocks of a type that cannot be used as they are, or not in this form.
    #[error("blocks of ggml type {0}, or rows that are not whole blocks, cannot be used as they are")]
    Blocks(u32),
}

/// A number that weights are kept in.
pub(crate) trait Element: Pod {
    /// Reads a register of them as fp32.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F;
    /// The nearest to `x`.
    fn from_f32(x: f32) -> Self;
    /// What it stands for.
    fn to_f32(self) -> f32;
}

/// IEEE half precision.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct F16(u16);

/// The upper half of an fp32.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Bf16(u16);

// SAFETY: a u16 by another name.
unsafe impl Pod for F16 {}
// SAFETY: as above.
unsafe impl Pod for Bf16 {}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F {
        // SAFETY: the caller's.
        unsafe { s.load(p) }
    }
    fn from_f32(x: f32) -> Self {
        x
    }
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for F16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F {
        // SAFETY: the caller's.
        unsafe { s.load_f16(p.cast()) }
    }
    fn from_f32(x: f32) -> Self {
        Self(half::from_f32(x))
    }
    fn to_f32(self) -> f32 {
        half::to_f32(self.0)
    }
}

impl Element for Bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F {
        // SAFETY: the caller's.
        unsafe { s.load_bf16(p.cast()) }
    }
    /// Rounded to nearest even.
    fn from_f32(x: f32) -> Self {
        let bits = x.to_bits();
        if x.is_nan() {
            // Rounding could carry into the sign.
            return Self((bits >> 16) as u16 | 0x40);
        }
        Self(((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16)
    }
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
}

/// Panels of one kind of number: [panels][ins][panel width].
#[derive(Debug)]
pub(crate) struct Panels<E> {
    pub(crate) numbers: AlignedVec<E>,
    pub(crate) ins: usize,
    pub(crate) width: usize,
}

impl<E: Element> Panels<E> {
    fn pack<'a>(
        pool: &mut ThreadPool,
        width: usize,
        ins: usize,
        columns: usize,
        row: impl Fn(usize) -> Option<(Numbers<'a>, usize)> + Sync,
    ) -> Self {
        let mut numbers = AlignedVec::zeros(columns.next_multiple_of(width) * ins);
        let shared = numbers.shared();
        pool.run(|worker| {
            let mut buffer = vec![0.0; ins];
            worker.parallel_for(columns.div_ceil(width), |panel| {
                // SAFETY: each panel is one piece's.
                let out: &mut [E] = unsafe { shared.write(panel * width * ins, width * ins) };
                for column in 0..width {
                    if let Some((numbers, row)) = row(panel * width + column) {
                        numbers.read_row(row, &mut buffer);
                        for (to, &x) in out[column..].iter_mut().step_by(width).zip(&buffer) {
                            *to = E::from_f32(x);
                        }
                    }
                }
            });
        });
        Self { numbers, ins, width }
    }

    /// The panels from this one on.
    pub(crate) fn panel(&self, panel: usize) -> &[E] {
        &self.numbers[panel * self.width * self.ins..]
    }

    fn read_column(&self, column: usize, out: &mut [f32]) {
        let panel = &self.numbers[column / self.width * self.width * self.ins..];
        for (x, packed) in out.iter_mut().zip(panel[column % self.width..].iter().step_by(self.width)) {
            *x = packed.to_f32();
        }
    }
}

/// The weights [outs, ins] of a linear layer.
#[derive(Debug)]
pub struct Matrix {
    pub(crate) store: Store,
    pub(crate) ins: usize,
    /// Outputs; of a gated matrix, those after the gate.
    pub(crate) outs: usize,
    pub(crate) merge: Merge,
}

/// The panels, by the kind of their numbers.
#[derive(Debug)]
pub(crate) enum Store {
    F32(Panels<f32>),
    F16(Panels<F16>),
    Bf16(Panels<Bf16>),
    Blocks(QuantWeights),
    Int8(QuantWeights),
}

impl Matrix {
    /// Packs sources of `ins` columns each, given with their numbers of rows.
    pub fn pack(
        pool: &mut ThreadPool,
        isa: Isa,
        parts: &[(usize, Numbers<'_>)],
        ins: usize,
        merge: Merge,
        form: Form,
    ) -> Result<Self, PackError> {
        for &(rows, numbers) in parts {
            if form == Form::Blocks && (numbers.bits().is_none() || numbers.bits() != parts[0].1.bits()) {
                return Err(PackError::Mixed);
            }
            let (found, expected) = match numbers {
                Numbers::F32(numbers) => (numbers.len(), rows * ins),
                Numbers::F16(numbers) | Numbers::Bf16(numbers) => (numbers.len(), rows * ins),
                Numbers::Blocks(kind, bytes) => match BlockType::from_ggml(kind) {
                    Some(blocks) if matches!(form, Form::Blocks | Form::Int8) && ins.is_multiple_of(BLOCK) => {
                        (bytes.len(), rows * blocks.row_bytes(ins))
                    }
                    _ => return Err(PackError::Blocks(kind)),
                },
            };
            if found != expected {
                return Err(PackError::Shape { rows, ins, expected, found });
            }
        }
        let rows: usize = parts.iter().map(|part| part.0).sum();
        let width = isa.panel();
        if merge == Merge::Gated && (parts.len() != 2 || parts[0].0 != parts[1].0) {
            return Err(PackError::Gate);
        }
        let outs = if merge == Merge::Gated { rows / 2 } else { rows };
        let places: Vec<_> = columns(isa, merge, outs).collect();
        let row = |column: usize| {
            let mut row = (*places.get(column)?)?;
            let part = parts.iter().find(|part| {
                let here = row < part.0;
                row -= if here { 0 } else { part.0 };
                here
            })?;
            Some((part.1, row))
        };
        let columns = places.len();
        let store = match form {
            Form::F32 => Store::F32(Panels::pack(pool, width, ins, columns, row)),
            Form::F16 => Store::F16(Panels::pack(pool, width, ins, columns, row)),
            Form::Bf16 => Store::Bf16(Panels::pack(pool, width, ins, columns, row)),
            Form::Blocks | Form::Int8 => {
                let bits = if parts.iter().all(|(_, numbers)| numbers.bits() == Some(Bits::Four)) { Bits::Four } else { Bits::Eight };
                let weights = QuantWeights::pack(pool, isa, bits, columns, ins, |column, buffer| match row(column) {
                    None => Source::Padding,
                    Some((Numbers::Blocks(kind, bytes), row)) => {
                        let kind = BlockType::from_ggml(kind).expect("checked above");
                        Source::Blocks(kind, &bytes[row * kind.row_bytes(ins)..][..kind.row_bytes(ins)])
                    }
                    Some((numbers, row)) => {
                        numbers.read_row(row, buffer);
                        Source::Floats
                    }
                });
                if form == Form::Blocks { Store::Blocks(weights) } else { Store::Int8(weights) }
            }
        };
        if let Store::F16(panels) = &store
            && let Some(place) = panels.numbers.iter().position(|x| x.to_f32().is_infinite())
        {
            let (panel, rest) = (place / (width * ins), place % (width * ins));
            let mut buffer = vec![0.0; ins];
            if let Some((numbers, row)) = row(panel * width + rest % width) {
                numbers.read_row(row, &mut buffer);
            }
            return Err(PackError::Overflow(buffer[rest / width]));
        }
        Ok(Self { store, ins, outs, merge })
    }

    /// Row `out` of the matrix, as an embedding. Not of a gated one.
    pub(crate) fn read_row(&self, out: usize, to: &mut [f32]) {
        assert!(out < self.outs, "there is no row {out}");
        match &self.store {
            Store::F32(panels) => panels.read_column(out, to),
            Store::F16(panels) => panels.read_column(out, to),
            Store::Bf16(panels) => panels.read_column(out, to),
            Store::Blocks(panels) | Store::Int8(panels) => panels.read_row(out, to),
        }
    }

    /// The matrix' row that each column of the panels is, the gate's rows before the others; `None` for columns that pad a panel.
    pub(crate) fn columns(&self, isa: Isa) -> impl Iterator<Item = Option<usize>> {
        columns(isa, self.merge, self.outs)
    }

    /// Whether it is of this shape.
    pub(crate) fn is(&self, outs: usize, ins: usize, merge: Merge) -> bool {
        (self.outs, self.ins, self.merge) == (outs, ins, merge)
    }

    /// How many panels there are.
    pub(crate) fn panels(&self, isa: Isa) -> usize {
        match self.merge {
            Merge::Stacked => self.outs.div_ceil(isa.panel()),
            Merge::Gated => self.outs.div_ceil(isa.panel() / 2),
        }
    }
}

fn columns(isa: Isa, merge: Merge, outs: usize) -> impl Iterator<Item = Option<usize>> {
    let width = isa.panel();
    // Of a gated matrix, half of a panel's columns are the gate's.
    let each = if merge == Merge::Gated { width / 2 } else { width };
    (0..outs.div_ceil(each) * width).map(move |column| {
        let row = column / width * each + column % width % each;
        (row < outs).then_some(row + column % width / each * outs)
    })
}
