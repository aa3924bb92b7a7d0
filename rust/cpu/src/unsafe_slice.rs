//! A slice that several threads can write at once. Each thread writes its own part.

use std::marker::PhantomData;

use crate::pod::Pod;

/// A mutable slice that several threads can use at once. Callers guarantee that no part is written by one thread while another uses it.
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

// SAFETY: it borrows a slice of numbers, and callers of `read` and `write` guarantee that written parts do not overlap others.
unsafe impl<T: Pod> Send for UnsafeSlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Pod> Sync for UnsafeSlice<'_, T> {}

impl<'a, T: Pod> UnsafeSlice<'a, T> {
    /// Creates a view of a slice.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), life: PhantomData }
    }

    /// Returns the address of `len` numbers from `start`. Panics if they do not exist.
    #[inline(always)]
    pub(crate) fn pointer(self, start: usize, len: usize) -> *mut T {
        assert!(start <= self.len && len <= self.len - start);
        self.start.wrapping_add(start)
    }

    /// Returns `len` numbers from `start` for reading.
    ///
    /// # Safety
    ///
    /// No thread writes these numbers while the slice lives.
    #[inline(always)]
    pub(crate) unsafe fn read(self, start: usize, len: usize) -> &'a [T] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: the range is within bounds, and the caller guarantees the rest.
        unsafe { std::slice::from_raw_parts(self.start.add(start), len) }
    }

    /// Returns `len` numbers from `start` for writing.
    ///
    /// # Safety
    ///
    /// No other thread reads or writes these numbers while the slice lives.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn write(self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: the range is within bounds, and the caller guarantees the rest.
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
                    // SAFETY: each thread writes its own quarter.
                    let mine = unsafe { shared.write(part * 25, 25) };
                    mine.fill(part as u16 + 1);
                });
            }
        });
        // SAFETY: all writing threads have ended.
        assert!(unsafe { shared.read(25, 50) }.iter().enumerate().all(|(i, &x)| usize::from(x) == 2 + i / 25));
        assert!(lines.iter().enumerate().all(|(i, &x)| usize::from(x) == 1 + i / 25));
        // SAFETY: the slice is empty, and no other view of it exists.
        assert!(unsafe { UnsafeSlice::new(&mut lines[..0]).write(0, 0) }.is_empty());
    }

    #[test]
    fn parts_outside_are_refused() {
        let mut numbers = [0_u8; 8];
        let shared = UnsafeSlice::new(&mut numbers);
        for (start, len) in [(0, 9), (8, 1), (9, 0), (usize::MAX, 2), (2, usize::MAX)] {
            // SAFETY: no other thread uses the numbers.
            assert!(std::panic::catch_unwind(|| unsafe { shared.read(start, len) }.len()).is_err());
            // SAFETY: as above.
            assert!(std::panic::catch_unwind(|| unsafe { shared.write(start, len) }.len()).is_err());
        }
        // SAFETY: as above.
        assert_eq!(unsafe { shared.read(8, 0) }.len(), 0);
    }
}
