//! A thread pool that runs one function on all its threads, in phases with a barrier after each.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::time_slice;

#[cfg(loom)]
use loom::{
    hint,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    sync::{Arc, Condvar, Mutex},
    thread,
};
#[cfg(not(loom))]
use std::{
    hint,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    sync::{Arc, Condvar, Mutex},
    thread,
};

/// Number of times that a thread polls the barrier before it yields its core.
///
/// This takes some tens of microseconds. Threads finish a phase at nearly the same time, unless the system has preempted one.
const SPINS: u32 = if cfg!(loom) { 0 } else { 2_000 };

/// A thread pool. Its threads sleep until [`ThreadPool::run`] is called.
#[derive(Debug)]
pub struct ThreadPool {
    state: Arc<State>,
    threads: Vec<thread::JoinHandle<()>>,
}

/// State that all threads share.
#[derive(Debug)]
struct State {
    size: usize,
    call: Mutex<Call>,
    called: Condvar,
    returned: Condvar,
    /// For each thread, how many indices of its own part of the current phase's loop are taken.
    taken: Vec<CachePadded<AtomicUsize>>,
    /// Number of threads that have reached the end of the phase.
    arrived: CachePadded<AtomicUsize>,
    /// Number of completed phases.
    phases: CachePadded<AtomicUsize>,
    /// Set when a thread has panicked. Other threads must not wait for it.
    broken: AtomicBool,
}

/// A value on its own pair of cache lines, so that waiting threads do not slow down working ones. Processors fetch cache lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct CachePadded<T>(T);

/// Panic payload of a thread that was waiting for a thread that panicked.
struct Abandoned;

/// The current call.
#[derive(Default)]
struct Call {
    number: u64,
    work: Option<Work>,
    working: usize,
    over: bool,
    panic: Option<Box<dyn Any + Send>>,
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Call").field("number", &self.number).finish_non_exhaustive()
    }
}

/// The function of the current call. The thread in [`ThreadPool::run`] owns it and does not return until all threads have returned from it.
#[derive(Clone, Copy)]
struct Work(*const (dyn Fn(&mut Worker<'_>) + Sync));

// SAFETY: the function is `Sync`, and lives as long as any thread can call it (see `ThreadPool::run`).
unsafe impl Send for Work {}

/// One thread's view of a call.
#[derive(Debug)]
pub struct Worker<'a> {
    state: &'a State,
    index: usize,
    phase: usize,
}

impl ThreadPool {
    /// Starts `threads - 1` threads. The thread that calls `run` is the first. If a thread cannot be started, the threads before it end.
    pub fn new(threads: usize) -> io::Result<Self> {
        Self::start(threads, |index, state| thread::Builder::new().name(format!("chairlift-cpu-{index}")).spawn(move || state.serve(index)))
    }

    /// Starts the threads with `spawn`, which gets the index of each.
    fn start(threads: usize, spawn: impl Fn(usize, Arc<State>) -> io::Result<thread::JoinHandle<()>>) -> io::Result<Self> {
        let state = Arc::new(State {
            size: threads.max(1),
            call: Mutex::default(),
            called: Condvar::new(),
            returned: Condvar::new(),
            taken: (0..threads.max(1)).map(|_| CachePadded::default()).collect(),
            arrived: CachePadded::default(),
            phases: CachePadded::default(),
            broken: AtomicBool::new(false),
        });
        // If `spawn` fails, dropping the pool ends the threads that have started.
        let mut pool = Self { state, threads: Vec::new() };
        for index in 1..pool.state.size {
            pool.threads.push(spawn(index, Arc::clone(&pool.state))?);
        }
        Ok(pool)
    }

    /// Number of threads, including the caller.
    pub fn size(&self) -> usize {
        self.state.size
    }

    /// Calls `work` once on every thread and returns when all calls have returned. If a call panics, this function panics with the same
    /// payload.
    pub fn run(&mut self, work: impl Fn(&mut Worker<'_>) + Sync) {
        let work: &(dyn Fn(&mut Worker<'_>) + Sync) = &work;
        let state = &*self.state;
        // Taking the lock below makes these stores visible to the threads.
        state.begin_phase();
        state.phases.0.store(0, Ordering::Relaxed);
        state.broken.store(false, Ordering::Relaxed);
        // SAFETY: only the lifetime is extended, and this function does not return before `working` is 0. Not a cast: a future Rust may
        // forbid casts that extend lifetimes.
        #[allow(clippy::transmute_ptr_to_ptr)]
        let forgotten = Work(unsafe {
            std::mem::transmute::<*const (dyn Fn(&mut Worker<'_>) + Sync), *const (dyn Fn(&mut Worker<'_>) + Sync + 'static)>(work)
        });
        {
            let mut call = state.call.lock().expect("nobody panics with the lock");
            call.work = Some(forgotten);
            call.number += 1;
            call.working = state.size - 1;
        }
        state.called.notify_all();
        state.call(work, 0);
        let mut call = state.call.lock().expect("nobody panics with the lock");
        while call.working > 0 {
            call = state.returned.wait(call).expect("nobody panics with the lock");
        }
        call.work = None;
        let panic = call.panic.take();
        drop(call);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.state.call.lock().expect("nobody panics with the lock").over = true;
        self.state.called.notify_all();
        for thread in self.threads.drain(..) {
            // `run` has already reported the thread's panic.
            let _ = thread.join();
        }
    }
}

impl State {
    /// Resets the counters before a phase.
    fn begin_phase(&self) {
        self.arrived.0.store(0, Ordering::Relaxed);
        self.taken.iter().for_each(|taken| taken.0.store(0, Ordering::Relaxed));
    }

    /// A thread's main loop: waits for a call, runs it, and reports its completion.
    fn serve(&self, index: usize) {
        let mut seen = 0;
        loop {
            let work = {
                let mut call = self.call.lock().expect("nobody panics with the lock");
                while call.number == seen && !call.over {
                    call = self.called.wait(call).expect("nobody panics with the lock");
                }
                if call.over {
                    return;
                }
                seen = call.number;
                call.work.expect("a call comes with its work")
            };
            // SAFETY: `run` waits for this thread before the function is dropped.
            self.call(unsafe { &*work.0 }, index);
            let mut call = self.call.lock().expect("nobody panics with the lock");
            call.working -= 1;
            if call.working == 0 {
                self.returned.notify_one();
            }
        }
    }

    /// Runs one thread's part of a call and keeps the first panic for the caller. `broken` is set after the panic is stored, so the panics
    /// of waiting threads always come later.
    fn call(&self, work: &(dyn Fn(&mut Worker<'_>) + Sync), index: usize) {
        time_slice::shorten();
        let mut worker = Worker { state: self, index, phase: 0 };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(&mut worker))) {
            self.call.lock().expect("nobody panics with the lock").panic.get_or_insert(panic);
            self.broken.store(true, Ordering::Release);
        }
    }
}

impl Worker<'_> {
    /// The thread's index, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Number of threads.
    pub fn size(&self) -> usize {
        self.state.size
    }

    /// Calls `body` with each index below `count` and waits until all threads have finished.
    ///
    /// Each thread has an equal part of the indices, in order, so that what it wrote in the phase before is still in its cache. Then it
    /// helps the threads after it. Every thread must call it with the same `count`. Writes of one phase are visible in the next.
    pub fn parallel_for(&mut self, count: usize, mut body: impl FnMut(usize)) {
        let size = self.size();
        for owner in (self.index..size).chain(0..self.index) {
            let (start, end) = (owner * count / size, (owner + 1) * count / size);
            let taken = &self.state.taken[owner].0;
            // Loading first leaves the cache line of a thread that needs no help alone.
            while taken.load(Ordering::Relaxed) < end - start {
                let index = start + taken.fetch_add(1, Ordering::Relaxed);
                if index >= end {
                    break;
                }
                body(index);
            }
        }
        self.wait();
    }

    /// Waits until all threads have reached this point.
    fn wait(&mut self) {
        let state = self.state;
        self.phase += 1;
        // Each thread's addition to `arrived` releases its writes. The last thread's addition acquires them, and its store to `phases`
        // releases them to the threads that load it. At this point every thread has taken its last index of this phase, and no thread has
        // taken one of the next, so the counters can be reset.
        if state.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == state.size {
            state.begin_phase();
            state.phases.0.store(self.phase, Ordering::Release);
            return;
        }
        let mut spins = 0;
        while state.phases.0.load(Ordering::Acquire) < self.phase {
            if state.broken.load(Ordering::Acquire) {
                resume_unwind(Box::new(Abandoned));
            }
            if spins < SPINS {
                spins += 1;
                hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_piece_is_done_once_and_phases_do_not_overlap() {
        for threads in [1, 2, 3, 7] {
            let mut pool = ThreadPool::new(threads).expect("threads");
            for round in 0..50 {
                let counts = [1, 0, 5, 64, 3];
                let done: Vec<Vec<AtomicUsize>> = counts.iter().map(|&n| (0..n).map(|_| AtomicUsize::new(0)).collect()).collect();
                pool.run(|worker| {
                    for (phase, pieces) in done.iter().enumerate() {
                        worker.parallel_for(pieces.len(), |i| {
                            pieces[i].fetch_add(1, Ordering::Relaxed);
                            let before = &done[..phase];
                            assert!(before.iter().flatten().all(|n| n.load(Ordering::Relaxed) == 1), "round {round}");
                        });
                    }
                });
                assert!(done.iter().flatten().all(|n| n.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn threads_begin_with_their_own_parts_and_then_help_others() {
        let mut pool = ThreadPool::new(3).expect("threads");
        let (firsts, left) = (Mutex::new(Vec::new()), AtomicUsize::new(11));
        pool.run(|worker| {
            let index = worker.index();
            let mut first = true;
            worker.parallel_for(12, |piece| {
                if std::mem::take(&mut first) {
                    firsts.lock().expect("nobody panics").push((index, piece));
                    while firsts.lock().expect("nobody panics").len() < 3 {
                        thread::yield_now();
                    }
                }
                // The others must do the rest of this thread's part.
                while piece == 0 && left.load(Ordering::Relaxed) > 0 {
                    thread::yield_now();
                }
                left.fetch_sub(usize::from(piece > 0), Ordering::Relaxed);
            });
        });
        let mut firsts = firsts.into_inner().expect("nobody panics");
        firsts.sort_unstable();
        assert_eq!(firsts, [(0, 0), (1, 4), (2, 8)]);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = ThreadPool::new(4).expect("threads");
        for round in 0..400 {
            let guilty = round % 4;
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(|worker| {
                    worker.parallel_for(10, |_| ());
                    // Unlike `panic!`, this does not write to standard error.
                    if worker.index() == guilty {
                        resume_unwind(Box::new(round));
                    }
                    worker.parallel_for(10, |_| ());
                });
            }));
            assert_eq!(*result.expect_err("it panicked").downcast::<usize>().expect("the one who began"), round);
            let count = AtomicUsize::new(0);
            pool.run(|worker| {
                worker.parallel_for(100, |_| {
                    count.fetch_add(1, Ordering::Relaxed);
                });
            });
            assert_eq!(count.load(Ordering::Relaxed), 100);
        }
    }

    #[test]
    fn a_piece_that_panics_leaves_nobody_waiting() {
        let mut pool = ThreadPool::new(3).expect("threads");
        for round in 0..100 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(|worker| {
                    for phase in 0..4 {
                        worker.parallel_for(7, |i| {
                            if (phase, i) == (round % 4, round % 7) {
                                resume_unwind(Box::new("this piece"));
                            }
                        });
                    }
                });
            }));
            assert_eq!(*result.expect_err("it panicked").downcast::<&str>().expect("with words"), "this piece");
        }
    }

    #[test]
    fn a_pool_that_cannot_start_all_threads_ends_those_it_started() {
        for failing in 1..4 {
            let kept = Mutex::new(None);
            let error = ThreadPool::start(4, |index, state| {
                *kept.lock().expect("one thread") = Some(Arc::downgrade(&state));
                if index == failing {
                    return Err(io::Error::other("no more threads"));
                }
                thread::Builder::new().spawn(move || state.serve(index))
            });
            assert_eq!(error.expect_err("one failed").to_string(), "no more threads");
            // Each running thread would hold a reference to the state.
            assert!(kept.into_inner().expect("one thread").expect("spawned").upgrade().is_none(), "thread {failing} failed");
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::cell::UnsafeCell;

    use super::*;

    /// Cells that loom checks for races. In each phase one thread writes each index.
    struct Cells(Vec<UnsafeCell<usize>>);
    // SAFETY: loom reports racing accesses.
    unsafe impl Sync for Cells {}

    impl Cells {
        fn new(count: usize) -> Self {
            Self((0..count).map(|_| UnsafeCell::new(0)).collect())
        }
        fn set(&self, index: usize, value: usize) {
            // SAFETY: as above.
            self.0[index].with_mut(|cell| unsafe { *cell = value });
        }
        fn get(&self, index: usize) -> usize {
            // SAFETY: as above.
            self.0[index].with(|cell| unsafe { *cell })
        }
    }

    fn model(check: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.or(Some(2));
        builder.check(check);
    }

    #[test]
    fn phases_see_what_the_phases_before_wrote() {
        model(|| {
            let mut pool = ThreadPool::new(2).expect("threads");
            let (first, second) = (Cells::new(2), Cells::new(2));
            pool.run(|worker| {
                worker.parallel_for(2, |i| first.set(i, i + 1));
                worker.parallel_for(2, |i| second.set(i, first.get(0) + first.get(1)));
            });
            assert_eq!((second.get(0), second.get(1)), (3, 3));
        });
    }

    #[test]
    fn calls_follow_each_other_and_the_pool_ends() {
        model(|| {
            let mut pool = ThreadPool::new(2).expect("threads");
            let cells = Cells::new(1);
            for value in 1..3 {
                pool.run(|worker| worker.parallel_for(1, |i| cells.set(i, cells.get(i) + value)));
            }
            assert_eq!(cells.get(0), 3);
        });
    }

    #[test]
    fn a_pool_that_is_never_used_ends() {
        model(|| drop(ThreadPool::new(3).expect("threads")));
    }
}
