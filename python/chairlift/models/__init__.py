"""Native model code, and the configuration that a checkpoint comes with."""
