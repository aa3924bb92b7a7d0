"""Benchmarks of OpenAI-compatible servers: traces, load, figures and reports."""
