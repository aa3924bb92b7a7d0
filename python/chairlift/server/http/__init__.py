"""HTTP: the protocol, sockets, request bodies and responses."""
