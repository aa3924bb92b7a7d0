//! The keys and values of all tokens, in blocks that requests own.

use std::alloc::{Layout, alloc_zeroed};
use std::ops::{Deref, DerefMut};
use std::ptr::slice_from_raw_parts_mut;

use thiserror::Error;

use crate::aligned::Pod;
use crate::half;
use crate::simd::Simd;
use crate::unsafe_slice::UnsafeSlice;

#[cfg(test)]
mod tests;

/// A token's values are padded to a multiple of this many, the widest register's lanes, so that kernels need no remainders.
const PADDING: usize = 16;

/// Bytes of a cache line, at which pages begin.
const LINE: usize = 64;

/// How large a cache is. No number is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers of the model.
    pub layers: usize,
    /// Blocks that sequences can own.
    pub blocks: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// Numbers of a head.
    pub head_dim: usize,
}

/// How numbers are stored in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvForm {
    /// As they are.
    F32,
    /// In IEEE half precision.
    F16,
    /// As integers from -127 to 127, with one fp32 scale for a token's keys, and one for its values, of each head.
    Int8,
}

/// The system refuses the memory that a cache asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the system has no {:.1} GiB of memory for KV blocks: ask for fewer", *bytes as f64 / f64::from(1 << 30))]
pub struct OutOfMemory {
    /// Bytes that were asked for; the largest number where there are more.
    pub bytes: usize,
}

/// Keys and values of all layers, and a second pool of blocks that only keeps what is swapped out.
///
/// A page is a block's part in one layer and head: for [`KvForm::Int8`] the scales of the keys and of the values, \[2\]\[block size\];
/// the values, \[block size\]\[head dim, padded\]; the keys, \[head dim\]\[block size\]. So scores are computed for several tokens at
/// once, and outputs for several dimensions: nothing is summed across a register.
pub struct KvCache {
    shape: KvShape,
    form: KvForm,
    /// \[layers\]\[blocks\]\[heads\] pages.
    device: Zeroed,
    /// \[blocks\]\[layers\]\[heads\] pages.
    host: Zeroed,
}

impl KvCache {
    /// A cache of zeros, with `host_blocks` more to swap to. It takes memory only as blocks are written.
    pub fn new(shape: KvShape, form: KvForm, host_blocks: usize) -> Result<Self, OutOfMemory> {
        let bytes = |blocks: usize| blocks.checked_mul(Self::bytes_per_block(shape, form)).ok_or(OutOfMemory { bytes: usize::MAX });
        Ok(Self { shape, form, device: Zeroed::new(bytes(shape.blocks)?)?, host: Zeroed::new(bytes(host_blocks)?)? })
    }

    /// Memory that a block of all layers takes.
    pub fn bytes_per_block(shape: KvShape, form: KvForm) -> usize {
        shape.layers * shape.kv_heads * Page::new(shape, form).bytes
    }

    /// How large it is.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Copies whole blocks, (source, target), one pair after the other. Panics where there is no such block.
    pub fn copy(&mut self, pairs: &[(u32, u32)]) {
        for &(source, target) in pairs {
            for layer in 0..self.shape.layers {
                let [source, target] = [source, target].map(|block| self.part(layer, block));
                self.device.copy_within(source, target.start);
            }
        }
    }

    /// Copies blocks to the host's pool, (block, host block), then others from it, (host block, block). Panics where there is no such block.
    pub fn swap(&mut self, outs: &[(u32, u32)], ins: &[(u32, u32)]) {
        for layer in 0..self.shape.layers {
            for &(block, host) in outs {
                let (inside, outside) = (self.part(layer, block), self.host_part(layer, host));
                self.host[outside].copy_from_slice(&self.device[inside]);
            }
            for &(host, block) in ins {
                let (inside, outside) = (self.part(layer, block), self.host_part(layer, host));
                self.device[inside].copy_from_slice(&self.host[outside]);
            }
        }
    }

    /// A view that threads may write to.
    pub(crate) fn pages(&mut self) -> Pages<'_> {
        Pages { cells: UnsafeSlice::new(&mut self.device), shape: self.shape, form: self.form, page: Page::new(self.shape, self.form) }
    }

    /// Where a block's pages of one layer lie.
    fn part(&self, layer: usize, block: u32) -> std::ops::Range<usize> {
        assert!((block as usize) < self.shape.blocks, "there is no block {block}");
        let bytes = Self::bytes_per_block(self.shape, self.form) / self.shape.layers;
        let start = (layer * self.shape.blocks + block as usize) * bytes;
        start..start + bytes
    }

    /// Where a swapped block's pages of one layer lie.
    fn host_part(&self, layer: usize, block: u32) -> std::ops::Range<usize> {
        let bytes = Self::bytes_per_block(self.shape, self.form) / self.shape.layers;
        let start = (block as usize * self.shape.layers + layer) * bytes;
        start..start + bytes
    }
}

/// Where in a page things lie, in bytes.
#[derive(Clone, Copy, Debug)]
struct Page {
    values: usize,
    keys: usize,
    bytes: usize,
}

impl Page {
    fn new(shape: KvShape, form: KvForm) -> Self {
        let (cell, scales) = match form {
            KvForm::F32 => (size_of::<f32>(), 0),
            KvForm::F16 => (size_of::<u16>(), 0),
            KvForm::Int8 => (size_of::<i8>(), 2 * shape.block_size * size_of::<f32>()),
        };
        let keys = scales + shape.block_size * shape.head_dim.next_multiple_of(PADDING) * cell;
        Self { values: scales, keys, bytes: (keys + shape.head_dim * shape.block_size * cell).next_multiple_of(LINE) }
    }
}

/// A cache that a team of threads writes and reads together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pages<'a> {
    cells: UnsafeSlice<'a, u8>,
    pub(crate) shape: KvShape,
    pub(crate) form: KvForm,
    page: Page,
}

/// A page's parts; what they hold is told in [`KvCache`].
#[derive(Clone, Copy)]
pub(crate) struct Parts<C> {
    /// Of the keys, then of the values; meaningless unless [`Cell::SCALED`].
    pub(crate) scales: *const f32,
    pub(crate) values: *const C,
    pub(crate) keys: *const C,
}

impl Pages<'_> {
    /// Numbers from one token's values to the next one's.
    #[inline(always)]
    pub(crate) fn padded(self) -> usize {
        self.shape.head_dim.next_multiple_of(PADDING)
    }

    /// Stores a token's keys and values \[heads\]\[head dim\] in one layer; its slot is block * block size + offset.
    ///
    /// # Safety
    ///
    /// Nobody else reads or writes the same slot meanwhile.
    pub(crate) unsafe fn write(self, layer: usize, slot: usize, keys: &[f32], values: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.form {
                KvForm::F32 => self.write_cells::<f32>(layer, slot, keys, values),
                KvForm::F16 => self.write_cells::<u16>(layer, slot, keys, values),
                KvForm::Int8 => self.write_cells::<i8>(layer, slot, keys, values),
            }
        }
    }

    /// # Safety
    ///
    /// As above, and `C` is of the cache's form.
    unsafe fn write_cells<C: Cell>(self, layer: usize, slot: usize, keys: &[f32], values: &[f32]) {
        let KvShape { kv_heads, block_size, head_dim, .. } = self.shape;
        let (block, offset) = (slot / block_size, slot % block_size);
        assert!(keys.len() == kv_heads * head_dim && values.len() == keys.len());
        for (head, (keys, values)) in keys.chunks_exact(head_dim).zip(values.chunks_exact(head_dim)).enumerate() {
            let start = self.start(layer, block, head);
            // SAFETY: the cells and scales of a slot are its own; all are aligned, as pages and their parts are.
            unsafe {
                let inverse = self.put_scale::<C>(start, offset, keys);
                for (d, &x) in keys.iter().enumerate() {
                    self.put(start + self.page.keys + (d * block_size + offset) * size_of::<C>(), C::store(x, inverse));
                }
                let inverse = self.put_scale::<C>(start, block_size + offset, values);
                for (d, &x) in values.iter().enumerate() {
                    self.put(start + self.page.values + (offset * self.padded() + d) * size_of::<C>(), C::store(x, inverse));
                }
            }
        }
    }

    /// Stores the scale of some numbers of a token, where there is one, and returns what to multiply them by.
    #[inline(always)]
    unsafe fn put_scale<C: Cell>(self, start: usize, index: usize, numbers: &[f32]) -> f32 {
        if !C::SCALED {
            return 1.0;
        }
        // Compared as integers, what is not a number is the largest, and stays in sight.
        let largest = f32::from_bits(numbers.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7fff_ffff)));
        // SAFETY: the caller's promise.
        unsafe { self.put(start + index * size_of::<f32>(), largest / 127.0) };
        if largest > 0.0 { 127.0 / largest } else { 0.0 }
    }

    #[inline(always)]
    unsafe fn put<T>(self, at: usize, x: T) {
        // SAFETY: the caller's promise.
        unsafe { self.cells.write(at, size_of::<T>()).as_mut_ptr().cast::<T>().write(x) }
    }

    /// A page to read.
    ///
    /// # Safety
    ///
    /// `C` is of the cache's form, and nobody writes the page while it is read.
    #[inline(always)]
    pub(crate) unsafe fn page<C: Cell>(self, layer: usize, block: usize, head: usize) -> Parts<C> {
        // SAFETY: the caller's promise; the offsets are within the page.
        unsafe {
            let page = self.cells.read(self.start(layer, block, head), self.page.bytes).as_ptr();
            Parts { scales: page.cast(), values: page.add(self.page.values).cast(), keys: page.add(self.page.keys).cast() }
        }
    }

    /// Where a page begins. Panics where there is no such block.
    #[inline(always)]
    fn start(self, layer: usize, block: usize, head: usize) -> usize {
        assert!(block < self.shape.blocks, "there is no block {block}");
        ((layer * self.shape.blocks + block) * self.shape.kv_heads + head) * self.page.bytes
    }
}

/// A number as it is stored.
pub(crate) trait Cell: Pod {
    /// Whether there are scales.
    const SCALED: bool;

    /// What is stored for `x`; `inverse` is one over the scale.
    fn store(x: f32, inverse: f32) -> Self;

    /// Reads a register of them, without the scale. They need not be aligned.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F;
}

impl Cell for f32 {
    const SCALED: bool = false;

    #[inline(always)]
    fn store(x: f32, _: f32) -> Self {
        x
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { s.load(p) }
    }
}

impl Cell for u16 {
    const SCALED: bool = false;

    #[inline(always)]
    fn store(x: f32, _: f32) -> Self {
        half::from_f32(x)
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { s.load_f16(p) }
    }
}

impl Cell for i8 {
    const SCALED: bool = true;

    /// Added to 1.5 * 2^23, a number is rounded to an integer, ties to even, that the lowest bits hold.
    #[inline(always)]
    fn store(x: f32, inverse: f32) -> Self {
        (x * inverse + 12_582_912.0).to_bits() as i8
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { s.load_i8(p) }
    }
}

/// Zeros that begin at a cache line.
struct Zeroed {
    memory: Box<[u8]>,
    start: usize,
    len: usize,
}

impl Zeroed {
    fn new(len: usize) -> Result<Self, OutOfMemory> {
        let refused = OutOfMemory { bytes: len };
        let size = len.checked_add(LINE).ok_or(refused)?;
        // Unaligned, since the allocator would clear aligned memory by itself, page for page.
        let layout = Layout::array::<u8>(size).map_err(|_| refused)?;
        // SAFETY: the layout is of one byte at least, and is that of a slice of bytes.
        let memory = unsafe {
            let memory = alloc_zeroed(layout);
            if memory.is_null() {
                return Err(refused);
            }
            Box::from_raw(slice_from_raw_parts_mut(memory, size))
        };
        let start = memory.as_ptr().align_offset(LINE);
        Ok(Self { memory, start, len })
    }
}

impl Deref for Zeroed {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }
}

impl DerefMut for Zeroed {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}
