//! ggml's block types whose codes are rows of a table, the type's grid: `IQ1_S` to `IQ3_S`.
//!
//! A block has 256 weights. An index selects 4 or 8 weights of the grid, and a bit for each of them its sign. The grids are not part of this
//! crate: [`provide_grid`] gets them from the `gguf` package, before the first tensor of the type is packed.

use std::sync::OnceLock;

/// Number of weights in a block of a K type, or of a type with a grid.
pub(crate) const SUPER: usize = 256;
/// Number of weights of an index in a word of the table.
pub(crate) const QUAD: usize = 4;

/// A type with a grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types)]
pub(crate) enum GridType {
    IQ2_XXS,
    IQ2_XS,
    IQ3_XXS,
    IQ1_S,
    IQ3_S,
    IQ2_S,
    IQ1_M,
}

/// The grids, in the order of [`GridType::ALL`].
static GRIDS: [OnceLock<Grid>; 7] = [const { OnceLock::new() }; 7];

/// The reason why a grid is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GridError {
    /// The type has no grid.
    #[error("ggml type {0} has no grid")]
    Type(u32),
    /// The grid has another number of values, or values that the type cannot have.
    #[error("this is not the grid of ggml type {0}")]
    Values(u32),
}

/// Sets the grid of a ggml type, \[entries\]\[weights of an entry\]. Does nothing if the type has one already.
///
/// # Errors
///
/// [`GridError`] if the type has no grid, or another one.
pub fn provide_grid(number: u32, values: &[i8]) -> Result<(), GridError> {
    let kind = GridType::ALL.into_iter().find(|kind| kind.number() == number).ok_or(GridError::Type(number))?;
    let allowed = if kind.has_signs() { 1..=kind.offset() as i8 } else { -1..=1 };
    if values.len() != kind.entries() * kind.weights() || !values.iter().all(|value| allowed.contains(value)) {
        return Err(GridError::Values(number));
    }
    kind.slot().get_or_init(|| Grid::new(kind, values));
    Ok(())
}

/// A type's table of values.
#[derive(Debug)]
pub(crate) struct Grid {
    /// Magnitudes, or codes if they get no signs.
    words: [Vec<u32>; 2],
    indexes: usize,
}

impl Grid {
    /// Makes the words of all indexes. Types without signs have a bit in the index that selects one of two deltas.
    fn new(kind: GridType, values: &[i8]) -> Self {
        let indexes = 1 << kind.index_bits();
        let value = |index: usize, weight: usize| {
            let value = values[index % kind.entries() * kind.weights() + weight];
            if kind.has_signs() {
                return value as u8;
            }
            let delta = if index < kind.entries() { 1 } else { -1 };
            ((8 * value + delta) as u8).wrapping_add(kind.offset())
        };
        let words = [[0, 1, 2, 3], [0, 2, 1, 3]].map(|order| {
            let word = |quad: usize, index: usize| u32::from_le_bytes(order.map(|i| value(index, quad * QUAD + i)));
            (0..kind.weights() / QUAD).flat_map(|quad| (0..indexes).map(move |index| word(quad, index))).collect()
        });
        Self { words, indexes }
    }

    /// Four weights of each index, a byte each: those of `quad`, which is 0 or 1 in a grid of 8 weights. If they get no signs, they are codes.
    /// The second and the third are exchanged if `crossed`.
    pub(crate) fn words(&self, quad: usize, crossed: bool) -> &[u32] {
        &self.words[usize::from(crossed)][quad * self.indexes..][..self.indexes]
    }
}

/// A block of the file, with the indexes not looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GridBlock {
    /// In half precision.
    pub(crate) scale: u16,
    /// Of each 16 weights: the scale is multiplied by twice the number plus 1.
    pub(crate) scales: [u8; 16],
    /// For each 4 or 8 weights.
    pub(crate) indexes: [u16; SUPER / 4],
    /// A bit for each weight that is negative.
    pub(crate) signs: [u8; SUPER / 8],
}

impl GridType {
    pub(crate) const ALL: [Self; 7] = [Self::IQ2_XXS, Self::IQ2_XS, Self::IQ3_XXS, Self::IQ1_S, Self::IQ3_S, Self::IQ2_S, Self::IQ1_M];

    /// ggml's type number.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::IQ2_XXS => 16,
            Self::IQ2_XS => 17,
            Self::IQ3_XXS => 18,
            Self::IQ1_S => 19,
            Self::IQ3_S => 21,
            Self::IQ2_S => 22,
            Self::IQ1_M => 29,
        }
    }

    /// Bytes of a block in the file.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::IQ2_XXS => 66,
            Self::IQ2_XS => 74,
            Self::IQ3_XXS => 98,
            Self::IQ1_S => 50,
            Self::IQ3_S => 110,
            Self::IQ2_S => 82,
            Self::IQ1_M => 56,
        }
    }

    /// Number of weights of an index.
    pub(crate) fn weights(self) -> usize {
        match self {
            Self::IQ3_XXS | Self::IQ3_S => 4,
            _ => 8,
        }
    }

    /// Number of bits of an index.
    pub(crate) fn index_bits(self) -> usize {
        match self {
            Self::IQ2_XXS | Self::IQ3_XXS => 8,
            Self::IQ2_XS | Self::IQ3_S => 9,
            Self::IQ2_S => 10,
            Self::IQ1_S | Self::IQ1_M => 12,
        }
    }

    /// Number of entries of the grid.
    fn entries(self) -> usize {
        1 << (self.index_bits() - usize::from(!self.has_signs()))
    }

    /// Whether the grid has magnitudes.
    pub(crate) fn has_signs(self) -> bool {
        !matches!(self, Self::IQ1_S | Self::IQ1_M)
    }

    /// What a code is above its value: the largest magnitude. A smaller number costs sums of products fewer bits.
    pub(crate) fn offset(self) -> u8 {
        match self {
            Self::IQ2_XXS | Self::IQ2_XS | Self::IQ2_S => 43,
            Self::IQ3_XXS => 62,
            Self::IQ3_S => 15,
            Self::IQ1_S | Self::IQ1_M => 9,
        }
    }

    /// Number of weights that share a scale.
    pub(crate) fn group(self) -> usize {
        match self {
            Self::IQ2_XS | Self::IQ2_S | Self::IQ1_M => 16,
            _ => 32,
        }
    }

    /// What the scale of a block is multiplied by, for the values of codes as integers.
    pub(crate) fn unit(self) -> f32 {
        match self {
            Self::IQ3_XXS => 0.25,
            Self::IQ3_S => 1.0,
            _ => 0.125,
        }
    }

    /// The grid, if it is known.
    pub(crate) fn grid(self) -> Option<&'static Grid> {
        self.slot().get()
    }

    fn slot(self) -> &'static OnceLock<Grid> {
        &GRIDS[self as usize]
    }

    /// Reads a block of the file.
    pub(crate) fn read(self, bytes: &[u8]) -> GridBlock {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let mut block = GridBlock { scale: half(0), scales: [0; 16], indexes: [0; SUPER / 4], signs: [0; SUPER / 8] };
        let low = if self == Self::IQ1_M { bytes } else { &bytes[2..] };
        block.indexes[..SUPER / self.weights()].iter_mut().zip(low).for_each(|(index, &byte)| *index = byte.into());
        match self {
            Self::IQ2_XXS => {
                for i in 0..8 {
                    let at = 2 + 8 * i;
                    (0..4).for_each(|j| block.indexes[4 * i + j] = bytes[at + j].into());
                    block.read_signs_and_scale(i, &bytes[at + 4..]);
                }
            }
            Self::IQ2_XS => {
                for i in 0..32 {
                    block.indexes[i] = half(2 + 2 * i) & 511;
                    block.signs[i] = with_parity(half(2 + 2 * i) >> 9);
                }
                block.read_scales(&bytes[66..]);
            }
            Self::IQ3_XXS => (0..8).for_each(|i| block.read_signs_and_scale(i, &bytes[66 + 4 * i..])),
            Self::IQ2_S => {
                block.signs.copy_from_slice(&bytes[34..66]);
                (0..32).for_each(|i| block.indexes[i] |= u16::from(bytes[66 + i / 4] >> (2 * (i % 4)) & 3) << 8);
                block.read_scales(&bytes[74..]);
            }
            Self::IQ3_S => {
                (0..64).for_each(|i| block.indexes[i] |= u16::from(bytes[66 + i / 8] >> (i % 8) & 1) << 8);
                block.signs.copy_from_slice(&bytes[74..106]);
                (0..16).for_each(|i| block.scales[i] = bytes[106 + i / 4] >> (i / 2 % 2 * 4) & 15);
            }
            Self::IQ1_S => {
                for i in 0..8 {
                    let high = half(34 + 2 * i);
                    (0..4).for_each(|j| block.indexes[4 * i + j] |= (high >> (3 * j) & 7 | high >> 15 << 3) << 8);
                    block.scales[2 * i..][..2].fill((high >> 12 & 7) as u8);
                }
            }
            Self::IQ1_M => {
                (0..32).for_each(|i| block.indexes[i] |= u16::from(bytes[32 + i / 2] >> (i % 2 * 4) & 15) << 8);
                let words = [48, 50, 52, 54].map(half);
                (0..16).for_each(|i| block.scales[i] = (words[i / 4] >> (3 * (i % 4)) & 7) as u8);
                block.scale = (0..).zip(words).fold(0, |scale, (i, word)| scale | word >> 12 << (4 * i));
            }
        }
        block
    }

    /// Looks up the codes of a block.
    ///
    /// # Panics
    ///
    /// If the grid is not known.
    pub(crate) fn codes(self, block: &GridBlock) -> [u8; SUPER] {
        let grid = self.grid().expect("types without a grid are refused");
        let mut all = [0; SUPER];
        for (i, codes) in all.as_chunks_mut::<QUAD>().0.iter_mut().enumerate() {
            let each = self.weights() / QUAD;
            *codes = grid.words(i % each, false)[usize::from(block.indexes[i / each])].to_le_bytes();
            if self.has_signs() {
                let signs = block.signs[i / 2] >> (i % 2 * QUAD);
                for (j, code) in codes.iter_mut().enumerate() {
                    *code = if signs >> j & 1 == 1 { self.offset() - *code } else { self.offset() + *code };
                }
            }
        }
        all
    }
}

impl GridBlock {
    /// Reads the signs of 32 weights, 7 bits for each 8, and their scale from 4 bytes.
    fn read_signs_and_scale(&mut self, i: usize, bytes: &[u8]) {
        let word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        (0..4).for_each(|j| self.signs[4 * i + j] = with_parity((word >> (7 * j)) as u16));
        self.scales[2 * i..][..2].fill((word >> 28) as u8);
    }

    /// Reads the scales of each 16 weights.
    fn read_scales(&mut self, bytes: &[u8]) {
        (0..16).for_each(|i| self.scales[i] = bytes[i / 2] >> (i % 2 * 4) & 15);
    }
}

/// Eight signs, of which an even number is set, from the lowest seven bits.
fn with_parity(bits: u16) -> u8 {
    let bits = (bits & 127) as u8;
    bits | ((bits.count_ones() as u8 & 1) << 7)
}
