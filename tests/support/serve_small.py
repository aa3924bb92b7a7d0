"""A server with the model `small`, on the port of argument 1, that says nothing else."""

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "small"}]}')

    def log_message(self, *arguments):
        pass


HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
