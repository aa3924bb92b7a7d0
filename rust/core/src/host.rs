//! Blocks in host memory: where preempted sequences' KV waits.

/// The free blocks of the host pool. What is in the others, their sequences know.
#[derive(Debug)]
pub(crate) struct HostPool {
    count: u32,
    free: Vec<u32>,
}

impl HostPool {
    pub(crate) fn new(count: u32) -> Self {
        Self { count, free: (0..count).rev().collect() }
    }

    pub(crate) fn len(&self) -> usize {
        self.count as usize
    }

    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// A free block; the caller has asked [`free`](Self::free) before.
    pub(crate) fn take(&mut self) -> u32 {
        self.free.pop().expect("a free host block")
    }

    /// Gives back all of `blocks`. A later step may write them, no earlier one.
    pub(crate) fn release(&mut self, blocks: &mut Vec<u32>) {
        self.free.append(blocks);
    }

    /// Panics unless `held` and the free ones are all there are, each once.
    pub(crate) fn check(&self, held: impl Iterator<Item = u32>) {
        let mut all: Vec<u32> = self.free.iter().copied().chain(held).collect();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..self.count), "a host block is lost or held twice");
    }
}
