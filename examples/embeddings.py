"""Sentence embeddings over HTTP: all-MiniLM-L6-v2 on NumPy and sdpa, served by aiohttp.

python examples/embeddings.py [--port 8080] [--waiting 64]
curl -d '{"texts": ["A cat sleeps.", "A kitten naps."]}' http://127.0.0.1:8080/embed

Requests that arrive together are computed together, their texts packed without padding. At most
`--waiting` requests wait; a further one is answered with 503 at once. On Ctrl-C or SIGTERM the
service answers the accepted requests, then ends. Server and weights: pip install '.[model]' and
make models.
"""

import argparse
import asyncio
import json
import logging
import socket
from itertools import accumulate

try:
    from aiohttp import web
except ImportError:
    raise SystemExit(
        "embeddings.py was skipped: it needs aiohttp: make models, or pip install aiohttp"
    ) from None

from sdpa_lab.minilm import MODEL, MiniLM

TEXTS = 64
"""The most texts in a request, and in a batch of several requests."""
BYTES = 1 << 20
SECONDS = 10.0
"""For headers, for a body, for an answer to leave, and for a connection to be used again."""

EXPECTED = {
    404: "expected POST /embed or GET /health",
    405: "expected POST /embed or GET /health",
    408: f"expected the whole request within {SECONDS:g} s",
    413: f"expected at most {BYTES} bytes",
}
"""What an error says, where it does not bring its own text."""


class Service:
    """Computes all waiting requests as one batch.

    Parameters
    ----------
    embed : callable
        From a list of texts to (texts, 384); it runs in a thread, so that the server goes on.
    waiting : int
        Requests that may wait.
    """

    def __init__(self, embed, waiting):
        self.embed = embed
        self.queue = asyncio.Queue(waiting)

    async def answer(self, request):
        """POST /embed."""
        try:
            async with asyncio.timeout(SECONDS):
                texts = texts_of(await request.read())
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        except (ConnectionError, web.RequestPayloadError):
            raise web.HTTPBadRequest(text="expected a whole body") from None
        future = asyncio.get_running_loop().create_future()
        try:
            self.queue.put_nowait((texts, future))
        except asyncio.QueueFull:
            raise web.HTTPServiceUnavailable(
                text="too many requests are waiting", headers={"Retry-After": "1"}
            ) from None
        rows = await future
        return web.json_response({"model": MODEL, "embeddings": rows.tolist()})

    async def running(self, _):
        """Compute from the start of the server until all requests are answered."""
        task = asyncio.create_task(self.compute())
        yield
        task.cancel()

    async def compute(self):
        """Batches, one after the other."""
        while True:
            batch = [await self.queue.get()]
            while sum(len(texts) for texts, _ in batch) < TEXTS and not self.queue.empty():
                batch.append(self.queue.get_nowait())
            texts = [text for texts, _ in batch for text in texts]
            try:
                rows = await asyncio.to_thread(self.embed, texts)
            except Exception as error:  # every request must be answered
                for _, future in batch:
                    future.set_exception(error)
            else:
                ends = accumulate(len(texts) for texts, _ in batch)
                for (texts, future), end in zip(batch, ends, strict=True):
                    future.set_result(rows[end - len(texts) : end])


def texts_of(content):
    """The texts of a request; raises HTTPBadRequest if there are none."""
    try:
        texts = json.loads(content)["texts"]
    except (ValueError, TypeError, KeyError, RecursionError):
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise web.HTTPBadRequest(text='expected {"texts": ["...", ...]}')
    if not 1 <= len(texts) <= TEXTS:
        raise web.HTTPBadRequest(text=f"expected 1 to {TEXTS} texts, got {len(texts)}")
    return texts


async def health(_):
    """GET /health."""
    return web.json_response({"model": MODEL})


@web.middleware
async def sent(request, handler):
    """Answer errors in JSON too; hang up on a client that does not take its answer."""
    transport = request.transport
    transport.set_write_buffer_limits(0)  # what is sent has left this process
    try:
        response = await handler(request)
    except web.HTTPException as error:
        message = {"error": EXPECTED.get(error.status, error.text)}
        headers = {k: v for k, v in error.headers.items() if not k.startswith("Content-")}
        response = web.json_response(message, status=error.status, headers=headers)
        if error.status == 408:
            response.force_close()
    except Exception:
        logging.exception("%s %s", request.method, request.path)
        response = web.json_response({"error": "see the server's log"}, status=500)
    try:
        async with asyncio.timeout(SECONDS):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        transport.abort()
    return response


def serve(embed, port, waiting):
    """Serve until SIGINT or SIGTERM."""
    service = Service(embed, waiting)
    app = web.Application(middlewares=[sent], client_max_size=BYTES)
    app.add_routes([web.post("/embed", service.answer), web.get("/health", health)])
    app.cleanup_ctx.append(service.running)
    listener = socket.create_server(("127.0.0.1", port))
    print(f"{MODEL} at http://127.0.0.1:{listener.getsockname()[1]}/embed", flush=True)
    # It would write a traceback for each request that is not HTTP.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    # keepalive_timeout also limits the time that the headers of a request take to arrive.
    web.run_app(
        app,
        sock=listener,
        print=None,
        access_log=None,
        keepalive_timeout=SECONDS,
        lingering_time=SECONDS,
        auto_decompress=False,
    )
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
