"""Schedules requests in front of other inference servers, and passes them on unchanged."""
