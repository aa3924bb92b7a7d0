"""Middleware around every request: access control and disconnects."""
