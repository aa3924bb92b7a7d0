"""The way in: sockets, HTTP, keys, bodies, and whether the client is still there."""
