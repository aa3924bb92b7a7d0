//! Memory that begins at a cache line, and memory that a team of threads writes together.

use std::alloc::{self, Layout};
use std::cell::Cell;
use std::marker::PhantomData;

/// 64 bytes, aligned.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A kind of number that any bytes are a value of.
///
/// # Safety
///
/// Every pattern of bits must be a value, without padding.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: all patterns of bits are numbers.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for i8 {}
// SAFETY: as above.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for i16 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}

/// Numbers that begin at a cache line; zero at first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lines<T> {
    memory: Box<[Line]>,
    len: usize,
    kind: PhantomData<T>,
}

impl<T: Plain> Lines<T> {
    /// `len` zeros.
    pub(crate) fn zeros(len: usize) -> Self {
        let bytes = Layout::array::<T>(len).expect("less than all memory").size();
        let count = bytes.div_ceil(size_of::<Line>());
        let layout = Layout::array::<Line>(count).expect("less than all memory");
        let memory = if count == 0 {
            Box::default()
        } else {
            // SAFETY: the layout is that of `count` lines, not of none, and zeros are a line.
            unsafe {
                let start = alloc::alloc_zeroed(layout).cast::<Line>();
                if start.is_null() {
                    alloc::handle_alloc_error(layout);
                }
                Box::from_raw(std::ptr::slice_from_raw_parts_mut(start, count))
            }
        };
        Self { memory, len, kind: PhantomData }
    }

    /// Makes room for `len` numbers at least. What was there is lost if there was less room.
    pub(crate) fn reserve(&mut self, len: usize) {
        if self.len < len {
            *self = Self::zeros(len);
        }
    }

    /// A view that threads may write to.
    pub(crate) fn shared(&mut self) -> Shared<'_, T> {
        Shared { start: self.as_mut_ptr(), len: self.len, life: PhantomData }
    }
}

impl<T: Plain> std::ops::Deref for Lines<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the lines hold `len` numbers, any bytes are some, and a line's alignment is more than theirs.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.len) }
    }
}

impl<T: Plain> std::ops::DerefMut for Lines<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), self.len) }
    }
}

/// Memory that several threads write at once, each its own part of it.
#[derive(Debug)]
pub(crate) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

impl<T> Clone for Shared<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<'_, T> {}

// SAFETY: it is a borrowed slice of numbers, and those who take parts of it promise that they do not overlap.
unsafe impl<T: Plain> Send for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Plain> Sync for Shared<'_, T> {}

impl<'a, T: Plain> Shared<'a, T> {
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

/// Memory that belongs to somebody else, such as an array of Python's, lent to a call.
///
/// Its owner must leave it alone until the call returns: as with other libraries' arrays, a program that writes to an array which it
/// has just handed over finds garbage.
#[derive(Debug)]
pub struct Window<'a, T>(Shared<'a, T>);

// SAFETY: it is as good as the unique slice that it becomes, by the owner's promise.
unsafe impl<T: Plain> Send for Window<'_, T> {}

impl<'a, T: Plain> Window<'a, T> {
    /// The cells, for as long as they are lent.
    pub fn new(cells: &'a [Cell<T>]) -> Self {
        Self(Shared { start: cells.as_ptr().cast::<T>().cast_mut(), len: cells.len(), life: PhantomData })
    }
}

impl<T: Plain> std::ops::Deref for Window<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the cells live, and only this call touches them.
        unsafe { self.0.read(0, self.0.len) }
    }
}

impl<T: Plain> std::ops::DerefMut for Window<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { self.0.write(0, self.0.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<T: Plain + PartialEq + std::fmt::Debug + From<u8>>() {
        for len in [0, 1, 15, 16, 17, 63, 64, 65, 1000] {
            let mut lines = Lines::<T>::zeros(len);
            assert_eq!(lines.len(), len);
            assert_eq!(lines.as_ptr() as usize % 64, 0);
            assert!(lines.iter().all(|&x| x == T::from(0)));
            for (i, x) in lines.iter_mut().enumerate() {
                *x = T::from(i as u8);
            }
            let copy = lines.clone();
            lines.fill(T::from(1));
            assert!(copy.iter().enumerate().all(|(i, &x)| x == T::from(i as u8)));
            assert_eq!(copy.as_ptr() as usize % 64, 0);
        }
    }

    #[test]
    fn zeros_begin_at_a_line_and_are_all_there() {
        check::<f32>();
        check::<i32>();
        check::<u16>();
        check::<u8>();
    }

    #[test]
    fn room_is_made_and_kept() {
        let mut lines = Lines::<f32>::default();
        assert!(lines.is_empty());
        lines.reserve(20);
        assert_eq!(*lines, [0.0; 20]);
        lines[7] = 1.0;
        lines.reserve(20);
        lines.reserve(3);
        assert_eq!((lines.len(), lines[7]), (20, 1.0));
        lines.reserve(21);
        assert_eq!(*lines, [0.0; 21]);
    }

    #[test]
    #[should_panic(expected = "less than all memory")]
    fn more_than_all_memory_is_refused() {
        // As many bytes as wrap around to a few.
        let _ = Lines::<f32>::zeros(usize::MAX / 4 + 2);
    }

    #[test]
    fn threads_write_their_own_parts() {
        let mut lines = Lines::<u16>::zeros(100);
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
        assert!(unsafe { Shared::new(&mut lines[..0]).write(0, 0) }.is_empty());
    }

    #[test]
    fn parts_outside_are_refused() {
        let mut numbers = [0_u8; 8];
        let shared = Shared::new(&mut numbers);
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
