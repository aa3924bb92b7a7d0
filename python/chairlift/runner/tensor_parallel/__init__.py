"""One model on several devices."""
