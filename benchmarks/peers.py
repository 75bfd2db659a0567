"""The systems sdpa is compared with, each behind the same four questions.

`forward`, `both`, `softmax` and `relative` return a call without arguments that does the work and
nothing else (operands are converted and graphs compiled beforehand), or None where the peer cannot
do it. A peer that is not installed is left out: `find` says which. Threads: before anything is
imported the process is given as many CPUs as there are threads (machine.cores), and each library is
told the number as well; JAX has no other setting, its pool has one thread per CPU of the affinity.
"""

import importlib
import importlib.util
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sdpa_lab.experiments.speed import numpy_backward, numpy_weights
from sdpa_lab.tools.clock import Call

Array = npt.NDArray[Any]


class Operands(NamedTuple):
    """(batch, heads, L, d) each; key and value may have fewer heads (GQA) and another L."""

    query: Array
    key: Array
    value: Array
    grad_out: Array
    is_causal: bool = False

    @property
    def is_gqa(self) -> bool:
        return self.query.shape[1] != self.key.shape[1]


class Peer:
    """What a peer is asked; by default it can do nothing."""

    name: str
    version: str
    package: str

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def forward(self, x: Operands) -> Call | None:
        """Attention of x, result in the peer's own layout."""
        return None

    def both(self, x: Operands) -> Call | None:
        """Attention and the gradients to query, key and value in one call."""
        return None

    def softmax(self, a: Array, axis: int = -1) -> Call | None:
        """Softmax along an axis."""
        return None

    def relative(self, name: str, *arrays: Array, axis: int = -1) -> Call | None:
        """log_softmax or logsumexp along an axis, or softmax_backward of (grad, weights)."""
        return None

    def result(self, call: Call) -> Array:
        """What a call of `forward`, `softmax` or `relative` returns, in the layout of NumPy."""
        return np.asarray(call())


class NumPy(Peer):
    """The formula, in place where it can be; its products on BLAS."""

    name = package = "numpy"
    version = np.__version__

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        from threadpoolctl import threadpool_limits

        self._limits = threadpool_limits(threads, user_api="blas")

    def forward(self, x: Operands) -> Call | None:
        if x.is_gqa:
            return None
        if x.is_causal:
            mask = np.where(np.tri(x.query.shape[-2], dtype=bool), 0, -np.inf).astype(x.query.dtype)
            return lambda: _masked_weights(x.query, x.key, mask) @ x.value
        return lambda: numpy_weights(x.query, x.key) @ x.value

    def both(self, x: Operands) -> Call | None:
        if x.is_gqa or x.is_causal:
            return None

        def call() -> object:
            p = numpy_weights(x.query, x.key)
            return p @ x.value, numpy_backward(x.grad_out, x.query, x.key, x.value, p)

        return call

    def softmax(self, a: Array, axis: int = -1) -> Call | None:
        def call() -> Array:
            e = a - a.max(axis=axis, keepdims=True)
            np.exp(e, out=e)
            e /= e.sum(axis=axis, keepdims=True)
            return e

        return call


def _masked_weights(q: Array, k: Array, mask: Array) -> Array:
    s = q @ k.swapaxes(-1, -2)
    s *= np.float32(q.shape[-1] ** -0.5)
    s += mask
    s -= s.max(axis=-1, keepdims=True)
    np.exp(s, out=s)
    s /= s.sum(axis=-1, keepdims=True)
    return s


class Torch(Peer):
    """scaled_dot_product_attention, its own choice of implementation."""

    name = package = "torch"

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        import torch

        self._torch = torch
        self.version = torch.__version__
        torch.set_num_threads(threads)

    def _options(self, x: Operands) -> dict[str, bool]:
        return {"is_causal": x.is_causal, "enable_gqa": x.is_gqa}

    def _tensor(self, a: Array) -> Any:
        if a.dtype.name == "bfloat16":
            return self._torch.from_numpy(a.view(np.uint16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(a)

    def _attention(self) -> Any:
        return self._torch.nn.functional.scaled_dot_product_attention

    def forward(self, x: Operands) -> Call | None:
        attention = self._attention()
        tensors = [self._tensor(a) for a in x[:3]]
        options = self._options(x)
        return lambda: attention(*tensors, **options)

    def _recorded(self, x: Operands) -> tuple[list[Any], Call]:
        attention = self._attention()
        inputs = [self._tensor(a).clone().requires_grad_() for a in x[:3]]
        options = self._options(x)
        return inputs, lambda: attention(*inputs, **options)

    def recorded(self, x: Operands) -> Call:
        """The forward of operands that need gradients."""
        return self._recorded(x)[1]

    def both(self, x: Operands) -> Call | None:
        inputs, attention = self._recorded(x)
        upstream = self._tensor(x.grad_out)

        def call() -> object:
            out = attention()
            return out, self._torch.autograd.grad(out, inputs, upstream)

        return call

    def backward(self, x: Operands) -> Call:
        """The gradients to query, key and value, from what one forward has kept."""
        inputs, attention = self._recorded(x)
        out, upstream = attention(), self._tensor(x.grad_out)
        gradients = self._torch.autograd.grad
        return lambda: gradients(out, inputs, upstream, retain_graph=True)

    def softmax(self, a: Array, axis: int = -1) -> Call | None:
        tensor = self._tensor(a)
        return lambda: self._torch.softmax(tensor, axis)

    def block(self, x: Array, w: Array, heads: int) -> Call:
        """Three projections of tokens x, attention, the fourth; w: (4, width, width)."""
        attention = self._attention()
        tokens, (w_query, w_key, w_value, w_out) = self._tensor(x), self._tensor(w)

        def call() -> object:
            q, k, v = (
                (tokens @ part).view(len(x), heads, -1).transpose(0, 1)
                for part in (w_query, w_key, w_value)
            )
            return attention(q, k, v).transpose(0, 1).reshape(x.shape) @ w_out

        return call

    def relative(self, name: str, *arrays: Array, axis: int = -1) -> Call | None:
        tensors = [self._tensor(a) for a in arrays]
        if name == "softmax_backward":
            backward, dtype = self._torch._softmax_backward_data, tensors[0].dtype
            return lambda: backward(*tensors, axis, dtype)
        function = getattr(self._torch, name)
        return lambda: function(*tensors, axis)

    def result(self, call: Call) -> Array:
        tensor: Any = call()
        return np.asarray(tensor.float().numpy())


class Bridge(Torch):
    """sdpa as PyTorch's users call it: no peer, but behind the same questions."""

    def _attention(self) -> Any:
        from sdpa.interop.torch import scaled_dot_product_attention

        return scaled_dot_product_attention


class Jax(Peer):
    """jax.nn.dot_product_attention on (batch, L, heads, d), compiled."""

    name = package = "jax"

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        import jax

        self._jax = jax
        self.version = jax.__version__
        self._attention: Any = jax.nn.dot_product_attention

    def _arrays(self, x: Operands) -> list[Any]:
        return [self._jax.numpy.asarray(a.swapaxes(1, 2)) for a in x[:4]]

    def forward(self, x: Operands) -> Call | None:
        if x.query.dtype == np.float64:
            return None
        q, k, v, _ = self._arrays(x)
        attention = self._attention
        compiled = self._jax.jit(lambda q, k, v: attention(q, k, v, is_causal=x.is_causal))
        return lambda: compiled(q, k, v).block_until_ready()

    def both(self, x: Operands) -> Call | None:
        if x.query.dtype == np.float64:
            return None
        q, k, v, g = self._arrays(x)
        attention = self._attention

        @self._jax.jit
        def compiled(q: Any, k: Any, v: Any, g: Any) -> Any:
            out, back = self._jax.vjp(lambda *a: attention(*a, is_causal=x.is_causal), q, k, v)
            return out, back(g)

        return lambda: self._jax.block_until_ready(compiled(q, k, v, g))

    def softmax(self, a: Array, axis: int = -1) -> Call | None:
        array = self._jax.numpy.asarray(a)
        compiled = self._jax.jit(lambda a: self._jax.nn.softmax(a, axis=axis))
        return lambda: compiled(array).block_until_ready()

    def result(self, call: Call) -> Array:
        array = np.asarray(call(), np.float32)
        return array.swapaxes(1, 2) if array.ndim == 4 else array


class JaxBridge(Jax):
    """The same with sdpa.interop.jax.dot_product_attention."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        from sdpa.interop.jax import dot_product_attention

        self._attention = dot_product_attention


class OnnxRuntime(Peer):
    """The operator Attention of ONNX (opset 23), on (batch, heads, L, d)."""

    name = "ort"
    package = "onnxruntime"
    domain = ""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        import onnx
        import onnxruntime

        self._onnx, self._ort = onnx, onnxruntime
        self.version = onnxruntime.__version__

    def _session(
        self, operator: str, domain: str, feeds: dict[str, Array], **attributes: Any
    ) -> Any:
        helper, numbers = self._onnx.helper, self._onnx.TensorProto
        node = helper.make_node(operator, list(feeds), ["out"], domain=domain, **attributes)
        inputs = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in feeds.items()
        ]
        output = helper.make_tensor_value_info("out", numbers.FLOAT, None)
        graph = helper.make_graph([node], "bench", inputs, [output])
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        session = self._ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return lambda: session.run(None, feeds)[0]

    def forward(self, x: Operands) -> Call | None:
        if x.query.dtype != np.float32 or x.is_gqa:
            return None
        feeds = dict(zip("qkv", x[:3], strict=True))
        return self._session("Attention", "", feeds, is_causal=int(x.is_causal))

    def softmax(self, a: Array, axis: int = -1) -> Call | None:
        return self._session("Softmax", "", {"x": a}, axis=axis)

    def relative(self, name: str, *arrays: Array, axis: int = -1) -> Call | None:
        if name == "log_softmax":
            return self._session("LogSoftmax", "", {"x": arrays[0]}, axis=axis)
        if name == "logsumexp":
            feeds = {"x": arrays[0], "axes": np.array([axis])}
            return self._session("ReduceLogSumExp", "", feeds, keepdims=0)
        return None


class OnnxRuntimeHeads(OnnxRuntime):
    """The operator MultiHeadAttention of com.microsoft, on (batch, L, heads d)."""

    name = "ort-mha"

    def forward(self, x: Operands) -> Call | None:
        heads, length, _ = x.query.shape[1:]
        if x.query.dtype != np.float32 or x.is_gqa or (x.is_causal and length != x.key.shape[2]):
            return None

        def packed(a: Array) -> Array:
            return np.ascontiguousarray(a.swapaxes(1, 2)).reshape(a.shape[0], a.shape[2], -1)

        feeds = {name: packed(a) for name, a in zip("qkv", x[:3], strict=True)}
        self._heads = heads
        causal = int(x.is_causal)
        return self._session(
            "MultiHeadAttention", "com.microsoft", feeds, num_heads=heads, unidirectional=causal
        )

    def softmax(self, a: Array, axis: int = -1) -> Call | None:
        return None

    def relative(self, name: str, *arrays: Array, axis: int = -1) -> Call | None:
        return None

    def result(self, call: Call) -> Array:
        out = np.asarray(call())
        return out.reshape(*out.shape[:2], self._heads, -1).swapaxes(1, 2)


class Evaluator(Peer):
    """The evaluator of onnx on NumPy, with its own operators or with these in their place."""

    name = package = "onnx"

    def __init__(self, threads: int, new_ops: list[type[Any]] | None = None) -> None:
        super().__init__(threads)
        self._new_ops = new_ops

    @classmethod
    def both(cls, threads: int) -> dict[str, "Evaluator"]:
        """{"onnx": its own, "operators": sdpa's}, if onnx is installed."""
        if importlib.util.find_spec("onnx") is None:
            return {}
        from sdpa.interop.onnx import reference_ops

        return {"onnx": cls(threads), "operators": cls(threads, reference_ops())}

    def forward(self, x: Operands) -> Call:
        from onnx import TensorProto, helper
        from onnx.reference import ReferenceEvaluator

        feeds = dict(zip("qkv", x[:3], strict=True))
        node = helper.make_node("Attention", list(feeds), ["out"], is_causal=int(x.is_causal))
        inputs = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, a.shape)
            for name, a in feeds.items()
        ]
        output = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
        graph = helper.make_graph([node], "bench", inputs, [output])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
        evaluator = ReferenceEvaluator(model, new_ops=self._new_ops)
        return lambda: evaluator.run(None, feeds)[0]


class OpenVino(Peer):
    """The operation ScaledDotProductAttention, operands and result in place."""

    name = package = "openvino"

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        import openvino
        from openvino import opset13

        self._ov, self._ops = openvino, opset13
        self.version = openvino.__version__.split("-")[0]
        self._core = openvino.Core()

    def _request(self, node: Any, parameters: list[Any], arrays: list[Array]) -> Call:
        settings = {
            "INFERENCE_NUM_THREADS": self.threads,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "ENABLE_CPU_PINNING": False,
        }
        model = self._core.compile_model(self._ov.Model([node], parameters), "CPU", settings)
        request = model.create_infer_request()
        for i, a in enumerate(arrays):
            request.set_input_tensor(i, self._ov.Tensor(a, shared_memory=True))

        def call() -> Array:
            request.infer()
            return np.asarray(request.get_output_tensor().data)

        return call

    def forward(self, x: Operands) -> Call | None:
        if x.query.dtype != np.float32 or x.is_gqa:
            return None
        parameters = [self._ops.parameter(a.shape, np.float32) for a in x[:3]]
        node = self._ops.scaled_dot_product_attention(*parameters, causal=x.is_causal)
        return self._request(node, parameters, list(x[:3]))

    def softmax(self, a: Array, axis: int = -1) -> Call | None:
        parameter = self._ops.parameter(a.shape, np.float32)
        return self._request(self._ops.softmax(parameter, axis), [parameter], [a])


ALL: tuple[type[Peer], ...] = (NumPy, Torch, Jax, OnnxRuntime, OnnxRuntimeHeads, OpenVino)


def find(threads: int) -> tuple[list[Peer], list[str]]:
    """The peers that are installed, and the names of those that are not."""
    found, missing = [], []
    for kind in ALL:
        try:
            importlib.import_module(kind.package)
            found.append(kind(threads))
        except ImportError:
            missing.append(kind.name)
    return found, missing
