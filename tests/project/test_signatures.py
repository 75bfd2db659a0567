"""Signatures, stub and docstrings, against one another and against the table of options."""

import ast
import importlib
import importlib.util
import inspect
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from support.calls import CALLS, backward_operands, operands

import sdpa
from sdpa import _core, _options
from sdpa._table import TABLE, options_of

ROOT = Path(__file__).parents[2]
ROWS, ADDED = "grad_out, query, key, value, out, lse", "w_query, w_key, w_score, bias"
# The parameters in front of the options; those behind the bar are keywords.
OPERANDS = {
    "attention": "query, key, value",
    "attention_forward": "query, key, value",
    "scaled_dot_product_attention": "query, key, value",
    "attention_backward": ROWS,
    "attention_jvp": "query, key, value",
    "attention_double_backward": f"gg_query, gg_key, gg_value, {ROWS}",
    "attention_statistics": "query, key, *",
    "attention_received": "query, key, *",
    "attention_weights": "query, key, *",
    "additive_attention": "query, key, value, w_query, w_key, w_score, bias=None, *",
    "additive_attention_forward": "query, key, value, w_query, w_key, w_score, bias=None, *",
    "additive_attention_backward": ROWS.replace("out, lse", f"{ADDED}, out, lse, *"),
}


def signature(name):
    """The signature by the table of options."""
    parts = OPERANDS[name].split(", ")
    for option in options_of(name).values():
        if option.name != "bias":
            parts += ["*"] * (option.keyword_only and "*" not in parts)
            parts.append(f"{option.name}={option.default!r}")
    return f"({', '.join(parts)})"


SIGNATURES = {name: signature(name) for name in OPERANDS} | {"merge_attention": "(outs, lses)"}
FUNCTIONS = [name for name in sdpa.__all__ if callable(getattr(sdpa, name)) and name.islower()]
DOCUMENTED = {name: getattr(sdpa, name) for name in FUNCTIONS} | {
    name: getattr(sdpa.bias, name) for name in sdpa.bias.__all__ if name.islower()
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert str(inspect.signature(getattr(sdpa, name))) == SIGNATURES[name]


def test_options_have_a_place_in_few_functions():
    """Those that PyTorch's function has; additive attention has a bias there, jvp tangents."""
    assert {x.name for x in TABLE if not x.keyword_only} == {
        *("attn_mask", "dropout_p", "is_causal", "bias", "query_t", "key_t", "value_t"),
    }
    for function, n in ((sdpa.attention, 6), (sdpa.attention_backward, 9)):
        kinds = [x.kind for x in inspect.signature(function).parameters.values()]
        assert kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) == n


def test_torch_signature(torch):
    documented = torch.nn.functional.scaled_dot_product_attention.__doc__.split(" -> ")[0]
    ours = SIGNATURES["scaled_dot_product_attention"].replace("*, ", "")
    assert "".join(documented.split()) == "scaled_dot_product_attention" + "".join(ours.split())


def tool(name):
    """A module of tools/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stubs():
    """The generator of files."""
    return tool("stubs")


@pytest.mark.parametrize("file", ["sdpa/_core.pyi", "sdpa/_options.py", "docs/api.md"])
def test_generated_files_are_up_to_date(file):
    assert file in stubs().FILES
    written = (ROOT / file).read_text(encoding="utf-8")
    if written != stubs().FILES[file]():
        pytest.fail(f"{file} does not fit the extension: run make stubs")


def test_a_flag_that_is_known_only_in_a_run_has_a_type():
    """A type checker takes no bool for either of Literal[True] and Literal[False]."""
    for kinds in stubs().OVERLOADS.values():
        given = [kind for _, kind, _ in kinds]
        assert ("Literal[True]" in given) == ("bool" in given)


API = tool("api")
FROZEN = dict(
    part.partition("\n")[::2]
    for part in re.split(r"^== ", API.LISTING.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
)


def test_every_public_module_is_listed():
    doors = {f"sdpa.interop.{name}" for name in sdpa.interop.__all__}
    found = {f"sdpa.{name}" for name in sdpa.__all__ if inspect.ismodule(getattr(sdpa, name))}
    assert {*API.MODULES} == {"sdpa"} | doors | found - {"sdpa.interop", "sdpa.reference"}
    assert list(FROZEN) == [*API.MODULES, API.ENVIRONMENT]


@pytest.mark.parametrize("module", [*API.MODULES, API.ENVIRONMENT])
def test_the_public_interface_is_the_listed_one(module):
    """Names, parameters, defaults, fields, exceptions and variables; a change is seen in a diff."""
    try:
        found = API.section(module)
    except ImportError as error:
        pytest.skip(str(error))
    if found.strip() != f"== {module}\n{FROZEN[module]}".strip():
        pytest.fail(f"{module} differs from tests/project/api.txt: run python tools/api.py")


def test_a_change_of_the_interface_is_noticed(monkeypatch):
    def alibi(heads, slope=1):
        """Slopes."""

    alibi.__module__ = "sdpa.bias"
    monkeypatch.setattr(sdpa.bias, "alibi", alibi)
    with pytest.raises(pytest.fail.Exception, match="differs"):
        test_the_public_interface_is_the_listed_one("sdpa.bias")


def stub():
    """The stub of each function, of overloaded ones the first, which has all defaults."""
    tree = ast.parse((ROOT / "sdpa" / "_core.pyi").read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body[::-1] if isinstance(node, ast.FunctionDef)}


def test_stub_agrees_with_the_signatures():
    for name, node in stub().items():
        function = getattr(_core, name)
        parameters = inspect.signature(function).parameters.values()
        args = node.args
        assert [p.name for p in parameters] == [
            a.arg
            for a in (*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg)
            if a is not None
        ]
        kinds = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        assert kinds == [a.arg for a in args.kwonlyargs]
        defaults = [ast.literal_eval(d) for d in (*args.defaults, *args.kw_defaults)]
        assert defaults == [p.default for p in parameters if p.default is not p.empty]
    compiled = {name for name in FUNCTIONS if hasattr(_core, name)}
    assert set(SIGNATURES) < compiled <= set(stub())


def test_an_option_has_one_type_and_one_kind():
    names = {option.name for option in TABLE}
    # scale of additive attention is no array, its needs may be None; most take no Generator as rng
    exceptions = 3
    assert len({(x.name, x.annotation, x.kind, x.axes) for x in TABLE}) == len(names) + exceptions
    kinds = {option.kind for option in TABLE}
    assert kinds == {
        "operand",
        "position",
        "packing",
        "score",
        "weight",
        "call",
        "derivative",
        "program",
    }


def test_every_option_has_its_type_in_the_stub():
    for function in SIGNATURES:
        table = {
            name: ast.unparse(ast.parse(option.annotation))
            for name, option in options_of(function).items()
        }
        args = stub()[function].args
        n = len(args.args) - len(args.defaults)
        for argument in (*args.args[n:], *args.kwonlyargs):
            assert ast.unparse(argument.annotation) == table[argument.arg], (function, argument.arg)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documentation(name):
    function = DOCUMENTED[name]
    document = inspect.getdoc(function)
    assert getattr(importlib.import_module(function.__module__), name) is function
    assert max(map(len, document.splitlines())) <= 100
    lists = re.findall(r"^\**([\w, ]+) : ", document, re.MULTILINE)
    documented = {name for names in lists for name in names.split(", ")}
    assert set(inspect.signature(function).parameters) <= documented
    assert ">>> " in document


@pytest.mark.parametrize("module", ["bias", "blocks", "plot", "reference"])
def test_types_in_help_have_their_short_names(module):
    """Not those that NumPy gives ArrayLike, some 200 letters for an argument."""
    found = importlib.import_module(f"sdpa.{module}")
    for name in found.__all__:
        if inspect.isroutine(getattr(found, name)):
            assert "numpy._typing" not in str(inspect.signature(getattr(found, name))), name


def listed(document, label):
    """The names in the sentence behind a label, quoted or not."""
    found = re.search(re.escape(label) + r"\W*([\w\", \n]+)[.)]", document)
    return tuple(name.strip(' "') for name in found[1].split(","))


@pytest.mark.parametrize(
    "name", ["attention_backward", "attention_double_backward", "additive_attention_backward"]
)
def test_documentation_lists_all_gradients(name):
    """needs and Returns name every field, and every name is accepted."""
    document = inspect.getdoc(getattr(sdpa, name))
    fields = getattr(sdpa, re.search(r"Returns\n-+\n(\w+)", document)[1])._fields
    assert listed(document, "Named tuple") == fields
    assert sorted(listed(document, "among")) == sorted(fields)
    refused = f"needs: expected names among {str(listed(document, 'among'))[1:-1]}, got 'x'"
    with pytest.raises(ValueError, match=f"^{re.escape(refused)}$"):
        getattr(sdpa, name)(**CALLS[getattr(sdpa, name)]() | {"needs": ["x"]})


@pytest.mark.parametrize("name", OPERANDS)
def test_documentation_has_the_error_of_an_index(name):
    """It comes while pairs are computed, unlike the others."""
    document = inspect.getdoc(getattr(sdpa, name))
    assert ("\nIndexError\n" in document) == ("score_mod" in options_of(name))


@pytest.mark.parametrize("name", [x for x in SIGNATURES if "rng" in options_of(x)])
def test_documentation_says_what_rng_may_be(name):
    """What each function does without a seed, and with a Generator, is what it says."""
    function, document = getattr(sdpa, name), inspect.getdoc(getattr(sdpa, name))
    text = re.search(r"^rng : (.*\n(?:    .*\n)*)", document, re.MULTILINE)[1]
    call = CALLS[function]() | {"dropout_p": 0.5}
    required = "None is\n    refused" in text
    if "Changes nothing" in text:
        with pytest.raises(ValueError, match=r"^dropout_p: expected 0"):
            function(**call)
        assert "Must be 0" in document
        return
    assert required != ("None draws" in text.replace("\n   ", ""))
    if required:
        with pytest.raises(ValueError, match=r"^rng: expected an int"):
            function(**call)
    else:
        function(**call)
    if "Generator" in text:
        function(**call, rng=np.random.default_rng(0))
    else:
        with pytest.raises(TypeError, match=r"^rng: expected an int"):
            function(**call, rng=np.random.default_rng(0))


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        (sdpa.cosine_attention, _options.CosineOptions),
        (sdpa.bilinear_attention, _options.BilinearOptions),
        (sdpa.shaw_attention, _options.ShawOptions),
        (sdpa.MultiHeadAttention.forward, _options.LayerOptions),
    ],
    ids=lambda x: x.__name__,
)
def test_documentation_says_which_options_a_composed_function_lacks(function, taken):
    text = re.search(r"but without (.*?)\. ", " ".join(function.__doc__.split()))[1]
    lacks = options_of("attention_forward").keys() - taken.__annotations__.keys()
    assert set(re.split(", | and ", text)) == lacks - {"score_args", "mask_args"}


def test_results_are_named_tuples():
    got = sdpa.attention_forward(**operands())
    assert isinstance(got, sdpa.AttentionForward)
    assert isinstance(got, tuple)
    assert got._fields == ("out", "lse")
    back = pickle.loads(pickle.dumps(got))
    assert type(back) is sdpa.AttentionForward
    np.testing.assert_array_equal(back.out, got.out)
    assert type(sdpa.attention_backward(**backward_operands())) is sdpa.AttentionGradients
    x = operands()
    tangents = [x["query"], x["key"], x["value"]]
    jvp = sdpa.attention_jvp(*x.values(), *tangents)
    assert jvp._fields == ("out", "out_t")
    second = sdpa.attention_double_backward(*tangents, **backward_operands())
    assert second._fields == (
        "grad_out", "query", "key", "value", "attn_mask", "sinks", "scale", "score_args"
    )  # fmt: skip
    statistics = sdpa.attention_statistics(x["query"], x["key"])
    assert statistics._fields == (
        *("lse", "entropy", "max_weight", "sum_p2", "sum_p3", "score_mean", "score_var"),
    )
    for result, name in [
        (got, "AttentionForward"),
        (jvp, "AttentionTangent"),
        (second, "AttentionSecondGradients"),
        (statistics, "AttentionStatistics"),
    ]:
        assert type(result) is getattr(sdpa, name)
        assert type(result).__module__ == "sdpa"
        assert type(pickle.loads(pickle.dumps(result))) is type(result)
