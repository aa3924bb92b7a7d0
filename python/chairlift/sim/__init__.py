"""The simulator: the scheduler that serves, in virtual time, on machines that need not be there."""
