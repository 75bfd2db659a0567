"""Examples in docstrings and pages: each one runs, or the package that it lacks is named."""

import doctest
import re

import pytest


class _Runner(doctest.DocTestRunner):
    def report_unexpected_exception(self, out, test, example, exc_info):
        error = exc_info[1]
        if isinstance(error, ModuleNotFoundError) and not error.name.startswith("sdpa"):
            pytest.skip(f"needs {error.name}: pip install '.[peers,lab,dask,model]'")
        if type(error) is ImportError and error.name is None:  # of sdpa: it says what to install
            pytest.skip(str(error))
        super().report_unexpected_exception(out, test, example, exc_info)


def run(text, name, request, *, line=0, namespace=None):
    """Run the examples of `text`, which begins at `line`, and return the names they define."""
    if re.search(r"^ *>>> .*\btorch\b", text, re.MULTILINE):
        request.getfixturevalue("torch")
    file = name.partition(":")[0]
    test = doctest.DocTestParser().get_doctest(text, namespace or {}, name, file, line)
    for example in test.examples:
        assert doctest.SKIP not in example.options, example.source
        assert example.want != "...\n", example.source
    report = []
    done = _Runner(verbose=False).run(test, out=report.append, clear_globs=False)
    assert not report, "".join(report)
    assert done.attempted == len(test.examples)
    return test.globs
