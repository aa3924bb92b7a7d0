"""A server with the model `small`, on the port of argument 1, that says nothing else."""

import sys
from http.server import HTTPServer

from local_server import Handler


class Answer(Handler):
    def do_GET(self):
        self.reply(b'{"data": [{"id": "small"}]}')


HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
