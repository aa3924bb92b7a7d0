//! The seam between linear layers and the arithmetic of their products.
//!
//! A layer cuts its work into panels of weights and tiles of rows, and finishes the sums with an epilogue. A [`Gemm`] packs the rows and
//! sums the products. Each kind of arithmetic has its own layouts of weights and of rows.

use std::ops::Range;

use crate::aligned::AlignedVec;
use crate::simd::Isa;

/// Maximum panels that a thread multiplies at once.
pub(crate) const STRIP: usize = 8;
/// Maximum rows that use a panel's slice while it is in the cache.
pub(crate) const GROUP: usize = 128;

/// Rows that are packed for one kind of arithmetic. A row's results do not depend on the other rows, on their number, or on the tiles.
pub(crate) trait Gemm: Copy {
    /// The panels of weights that these rows are multiplied by.
    type Weights;

    /// Packs `numbers` as row `row` of the tile with the rows `tile`.
    ///
    /// # Safety
    ///
    /// No other thread packs or reads the tile's rows meanwhile.
    unsafe fn pack(self, isa: Isa, tile: Range<usize>, row: usize, numbers: &[f32]);

    /// Puts a tile, whose rows of `ins` numbers are all packed, in the order of the products, if that is another one.
    ///
    /// # Safety
    ///
    /// As for [`Gemm::pack`].
    unsafe fn seal(self, _isa: Isa, _tile: &Range<usize>, _ins: usize) {}

    /// Multiplies tiles by panels. Writes the result to `sums`, \[panels\]\[rows\]\[columns of a panel\].
    ///
    /// # Safety
    ///
    /// The rows are packed and have the weights' number of inputs. No thread packs rows of these tiles meanwhile.
    unsafe fn multiply(
        self,
        isa: Isa,
        weights: &Self::Weights,
        panels: Range<usize>,
        tiles: &Tiles,
        sums: &mut [f32],
        scratch: &mut Scratch,
    );
}

/// Per-thread scratch memory.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Weights that became fp32.
    pub(crate) expanded: AlignedVec<f32>,
    /// Pairs of bfloat16 weights, and their scales and shifts.
    pub(crate) pairs: AlignedVec<u32>,
    pub(crate) scales: AlignedVec<f32>,
    /// Sums of matrix tiles.
    pub(crate) sums: AlignedVec<f32>,
}

/// Splits inputs into equal slices of at most `depth`. Each slice is a multiple of `unit`.
pub(crate) fn slices(ins: usize, unit: usize, depth: usize) -> impl Iterator<Item = Range<usize>> {
    let each = ins.div_ceil(ins.div_ceil(depth).max(1)).next_multiple_of(unit).clamp(1, depth);
    (0..ins).step_by(each).map(move |start| start..ins.min(start + each))
}

/// Splits rows into as few tiles as possible, with sizes as equal as possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiling {
    first: usize,
    rows: usize,
    tiles: usize,
}

impl Tiling {
    /// Tiles of at most `most` rows.
    pub(crate) fn new(rows: Range<usize>, most: usize) -> Self {
        Self { first: rows.start, rows: rows.len(), tiles: rows.len().div_ceil(most) }
    }

    pub(crate) fn tiles(self) -> usize {
        self.tiles
    }

    /// The rows of a tile.
    #[inline(always)]
    pub(crate) fn range(self, tile: usize) -> Range<usize> {
        let (each, more) = (self.rows / self.tiles, self.rows % self.tiles);
        let start = self.first + tile * each + tile.min(more);
        start..start + each + usize::from(tile < more)
    }
}

/// Rows that are multiplied by one matrix while a panel's slice is in the cache: at most [`GROUP`] rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RowGroup {
    /// Index of the matrix: an expert, or 0 for an ordinary layer.
    pub(crate) matrix: usize,
    pub(crate) rows: Range<usize>,
}

impl RowGroup {
    /// Splits the rows of a matrix into as few groups as possible.
    pub(crate) fn split(matrix: usize, rows: Range<usize>) -> impl Iterator<Item = Self> {
        let tiling = Tiling::new(rows, GROUP);
        (0..tiling.tiles()).map(move |group| Self { matrix, rows: tiling.range(group) })
    }

    /// The group's tiles of at most `most` rows.
    pub(crate) fn tiles(&self, most: usize) -> Tiles {
        let tiling = Tiling::new(self.rows.clone(), most);
        Tiles { tiling, range: 0..tiling.tiles() }
    }
}

/// Consecutive tiles, at least one.
#[derive(Clone, Debug)]
pub(crate) struct Tiles {
    pub(crate) tiling: Tiling,
    pub(crate) range: Range<usize>,
}

impl Tiles {
    /// The rows of all tiles.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.tiling.range(self.range.start).start..self.tiling.range(self.range.end - 1).end
    }

    /// The rows of consecutive tiles of the same height, that height, and the index of the first tile among these tiles.
    pub(crate) fn of_equal_height(&self) -> impl Iterator<Item = (Range<usize>, usize, usize)> {
        let first = self.tiling.range(self.range.start).len();
        let end = self.range.clone().find(|&tile| self.tiling.range(tile).len() < first).unwrap_or(self.range.end);
        [self.range.start..end, end..self.range.end].into_iter().filter(|tiles| !tiles.is_empty()).map(|range| {
            let tiles = Self { tiling: self.tiling, range };
            (tiles.rows(), tiles.rows().len() / tiles.range.len(), tiles.range.start - self.range.start)
        })
    }

    /// The rows of each tile.
    pub(crate) fn each(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let tiling = self.tiling;
        self.range.clone().map(move |tile| tiling.range(tile))
    }
}
