"""A page of another site, and what it may try against a server: read, post, submit a form."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

FETCH = """async ([address, how]) => {
    try {
        const answer = await fetch(address, how);
        return answer.type === 'opaque' ? 'not to be read' : await answer.text();
    } catch (error) {
        return 'not to be read';
    }
}"""
SUBMIT = """address => {
    const form = document.createElement('form');
    Object.assign(form, {action: address, method: 'POST', enctype: 'text/plain'});
    form.innerHTML = '<input name=\\'{"name":"theirs","x":"\\' value=\\'"}\\'>';
    document.body.append(form);
    form.submit();
}"""


@contextmanager
def other_site() -> Iterator[int]:
    """The port of this machine on which another site has a page."""

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>another site</title><body>")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()
