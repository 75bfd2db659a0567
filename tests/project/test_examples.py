"""Every example in a docstring of the package runs."""

import ast
import doctest
from pathlib import Path

import pytest
from support import doctests

import sdpa
from sdpa import _core

PACKAGE = Path(sdpa.__file__).parent
SOURCES = {
    str(path.relative_to(PACKAGE.parent)): path.read_text(encoding="utf-8")
    for package in (PACKAGE, PACKAGE.with_name("sdpa_lab"))
    for path in sorted(package.rglob("*.py"))
}


def documents(source):
    """{line: string that has examples}, whether or not an object still carries it."""
    strings = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return {node.lineno: node.value for node in strings if ">>>" in node.value}


def left_out(source):
    """How many prompts doctest does not see: outside of strings, or within a line."""
    seen = map(doctest.DocTestParser().get_examples, documents(source).values())
    return source.count(">>>") - sum(map(len, seen))


EXAMPLES = {
    f"{path}:{line}": (text, line - 1)
    for path, source in SOURCES.items()
    for line, text in documents(source).items()
} | {
    f"sdpa.{name}": (function.__doc__, 0)
    for name, function in vars(_core).items()
    if ">>>" in (getattr(function, "__doc__", None) or "")
}


@pytest.mark.parametrize("document", EXAMPLES)
@pytest.mark.thread_unsafe(reason="doctest takes over sys.stdout")
def test_examples(document, request):
    """As a reader runs them: nothing is imported that they do not import."""
    text, line = EXAMPLES[document]
    doctests.run(text, document, request, line=line)


def test_no_module_is_left_out():
    assert {path: n for path, source in SOURCES.items() if (n := left_out(source))} == {}
    run = {document.partition(":")[0] for document in EXAMPLES}
    assert run > {path for path, source in SOURCES.items() if ">>>" in source}
    assert run > {"sdpa/_cache.py", "sdpa_lab/theory.py", "sdpa.attention"}


def test_an_example_that_is_left_out_is_noticed():
    assert left_out('def f():\n    """F.\n\n    >>> f()\n    """\n') == 0
    assert left_out("def f():\n    # >>> f()\n    pass\n") == 1
    assert left_out('def f():\n    """F: >>> f()"""\n') == 1


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (">>> 1 + 1\n3\n", "Expected:\n    3\nGot:\n    2"),
        (">>> 1 + 1  # doctest: +SKIP\n", "SKIP"),
        (">>> print(1)  # doctest: +ELLIPSIS\n...\n", "print"),
        (">>> from sdpa import nothing\n", "cannot import name 'nothing'"),
        (">>> import sdpa.nothing\n", "No module named 'sdpa.nothing'"),
    ],
)
def test_an_example_that_fails_or_does_not_run_is_noticed(example, message, request):
    with pytest.raises(AssertionError, match=message):
        doctests.run(example, "name", request)


def test_a_missing_package_is_named(request):
    with pytest.raises(pytest.skip.Exception, match="needs no_package"):
        doctests.run(">>> import no_package\n", "name", request)
