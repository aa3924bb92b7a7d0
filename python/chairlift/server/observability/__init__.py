"""Metrics, logs, traces, the dashboard's data and explanations of requests."""
