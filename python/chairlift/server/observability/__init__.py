"""Metrics, logs, traces, and explanations of requests."""
