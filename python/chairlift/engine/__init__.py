"""The engine: takes requests, plans and runs steps, and returns tokens."""
