//! Whether a simulation goes on, or its caller has been interrupted.

/// Number of steps and requests between two questions.
const OFTEN: u32 = 256;

/// Asks a simulation's caller now and then whether to go on. After a "no" it asks no more.
pub(crate) struct GoesOn<'a> {
    asks: Box<dyn FnMut() -> bool + 'a>,
    calls: u32,
    stopped: bool,
}

impl<'a> GoesOn<'a> {
    pub(crate) fn new(asks: impl FnMut() -> bool + 'a) -> Self {
        Self { asks: Box::new(asks), calls: 0, stopped: false }
    }

    /// Whether to go on. Call it for each step and each request.
    pub(crate) fn ask(&mut self) -> bool {
        self.calls = (self.calls + 1) % OFTEN;
        self.stopped = self.stopped || (self.calls == 0 && !(self.asks)());
        !self.stopped
    }
}
