//! Blocks in host memory, which hold the KV of swapped sequences.

/// The free blocks of the host pool. Each sequence knows the host blocks it holds.
#[derive(Debug)]
pub(crate) struct SwapPool {
    count: u32,
    free: Vec<u32>,
}

impl SwapPool {
    pub(crate) fn new(count: u32) -> Self {
        Self { count, free: (0..count).rev().collect() }
    }

    pub(crate) fn len(&self) -> usize {
        self.count as usize
    }

    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// Takes a free block. The caller must check [`free`](Self::free) first.
    pub(crate) fn take(&mut self) -> u32 {
        self.free.pop().expect("a free host block")
    }

    /// Releases `blocks`. Only later steps may write them.
    pub(crate) fn release(&mut self, blocks: &mut Vec<u32>) {
        self.free.append(blocks);
    }

    /// Panics unless `held` and the free blocks are all blocks, each once.
    pub(crate) fn check(&self, held: impl Iterator<Item = u32>) {
        let mut all: Vec<u32> = self.free.iter().copied().chain(held).collect();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..self.count), "a host block is lost or held twice");
    }
}
