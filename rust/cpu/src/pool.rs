//! A thread pool that runs one function on its threads, in phases.
//!
//! A phase ends when its work is done. It has no barrier that all threads must reach, because other programs use the cores too: a thread
//! that the system has preempted between two pieces of work delays no other thread. When it resumes, it skips the phases that have ended.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::time_slice;

#[cfg(loom)]
use loom::{
    hint,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    sync::{Arc, Condvar, Mutex},
    thread,
};
#[cfg(not(loom))]
use std::{
    hint,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    sync::{Arc, Condvar, Mutex},
    thread,
};

/// Number of times that a thread looks for the end of a phase before it yields its core.
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
    /// For each thread, how many indices of its own part are taken, and in which phase.
    taken: Vec<CachePadded<Taken>>,
    /// How many indices of the current phase are done.
    done: CachePadded<AtomicUsize>,
    /// Number of completed phases.
    phases: CachePadded<AtomicUsize>,
    /// Set when a thread has panicked. Other threads must not wait for it.
    broken: AtomicBool,
}

/// A value on its own pair of cache lines, so that waiting threads do not slow down working ones. Processors fetch cache lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct CachePadded<T>(T);

/// How many indices of a part were taken, in the lower half, and in which phase, in the upper half. Both change at once, so that a thread
/// which comes late to a phase cannot take an index of a later one.
#[derive(Debug, Default)]
struct Taken(AtomicU64);

impl Taken {
    /// Takes the next of `len` indices in a phase. None if all are taken, or if the phase is over.
    fn take(&self, phase: usize, len: usize) -> Option<usize> {
        let phase = phase as u64;
        // Loading first leaves the cache line of a thread that needs no help alone.
        let mut before = self.0.load(Ordering::Relaxed);
        loop {
            let (latest, taken) = (before >> 32, before & u64::from(u32::MAX));
            let index = if latest < phase { 0 } else { taken };
            if latest > phase || index >= len as u64 {
                return None;
            }
            // If it succeeds, the index was not taken, so the phase is not over.
            match self.0.compare_exchange_weak(before, phase << 32 | (index + 1), Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(index as usize),
                Err(now) => before = now,
            }
        }
    }
}

/// Shows whether a pool's calls make progress. Any thread can read it, also during a call.
#[derive(Clone, Debug)]
pub struct Progress(Arc<State>);

impl Progress {
    /// A number that grows within a call whenever a thread begins an index of a phase. It starts from 0 in each call.
    pub fn value(&self) -> u64 {
        self.0.taken.iter().fold(0, |sum, taken| sum.wrapping_add(taken.0.0.load(Ordering::Relaxed)))
    }
}

/// Panic payload of a thread that was waiting for a thread that panicked.
struct Abandoned;

/// The current call.
#[derive(Default)]
struct Call {
    number: u64,
    /// None when the call is over, also for threads that have not begun it.
    work: Option<Work>,
    /// Number of threads that have begun the call and not returned from it, without the caller.
    working: usize,
    over: bool,
    panic: Option<Box<dyn Any + Send>>,
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Call").field("number", &self.number).finish_non_exhaustive()
    }
}

/// The function of the current call. The thread in [`ThreadPool::run`] owns it. It does not return until all threads that have begun the
/// function have returned from it, and no thread can begin it later.
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
            done: CachePadded::default(),
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

    /// A view of the pool's progress.
    pub fn progress(&self) -> Progress {
        Progress(Arc::clone(&self.state))
    }

    /// Calls `work` on the threads and returns when all calls have returned. A thread that the system does not run in time is left out. If a
    /// call panics, this function panics with the same payload.
    pub fn run(&mut self, work: impl Fn(&mut Worker<'_>) + Sync) {
        let work: &(dyn Fn(&mut Worker<'_>) + Sync) = &work;
        let state = &*self.state;
        // No thread is in a call. Taking the lock below makes these stores visible to the threads.
        state.taken.iter().for_each(|taken| taken.0.0.store(0, Ordering::Relaxed));
        state.done.0.store(0, Ordering::Relaxed);
        state.phases.0.store(0, Ordering::Relaxed);
        state.broken.store(false, Ordering::Relaxed);
        // SAFETY: only the lifetime is extended, and this function does not return before `work` is None and `working` is 0. Not a cast: a
        // future Rust may forbid casts that extend lifetimes.
        #[allow(clippy::transmute_ptr_to_ptr)]
        let forgotten = Work(unsafe {
            std::mem::transmute::<*const (dyn Fn(&mut Worker<'_>) + Sync), *const (dyn Fn(&mut Worker<'_>) + Sync + 'static)>(work)
        });
        {
            let mut call = state.call.lock().expect("nobody panics with the lock");
            call.work = Some(forgotten);
            call.number += 1;
        }
        state.called.notify_all();
        state.call(work, 0);
        let mut call = state.call.lock().expect("nobody panics with the lock");
        call.work = None;
        while call.working > 0 {
            call = state.returned.wait(call).expect("nobody panics with the lock");
        }
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
    /// A thread's main loop: waits for a call, runs it, and reports its completion.
    fn serve(&self, index: usize) {
        let mut seen = 0;
        loop {
            let work = {
                let mut call = self.call.lock().expect("nobody panics with the lock");
                loop {
                    match call.work.filter(|_| call.number != seen) {
                        _ if call.over => return,
                        Some(work) => {
                            seen = call.number;
                            call.working += 1;
                            break work;
                        }
                        None => call = self.called.wait(call).expect("nobody panics with the lock"),
                    }
                }
            };
            // SAFETY: `run` waits for this thread, which it counts, before the function is dropped.
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

    /// Calls `body` with each index below `count` and returns when all of these calls have returned.
    ///
    /// Each thread has an equal part of the indices, in order, so that what it wrote in the phase before is still in its cache. Then it
    /// helps the threads after it. Every thread must call it with the same `count`. Writes of one phase are visible in the next.
    ///
    /// A thread may come when this phase and later ones have ended. Between phases it must therefore read nothing that a later phase writes.
    pub fn parallel_for(&mut self, count: usize, mut body: impl FnMut(usize)) {
        if count == 0 {
            return;
        }
        let (size, mut done) = (self.size(), 0);
        self.phase += 1;
        for owner in (self.index..size).chain(0..self.index) {
            let (start, end) = (owner * count / size, (owner + 1) * count / size);
            while let Some(index) = self.state.taken[owner].0.take(self.phase, end - start) {
                body(start + index);
                done += 1;
            }
        }
        self.wait(done, count);
    }

    /// Counts `done` calls and waits until there were `count` in this phase.
    fn wait(&self, done: usize, count: usize) {
        let state = self.state;
        // Each addition to `done` releases a thread's writes. The last one acquires them, and its store to `phases` releases them to the
        // threads that load it. All indices are taken then, and no thread has taken one of the next phase, so `done` can be reset.
        if done > 0 && state.done.0.fetch_add(done, Ordering::AcqRel) + done == count {
            state.done.0.store(0, Ordering::Relaxed);
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
                    firsts.lock().expect("no thread panics").push((index, piece));
                    while firsts.lock().expect("no thread panics").len() < 3 {
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
        let mut firsts = firsts.into_inner().expect("no thread panics");
        firsts.sort_unstable();
        assert_eq!(firsts, [(0, 0), (1, 4), (2, 8)]);
    }

    #[test]
    fn a_phase_that_is_over_gives_no_index() {
        let taken = Taken::default();
        let phases = [1, 2, 1, 2, 2];
        assert_eq!(phases.map(|phase| taken.take(phase, 2)), [Some(0), Some(0), None, Some(1), None]);
    }

    #[test]
    fn each_piece_of_a_call_is_progress_and_waiting_is_none() {
        let mut pool = ThreadPool::new(2).expect("threads");
        let progress = pool.progress();
        let values = Mutex::new(Vec::new());
        pool.run(|worker| {
            for _ in 0..3 {
                worker.parallel_for(4, |_| {
                    let mut values = values.lock().expect("no thread panics");
                    values.push(progress.value());
                });
            }
        });
        let values = values.into_inner().expect("no thread panics");
        let ended = progress.value();
        assert!(values.is_sorted() && values[0] > 0 && values[11] <= ended, "{values:?}");
        // The other thread can have begun an index too, while a thread held the lock.
        assert!(values.windows(3).all(|three| three[0] < three[2]), "{values:?}");
        assert_eq!(progress.value(), ended);
    }

    #[test]
    fn a_thread_between_two_pieces_keeps_nobody_waiting() {
        let mut pool = ThreadPool::new(2).expect("threads");
        let (begun, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let done: Vec<_> = (0..300).map(|_| AtomicUsize::new(0)).collect();
        pool.run(|worker| {
            let waits_for = if worker.index() == 0 { &begun } else { &over };
            begun.fetch_or(worker.index() == 1, Ordering::Relaxed);
            while !waits_for.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            for phase in done.chunks(3) {
                worker.parallel_for(3, |i| {
                    phase[i].fetch_add(1, Ordering::Relaxed);
                });
            }
            over.store(true, Ordering::Relaxed);
        });
        assert!(done.iter().all(|n| n.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = ThreadPool::new(4).expect("threads");
        for round in 0..400 {
            let (guilty, begun) = (round % 4, AtomicUsize::new(0));
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(|worker| {
                    begun.fetch_add(1, Ordering::Relaxed);
                    worker.parallel_for(10, |_| {
                        while begun.load(Ordering::Relaxed) < 4 {
                            thread::yield_now();
                        }
                    });
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
    fn a_late_thread_takes_nothing_of_a_phase_that_is_over() {
        model(|| {
            let mut pool = ThreadPool::new(2).expect("threads");
            let cells = Cells::new(4);
            pool.run(|worker| {
                for phase in 0..2 {
                    worker.parallel_for(4, |i| {
                        assert_eq!(cells.get(i), phase);
                        cells.set(i, phase + 1);
                    });
                }
            });
            assert!((0..4).all(|i| cells.get(i) == 2));
        });
    }

    #[test]
    fn a_pool_that_is_never_used_ends() {
        model(|| drop(ThreadPool::new(3).expect("threads")));
    }
}
