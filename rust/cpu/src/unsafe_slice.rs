//! A slice that several threads write at once, each its own part.

use std::marker::PhantomData;

use crate::aligned::Pod;

/// Memory that several threads write at once, each its own part of it.
#[derive(Debug)]
pub(crate) struct UnsafeSlice<'a, T> {
    start: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

impl<T> Clone for UnsafeSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for UnsafeSlice<'_, T> {}

// SAFETY: it is a borrowed slice of numbers, and those who take parts of it promise that they do not overlap.
unsafe impl<T: Pod> Send for UnsafeSlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Pod> Sync for UnsafeSlice<'_, T> {}

impl<'a, T: Pod> UnsafeSlice<'a, T> {
    /// A view of a slice.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), life: PhantomData }
    }

    /// The numbers from `start` on, to read.
    ///
    /// # Safety
    ///
    /// Nobody writes them while the slice lives.
    #[inline(always)]
    pub(crate) unsafe fn read(self, start: usize, len: usize) -> &'a [T] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: within bounds, and the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.add(start), len) }
    }

    /// The numbers from `start` on, to write.
    ///
    /// # Safety
    ///
    /// Nobody else reads or writes them while the slice lives.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn write(self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: within bounds, and the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aligned::AlignedVec;

    #[test]
    fn threads_write_their_own_parts() {
        let mut lines = AlignedVec::<u16>::zeros(100);
        let shared = lines.shared();
        std::thread::scope(|scope| {
            for part in 0..4 {
                scope.spawn(move || {
                    // SAFETY: each thread has its own quarter.
                    let mine = unsafe { shared.write(part * 25, 25) };
                    mine.fill(part as u16 + 1);
                });
            }
        });
        // SAFETY: nobody writes any more.
        assert!(unsafe { shared.read(25, 50) }.iter().enumerate().all(|(i, &x)| usize::from(x) == 2 + i / 25));
        assert!(lines.iter().enumerate().all(|(i, &x)| usize::from(x) == 1 + i / 25));
        // SAFETY: nothing, of what nobody else has.
        assert!(unsafe { UnsafeSlice::new(&mut lines[..0]).write(0, 0) }.is_empty());
    }

    #[test]
    fn parts_outside_are_refused() {
        let mut numbers = [0_u8; 8];
        let shared = UnsafeSlice::new(&mut numbers);
        for (start, len) in [(0, 9), (8, 1), (9, 0), (usize::MAX, 2), (2, usize::MAX)] {
            // SAFETY: nobody else has the numbers.
            assert!(std::panic::catch_unwind(|| unsafe { shared.read(start, len) }.len()).is_err());
            // SAFETY: as above.
            assert!(std::panic::catch_unwind(|| unsafe { shared.write(start, len) }.len()).is_err());
        }
        // SAFETY: as above.
        assert_eq!(unsafe { shared.read(8, 0) }.len(), 0);
    }
}
