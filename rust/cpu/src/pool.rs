//! Threads that do one thing together, in phases.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::{hint, thread};

/// How often a thread looks whether a phase has ended before it lets others have the core.
///
/// Some tens of microseconds: phases end nearly together, unless a thread lost its core to somebody else.
const SPINS: u32 = 2_000;

/// Threads that sleep until there is work, and then work as a team.
#[derive(Debug)]
pub struct Pool {
    team: Arc<Team>,
    threads: Vec<JoinHandle<()>>,
}

/// What all threads share.
#[derive(Debug)]
struct Team {
    size: usize,
    call: Mutex<Call>,
    called: Condvar,
    returned: Condvar,
    /// The next piece of the phase.
    ticket: Apart<AtomicUsize>,
    /// Threads that have come to the end of the phase.
    arrived: Apart<AtomicUsize>,
    /// Phases that have ended.
    phases: Apart<AtomicUsize>,
    /// A thread panicked: nobody may wait for it.
    broken: AtomicBool,
}

/// On a cache line of its own (processors fetch them in pairs), so that those who wait do not slow down those who work.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Apart<T>(T);

/// What a thread panics with that others wait for in vain.
struct Abandoned;

/// What the threads are to do now.
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

/// A function of the thread that called [`Pool::run`], which stays there until all have returned from it.
#[derive(Clone, Copy)]
struct Work(*const (dyn Fn(&mut Worker<'_>) + Sync));

// SAFETY: the function is `Sync`, and lives as long as anybody may call it (see `Pool::run`).
unsafe impl Send for Work {}

/// One thread's part in a call.
#[derive(Debug)]
pub struct Worker<'a> {
    team: &'a Team,
    index: usize,
    phase: usize,
}

impl Pool {
    /// Starts `threads - 1` threads: the one that calls `run` is one of the team.
    pub fn new(threads: usize) -> Self {
        let team = Arc::new(Team {
            size: threads.max(1),
            call: Mutex::default(),
            called: Condvar::new(),
            returned: Condvar::new(),
            ticket: Apart::default(),
            arrived: Apart::default(),
            phases: Apart::default(),
            broken: AtomicBool::new(false),
        });
        let threads = (1..team.size)
            .map(|index| {
                let team = Arc::clone(&team);
                thread::Builder::new()
                    .name(format!("chairlift-cpu-{index}"))
                    .spawn(move || team.serve(index))
                    .expect("a thread can be started")
            })
            .collect();
        Self { team, threads }
    }

    /// How many threads there are, the caller's included.
    pub fn size(&self) -> usize {
        self.team.size
    }

    /// Lets every thread call `work` once, and returns when all have. What one panics with, this panics with.
    pub fn run(&mut self, work: impl Fn(&mut Worker<'_>) + Sync) {
        let work: &(dyn Fn(&mut Worker<'_>) + Sync) = &work;
        let team = &*self.team;
        // The lock below shows this to the threads.
        team.ticket.0.store(0, Ordering::Relaxed);
        team.arrived.0.store(0, Ordering::Relaxed);
        team.phases.0.store(0, Ordering::Relaxed);
        team.broken.store(false, Ordering::Relaxed);
        // SAFETY: only the lifetime is forgotten, and this function does not return before `working` is 0. No cast: those may not
        // change lifetimes in days to come.
        #[allow(clippy::transmute_ptr_to_ptr)]
        let forgotten = Work(unsafe {
            std::mem::transmute::<*const (dyn Fn(&mut Worker<'_>) + Sync), *const (dyn Fn(&mut Worker<'_>) + Sync + 'static)>(work)
        });
        {
            let mut call = team.call.lock().expect("nobody panics with the lock");
            call.work = Some(forgotten);
            call.number += 1;
            call.working = team.size - 1;
        }
        team.called.notify_all();
        team.call(work, 0);
        let mut call = team.call.lock().expect("nobody panics with the lock");
        while call.working > 0 {
            call = team.returned.wait(call).expect("nobody panics with the lock");
        }
        call.work = None;
        let panic = call.panic.take();
        drop(call);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.team.call.lock().expect("nobody panics with the lock").over = true;
        self.team.called.notify_all();
        for thread in self.threads.drain(..) {
            // What a thread panicked with was told by `run`.
            let _ = thread.join();
        }
    }
}

impl Team {
    /// A thread's life: wait for a call, work, say so.
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
            // SAFETY: `run` waits for this thread before it lets go of the function.
            self.call(unsafe { &*work.0 }, index);
            let mut call = self.call.lock().expect("nobody panics with the lock");
            call.working -= 1;
            if call.working == 0 {
                self.returned.notify_one();
            }
        }
    }

    /// One thread's part. What it panics with is kept for the caller if it is the first; only then do others hear of it, so that
    /// theirs are later.
    fn call(&self, work: &(dyn Fn(&mut Worker<'_>) + Sync), index: usize) {
        let mut worker = Worker { team: self, index, phase: 0 };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(&mut worker))) {
            self.call.lock().expect("nobody panics with the lock").panic.get_or_insert(panic);
            self.broken.store(true, Ordering::Release);
        }
    }
}

impl Worker<'_> {
    /// The thread's number, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// How many threads there are.
    pub fn size(&self) -> usize {
        self.team.size
    }

    /// Calls `piece` with the numbers below `count`, each on one thread of the team, whoever is free; then waits for the others.
    ///
    /// All threads of the team must come by with the same `count`. What was written in one phase is seen in the next.
    pub fn each(&mut self, count: usize, mut piece: impl FnMut(usize)) {
        loop {
            let next = self.team.ticket.0.fetch_add(1, Ordering::Relaxed);
            if next >= count {
                break;
            }
            piece(next);
        }
        self.wait();
    }

    /// Waits until all threads have come here.
    fn wait(&mut self) {
        let team = self.team;
        self.phase += 1;
        // What each thread did is released by its addition, acquired by the last one's, and released with the phase's end to
        // those who see it. In between all have drawn their last ticket and none the next phase's first: a time to reset it.
        if team.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == team.size {
            team.arrived.0.store(0, Ordering::Relaxed);
            team.ticket.0.store(0, Ordering::Relaxed);
            team.phases.0.store(self.phase, Ordering::Release);
            return;
        }
        let mut spins = 0;
        while team.phases.0.load(Ordering::Acquire) < self.phase {
            if team.broken.load(Ordering::Acquire) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_is_done_once_and_phases_do_not_overlap() {
        for threads in [1, 2, 3, 7] {
            let mut pool = Pool::new(threads);
            for round in 0..50 {
                let counts = [1, 0, 5, 64, 3];
                let done: Vec<Vec<AtomicUsize>> = counts.iter().map(|&n| (0..n).map(|_| AtomicUsize::new(0)).collect()).collect();
                pool.run(|worker| {
                    for (phase, pieces) in done.iter().enumerate() {
                        worker.each(pieces.len(), |i| {
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
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = Pool::new(4);
        for round in 0..400 {
            let guilty = round % 4;
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(|worker| {
                    worker.each(10, |_| ());
                    // Without a word to the standard error, which others read.
                    if worker.index() == guilty {
                        resume_unwind(Box::new(round));
                    }
                    worker.each(10, |_| ());
                });
            }));
            assert_eq!(*result.expect_err("it panicked").downcast::<usize>().expect("the one who began"), round);
            let count = AtomicUsize::new(0);
            pool.run(|worker| {
                worker.each(100, |_| {
                    count.fetch_add(1, Ordering::Relaxed);
                });
            });
            assert_eq!(count.load(Ordering::Relaxed), 100);
        }
    }

    #[test]
    fn a_piece_that_panics_leaves_nobody_waiting() {
        let mut pool = Pool::new(3);
        for round in 0..100 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(|worker| {
                    for phase in 0..4 {
                        worker.each(7, |i| {
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
}
