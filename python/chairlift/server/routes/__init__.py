"""The routes, a package for each API."""
