//! The time slices that Linux gives to a thread which shares its core.

use std::cell::Cell;

/// Nanoseconds of a slice: the shortest that Linux gives. The usual ones have some 3 ms.
#[cfg(target_os = "linux")]
const SHORTEST: u64 = 100_000;

/// Asks for short time slices for this thread, once.
///
/// The threads of a step often wait for each other, and yield. Linux lets a thread that has yielded run again a slice later. So beside other
/// busy threads a step takes less time, though its threads get no larger share of the cores. Linux before 6.12 ignores it.
pub(crate) fn shorten() {
    thread_local!(static IS_SHORT: Cell<bool> = const { Cell::new(false) });
    if !IS_SHORT.replace(true) && !cfg!(miri) {
        #[cfg(target_os = "linux")]
        if let Some(attributes) = attributes().filter(|found| found.sched_policy == libc::SCHED_OTHER as u32) {
            let attributes = libc::sched_attr { sched_runtime: SHORTEST, ..attributes };
            // SAFETY: the kernel reads as many bytes as the struct says it has. A refusal changes nothing.
            unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
        }
    }
}

/// How Linux schedules this thread.
#[cfg(target_os = "linux")]
fn attributes() -> Option<libc::sched_attr> {
    let size = size_of::<libc::sched_attr>() as u32;
    let mut found = std::mem::MaybeUninit::<libc::sched_attr>::zeroed();
    // SAFETY: the kernel writes at most `size` bytes. All bits of a struct of integers may be zero.
    unsafe { (libc::syscall(libc::SYS_sched_getattr, 0, found.as_mut_ptr(), size, 0) == 0).then(|| found.assume_init()) }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn slices_become_short_and_policy_and_priority_stay() {
        let thread = std::thread::spawn(|| {
            let before = attributes().expect("Linux says it");
            shorten();
            let after = attributes().expect("Linux says it");
            assert_eq!((after.sched_policy, after.sched_nice), (before.sched_policy, before.sched_nice));
            // Earlier versions do not know slices of one thread.
            assert!([SHORTEST, before.sched_runtime].contains(&after.sched_runtime), "{} ns", after.sched_runtime);
        });
        thread.join().expect("no panic");
    }
}
