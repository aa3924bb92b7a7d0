"""The image's health check: asks /health on the admin socket, whatever port, certificate or keys the server has."""

import http.client
import os
import socket
import sys

connection = http.client.HTTPConnection("admin")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.settimeout(3)
try:
    connection.sock.connect(os.environ["CHAIRLIFT_ADMIN_SOCKET"])
    connection.request("GET", "/health")
    answer = connection.getresponse()
    sys.exit(None if answer.status == 200 else answer.read().decode(errors="replace"))
except OSError as error:
    sys.exit(f"no answer on the admin socket: {error}")
