"""Runs batches: reads their input, sends the requests to the application, and stores the answers."""
