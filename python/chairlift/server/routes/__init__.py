"""Routes, one package for each API."""
